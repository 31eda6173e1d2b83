"""What a number has to be, and the errors that say so."""

import math
import operator

import numpy as np


def is_number(value):
    """Whether `value` is a real number, bools aside."""
    return isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(
        value, (bool, np.bool_)
    )


def check_scale(argument, value):
    """Returns `value` as a float, or says why it cannot be a loss scale."""
    if not is_number(value):
        raise TypeError(
            f"Argument `{argument}` must be a positive, finite number such as "
            f"2.0**15. Received: {argument}={value!r} of type {type(value).__name__}"
        )
    with np.errstate(over="ignore", under="ignore"):
        # Python integers can be too large for a float.
        try:
            in_float32 = np.float32(value)
        except OverflowError:
            in_float32 = np.float32(np.inf)
    if not (np.isfinite(in_float32) and in_float32 > 0):
        raise ValueError(
            f"Argument `{argument}` must be positive and finite in float32, such "
            f"as 2.0**15. Received: {argument}={value!r}"
        )
    return float(value)


def check_bounds(min_scale, max_scale, **initial):
    """Refuses bounds that cross, or that exclude the initial scale."""
    if min_scale > max_scale:
        raise ValueError(
            "`min_scale` must not be above `max_scale`. "
            f"Received: min_scale={min_scale}, max_scale={max_scale}"
        )
    for name, value in initial.items():
        if not min_scale <= value <= max_scale:
            raise ValueError(
                f"`{name}` must lie between `min_scale` and `max_scale`. Received: "
                f"{name}={value}, min_scale={min_scale}, max_scale={max_scale}. "
                "Choose another scale, or widen the bounds."
            )


def check_positive_int(argument, value):
    """Returns `value` as an int, or says why it is not a count of steps."""
    try:
        count = operator.index(value)
    except TypeError:
        count = None
    if count is None or isinstance(value, (bool, np.bool_)) or count < 1:
        raise ValueError(
            f"Argument `{argument}` must be a positive integer. "
            f"Received: {argument}={value!r} of type {type(value).__name__}"
        )
    return count


def check_factor(argument, value, above, below=math.inf):
    """Returns `value` as a float strictly between `above` and `below`."""
    if not is_number(value) or not above < value < below:
        span = f"above {above}" + (f" and below {below}" if below < math.inf else "")
        raise ValueError(
            f"Argument `{argument}` must be a finite number {span}. "
            f"Received: {argument}={value!r}"
        )
    return float(value)
