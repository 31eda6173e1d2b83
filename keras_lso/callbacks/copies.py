"""`Copies`: snapshots of a run in host memory, to restore."""

from typing import Any, NamedTuple

import keras
import numpy as np
from keras import ops
from keras.optimizers.schedules import LearningRateSchedule
from numpy.typing import NDArray

from keras_lso._backend import backend
from keras_lso._core.counters import steps_attempted
from keras_lso._keras_internals.models import unlisted_state_of
from keras_lso._keras_internals.optimizers import steppers_of
from keras_lso._keras_internals.rates import rate_given_to
from keras_lso._keras_internals.variables import layers_of
from keras_lso.loss_scale_optimizer import LossScaleOptimizer
from keras_lso.schedules import Scaled


class Copy(NamedTuple):
    """The numbers of attempted and applied steps of a run, and its values."""

    attempted: int
    applied: int
    values: list[NDArray[Any]]


class Copies:
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
        for rate in map(rate_given_to, self._steppers()):
            is_known = isinstance(rate, keras.Variable | LearningRateSchedule)
            if factor != 1 and not is_known:
                raise ValueError(
                    '`on_stall="restore"` multiplies the learning rate, which must be '
                    "a number or a schedule. Write the function as the `__call__` of a "
                    "subclass of `LearningRateSchedule`, or "
                    f"`learning_rate_factor=1.0`. Received: learning_rate={rate!r}"
                )
        self._copies: list[Copy] = []
        # No copy can be due before this number of steps.
        self._due = 0
        # The copy that was restored last, until there is a newer copy.
        self._last: Copy | None = None
        self.restored: int = 0
        trained = set(map(id, model.trainable_weights))
        # Positions, since a buffer of PyTorch is a new object each time.
        self._constants = {
            at
            for at, variable in enumerate(_weights_of(model))
            if id(variable) not in trained and not is_finite(value_of(variable))
        }

    def take(self, model: keras.Model, steps: int) -> list[Any]:
        """Copies the run if a copy is due after at most so many steps.

        Returns the variables that hold inf or NaN, because of which there is no copy.
        """
        # Usually no copy can be due, which takes no read of the device.
        if steps < self._due or not self._optimizer.built:
            return []
        attempted = steps_attempted(self._optimizer)
        # By NumPy, since `int` does not accept a value that replicas share.
        applied = int(ops.convert_to_numpy(self._optimizer._counters.applied))
        due = self._copies[-1].applied + self._every if self._copies else applied
        self._due = steps + (due - applied if due > applied else self._every)
        if due > applied:
            return []
        variables = [*_weights_of(model), *self._optimizer._state.in_memory]
        values = list(map(value_of, variables))
        refused = [
            variable
            for at, (variable, value) in enumerate(zip(variables, values, strict=True))
            if at not in self._constants and not is_finite(value)
        ]
        if not refused:
            copy = Copy(attempted, applied, values)
            self._copies = [*self._copies, copy][-self._keep :]
            self._last = None
        return refused

    def restore(self, model: keras.Model, steps: int, before: int) -> Copy | None:
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
        steppers = self._steppers()
        rates = [_multiplied_rate(stepper, self._factor) for stepper in steppers]
        weights, state = _weights_of(model), self._optimizer._state
        count = len(weights)
        for variable, value in zip(weights, copy.values[:count], strict=True):
            variable.assign(ops.convert_to_tensor(value, dtype=variable.value.dtype))
        state.assign(state.in_memory, copy.values[count:])
        self.restored += 1
        self._due = steps + self._every
        for stepper, rate in zip(steppers, rates, strict=True):
            stepper.learning_rate = rate
        return copy

    def _steppers(self):
        # A `MultiOptimizer` may know its members only when it is built.
        return steppers_of(self._optimizer.inner_optimizer)


def _weights_of(model):
    # Without the states of seeds: random numbers after a restore are new.
    return [*model.weights, *unlisted_state_of(layers_of(model))]


def _multiplied_rate(stepper, factor):
    rate = rate_given_to(stepper)
    if isinstance(rate, keras.Variable):
        return float(ops.convert_to_tensor(rate) * factor)
    if factor == 1:
        return rate
    if isinstance(rate, Scaled):
        return Scaled(rate.schedule, rate.factor * factor)
    return Scaled(rate, factor)


def value_of(variable: keras.Variable) -> NDArray[Any]:
    """Returns the value of a variable as a new array."""
    return backend.host.to_host(variable.value)


def is_finite(value: NDArray[Any]) -> bool:
    """Whether all numbers of an array are finite."""
    is_whole = np.issubdtype(value.dtype, np.integer) or value.dtype == bool
    return is_whole or bool(np.isfinite(value).all())
