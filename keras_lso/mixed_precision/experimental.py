"""The names of `tf.keras.mixed_precision.experimental` that concern loss scaling."""

import warnings
from collections.abc import Callable, Mapping
from typing import Any, Self

import keras

from keras_lso._core.wrapper import check_inner_optimizer
from keras_lso.compat.moved import refuse_other_names
from keras_lso.loss_scale_optimizer import LossScaleOptimizer as ModernOptimizer
from keras_lso.loss_scales import DynamicLossScale, FixedLossScale, LossScale
from keras_lso.loss_scales.lookup import get_for, read_config

__all__ = ["DynamicLossScale", "FixedLossScale", "LossScale", "LossScaleOptimizer"]

refuse_other_names(globals())


@keras.saving.register_keras_serializable(
    "keras_lso", name="mixed_precision.experimental.LossScaleOptimizer"
)
class LossScaleOptimizer(ModernOptimizer):
    """The deprecated optimizer that applies loss scaling.

    It differs from `keras_lso.LossScaleOptimizer` in the arguments of its constructor,
    and in that `apply_gradients` assumes unscaled gradients, as in tf.keras, unless
    you pass `scaled=True` or `scale_loss` has scaled the loss, as in Keras 3's `fit`.

    As in TensorFlow, configs and files of models restore it as the modern class; a loop
    of yours that scales no loss must then write `apply_gradients(..., scaled=False)`.
    Its own `from_config`, `copy.deepcopy` and `pickle` return this class.

    Args:
        optimizer: The `keras.optimizers.Optimizer` to wrap.
        loss_scale: A number for a fixed loss scale, the string `"dynamic"`, a
            `keras_lso.loss_scales.FixedLossScale` or `DynamicLossScale`, whose
            multiplier must be 2, or the config dict of one of them.

    Raises:
        ValueError, TypeError: If an argument is not valid.

    Example:

    >>> import keras, keras_lso
    >>> optimizer = keras_lso.mixed_precision.experimental.LossScaleOptimizer(
    ...     keras.optimizers.SGD(), loss_scale="dynamic"
    ... )
    >>> modern = keras_lso.LossScaleOptimizer(keras.optimizers.SGD())
    >>> optimizer.get_config() == modern.get_config()
    True

    Reference:

    - [tf.keras.mixed_precision.experimental.LossScaleOptimizer, TensorFlow 2.4](
        https://www.tensorflow.org/versions/r2.4/api_docs/python/tf/keras/mixed_precision/experimental/LossScaleOptimizer)
    """

    _takes_unscaled_pairs = True

    def __init__(
        self,
        optimizer: keras.optimizers.Optimizer,
        loss_scale: LossScale | float | str | dict[str, Any],
    ) -> None:
        check_inner_optimizer(optimizer, "optimizer")
        policy = _policy(loss_scale)
        # Before any side effect, since the warning may be an error.
        warnings.warn(
            "keras_lso.mixed_precision.experimental.LossScaleOptimizer is deprecated, "
            "as it was in TensorFlow. Write instead: "
            f"keras_lso.LossScaleOptimizer(optimizer, loss_scale={loss_scale!r})",
            DeprecationWarning,
            stacklevel=2,
        )
        super().__init__(optimizer, loss_scale=policy)

    @classmethod
    def from_config(
        cls, config: dict[str, Any], custom_objects: Mapping[str, Any] | None = None
    ) -> Self:
        inner, arguments = read_config(config, custom_objects)
        if "loss_scale" in arguments:
            _policy(arguments["loss_scale"])
        # Without the warning, which the first construction has given already.
        return cls._with_arguments(inner, arguments)

    def __reduce__(self) -> Any:
        # Keras copies with `serialize`, which would change the class, and with it
        # whether gradients are taken as scaled.
        load, arguments = super().__reduce__()
        return _load_as, (type(self), load, arguments)


# Under the name of this class in a config, Keras finds the modern class.
keras.saving.get_custom_objects()[
    keras.saving.get_registered_name(LossScaleOptimizer)
] = ModernOptimizer


def _load_as(
    cls: type, load: Callable[..., Any], arguments: tuple[Any, ...]
) -> LossScaleOptimizer:
    """Returns the optimizer that `load` returns, as an instance of `cls`."""
    optimizer = load(*arguments)
    optimizer.__class__ = cls
    return optimizer


def policy_of(loss_scale: LossScale | float | str | dict[str, Any]) -> LossScale:
    """Returns the loss-scale policy of an argument, or raises TF's `ValueError`."""
    try:
        return get_for("loss_scale", loss_scale)
    except TypeError as error:
        raise ValueError(str(error)) from error


def _policy(loss_scale: LossScale | float | str | dict[str, Any]) -> LossScale:
    """Returns the policy; rejects those that the class of tf.keras did not accept."""
    policy = policy_of(loss_scale)
    end = (
        f"Received: loss_scale={loss_scale!r}. Write "
        "keras_lso.LossScaleOptimizer(optimizer, loss_scale=...), which takes any."
    )
    if not isinstance(policy, FixedLossScale | DynamicLossScale):
        raise TypeError(
            f"`loss_scale` must be a FixedLossScale or a DynamicLossScale. {end}"
        )
    if isinstance(policy, DynamicLossScale) and policy.multiplier != 2:
        raise ValueError(
            f"The `multiplier` of a DynamicLossScale must be 2 as `loss_scale`. {end}"
        )
    return policy
