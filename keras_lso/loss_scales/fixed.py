"""`FixedLossScale`: a loss scale that never changes."""

from dataclasses import dataclass

from keras_lso._backend.tensors import Tensor
from keras_lso._core.fields import Scale, check_fields, registered
from keras_lso.loss_scales.loss_scale import LossScale


@registered("FixedLossScale")
@dataclass(eq=False, repr=False)
class FixedLossScale(LossScale):
    """A loss scale that never changes.

    Steps whose gradients are not finite are still skipped, so an overflow never
    reaches a weight. (In tf.keras and TF1 it does.)

    Args:
        loss_scale_value: The loss scale, positive and finite in float32.

    Example:

    >>> import keras_lso
    >>> policy = keras_lso.loss_scales.FixedLossScale(1024)
    >>> float(policy())
    1024.0
    """

    loss_scale_value: Scale

    def __post_init__(self) -> None:
        check_fields(self)
        self.initial_loss_scale: float = self.loss_scale_value
        self.min_scale: float = self.loss_scale_value
        self.max_scale: float = self.loss_scale_value

    def _passes_over(self, keeps: Tensor) -> bool:
        return type(self) is FixedLossScale

    def step(self, finite: bool | Tensor, amax: float | Tensor | None = None) -> None:
        return
