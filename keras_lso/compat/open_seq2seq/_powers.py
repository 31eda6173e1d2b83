"""Powers with float32's full accuracy, for devices and backends without float64.

Raising a rounded number to the power n multiplies its relative error by n. So the base
here is an integer below 2**24, which float32 represents exactly, and the remainder
becomes a separate factor near 1. Constants are computed in float64. The exact
operations stay exact under a compiler that fuses a product and a sum, multiplies by the
reciprocal of a constant or folds constants.
"""

import math

import numpy as np
from keras import ops

from keras_lso.schedules._curves import float32


def power_of_two(count, rate):
    """Returns `2 ** (count * rate)` for an integer tensor from 0 to 2**24."""
    # The product of two 12-bit numbers is exact; the rest of the rate is small.
    low = count % 2**12
    high, low = ops.cast(count - low, "float32"), ops.cast(low, "float32")
    mantissa, exponent = math.frexp(rate)
    leading = math.ldexp(math.floor(mantissa * 2**12), exponent - 12)
    first, second = high * leading, low * leading
    integer = ops.floor(first + second)
    # The clips change values only where the power is zero or infinite anyway. Without
    # the clips the power would be NaN there.
    fraction = ops.clip((first - integer) + second, float32(-1), float32(2))
    rest = ops.clip((high + low) * (rate - leading), float32(-1), float32(1))
    # As factors: a compiler may reorder the terms of a longer sum.
    return (
        ops.power(float32(2), integer)
        * ops.exp(fraction * math.log(2))
        * ops.exp(rest * math.log(2))
    )


def power_of_share(count, offset, total, power):
    """Returns `((count + offset) / total) ** power`.

    Args:
        count: Integer tensor, at least zero; at least one for a negative power.
        offset: Float of zero or more.
        total: Positive float, which `count + offset` does not exceed.
        power: Float.
    """
    # In units such that the total is between 2**23 and 2**24.
    exponent = math.frexp(total)[1] - 24
    unit = 2.0**exponent
    offset_rest, offset_units = math.modf(offset / unit)
    count_rest = count % int(min(max(unit, 1), 2**31 - 1))
    units = ops.cast(count - count_rest, "float32") / unit + offset_units
    rest = ops.cast(count_rest, "float32") / unit + offset_rest
    # At least one, since it is a divisor.
    base = ops.maximum(units, float32(1))
    excess = ((units - base) + rest) / base
    # A power of two scales without rounding.
    return _power_of_product(
        base / 2**23, excess, math.log(2**23 * unit / total), power
    )


def _power_of_product(base, excess, log_factor, power):
    """Returns `(base * (1 + excess) * exp(log_factor)) ** power`.

    Beyond a power of 100, `base ** power` may leave float32's range. The result is then
    computed as a power of a power. Its rounding errors exceed 1e-6 from a power of 300
    on.
    """
    outer = max(math.ceil(abs(power) / 100), 1)
    power = power / outer
    rounded = float(np.float32(power))
    correction = power * ops.log1p(excess) + (power - rounded) * ops.log(base)
    result = ops.power(base, float32(rounded)) * ops.exp(correction)
    result = result * math.exp(power * log_factor)
    return result if outer == 1 else ops.power(result, float32(float(outer)))
