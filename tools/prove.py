"""Proves the numeric core by trying each number there is, and prints a row a claim.

    KERAS_BACKEND=jax python -m tools.prove [WORD ...]

runs the checks with one of the words in their names, or all. Most take the 2**32
patterns of 32 bits: as float32 numbers, as a 16-bit weight over a remainder, or as a
number and a random draw. `testing/integers.py` has what is right. The two halves of a
codec are compiled apart, since a step reads what the one before has stored: in one
program XLA could leave out the rounding between them.
"""

import argparse
import functools
import itertools
import operator
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

import keras
import numpy as np
from keras import ops
from rich.console import Console

from keras_lso._backend import backend
from keras_lso._backend.codecs import CODECS, PLACES, hashed, int32
from keras_lso._core.checks import LARGEST_STEP
from keras_lso.loss_scales import DynamicLossScale
from testing.integers import (
    INFINITE_BFLOAT16,
    INFINITY,
    LARGEST,
    NO_SIGN,
    NORMAL_FLOAT16,
    ON_JAX,
    SIGN,
    Rounding,
    broadcast,
    held,
    is_near,
    judged,
    power,
    xp,
)
from testing.masters import NUMPY

if ON_JAX:
    import jax

# All upper or lower halves of 32 bits.
HALVES = np.arange(2**16, dtype=np.int32)

# --- Codecs ---------------------------------------------------------------------------
# A check takes the upper halves of some patterns, a column, and the lower ones, a row.
# It returns, for each of its claims, which patterns are a case of it, and for which it
# is wrong.


def compiled(function):
    """A function of the package."""
    return jax.jit(function) if ON_JAX else function


@compiled
def bits_of(values):
    return backend.bitcast(ops.cast(values, "float32"), "int32")


class Kind:
    """A kind of master, and what is stored of it with weights of a dtype."""

    def __init__(self, name, dtype):
        codec = CODECS[name]

        @compiled
        def encode(bits, draws=None):
            number = backend.bitcast(bits, "float32")
            weight, kept = codec.encode(backend, number, dtype, draws)
            return weight, None if kept is None else ops.cast(kept, codec.aux_dtype)

        @compiled
        def decode(weight, kept):
            return codec.decode(backend, weight, kept)

        self.encode, self.decode = encode, decode


@judged
def pattern(upper, lower):
    return (upper << 16) | lower


def joined(upper, lower):
    """Returns the patterns as a tensor."""
    return ops.convert_to_tensor(pattern(upper, lower))


def each_number(name, dtype):
    """Each float32 number becomes a weight and what is kept with it, and comes back."""
    kind = Kind(name, dtype)
    largest, beyond, word = LARGEST[dtype], LARGEST[dtype], "65,504"
    if dtype == "bfloat16":
        largest, beyond, word = INFINITE_BFLOAT16 - 1, INFINITY, "infinite"
    # Of small numbers in float16, remainders of 16 bits lose a part.
    least = NORMAL_FLOAT16 if (name, dtype) == ("remainder", "float16") else 0

    @judged
    def claims(bits, weight, back):
        size, sign = bits & NO_SIGN, bits & SIGN
        number, rounded = held(size, name, dtype)
        is_wrong = weight != (rounded | sign)
        is_within = size <= largest
        end = bits if name == "float32" else beyond | sign
        are_nan = xp.minimum(weight & NO_SIGN, back & NO_SIGN) > INFINITY
        is_wrong_end = (weight != (beyond | sign)) | (back != end)
        return {
            "comes back, from the nearest weight": (
                is_within & (size >= least),
                is_wrong | (back != (number | sign)),
            ),
            "below 2**-14 comes back within 2**-39": (
                size < least,
                is_wrong | ~is_near(back, bits),
            ),
            f"that is too large becomes {word}, and NaN stays NaN": (
                ~is_within,
                xp.where(size > INFINITY, ~are_nan, is_wrong_end),
            ),
        }

    def check(upper, lower):
        bits = joined(upper, lower)
        weight, kept = kind.encode(bits)
        return claims(bits, bits_of(weight), bits_of(kind.decode(weight, kept)))

    return check


