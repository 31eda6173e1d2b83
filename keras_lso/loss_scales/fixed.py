"""`FixedLossScale`: a loss scale that never changes."""

from typing import Any

import keras

from keras_lso._backend.types import Tensor
from keras_lso._core.checks import check_scale
from keras_lso.loss_scales.loss_scale import LossScale


@keras.saving.register_keras_serializable("keras_lso", name="FixedLossScale")
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

    def __init__(self, loss_scale_value: float) -> None:
        value = check_scale("loss_scale_value", loss_scale_value)
        super().__init__(value, min_scale=value, max_scale=value)
        self.loss_scale_value = value

    def step(self, finite: bool | Tensor, amax: float | Tensor | None = None) -> None:
        """Leaves the scale unchanged."""
        # AutoGraph cannot read a function that has only a docstring.
        return

    def get_config(self) -> dict[str, Any]:
        return {"loss_scale_value": self.loss_scale_value}
