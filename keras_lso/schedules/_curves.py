"""The curves that schedules consist of, in float32, each formula once."""

import math

from keras import ops


def float32(value):
    """Returns a float32 tensor; Keras may convert a bare float to `floatx`."""
    return ops.convert_to_tensor(value, dtype="float32")


def elapsed(step, offset=0):
    """Returns `step - offset` in float32, subtracted as integers if they are."""
    return ops.cast(ops.convert_to_tensor(step) - offset, "float32")


def straight_line(step, steps, start, end):
    """Returns the rate on the line from `start` at step 0 to `end` at `steps`."""
    return start + step / max(steps, 1) * (end - start)


def warmed_up(step, steps, start, end, rate):
    """Returns `rate`, but before `steps` the straight line from `start` to `end`."""
    line = straight_line(elapsed(step), steps, start, end)
    return ops.where(step < steps, line, rate)


def half_cosine(step, steps):
    """Returns `(1 + cos(pi * step / steps)) / 2`, rounded as in the Model Garden."""
    return (ops.cos(math.pi * step / steps) + 1.0) / 2.0


def accurate_half_cosine(left, done, steps):
    """Returns the half cosine and one minus it, both without cancellation near zero.

    `(1 + cos(pi * x)) / 2` is `sin(pi / 2 * (1 - x)) ** 2`; one minus that is
    `sin(pi / 2 * x) ** 2`. This form is accurate to 1e-6 of the result, but rounds
    differently from `half_cosine`, whose rates are those of the Model Garden.

    `left` and `done` are integer tensors, the remaining and the completed steps.
    """
    return [
        ops.square(ops.sin(elapsed(count) * (math.pi / 2 / steps)))
        for count in (left, done)
    ]


def power_of_step(step, power, steps=1):
    """Returns `(step / steps) ** power`; steps before the first count as step 1."""
    return ops.power(ops.maximum(step, float32(1)) / steps, float32(power))