def each_pair(name, dtype):
    """Each weight over each remainder, also one that no number has: it was assigned."""
    kind = Kind(name, dtype)
    # Where small numbers lose a part, and pairs are more than numbers.
    loses = (name, dtype) == ("remainder", "float16")

    @judged
    def claims(weight, low, first, stored, kept, second, third):
        size = weight & NO_SIGN
        right = first
        if dtype == "float16":
            # The largest weight may be assigned over a remainder that goes beyond it.
            right = (first & SIGN) | xp.minimum(first & NO_SIGN, LARGEST[dtype])
        is_moved = second != right
        if loses:
            is_small = size < NORMAL_FLOAT16
            is_moved &= ~(is_small & is_near(second, first) & (third == second))
        else:
            is_moved |= (kept != low) & (first != weight) & (first == right)
        is_wrong = is_moved | (stored != weight) | ((first & NO_SIGN) >= INFINITY)
        is_nan = (size > INFINITY) & ((first & NO_SIGN) > INFINITY)
        is_wrong = xp.where(size < INFINITY, is_wrong, (first != weight) & ~is_nan)
        claim = "is a number, and steps by 0 change neither"
        claim += ", but one below 2**-14, once, by 2**-39" if loses else ""
        return {claim: (first == first, is_wrong)}

    def check(upper, lower):
        patterns = upper.astype(np.uint16).view(NUMPY[dtype]).astype(np.float32)
        weight = ops.cast(ops.convert_to_tensor(patterns), dtype)
        low = ops.cast(ops.convert_to_tensor(lower), CODECS[name].aux_dtype)
        first = bits_of(kind.decode(weight, low))
        stored, kept = kind.encode(first)
        second = bits_of(kind.decode(stored, kept))
        third = bits_of(kind.decode(*kind.encode(second))) if loses else second
        return claims(bits_of(weight), low, first, bits_of(stored), kept, second, third)

    return check


def each_threshold(dtype):
    """The draws of each number between which it begins to round away from 0."""
    kind = Kind("stochastic", dtype)
    largest = LARGEST[dtype]

    @judged
    def thresholds(bits):
        at = Rounding(bits, dtype)
        more = at.is_between.astype(np.int32)
        away = xp.where(at.are_last, at.edge, at.edge - 1)
        back = xp.where(at.are_last, at.edge - 1 - more, at.edge + more)
        # The other bits of a draw do not count.
        return [(draw & (at.draws - 1)) | (bits & -at.draws) for draw in (away, back)]

    @judged
    def claims(bits, away, back):
        at = Rounding(bits, dtype)
        is_wrong = ~at.is_weight(back, at.below)
        is_wrong |= (at.away > 0) & ~at.is_weight(away, at.above)
        is_within = at.size <= largest
        is_infinite = (at.size == INFINITY) & (dtype == "bfloat16")
        end = xp.where(is_infinite, INFINITY, largest) | at.sign
        are_nan = xp.minimum(away & NO_SIGN, back & NO_SIGN) > INFINITY
        is_wrong_end = (away != end) | (back != end)
        return {
            f"goes away from 0 by as many of {at.draws:,} draws as its place says": (
                is_within & ~at.is_between,
                is_wrong,
            ),
            "below 2**-25 does so, but for a part of one draw": (
                is_within & at.is_between,
                is_wrong,
            ),
            "that is too large becomes the largest, and NaN stays NaN": (
                ~is_within,
                xp.where(at.size > INFINITY, ~are_nan, is_wrong_end),
            ),
        }

    def check(upper, lower):
        bits = joined(upper, lower)
        draws = map(ops.convert_to_tensor, thresholds(bits))
        return claims(bits, *(bits_of(kind.encode(bits, draw)[0]) for draw in draws))

    return check


def each_draw(dtype, numbers):
    """All draws of some numbers are on the right side of the threshold.

    `numbers` has bits: in bfloat16 an upper half, which is taken with each lower one.
    """
    kind = Kind("stochastic", dtype)

    @judged
    def claims(bits, draws, weight):
        at = Rounding(bits, dtype)
        is_away = xp.where(at.are_last, draws >= at.edge, draws < at.edge)
        right = xp.where(is_away, at.above, at.below)
        claim = "is on the right side with each draw"
        return {claim: (draws == draws, ~at.is_weight(weight, right))}

    def check(upper, lower):
        if dtype == "bfloat16":
            bits, draws = pattern(numbers, upper), lower
        else:
            bits, draws = numbers[upper >> 8], pattern(upper & 0xFF, lower)
        bits, draws = map(ops.convert_to_tensor, broadcast(bits, draws))
        return claims(bits, draws, bits_of(kind.encode(bits, draws)[0]))

    return check


