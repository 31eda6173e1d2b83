"""Codecs: how a tensor in 16 bits holds a number that is trained in float32.

A float16 weight of 1.0 cannot take a step smaller than 0.0005, and a bfloat16 weight
none smaller than 0.004: the step is rounded away. So the optimizer steps on a float32
master, and the weight is its rounded value. A codec may store another tensor with
the weight. It decodes the two into the master before a step, and encodes the master
after it.

| codec | stored with the weight | bytes |
| --- | --- | --- |
| `Float32` | the master | 4 |
| `Remainder(16)` | the rounding error | 2 |
| `Remainder(8)` | the rounding error, itself rounded | 1 |
| `Stochastic` | nothing: rounding is unbiased, and loses nothing on average | 0 |

Slots are held likewise: in bfloat16 by `Stochastic`, in 8 bits by `Roots`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import keras
from keras import ops

from keras_lso._backend.tensors import FLOAT16_MAX, Tensor

if TYPE_CHECKING:
    from keras_lso._backend.framework import Framework

EXPONENT, MANTISSA = 0x7F800000, 23
# The float32 bits of the smallest number that rounds to an infinity in bfloat16.
_INFINITE_BFLOAT16 = 0x7F7F8000
LARGEST_BFLOAT16 = (2 - 2**-7) * 2.0**127
# The float32 bits of the smallest normal float16, and the exponent of the unit in the
# last place of 1.0 in float16.
SMALLEST_FLOAT16, _UNIT_OF_FLOAT16 = (127 - 14) << MANTISSA, -10


class Codec:
    """The base class of codecs."""

    # The dtype of the auxiliary tensor stored with each tensor, if there is one. It
    # starts as zeros, which stand for the stored tensor itself.
    aux_dtype: str | None = None
    # Whether that tensor is the float32 master itself, which a step may change in
    # place, and which restarts from a weight that was assigned.
    aux_is_master: ClassVar[bool] = False
    # Whether encoding takes random bits.
    is_random: ClassVar[bool] = False
    # How many numbers, along the last axis, share a number of the auxiliary tensor.
    block: ClassVar[int] = 1

    def decode(self, framework: Framework, stored: Tensor, aux: Tensor) -> Tensor:
        """Returns the float32 master of a stored tensor and of its auxiliary one."""
        raise NotImplementedError

    def encode(
        self, framework: Framework, master: Tensor, dtype: Any, bits: Tensor = None
    ) -> tuple[Tensor, Tensor]:
        """Returns the tensors to store after a step: one of a dtype, and the other."""
        # The second may be in int32, which compilers vectorize and int16 not: the
        # caller casts it. `bits` is an int32 tensor of random bits with the shape of
        # `master`, if it `is_random`.
        raise NotImplementedError

    def aux_for(self, framework: Framework, stored: Tensor, master: Tensor) -> Tensor:
        """Returns the auxiliary tensor for a tensor that another codec encoded."""
        # At a tie, `Float32` and `Remainder` round to different neighbours, and next to
        # one, remainders of 8 bits and others. A file of one kind may be read by the
        # other, and may have weights there.
        raise NotImplementedError


class Plain(Codec):
    """A tensor that is trained as it is stored."""

    def decode(self, framework: Framework, stored: Tensor, aux: Tensor) -> Tensor:
        return stored

    def encode(
        self, framework: Framework, master: Tensor, dtype: Any, bits: Tensor = None
    ) -> tuple[Tensor, Tensor]:
        return master, None


PLAIN = Plain()


class Float32(Codec):
    """A float32 master."""

    aux_dtype = "float32"
    aux_is_master = True

    def decode(self, framework: Framework, stored: Tensor, aux: Tensor) -> Tensor:
        # A weight that was assigned, as by `set_weights`, differs from its rounded
        # master.
        is_in_sync = ops.equal(framework.rounded(aux, stored.dtype), stored)
        return ops.where(is_in_sync, aux, ops.cast(stored, "float32"))

    def encode(
        self, framework: Framework, master: Tensor, dtype: Any, bits: Tensor = None
    ) -> tuple[Tensor, Tensor]:
        return framework.rounded(master, dtype), master

    def aux_for(self, framework: Framework, stored: Tensor, master: Tensor) -> Tensor:
        upper, _ = CODECS["remainder"].encode(framework, master, stored.dtype)
        is_other = framework.rounded(master, stored.dtype) != stored
        # The next float32 number rounds to the upper neighbour.
        bits = framework.bitcast(master, "int32")
        after = framework.bitcast(bits + 1, "float32")
        return ops.where(ops.logical_and(is_other, upper == stored), after, master)


class Remainder(Codec):
    """The 16 or 8 bits by which the weight differs from the float32 number.

    For bfloat16, the remainder is the lower half of the number's bits. The weight is
    the upper half, plus 1 if the lower half is negative as a signed integer. A tie thus
    goes to the upper neighbour, since rounding to even might lose a bit.

    For float16, the remainder is the difference in units of `2**-15` of the weight's
    last place. (For weights below `2**-14`, that place is `2**-24`.) It is exact from
    `2**-14` to 65504, and within `2**-39` below.

    A weight that is assigned keeps its remainder, at most half a unit in its last
    place. The remainder counts as 0 if the sum would round to another weight, as next
    to a power of two in float16, or would be no number, as with 0 and infinities.

    A remainder of 8 bits is the upper half of one of 16. First the number is rounded to
    the nearest with such a remainder: a tie goes up in bfloat16, and to even in
    float16, as that of a weight. The weight is the one of the rounded number.

    Sources: for bfloat16 "store_param_remainders" of
    [Transformer Engine](https://docs.nvidia.com/deeplearning/transformer-engine/), for
    8 bits [FlashOptim](https://arxiv.org/abs/2602.23349).
    """

    def __init__(self, bits: int) -> None:
        self.aux_dtype = f"int{bits}"

    # Not attributes, which are no constants in a graph of `torch.compile`.
    @property
    def _shift(self) -> int:
        """How many of 16 bits are left out."""
        return 8 if self.aux_dtype == "int8" else 0

    @property
    def _count(self) -> int:
        """How many remainders a float16's last place has."""
        return 2 ** (15 - self._shift)

    def decode(self, framework: Framework, stored: Tensor, aux: Tensor) -> Tensor:
        wide = ops.cast(stored, "float32")
        if keras.backend.standardize_dtype(stored.dtype) == "float16":
            # Negated twice: a remainder of 0 adds -0.0, which keeps a weight of -0.0.
            unit = units_of(framework, wide)[0] * (-1 / self._count)
            master = wide + -ops.cast(aux, "float32") * unit
            # By the bits, since 0.0 has no negative remainder.
            pair = framework.in_float16(master), wide
            again, exact = (framework.bitcast(values, "int32") for values in pair)
            return ops.where(again == exact, master, wide)
        bits, low = framework.bitcast(wide, "int32"), ops.cast(aux, "int32")
        if self._shift:
            low = ops.left_shift(low, self._shift)
        # No number has a weight of 0 and a negative remainder: 0 was assigned. The sum
        # would be the bits of a NaN, as with the bits of an infinity. (Not `wide == 0`:
        # a subnormal may compare equal.)
        magnitude = ops.bitwise_and(bits, 2**31 - 1)
        is_below_zero = ops.logical_and(magnitude == 0, low < 0)
        is_special = ops.logical_or(is_below_zero, magnitude == EXPONENT)
        low = ops.where(is_special, ops.zeros_like(low), low)
        return framework.bitcast(bits + low, "float32")

    def encode(
        self, framework: Framework, master: Tensor, dtype: Any, bits: Tensor = None
    ) -> tuple[Tensor, Tensor]:
        if keras.backend.standardize_dtype(dtype) == "float16":
            master = framework.xp.clip(master, -FLOAT16_MAX, FLOAT16_MAX)
            wide = framework.in_float16(master)
            unit, inverse = units_of(framework, wide)
            if self._shift:
                # As a difference of differences it keeps a weight of -0.0.
                error = ops.round((wide - master) * inverse * float(self._count))
                master = wide - error * unit * (1 / self._count)
                # Half a unit away, the even weight may be the other one.
                wide = framework.in_float16(master)
                _, inverse = units_of(framework, wide)
            # By a little less than 2**15: only an exact half of a unit becomes 2**14.
            low = ops.round((master - wide) * inverse * (self._count - 1.0))
        else:
            bits = framework.bitcast(master, "int32")
            if self._shift:
                half = 2**self._shift // 2
                # Numbers that round to an infinity are cut below, by `right_shift`.
                magnitude = ops.bitwise_and(bits, 2**31 - 1)
                is_finite = magnitude < _INFINITE_BFLOAT16 - half
                rounded = ops.bitwise_and(bits + half, -2 * half)
                bits = ops.where(is_finite, rounded, bits)
            low = ops.right_shift(ops.left_shift(bits, 16), 16)
            # Otherwise a NaN whose bits are all ones would become a zero.
            low = ops.where(_are_nan(bits), ops.zeros_like(low), low)
            wide = framework.bitcast(bits - low, "float32")
            if self._shift:
                low = ops.right_shift(low, self._shift)
        return ops.cast(wide, dtype), ops.cast(low, "int32")

    def aux_for(self, framework: Framework, stored: Tensor, master: Tensor) -> Tensor:
        upper, low = self.encode(framework, master, stored.dtype)
        is_nearest = framework.rounded(master, stored.dtype) == stored
        is_other = ops.logical_and(is_nearest, upper != stored)
        # The last remainder of the neighbour.
        is_float16 = keras.backend.standardize_dtype(stored.dtype) == "float16"
        last = self._count // (2 if is_float16 else 1) - 1
        return ops.where(is_other, ops.sign(low) * -last, low)


class Stochastic(Codec):
    """Rounds a number up with the probability of its remainder, and keeps nothing.

    Source: [Zamirai et al., 2020, Revisiting BFloat16
    Training](https://arxiv.org/abs/2010.06192).
    """

    is_random = True

    def decode(self, framework: Framework, stored: Tensor, aux: Tensor) -> Tensor:
        return ops.cast(stored, "float32")

    def encode(
        self, framework: Framework, master: Tensor, dtype: Any, bits: Tensor = None
    ) -> tuple[Tensor, Tensor]:
        if keras.backend.standardize_dtype(dtype) == "float16":
            master = framework.xp.clip(master, -FLOAT16_MAX, FLOAT16_MAX)
            unit, inverse = units_of(framework, master)
            quotient = master * inverse
            below = ops.floor(quotient)
            chance = ops.cast(ops.bitwise_and(bits, 2**24 - 1), "float32") * 2.0**-24
            # A sum would turn -0.0 into 0.0.
            drawn = ops.where(chance < quotient - below, below + 1.0, below)
            return ops.cast(drawn * unit, dtype), None
        exact = framework.bitcast(master, "int32")
        # Infinities and NaNs stay as they are, and no number becomes one.
        is_within = ops.abs(master) <= LARGEST_BFLOAT16
        drawn = ops.where(is_within, ops.bitwise_and(bits, 0xFFFF), 0)
        cut = ops.bitwise_and(exact + drawn, -0x10000)
        wide = framework.bitcast(ops.where(_are_nan(exact), exact, cut), "float32")
        return ops.cast(wide, dtype), None


class Roots(Codec):
    """The fourth roots of a slot's magnitudes in 8 bits, by blocks of the last axis.

    ```python
    scale = max(abs(block))
    code = sign(number) * floor(levels * (abs(number) / scale) ** (1 / 4) + random)
    ```

    A root is rounded up with the probability of its remainder. Rounded to the nearest,
    a moment that decays slowly would not move while the largest of its block stays; nor
    would a first moment reach 0, and it would move its weight for ever. A fourth root
    has 127 levels for eight decades of magnitudes, and 255 without a sign, as second
    moments have none. These are 0 only where the number is: a step divides by them.

    Without random bits, rounding is to the nearest, which keeps what was rounded.

    Sources: [8-bit optimizers via block-wise
    quantization](https://arxiv.org/abs/2110.02861), for roots
    [FlashOptim](https://arxiv.org/abs/2602.23349).
    """

    is_random = True
    aux_dtype = "float32"
    block = 64

    def __init__(self, is_signed: bool) -> None:
        self._is_signed, self._levels = is_signed, 127.0 if is_signed else 255.0

    def decode(self, framework: Framework, stored: Tensor, aux: Tensor) -> Tensor:
        codes = ops.cast(stored, "float32")
        squares = ops.square(codes * (1 / self._levels))
        values = squares * squares * self._of_each(aux)
        return ops.where(codes < 0, -values, values) if self._is_signed else values

    def encode(
        self, framework: Framework, master: Tensor, dtype: Any, bits: Tensor = None
    ) -> tuple[Tensor, Tensor]:
        sizes = ops.abs(master)
        *outer, size = sizes.shape
        blocks = ops.reshape(sizes, (*outer, size // self.block, self.block))
        largest = 2.0**125
        scales = framework.xp.clip(framework.xp.amax(blocks), 0.0, largest)
        scales = ops.squeeze(scales, -1)
        # XLA multiplies by the reciprocal, which is 0 for more, and infinite for 0.
        divisors = framework.xp.clip(self._of_each(scales), 2.0**-126, largest)
        roots = ops.sqrt(ops.sqrt(sizes / divisors)) * self._levels
        if bits is None:
            codes = ops.round(roots)
        else:
            drawn = ops.cast(ops.bitwise_and(bits, 0xFFFF), "float32")
            codes = ops.floor(roots + (drawn + 0.5) * 2.0**-16)
        # The sum of the largest root and random bits may be rounded up.
        codes = framework.xp.clip(codes, 0.0, self._levels)
        if self._is_signed:
            codes = ops.where(master < 0, -codes, codes)
        else:
            codes = ops.maximum(codes, ops.cast(master > 0, "float32"))
        return ops.cast(codes, dtype), scales

    def _of_each(self, scales: Tensor) -> Tensor:
        """Returns the scale of each number, in the shape of the numbers."""
        # XLA fuses what follows with the step of the weight, which has their shape.
        *outer, count = scales.shape
        each = ops.broadcast_to(
            ops.expand_dims(scales, -1), (*scales.shape, self.block)
        )
        return ops.reshape(each, (*outer, count * self.block))


def _are_nan(bits: Tensor) -> Tensor:
    """Whether float32 numbers with these bits are NaN, which Inductor vectorizes."""
    return ops.bitwise_and(bits, 2**31 - 1) > EXPONENT


def units_of(framework: Framework, values: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the float16 unit in the last place of each float32 value, and 1 / it."""
    # XLA would store a quotient, and compute the values again, with other roundings,
    # where it needs them again: perhaps on the other side of a power of two.
    exponent = ops.bitwise_and(framework.bitcast(values, "int32"), EXPONENT)
    exponent = ops.maximum(exponent, SMALLEST_FLOAT16) + (_UNIT_OF_FLOAT16 << MANTISSA)
    both = exponent, (2 * 127 << MANTISSA) - exponent
    return tuple(framework.bitcast(bits, "float32") for bits in both)


# Keyed by the value of `master_weights`.
CODECS = {
    "float32": Float32(),
    "remainder": Remainder(16),
    "remainder8": Remainder(8),
    "stochastic": Stochastic(),
}
# The codecs of slots in less than float32, by their dtypes. Slots are rounded
# stochastically. To the nearest, they would not decay: a step changes Adam's second
# moment by 1/1000, less than half of the last place.
SLOT_CODECS = {
    "bfloat16": CODECS["stochastic"],
    "int8": Roots(is_signed=True),
    "uint8": Roots(is_signed=False),
}


# --- Random bits --------------------------------------------------------------------
#
# Random bits depend on the place of an element, the position of its weight, and the
# number of the step. So all replicas and processes draw the same bits, and a resumed
# run continues as if it had not stopped. The hash is "lowbias32" of
# https://github.com/skeeto/hash-prospector. It is computed in int32, whose products
# wrap around on every backend.

FACTORS = 0x7FEB352D, 0x846CA68B - 2**32
PLACES, WEIGHTS = 0x9E3779B1 - 2**32, 0x85EBCA77 - 2**32


def random_bits(
    framework: Framework, weight: Tensor, position: int, iterations: Tensor
) -> Tensor:
    """Returns int32 random bits for the weight at a position, in step `iterations`."""
    key = hashed(ops.cast(iterations, "int32") + int32(position * WEIGHTS))
    return hashed(framework.flat_indices(weight) * PLACES + key)


def drawn(framework: Framework, keys: Tensor, start: int = 0) -> Tensor:
    """Returns the random bits of flat elements from place `start` on, given keys."""
    return hashed((framework.flat_indices(keys) + start) * PLACES + keys)


def int32(number: int) -> int:
    """Returns the int32 that has the same lower bits as a Python integer."""
    return (number + 2**31) % 2**32 - 2**31


def hashed(bits: Tensor) -> Tensor:
    """Returns a hash of each item of an int32 tensor."""
    bits = _mixed(bits, 16) * FACTORS[0]
    bits = _mixed(bits, 15) * FACTORS[1]
    return _mixed(bits, 16)


def _mixed(bits: Tensor, count: int) -> Tensor:
    """Returns the bits with the upper ones mixed into the lower ones."""
    # Masked, since the shift copies the sign bit.
    shifted = ops.bitwise_and(ops.right_shift(bits, count), 2 ** (32 - count) - 1)
    return ops.bitwise_xor(bits, shifted)
