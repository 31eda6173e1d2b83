"""`RunCopies`: copies of a run in host memory, to go back to after a stall."""

from typing import Any, NamedTuple

import keras
import numpy as np
from keras import ops
from keras.optimizers.schedules import LearningRateSchedule
from numpy.typing import NDArray

from keras_lso._backend import backend
from keras_lso._core.step_record import steps_attempted
from keras_lso._keras_internals.layers import unlisted_state_of
from keras_lso._keras_internals.optimizers import bases_of
from keras_lso._keras_internals.rules import rate_given_to
from keras_lso._keras_internals.variables import layers_of
from keras_lso.loss_scale_optimizer import LossScaleOptimizer
from keras_lso.schedules import Scaled


class RunCopy(NamedTuple):
    """The numbers of attempted and applied steps of a run, and its values."""

    attempted: int
    applied: int
    values: list[NDArray[Any]]


class RunCopies:
    """The last copies of a model and its optimizer in which all numbers are finite.

    Weights that are not trained and are not finite from the beginning, such as an
    attention mask of -inf, are constants, and may be in a copy. The model is given for
    each copy again: on JAX, `Callback.model` attaches the values to its variables.
    """

    def __init__(
        self,
        model: keras.Model,
        optimizer: LossScaleOptimizer,
        every: int,
        keep: int,
        factor: float,
    ) -> None:
        self._optimizer = optimizer
        self._every, self._keep, self._factor = every, keep, factor
        for base in self._bases():
            rate = rate_given_to(base)
            is_known = isinstance(rate, keras.Variable | LearningRateSchedule)
            if factor != 1 and not is_known:
                raise ValueError(
                    '`on_stall="restore"` multiplies the learning rate, which must be '
                    "a number or a schedule. Write the function as the `__call__` of a "
                    "subclass of `LearningRateSchedule`, or "
                    f"`learning_rate_factor=1.0`. Received: learning_rate={rate!r}"
                )
        self._copies: list[RunCopy] = []
        # No copy can be due before this number of steps.
        self._next_copy_at = 0
        # The copy that was restored last, until there is a newer copy.
        self._last: RunCopy | None = None
        self.restored: int = 0
        trained = {id(variable) for variable in model.trainable_weights}
        # Positions, since a buffer of PyTorch is a new object each time.
        self._constants = {
            at
            for at, variable in enumerate(_weights_of(model))
            if id(variable) not in trained and not is_finite(variable)
        }

    def take(self, model: keras.Model, steps: int) -> list[Any]:
        """Copies the run if a copy is due after at most so many steps.

        Returns the variables that hold inf or NaN, because of which there is no copy.
        """
        # Usually no copy can be due, which takes no read of the device.
        if steps < self._next_copy_at or not self._optimizer.built:
            return []
        attempted = steps_attempted(self._optimizer)
        # By NumPy, since `int` does not accept a value that replicas share.
        applied = int(ops.convert_to_numpy(self._optimizer._counters.applied))
        left = 0
        if self._copies:
            left = max(0, self._copies[-1].applied + self._every - applied)
        self._next_copy_at = steps + (left or self._every)
        if left:
            return []
        variables = [*_weights_of(model), *self._optimizer._in_memory]
        values = [backend.host.to_host(variable.value) for variable in variables]
        not_finite = [
            variable
            for at, (variable, value) in enumerate(zip(variables, values, strict=True))
            if at not in self._constants and not np.isfinite(value).all()
        ]
        if not not_finite:
            copy = RunCopy(attempted, applied, values)
            self._copies = [*self._copies, copy][-self._keep :]
            self._last = None
        return not_finite

    def restore(self, model: keras.Model, steps: int, before: int) -> RunCopy | None:
        """Restores the last copy from before the skipped steps, if there is one.

        If that copy has led to a stall before the next copy was due, an older copy is
        restored. The current learning rate is multiplied by the factor.
        """
        self._copies = [c for c in self._copies if c.attempted <= before]
        if len(self._copies) > 1 and self._copies[-1] is self._last:
            self._copies.pop()
        if not self._copies:
            return None
        self._last = copy = self._copies[-1]
        bases = self._bases()
        rates = [_multiplied_rate(base, self._factor) for base in bases]
        weights, state = _weights_of(model), self._optimizer._state
        count = len(weights)
        for variable, value in zip(weights, copy.values[:count], strict=True):
            variable.assign(ops.convert_to_tensor(value, dtype=variable.value.dtype))
        state.assign(self._optimizer._in_memory, copy.values[count:])
        self.restored += 1
        self._next_copy_at = steps + self._every
        for base, rate in zip(bases, rates, strict=True):
            base.learning_rate = rate
        return copy

    def _bases(self) -> list[keras.Optimizer]:
        """Returns the base optimizers, which a `MultiOptimizer` may know once built."""
        return bases_of(self._optimizer.inner_optimizer)


def _weights_of(model: keras.Model) -> list[Any]:
    """Returns the state of a model without seeds: random numbers then are new."""
    return [*model.weights, *unlisted_state_of(layers_of(model))]


def is_finite(variable: Any) -> bool:
    """Whether a variable holds neither inf nor NaN."""
    return bool(np.isfinite(backend.host.to_host(variable.value)).all())


def _multiplied_rate(base: keras.Optimizer, factor: float) -> Any:
    """Returns the learning rate of an optimizer times a factor."""
    rate = rate_given_to(base)
    if isinstance(rate, keras.Variable):
        return float(ops.convert_to_tensor(rate) * factor)
    if factor == 1:
        return rate
    if isinstance(rate, Scaled):
        return Scaled(rate.schedule, rate.factor * factor)
    return Scaled(rate, factor)
