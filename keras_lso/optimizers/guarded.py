"""`GuardedOptimizer`: skips steps that are not finite, without a loss scale."""

from typing import Any, Literal, Never

import keras
from keras import ops

from keras_lso._backend.tensors import Tensor
from keras_lso._core.checks import warn
from keras_lso._core.configs import refuse_unsupported
from keras_lso._core.spikes import SpikeGuard
from keras_lso._core.step import NoLossScaling
from keras_lso._keras_internals.variables import layer_in_float16
from keras_lso.loss_scale_optimizer import LossScaleOptimizer
from keras_lso.loss_scales.fixed import FixedLossScale

DEFAULT_NAME = "guarded_optimizer"


@keras.saving.register_keras_serializable("keras_lso", name="GuardedOptimizer")
class GuardedOptimizer(LossScaleOptimizer):
    """An optimizer that skips steps with gradients that are not finite, for bfloat16.

    The range of bfloat16 and float32 is wide enough to need no loss scale. This class
    is a `LossScaleOptimizer` without one:

    - A step whose gradients contain inf or NaN is skipped on all replicas. It changes
      nothing, bit for bit.
    - bfloat16 and float16 weights are trained in float32, through masters. Without
      masters, a step smaller than 1/512 of a bfloat16 weight is rounded away, and
      with Keras's Adam no weight may move at all.
    - Most optimizers check the gradients and update the weights in one step.
    - `keras_lso.callbacks.LossScaleMonitor` and `keras_lso.protect_statistics` work.

    Losses and gradients are not scaled: `scale_loss` and `get_scaled_loss` return the
    loss unchanged, and `get_unscaled_gradients` returns the gradients unchanged. The
    attributes are those of a `LossScaleOptimizer`; `loss_scale` is 1.0.

    Args:
        inner_optimizer: The `keras.optimizers.Optimizer` to wrap.
        master_weights: `"auto"`, `"float32"`, `"remainder"`, `"remainder8"`,
            `"stochastic"`, True or False. How bfloat16 or float16 weights keep steps
            that are too small for 16 bits: see `keras_lso.LossScaleOptimizer`.
            Defaults to `"auto"`.
        spike_guard: A `keras_lso.SpikeGuard`, which decides by the norm of the
            gradients which steps are outliers. Outliers are skipped as well. Defaults
            to `None`: no step counts as an outlier.
        slot_dtype: `"bfloat16"` or `"int8"` for moments in 16 or 8 bits, as in a
            `LossScaleOptimizer`.
            Defaults to `None`: slots are in float32.
        shard_state: On JAX, whether the devices of a `keras.distribution` share the
            state, as in a `LossScaleOptimizer`. Defaults to `False`.
        name: The name of the optimizer. Defaults to `"guarded_optimizer"`.

    Example:

    >>> import keras, keras_lso
    >>> w = keras.Variable([1.0], dtype="bfloat16")
    >>> optimizer = keras_lso.GuardedOptimizer(keras.optimizers.SGD(1e-4))
    >>> for _ in range(100):
    ...     optimizer.apply([keras.ops.ones(1)], [w])
    >>> print(keras.ops.convert_to_numpy(w).astype("float32"))
    [0.98828125]
    >>> optimizer.apply([keras.ops.array([float("nan")])], [w])
    >>> int(optimizer.iterations), int(optimizer.skipped_steps)
    (100, 1)
    """

    _scaling_class = NoLossScaling

    def __init__(
        self,
        inner_optimizer: keras.optimizers.Optimizer,
        *,
        master_weights: Literal[
            "auto", "float32", "remainder", "remainder8", "stochastic"
        ]
        | bool = "auto",
        spike_guard: SpikeGuard | dict[str, Any] | None = None,
        slot_dtype: Literal["bfloat16", "int8"] | None = None,
        shard_state: bool = False,
        name: str | None = DEFAULT_NAME,
        **kwargs: Never,
    ) -> None:
        refuse_unsupported(kwargs, GuardedOptimizer, LossScaleOptimizer)
        super().__init__(
            inner_optimizer,
            loss_scale=FixedLossScale(1.0),
            master_weights=master_weights,
            spike_guard=spike_guard,
            slot_dtype=slot_dtype,
            shard_state=shard_state,
            name=DEFAULT_NAME if name is None else name,
        )
        self._state.mark_without_scale()

    @property
    def loss_scale(self) -> Tensor:
        """1.0, a float32 scalar tensor."""
        # A checkpoint of another optimizer may assign another value to the variable.
        return ops.ones((), dtype="float32")

    def _warn_of_dtypes(self, model: Any, in_float16: str | None) -> None:
        """Warns if something is known to be in float16."""
        if in_float16 is not None:
            warn(
                "GuardedOptimizer does not scale the loss, and float16 gradients need "
                "a loss scale: gradients below 6e-8 become 0. Write "
                "`LossScaleOptimizer(inner_optimizer)`, or use bfloat16. Received: "
                f"{in_float16}"
            )

    def get_config(self) -> dict[str, Any]:
        """Returns the config: the arguments of the constructor."""
        names = {"name", "protect_statistics", *self._parts} - {"loss_scale_policy"}
        return {key: v for key, v in super().get_config().items() if key in names}


def wrapper_for(model: keras.Model) -> str:
    """Returns the name of the class whose objects a model needs as its optimizer."""
    needs_scale = layer_in_float16(model) is not None
    return (LossScaleOptimizer if needs_scale else GuardedOptimizer).__name__
