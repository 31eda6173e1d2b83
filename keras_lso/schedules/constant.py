"""`FixedLR`: a constant rate as a schedule. `schedules.get` makes it from a number."""

from typing import Any

import keras
from keras.optimizers.schedules import LearningRateSchedule

from keras_lso._backend.types import Tensor
from keras_lso.schedules import _check as check
from keras_lso.schedules._curves import float32


@keras.saving.register_keras_serializable("keras_lso", name="FixedLR")
class FixedLR(LearningRateSchedule):
    """OpenSeq2Seq's `fixed_lr`: the same rate at every step.

    ```python
    rate = learning_rate
    ```

    Args:
        learning_rate: The rate.
        name: Defaults to `"FixedLR"`.

    Returns:
        A schedule: called with a step, it returns the rate, a float32 scalar.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If a rate is negative, a number is NaN or infinite, a number of
            steps is not an integer, or an argument is outside the range above.

    Example:

    >>> from keras_lso.schedules import FixedLR
    >>> schedule = FixedLR(0.25)
    >>> [float(schedule(step)) for step in (0, 1, 1_000_000)]
    [0.25, 0.25, 0.25]

    References:

    - [OpenSeq2Seq's `lr_policies`](
        https://nvidia.github.io/OpenSeq2Seq/html/api-docs/optimizers.html)
    """

    # It does not count steps. `LossScaleOptimizer` checks this before it warns.
    _counts_micro_batches = False

    def __init__(self, learning_rate: float, name: str = "FixedLR") -> None:
        super().__init__()
        self.learning_rate: float = check.rate("learning_rate", learning_rate)
        self.name: str = check.name(name, type(self))

    def __call__(self, step: int | Tensor) -> Tensor:
        return float32(self.learning_rate)

    def get_config(self) -> dict[str, Any]:
        return {"learning_rate": self.learning_rate, "name": self.name}
