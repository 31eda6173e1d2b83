"""The names of `tf.keras.mixed_precision.experimental` that concern loss scaling."""

import warnings
from collections.abc import Mapping
from typing import Any, Self

import keras

from keras_lso import loss_scales
from keras_lso._core.checks import is_number
from keras_lso.loss_scale_optimizer import LossScaleOptimizer as ModernOptimizer
from keras_lso.loss_scale_optimizer import check_inner_optimizer, read_config
from keras_lso.loss_scales import DynamicLossScale, FixedLossScale, LossScale
from keras_lso.loss_scales.lookup import get_for, policy_arguments

__all__ = ["DynamicLossScale", "FixedLossScale", "LossScale", "LossScaleOptimizer"]


@keras.saving.register_keras_serializable(
    "keras_lso", name="mixed_precision.experimental.LossScaleOptimizer"
)
class LossScaleOptimizer(ModernOptimizer):
    """The deprecated optimizer that applies loss scaling.

    It differs from `keras_lso.LossScaleOptimizer` in the arguments of its constructor.
    As in tf.keras, `apply_gradients` assumes unscaled gradients, unless you pass
    `scaled=True` or `scale_loss` has scaled the loss, as in Keras 3's `fit`.

    As in TensorFlow, a config from `keras.optimizers.serialize` deserializes as
    `keras_lso.LossScaleOptimizer`, and so does the optimizer in the file of a model.
    That class assumes scaled gradients, unless `get_unscaled_gradients` has unscaled
    them. If your loop continues with that class and does not scale the loss, write
    `apply_gradients(..., scaled=False)`. `from_config` of this class, `copy.deepcopy`
    and `pickle` return this class.

    Args:
        optimizer: The `keras.optimizers.Optimizer` to wrap.
        loss_scale: A number for a fixed loss scale, the string `"dynamic"`, a
            `keras_lso.loss_scales.FixedLossScale` or `DynamicLossScale`, or the
            config dict of one of them. The multiplier of a `DynamicLossScale` must
            be 2.

    Raises:
        ValueError: If `loss_scale` is not valid, or has another multiplier.
        TypeError: If `loss_scale` is a `LossScale` of another class, or `optimizer`
            is not an optimizer.

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
            f"as it was in TensorFlow. Write instead: {_modern_call(policy)}",
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
        # Keras copies with `serialize`, which would change the class, and with it the
        # kind of gradients that the copy takes.
        load, arguments = super().__reduce__()
        return _load_as, (type(self), load, arguments)


# Under the name of this class in a config, Keras finds the modern class.
keras.saving.get_custom_objects()[
    keras.saving.get_registered_name(LossScaleOptimizer)
] = ModernOptimizer


def _load_as(cls, load, arguments):
    optimizer = load(*arguments)
    optimizer.__class__ = cls
    return optimizer


def _policy(loss_scale):
    is_name = isinstance(loss_scale, str) and loss_scale == "dynamic"
    is_policy = isinstance(loss_scale, LossScale | dict)
    if not (is_name or is_policy or is_number(loss_scale)):
        raise ValueError(
            "Argument `loss_scale` must be the string 'dynamic' (recommended), an int, "
            "a float, a FixedLossScale, a DynamicLossScale, or the config dict of one "
            f"of them. Received: loss_scale={loss_scale!r}"
        )
    try:
        policy = get_for("loss_scale", loss_scale)
    except TypeError as error:
        raise ValueError(f"{error} Received: loss_scale={loss_scale!r}") from error
    if not isinstance(policy, FixedLossScale | DynamicLossScale):
        raise TypeError(
            "Passing a LossScale that is not a FixedLossScale or a DynamicLossScale is "
            f"not supported. Received: loss_scale={loss_scale!r}. Write "
            "keras_lso.LossScaleOptimizer(optimizer, loss_scale=...), which takes any."
        )
    if isinstance(policy, DynamicLossScale) and policy.multiplier != 2:
        raise ValueError(
            "When passing a DynamicLossScale to `loss_scale`, its `multiplier` must be "
            f"2. Received: loss_scale={loss_scale!r}. Write "
            "keras_lso.LossScaleOptimizer(optimizer, loss_scale=...), which takes any "
            "multiplier."
        )
    return policy


def _modern_call(policy):
    """Returns the code that constructs the same optimizer with the modern class."""
    arguments = policy_arguments(policy)
    if "loss_scale" in arguments:
        arguments = {"loss_scale": policy}
    elif isinstance(policy, FixedLossScale):
        arguments["initial_scale"] = policy.initial_loss_scale
    else:
        if policy.initial_loss_scale != loss_scales.DEFAULT_INITIAL_SCALE:
            arguments["initial_scale"] = policy.initial_loss_scale
        if policy.increment_period != loss_scales.DEFAULT_GROWTH_STEPS:
            arguments["dynamic_growth_steps"] = policy.increment_period
    written = "".join(f", {k}={_literal(v)}" for k, v in arguments.items())
    return f"keras_lso.LossScaleOptimizer(optimizer{written})"


def _literal(value):
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    if isinstance(value, LossScale):
        return f"{type(value).__module__}.{value!r}"
    return repr(value)