def each_place(key):
    """The random bits of each place of a tensor lead back to it."""

    @compiled
    def drawn(places):
        return hashed(places * PLACES + int32(key))

    def mixed(bits, *counts):
        shifted = [(bits >> n) & (2 ** (32 - n) - 1) for n in counts]
        return functools.reduce(operator.xor, shifted, bits)

    def divided(bits, factor):
        return bits * int32(pow(factor, -1, 2**32))

    @judged
    def claims(places, bits):
        bits = divided(mixed(bits, 16), 0x846CA68B)
        bits = divided(mixed(bits, 15, 30), 0x7FEB352D)
        back = divided(mixed(bits, 16) - int32(key), PLACES)
        return {"has random bits of its own": (places == places, back != places)}

    def check(upper, lower):
        places = joined(upper, lower)
        return claims(places, drawn(places))

    return check


# --- The loss scale -------------------------------------------------------------------


def steps_of(policy):
    """Returns a function of arrays: the states of a policy after a step from others.

    It takes whether the gradients are finite, the values of the variables, and the
    policy's attributes.
    """
    policy.build()

    def step(finite, values, attributes):
        vars(policy).update(attributes)
        scope = keras.StatelessScope(list(zip(policy.variables, values, strict=True)))
        with scope:
            policy.step(finite)
        return [scope.get_current_value(v) for v in policy.variables]

    def steps(finite, values, attributes):
        after = [np.empty_like(value) for value in values]
        for i in np.ndindex(finite.shape):
            for variable, value in zip(policy.variables, values, strict=True):
                variable.assign(value[i])
            vars(policy).update({k: v[i].item() for k, v in attributes.items()})
            policy.step(bool(finite[i]))
            for variable, value in zip(policy.variables, after, strict=True):
                value[i] = ops.convert_to_numpy(variable)
        return after

    return jax.jit(jax.vmap(jax.vmap(step))) if ON_JAX else steps


def each_scale():
    """Both bounds, the scale between them and its factors, all powers of two."""
    steps = steps_of(DynamicLossScale(increment_period=1))

    @judged
    def before(low, high, scale, factor, finite):
        attributes = {
            "min_scale": power(low),
            "max_scale": power(high),
            "growth_factor": power(factor),
            "backoff_factor": power(-factor),
        }
        return finite == 1, [xp.zeros_like(scale), power(scale)], attributes

    @judged
    def claims(low, high, scale, factor, finite, counter, found):
        moved = scale + xp.where(finite == 1, factor, -factor)
        is_case = (low <= scale) & (scale <= high) & (factor > 0) & (factor < 127)
        is_wrong = (found != power(xp.clip(moved, low, high))) | (counter != 0)
        return {"is its product with a factor, within the bounds": (is_case, is_wrong)}

    def check(upper, lower):
        low, high, scale = (
            byte - 126 for byte in (upper >> 8, upper & 0xFF, lower >> 8)
        )
        numbers = broadcast(low, high, scale, (lower >> 1) & 0x7F, lower & 1)
        return claims(*numbers, *steps(*before(*numbers)))

    return check


