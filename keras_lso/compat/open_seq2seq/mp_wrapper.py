"""`MixedPrecisionOptimizerWrapper`: OpenSeq2Seq's loss scaling with master weights."""

import keras

from keras_lso._core.checks import is_number, refusal
from keras_lso._core.wrapper import check_inner_optimizer
from keras_lso._keras_internals.state import name_of
from keras_lso.compat.open_seq2seq.automatic_loss_scaler import AutomaticLossScaler
from keras_lso.compat.v1.mixed_precision import MixedPrecisionLossScaleOptimizer
from keras_lso.loss_scales.loss_scale import LossScale


@keras.saving.register_keras_serializable(
    "keras_lso", name="compat.open_seq2seq.MixedPrecisionOptimizerWrapper"
)
class MixedPrecisionOptimizerWrapper(MixedPrecisionLossScaleOptimizer):
    """An optimizer that trains in float16, with OpenSeq2Seq's name and methods.

    It scales the loss, and the wrapped optimizer trains float32 master weights of the
    float16 variables. `compute_gradients` returns unscaled float32 gradients, in pairs
    with the model's own variables; in OpenSeq2Seq with the master weights.

    The wrapper is a `keras_lso.LossScaleOptimizer`, also for `compile`. It skips
    non-finite steps with any loss scale; OpenSeq2Seq only with `AutomaticLossScaler`.

    Args:
        optimizer: The `keras.optimizers.Optimizer` to wrap.
        loss_scale: A float, an `AutomaticLossScaler` or a
            `keras_lso.loss_scales.LossScale`. Defaults to `None`: no scaling.

    Raises:
        ValueError, TypeError: If an argument is not valid.

    Example:

    >>> import keras
    >>> from keras_lso.compat.open_seq2seq import MixedPrecisionOptimizerWrapper
    >>> optimizer = MixedPrecisionOptimizerWrapper(keras.optimizers.SGD(1.0), 1024.0)
    >>> w = keras.Variable([1.0], dtype="float16")
    >>> for _ in range(3):
    ...     pairs = optimizer.compute_gradients(lambda: w[0] * 2e-4, [w])
    ...     _ = optimizer.apply_gradients(pairs)
    >>> print(w.numpy())  # the float16 next below 1 is 0.9995
    [0.9995]
    """

    def __init__(
        self,
        optimizer: keras.optimizers.Optimizer,
        loss_scale: LossScale | AutomaticLossScaler | float | None = None,
    ) -> None:
        check_inner_optimizer(optimizer, "optimizer")
        if loss_scale is None:
            loss_scale = 1.0
        elif isinstance(loss_scale, AutomaticLossScaler):
            loss_scale = loss_scale.policy
        elif not (is_number(loss_scale) or isinstance(loss_scale, LossScale)):
            requirement = "be None, a number or an `AutomaticLossScaler('Backoff')`"
            raise refusal("loss_scale", loss_scale, requirement, TypeError)
        super().__init__(optimizer, loss_scale, name=f"{name_of(optimizer)}-MP")
