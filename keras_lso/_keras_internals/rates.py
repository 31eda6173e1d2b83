"""Learning rates and other coefficients of a step, which have to be finite."""

import math
import operator

import keras
import numpy as np
from keras import ops

from keras_lso._backend import backend
from keras_lso._keras_internals.optimizers import (
    iteration_variable,
    optimizers_in,
    steppers_of,
    steps_in_dtype_of_variables,
    variables_of,
)
from keras_lso._keras_internals.variables import read

# The learning rate as it was set: a variable, a schedule or a callable.
rate_given_to = operator.attrgetter("_learning_rate")


def rate_of(optimizer):
    """Returns the learning rate of this step, a scalar computed on the device."""
    if isinstance(optimizer._learning_rate, keras.Variable):
        return ops.convert_to_tensor(optimizer.learning_rate)

    def rate():
        value = ops.convert_to_tensor(optimizer.learning_rate)
        # A schedule or a callable may return an integer, or an array of one number.
        is_whole = "int" in keras.backend.standardize_dtype(value.dtype)
        value = ops.cast(value, "float32") if is_whole else value
        return ops.reshape(value, ()) if value.shape else value

    steps = ops.convert_to_tensor(iteration_variable(optimizer))
    return backend.without_host(rate, near=steps)


def _rate_in_step(optimizer):
    """Returns the rate in the dtype in which a step multiplies by it."""
    # Keras's optimizers cast the rate to the dtype of each weight. For a float16 weight
    # without a master, a rate above 65,504 becomes inf.
    rate = rate_of(optimizer)
    casts = steps_in_dtype_of_variables(optimizer)
    if not casts or all(v.dtype != "float16" for v in variables_of(optimizer)):
        return rate
    return ops.cast(rate, "float16")


def rates_of(optimizers):
    """Returns the learning rates, tensors, that the next step may multiply by."""
    found = []
    for optimizer in optimizers:
        window = optimizer.gradient_accumulation_steps
        if not window:
            found.append(_rate_in_step(optimizer))
            continue
        may_end = (read(iteration_variable(optimizer)) + 1) % window == 0
        if backend.value_if_on_host(may_end) is not False:
            rate = backend.scalar(_rate_in_step(optimizer), "float32")
            zero = backend.scalars.zeros_like(rate)
            found.append(backend.scalars.where(may_end, rate, zero))
    return found


def updates_of(optimizer):
    """Returns the number of times the optimizer has updated its variables, a tensor."""
    # With accumulation `optimizer.iterations` would make a copy to the device.
    steps = read(optimizer._iterations)
    count = optimizer.gradient_accumulation_steps
    return steps // count if count else steps


# Numbers that are None at first, unless they are given.
GIVEN_NUMBERS = ("weight_decay", "clipnorm", "global_clipnorm", "clipvalue")


class Hyperparameters:
    """The public numbers of an optimizer and those in it, which users may change."""

    # In a user's own class, a number may be infinite from the start, to limit nothing.

    def __init__(self, optimizer):
        self._names = [(o, _numbers_of(o)) for o in optimizers_in(optimizer)]

    def find_not_finite(self):
        """Returns the name and value of a number that no step can be taken with."""
        # Only numbers that the host knows are checked, and learning rates are tensors.
        # NumPy's numbers become Python's, which take the dtype of a tensor.
        for optimizer, names in self._names:
            state = vars(optimizer)
            factor = optimizer.loss_scale_factor
            if factor is not None:
                raise ValueError(
                    f"The inner optimizer has loss_scale_factor={factor}, by which it "
                    "would divide gradients that LossScaleOptimizer has unscaled "
                    "already. Set it to None. For a fixed loss scale write "
                    "`LossScaleOptimizer(inner_optimizer, dynamic=False, "
                    f"initial_scale={factor})`."
                )
            for name in names:
                value = state.get(name)
                # An infinite `clipvalue` clips nothing.
                if isinstance(value, _FLOATS) and not (
                    math.isfinite(value) or (name == "clipvalue" and value > 0)
                ):
                    return name, value
                if isinstance(value, np.floating):
                    setattr(optimizer, name, float(value))
        return None


_FLOATS = (float, np.floating)


def _numbers_of(optimizer):
    """Returns the names of the numbers that have to stay finite, a list."""
    is_known = type(optimizer).__module__.partition(".")[0] in ("keras", "keras_lso")
    found = [
        name
        for name, value in vars(optimizer).items()
        if isinstance(value, (int, *_FLOATS))
        and not name.startswith("_")
        and (is_known or not math.isinf(value))
    ]
    return list(dict.fromkeys([*GIVEN_NUMBERS, *found]))


def why_skipped(optimizer, hyperparameters=None):
    """Returns a message on a coefficient that is not finite, or None; reads rates."""
    found = (hyperparameters or Hyperparameters(optimizer)).find_not_finite()
    if found is not None:
        name, value = found
        return f"`{name}` of the inner optimizer is {value}. {_ADVICE}"
    for stepper in steppers_of(optimizer):
        rate = float(ops.convert_to_numpy(rate_of(stepper)))
        if not math.isfinite(float(ops.convert_to_numpy(_rate_in_step(stepper)))):
            step = int(ops.convert_to_numpy(iteration_variable(stepper)))
            source, computed = rate_given_to(stepper), ""
            if not isinstance(source, keras.Variable):
                name = getattr(source, "__name__", type(source).__name__)
                computed = f", as `{name}` computes it"
            if math.isfinite(rate):
                computed += ", and inf in float16, to which a float16 weight casts it"
            return f"The learning rate is {rate} at step {step}{computed}. {_ADVICE}"
    return None


_ADVICE = (
    "A step with such a number is skipped, whatever the gradients are, and the loss "
    "scale stays as it is. Set a finite number, such as `optimizer.learning_rate = "
    "1e-3`, or correct the schedule."
)