def each_state(period, hysteresis, consecutive):
    """The finite steps since the scale moved, and the overflows before it falls."""
    steps = steps_of(
        DynamicLossScale(
            increment_period=period,
            hysteresis=hysteresis,
            consecutive_hysteresis=consecutive,
        )
    )
    has_budget = hysteresis > 1
    budgets = hysteresis + has_budget

    @judged
    def before(patterns):
        scale = xp.full(patterns.shape, 2**15, np.float32)
        values = [patterns // budgets, scale, patterns % budgets]
        return patterns == patterns, values[: 2 + has_budget]

    @judged
    def claims(patterns, *found):
        counter, left = patterns // budgets, patterns % budgets
        grows = counter + 1 == period
        less = xp.maximum(left - 1, 0)
        refilled = xp.where(grows | consecutive, hysteresis, left)
        right = [xp.where(grows, 0, counter + 1), xp.where(grows, 2**16, 2**15)]
        right += [refilled] * has_budget
        right += [xp.zeros_like(counter), xp.where(less == 0, 2**14, 2**15)]
        right += [less] * has_budget
        wrong = [x != y for x, y in zip(found, right, strict=True)]
        claim = "is the right one after a finite step and after an overflow"
        is_case = (counter >= 0) & (counter < period)
        return {claim: (is_case, functools.reduce(operator.or_, wrong))}

    def check(upper, lower):
        patterns = pattern(upper, lower)
        finite, values = before(patterns)
        return claims(patterns, *steps(finite, values, {}), *steps(~finite, values, {}))

    return check


# --- All of them ----------------------------------------------------------------------


class Check(NamedTuple):
    """What is checked, and the halves of the patterns."""

    name: str
    make: Callable
    upper: np.ndarray = HALVES
    lower: np.ndarray = HALVES


# The increment period, the hysteresis, and whether each finite step restores that.
POLICIES = [(period, 1, False) for period in (1, 2, 2000, LARGEST_STEP)]
POLICIES += itertools.product((1, 2, 2000), (2, 5), (False, True))


def checks():
    """Yields all checks."""

    def check(name, function, *arguments, **halves):
        return Check(name, functools.partial(function, *arguments), **halves)

    of_8_bits = np.arange(-(2**7), 2**7, dtype=np.int32)
    for dtype in ("bfloat16", "float16"):
        for kind in ("float32", "remainder", "remainder8"):
            yield check(f"{dtype}, {kind}: a number", each_number, kind, dtype)
        for kind, lower in (("remainder", HALVES), ("remainder8", of_8_bits)):
            name = f"{dtype}, {kind}: a weight over any remainder"
            yield check(name, each_pair, kind, dtype, lower=lower)
        yield check(f"{dtype}, stochastic: a number", each_threshold, dtype)
    # Next to 1, -1 and 0, and below the largest.
    for upper in (0x3F80, 0xBF80, 0x0000, 0x7F7E):
        name = "bfloat16, stochastic: each number of 4 intervals"
        yield check(name, each_draw, "bfloat16", np.int32([[upper]]))
    random = np.random.default_rng(0)
    numbers = random.choice([-1, 1], 256) * np.exp2(random.uniform(-25, 15.9, 256))
    bits = np.float32(numbers).view(np.int32)
    yield check("float16, stochastic: each of 256 numbers", each_draw, "float16", bits)
    yield check("a place of a tensor", each_place, 0x12345678)
    # Bounds from 2**-126 to 2**126, of which a byte holds an exponent.
    low, high = np.triu_indices(253)
    yield check("a loss scale", each_scale, upper=np.int32(low << 8 | high))
    for period, hysteresis, consecutive in POLICIES:
        states = period * (hysteresis + (hysteresis > 1))
        upper = HALVES[: -(-states // 2**16)]
        policy = period, hysteresis, consecutive
        yield check("a state of the loss scale", each_state, *policy, upper=upper)


def counted(group, rows=2):
    """Returns a list for each claim: its cases, its faults, and the first of these."""
    found = {}
    for check in group:
        run = check.make()
        # Two rows fit into the cache of a core.
        for start in range(0, len(check.upper), rows):
            upper, lower = check.upper[start : start + rows, None], check.lower[None]
            for claim, pair in run(upper, lower).items():
                is_case, is_wrong = map(np.asarray, pair)
                is_fault = is_case & is_wrong
                count = found.setdefault(claim, [0, 0, None])
                count[0] += np.count_nonzero(is_case)
                count[1] += np.count_nonzero(is_fault)
                if count[2] is None and is_fault.any():
                    halves = np.broadcast_arrays(upper, lower)
                    count[2] = [hex(half[is_fault][0]) for half in halves]
    # A claim about small numbers says nothing of the other kinds.
    return {claim: count for claim, count in found.items() if count[0]}


def main(argv=None):
    parser = argparse.ArgumentParser(prog="python -m tools.prove")
    parser.add_argument(
        "words", nargs="*", help="of the names of checks (default: all)"
    )
    words = parser.parse_args(argv).words
    console, all_cases, all_faults = Console(highlight=False, soft_wrap=True), 0, 0
    begin = time.monotonic()
    console.print(f"{'cases':>14}{'faults':>8}  claim", style="bold")
    for name, group in itertools.groupby(checks(), lambda check: check.name):
        if words and not any(word in name for word in words):
            continue
        for claim, (cases, faults, first) in counted(group).items():
            row = f"{cases:>14,}{faults:>8,}  {name} {claim}"
            row += f" (first: {', '.join(first)})" if faults else ""
            console.print(row, style="red" if faults else None)
            all_cases, all_faults = all_cases + cases, all_faults + faults
    seconds = time.monotonic() - begin
    console.print(f"{all_cases:>14,}{all_faults:>8,}  in {seconds:.0f} s", style="bold")
    return 1 if all_faults or not all_cases else 0


if __name__ == "__main__":
    sys.exit(main())
