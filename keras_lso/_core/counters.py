"""The counters of a `LossScaleOptimizer`, which the host does not read in a step."""

from typing import TYPE_CHECKING, Any

import keras
from keras import ops
from numpy.typing import NDArray

from keras_lso._backend import backend
from keras_lso._backend.tensors import Tensor, Variables
from keras_lso._core.checks import check_buffer, check_positive_int
from keras_lso._core.flag import Flag
from keras_lso._core.step_record import StepRecord
from keras_lso._keras_internals.optimizers import (
    iteration_variable,
)
from keras_lso._keras_internals.rules import why_skipped
from keras_lso._keras_internals.variables import read, storage_of

if TYPE_CHECKING:
    from keras_lso.loss_scale_optimizer import LossScaleOptimizer

LOOK_FOR = (
    "Look for inf or NaN in the data, and for a layer that overflows in float16, which "
    "`keras_lso.float16_report(model, x, y)` names."
)
REMEDIES = (
    f"{LOOK_FOR} Without either the model itself has diverged: go back to a checkpoint "
    "from before the stall, and lower the learning rate or clip the gradients "
    "(`global_clipnorm` of the inner optimizer)."
)


class StepCounters:
    """The counters of a `LossScaleOptimizer`; its `variables` are not saved."""

    def __init__(self, optimizer: "LossScaleOptimizer"):
        self._policy = optimizer.loss_scale_policy
        self._inner_optimizer = optimizer.inner_optimizer
        self._add_variable = optimizer.add_variable
        self._skipped = iteration_variable(optimizer)
        # The user may assign this count, for example to restart a schedule.
        self.applied = iteration_variable(self._inner_optimizer)
        self.variables: Variables = []
        # Single gradients are not checked until `record_overflows` is called.
        self.overflows: Any = None
        self.record: Any = None
        self._amax: Any = None
        if self._policy.needs_amax:
            self._amax = self._add("amax_since_update")
        # The steps skipped in a row, the overflows in a row at the lowest scale, and
        # the overflows since the last update of the scale.
        self._streaks = self._add("consecutive_skips", "int", (3,))
        self._marked = 0, 0

    def _add(
        self, name: str, dtype: str = "float32", shape: tuple[int, ...] = ()
    ) -> keras.Variable:
        """Adds a variable of zeros that is not saved."""
        counter = self._add_variable(
            shape=shape,
            dtype=dtype,
            initializer="zeros",
            aggregation="only_first_replica",
            name=name,
        )
        self.variables.append(counter)
        return counter

    def count(
        self, finite: Tensor, applies: Flag, update_scale: bool, has_counted: bool
    ) -> Tensor:
        """Counts a step, before the scale moves.

        Returns whether the gradients of all steps since the last update of the scale
        were finite, those with `update_scale=False` too.
        """
        # `has_counted`: the inner optimizer counts its own step, but no fused step.
        scale = read(self._policy.scale)
        variables = [self._skipped, self.applied, self._streaks]
        skipped, applied, streaks = storage_of(variables)
        counts = skipped, None if has_counted else applied, streaks
        flags = finite, applies.tensor
        scales = scale, self._policy.min_scale
        assign = self._inner_optimizer.assign
        return backend.count_step(*counts, *flags, scales, update_scale, assign)

    def count_amax(self, amax: Tensor, update_scale: bool) -> Tensor:
        """Returns the largest magnitude since the scale was last updated."""
        amax = ops.maximum(amax, ops.convert_to_tensor(self._amax))
        self._amax.assign(ops.zeros_like(amax) if update_scale else amax)
        return amax

    @property
    def moved_with_scale(self) -> Variables:
        """The scale's variables, and those that are reset when it moves."""
        variables = list(self._policy.variables)
        return variables if self._amax is None else [*variables, self._amax]

    @property
    def skipped(self) -> Tensor:
        """The number of steps that were skipped, an integer scalar tensor."""
        # A copy: on PyTorch the variable's own tensor changes in place.
        return ops.copy(self._skipped)

    @property
    def last_was_applied(self) -> Tensor:
        """Whether the last step was applied, a boolean scalar tensor."""
        return ops.equal(ops.convert_to_tensor(self._streaks)[0], 0)

    def skips(self) -> list[int]:
        """Reads how many steps in a row were skipped, and how many at the lowest."""
        return ops.convert_to_numpy(self._streaks)[:2].tolist()

    def mark(self) -> int:
        """Reads how many steps were skipped since the last call; 0 if one was not."""
        before = self._marked
        counts = self._skipped, self.applied
        skipped, applied = [int(ops.convert_to_numpy(count)) for count in counts]
        self._marked = skipped, applied
        return skipped - before[0] if applied == before[1] else 0

    def check_stalled(self, patience: int) -> None:
        """See `LossScaleOptimizer.check_stalled`."""
        patience = check_positive_int("patience", patience)
        skips, at_lowest = self.skips()
        reason = why_skipped(self._inner_optimizer) if skips >= patience else None
        if reason is not None:
            raise FloatingPointError(
                f"The last {skips} steps were all skipped. {reason}"
            )
        if at_lowest >= patience:
            raise FloatingPointError(
                f"The last {at_lowest} steps were all skipped at the lowest loss scale "
                f"({self._policy.min_scale}): the gradients are inf or NaN at any "
                f"scale. {REMEDIES}"
            )

    def reset(self) -> None:
        """Resets everything except the number of applied steps."""
        if self.record is not None:
            self.record.restart()
        for variable in (self._skipped, *self.variables):
            variable.assign(ops.zeros(variable.shape, variable.dtype))

    # --- The record of each step ----------------------------------------------

    def record_steps(self, length: int, optimizer: "LossScaleOptimizer") -> None:
        """Starts recording each step; see `LossScaleOptimizer.record_steps`."""
        length = check_buffer("length", length)
        if self.record is None:
            self.record = StepRecord(length, optimizer, self._add)
        elif self.record.length < length:
            raise ValueError(
                "The optimizer already records its steps, the last "
                f"{self.record.length} of them. Ask for the length that you need "
                f"before the first step. Received: length={length}"
            )

    def read_record(self) -> dict[str, NDArray[Any]]:
        """See `LossScaleOptimizer.read_record`."""
        return _started(self.record, "record_steps").read()

    # --- The record of gradients that are not finite --------------------------

    def record_overflows(self, count: int) -> None:
        """Starts checking each of `count` gradients separately."""
        if self.overflows is None:
            self.overflows = self._add("overflows", "int32", (count,))

    def stop_recording_overflows(self) -> None:
        """Stops checking single gradients."""
        self.variables = [v for v in self.variables if v is not self.overflows]
        self.overflows = None

    def note_overflows(self, are_finite: list[Tensor], positions: list[int]) -> None:
        """Stores whether the gradients of the variables at `positions` are finite."""
        flags = [ops.zeros((), "int32")] * self.overflows.shape[0]
        for finite, i in zip(are_finite, positions, strict=True):
            flags[i] = ops.cast(ops.logical_not(finite), "int32")
        self.overflows.assign(ops.stack(flags))

    def overflowed(self) -> NDArray[Any]:
        """Returns for each variable whether its gradient was not finite, an array."""
        return ops.convert_to_numpy(_started(self.overflows, "record_overflows"))


def _started(record: Any, method: str) -> Any:
    """Returns a record; raises a `ValueError` if it was not started."""
    if record is None:
        raise ValueError(
            f"There is a record only after `optimizer.{method}()`. Call it, and make "
            "a step."
        )
    return record
