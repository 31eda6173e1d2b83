"""The curves of the schedules, in float32.

A curve is a function of the share of its steps that is left and of the share that is
done. Each is a division of integers (`_steps.py`): a small share has the accuracy of
float32, and at the ends they are exactly 0 and 1.
"""

import math

import numpy as np
from keras import ops


def float32(value):
    """Returns a float32 tensor; Keras may convert a bare float to `floatx`."""
    return ops.convert_to_tensor(value, dtype="float32")


def shares(left, done, *, before=None):
    """Returns the share of some steps that is left, and the share that is done.

    Both numbers are divided by their sum, since a compiler may replace the division by
    a constant with a multiplication by its rounded inverse: 49 / 49 would be below 1,
    3 / 3 above it, and 1 - 3 / 3 negative. On an NVIDIA GPU, XLA's quotient of two
    equal numbers may be off by one rounding; the quotient of zero is zero.
    """
    total = left + done
    # With 20 million steps left and minus 20 million done, rounding would change it.
    if before is not None:
        total = ops.where(done < 0, float32(float(before)), total)
    return left / total, done / total


def straight_line(steps, total, start, end):
    """Returns the rate on the line from `start` at step 0 to `end` at `total`."""
    total = max(total, 1)
    if start == 0:
        return steps.in_float32() / total * end
    left, done = shares(*steps.left_and_done(total), before=total)
    return line_between(left, done, start, end)


def line_between(left, done, start, end):
    """Returns the rate on the line from `start` to `end`."""
    return left * start + done * end


def cosine_between(left, done, start, end):
    """Returns the rate on the half cosine from `start` to `end`."""
    return line_between(half_cosine(left), half_cosine(done), start, end)


def root_between(left, done, start, end):
    """Returns the rate on `1 - sqrt(done)` from `start` to `end`."""
    root = ops.sqrt(done)
    # `1 - root` would lose digits near the end.
    return line_between(left / (1 + root), root, start, end)


def exponential_between(left, done, start, end):
    """Returns the rate on the exponential from `start` to `end`, both positive."""
    growth = math.log(end) - math.log(start)
    # From the nearer end, so that the exponent is small, and 0 at both ends.
    from_start = start * ops.exp(ops.minimum(done, float32(0.5)) * growth)
    from_end = end * ops.exp(ops.minimum(left, float32(0.5)) * -growth)
    return ops.where(done < 0.5, from_start, from_end)


def warmed_up(steps, total, start, end, rate):
    """Returns the line from `start` to `end` before step `total`, then `rate`."""
    line = straight_line(steps, total, start, end)
    return ops.where(steps.is_before(total), line, rate)


def half_cosine(share):
    """Returns `(1 - cos(pi * share)) / 2`, accurate near zero as well."""
    sine = ops.sin(share * (math.pi / 2))
    return sine * sine


def one_minus_power(left, done, power):
    """Returns `1 - left ** power`, accurate for small `done` too."""
    log_left = ops.where(
        done < 0.5, ops.log1p(-ops.minimum(done, float32(0.5))), ops.log(left)
    )
    return -ops.expm1(power * log_left)


def power_of_step(steps, power, total=1):
    """Returns `(steps / total) ** power`; steps before the first count as step 1."""
    count = ops.maximum(steps.in_float32(), float32(1))
    return ops.power(count / total if total > 1 else count, float32(power))


def power_of_rate(rate, count):
    """Returns `rate ** count` for a positive float and an integer tensor."""
    limits = np.finfo("float32")
    base = float(np.clip(rate, limits.tiny, limits.max).astype("float32"))
    count = ops.cast(count, "float32")
    result = ops.power(float32(base), count)
    if base == rate:
        return result
    # A million times the rounding error of the rate matters: it has its own factor.
    # Within these limits that is a normal number: 0 times inf would be NaN.
    rest = ops.clip(count * math.log(rate / base), float32(-87), float32(87))
    return result * ops.exp(rest)


def stairs(steps, boundaries, values):
    """Returns the value of the interval; a boundary belongs to the one before it."""
    first, *later = values
    rate = float32(first)
    for boundary, value in zip(boundaries, later, strict=True):
        rate = ops.where(steps > boundary, float32(value), rate)
    return rate
