"""The kinds of masters: what is kept of a float32 number, and how it is rounded."""

import keras
import numpy as np
import pytest
from keras import ops

from keras_lso._backend import backend
from keras_lso._backend.codecs import CODECS, SLOT_CODECS, random_bits
from keras_lso._backend.framework import Framework
from keras_lso._backend.leaves import Leaf
from testing.comparisons.inputs import REFERENCE
from testing.comparisons.masters import same_numbers
from testing.masters import NUMPY, hashed, numbers_of, shortened, split, unit_of

DTYPES = ["float16", "bfloat16"]
STOCHASTIC = CODECS["stochastic"]
of_each_dtype = pytest.mark.parametrize("dtype", DTYPES)
of_each_remainder = pytest.mark.parametrize("kind", ["remainder", "remainder8"])


def weights_of(values, dtype):
    return ops.convert_to_tensor(values.astype("float32"), dtype=dtype)


def numpy_of(tensor):
    """As an array of the tensor's own dtype: PyTorch has no bfloat16 for NumPy."""
    dtype = keras.backend.standardize_dtype(tensor.dtype)
    wide = ops.convert_to_numpy(ops.cast(tensor, "float32"))
    return wide.astype(NUMPY[dtype])


def parts_of(numbers, dtype, kind="remainder"):
    weight, low = CODECS[kind].encode(backend, ops.convert_to_tensor(numbers), dtype)
    return numpy_of(weight), ops.convert_to_numpy(low)


def number_of(weights, low, dtype, kind="remainder"):
    low = ops.convert_to_tensor(low)
    return ops.convert_to_numpy(
        CODECS[kind].decode(backend, weights_of(weights, dtype), low)
    )


def assert_remainders(numbers, dtype):
    """Compares parts with NumPy's, and the number that they make with what it was."""
    weights, low = parts_of(numbers, dtype)
    right, right_low = split(numbers, dtype)
    assert weights.tobytes() == right.tobytes()
    np.testing.assert_array_equal(low, right_low)
    again = number_of(weights, low, dtype)
    # A number that rounds to an infinite weight is one from then on.
    numbers = np.where(np.isinf(weights), weights.astype("float32"), numbers)
    if dtype == "float16":
        # Exact in its normal range, to 2**-39 below.
        is_small = np.abs(numbers) < 2.0**-14
        errors = np.abs(again[is_small].astype("float64") - numbers[is_small])
        assert errors.max(initial=0.0) <= 2.0**-39
        again, numbers = again[~is_small], numbers[~is_small]
    assert again.tobytes() == numbers.tobytes()


@of_each_dtype
def test_weight_and_remainder_recover_float32_number(dtype):
    assert_remainders(numbers_of("float32", (2**16,)), dtype)


def test_sampled_bit_patterns_round_trip_through_bfloat16_and_remainder():
    """A sample: each pattern of the upper half, with lower halves at the edges."""
    upper = np.arange(2**16, dtype=np.uint32) << 16
    for low in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF):
        numbers = (upper | np.uint32(low)).view(np.float32)
        assert_remainders(numbers[np.isfinite(numbers)], "bfloat16")


def float16_numbers(exponent, mantissas):
    """Numbers of a binade of float16's, with some float32 mantissas of 23 bits."""
    bits = np.uint32((127 + exponent) << 23) | mantissas.astype(np.uint32)
    return np.concatenate([bits, bits | np.uint32(2**31)]).view(np.float32)


def test_numbers_of_each_binade_round_trip_through_float16_and_remainder():
    ties = np.arange(0, 2**23, 2**12)
    mantissas = np.unique(np.concatenate([ties, ties + 1, ties[1:] - 1, [2**23 - 1]]))
    for exponent in range(-30, 15):
        numbers = float16_numbers(exponent, mantissas)
        assert_remainders(numbers[np.abs(numbers) <= 65504], "float16")


ALL_INT8 = range(-(2**7), 2**7)


def held_by_short_remainders(dtype, lows=ALL_INT8):
    """Returns all weights with remainders, and the numbers that they are in NumPy."""
    weights = np.arange(2**16, dtype=np.uint16).repeat(len(lows)).view(NUMPY[dtype])
    low = np.tile(np.int8(lows), 2**16)
    wide = weights.astype(np.float32)
    if dtype == "bfloat16":
        # 24 bits: those of the weight, and 8 below them.
        is_kept = np.isfinite(wide) & ((wide != 0) | (low >= 0))
        bits = wide.view(np.int32) + np.where(is_kept, low, 0).astype(np.int32) * 2**8
        return weights, low, bits.view(np.float32)
    with np.errstate(invalid="ignore"):
        exact = wide + low * unit_of(weights) * 2.0**-7
        again = exact.clip(-65504, 65504).astype(np.float16)
    is_kept = again.view(np.uint16) == weights.view(np.uint16)
    return weights, low, np.where(is_kept, exact, wide).astype(np.float32)


@of_each_dtype
@pytest.mark.parametrize(
    "lows",
    [
        pytest.param([-128, -127, -64, -63, -1, 0, 1, 63, 64, 127], id="edges"),
        pytest.param(ALL_INT8, id="all", marks=pytest.mark.full),
    ],
)
def test_each_weight_with_short_remainder_comes_back(lows, dtype):
    weights, low, right = held_by_short_remainders(dtype, lows)
    numbers = number_of(weights, low, dtype, "remainder8")
    np.testing.assert_array_equal(numbers, right)
    # An assigned weight may be of a number that float16 clips.
    is_finite = np.abs(right) <= (65504 if dtype == "float16" else np.float32(3.4e38))
    weights, low, right = weights[is_finite], low[is_finite], right[is_finite]
    again, low_again = parts_of(right, dtype, "remainder8")
    assert again.tobytes() == weights.tobytes()
    # An int8 that counts as 0 was assigned over.
    low = np.where(right == weights.astype(np.float32), 0, low)
    np.testing.assert_array_equal(low_again, low)


def numbers_next_to_short_remainders(dtype):
    """Returns numbers of each binade: random ones, what is held, ties, and those next.

    And next to the largest weights, to the smallest, and to powers of two.
    """
    random = np.random.default_rng(0)
    if dtype == "float16":
        exponents = np.arange(127 - 30, 127 + 16)
    else:
        exponents = np.arange(255)
    places = random.integers(0, 2**23, (exponents.size, 2**10))
    # A tie of remainders is at the lower of these bits, one of weights at the higher.
    edges = [2**7, 2**15] if dtype == "bfloat16" else [2**5, 2**12]
    cut = places.copy()
    for edge, column in zip(edges, (slice(200, 500), slice(500, 800)), strict=True):
        cut[:, column] = places[:, column] // edge * edge
    cut[:, 800:900], cut[:, 900:] = 0, 2**23 - 1
    shifts = random.integers(-2, 3, cut.shape)
    wide = random.integers(-(2**13), 2**13, cut.shape)
    shifts = np.where(random.random(cut.shape) < 0.2, wide, shifts)
    bits = np.clip((exponents[:, None] << 23) + cut + shifts, 0, 0x7F7FFFFF).ravel()
    numbers = bits.astype(np.int32).view(np.float32)
    numbers *= random.choice(np.float32([-1, 1]), numbers.size)
    return numbers[np.abs(numbers) <= 65504] if dtype == "float16" else numbers


@of_each_dtype
def test_short_remainder_is_that_of_rounded_number(dtype):
    numbers = numbers_next_to_short_remainders(dtype)
    weights, low = parts_of(numbers, dtype, "remainder8")
    right, right_low = split(numbers, dtype, "remainder8")
    assert weights.tobytes() == right.tobytes()
    np.testing.assert_array_equal(low, right_low)


@of_each_dtype
@pytest.mark.full
def test_short_remainder_holds_the_nearest_number(dtype):
    """Of all that there are."""
    numbers = numbers_next_to_short_remainders(dtype)
    weights, low = parts_of(numbers, dtype, "remainder8")
    found = number_of(weights, low, dtype, "remainder8").astype(np.float64)
    # It is infinite only where the weight of any other kind is.
    plain, _ = split(numbers, dtype)
    is_finite = np.isfinite(plain.astype(np.float32))
    assert (np.isfinite(found) == is_finite).all()
    held = np.unique(held_by_short_remainders(dtype)[2])
    held = held[np.isfinite(held)].astype(np.float64)
    exact, found = numbers[is_finite].astype(np.float64), found[is_finite]
    after = np.searchsorted(held, exact).clip(1, held.size - 1)
    gaps = np.abs(exact - held[after - 1]), np.abs(exact - held[after])
    np.testing.assert_array_equal(np.abs(exact - found), np.minimum(*gaps))
    # The weight is that of the number which is held.
    of_held, _ = split(found.astype(np.float32), dtype)
    assert weights[is_finite].tobytes() == of_held.tobytes()


def test_ties_of_short_remainders_are_those_of_weights():
    """Up in bfloat16, also into the next weight; to even in float16."""
    numbers = 1 + np.float32([1, 3, 127.5, 128, 128.5, 255.5]) * 2.0**-15
    numbers[:2] -= np.float32(2.0**-16)
    weights, low = parts_of(numbers.astype(np.float32), "bfloat16", "remainder8")
    units = (weights.astype(np.float64) - 1) * 2.0**7
    assert units.tolist() == [0, 0, 1, 1, 1, 1]
    assert low.tolist() == [1, 3, -128, -128, -127, 0]
    # In units of the weight's last place, from an odd weight on.
    places = [0.5 / 128, 1.5 / 128, 63.5 / 128, 63.75 / 128, 0.5, 64.5 / 128, 1.0]
    numbers = 1 + (1 + np.float64(places)) * 2.0**-10
    weights, low = parts_of(numbers.astype(np.float32), "float16", "remainder8")
    units = (weights.astype(np.float64) - 1) * 2.0**10
    assert units.tolist() == [1, 1, 2, 2, 2, 2, 2]
    assert low.tolist() == [0, 2, -64, -64, -64, -64, 0]


@of_each_remainder
@of_each_dtype
def test_remainders_preserve_sign_of_zero(dtype, kind):
    numbers = np.float32([0.0, -0.0])
    again = number_of(*parts_of(numbers, dtype, kind), dtype, kind)
    assert again.tobytes() == numbers.tobytes()


@of_each_remainder
def test_numbers_above_largest_float16_saturate(kind):
    weights, low = parts_of(np.float32([7e4, -1e9, np.inf, 65504.0]), "float16", kind)
    assert weights.tolist() == [65504.0, -65504.0, 65504.0, 65504.0]
    assert low.tolist() == [0, 0, 0, 0]


@of_each_remainder
@of_each_dtype
def test_nan_with_any_bits_stays_nan(dtype, kind):
    # The canonical ones of x86, of ARM and of CUDA, and the smallest.
    bits = np.uint32([0xFFC00000, 0x7FC00000, 0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001])
    weights, low = parts_of(bits.view(np.float32), dtype, kind)
    assert np.isnan(weights).all()
    assert np.isnan(number_of(weights, low, dtype, kind)).all()


@of_each_remainder
@of_each_dtype
def test_assigned_weight_differs_from_number_by_at_most_one_unit(dtype, kind):
    limits = np.iinfo(CODECS[kind].aux_dtype)
    values, remainders = [0.0, -0.0, 1.0, -2.0, 3.0e-5], [limits.min, -1, 0, limits.max]
    weights, low = np.meshgrid(values, remainders)
    weights = weights.astype(NUMPY[dtype]).ravel()
    numbers = number_of(weights, low.astype(limits.dtype).ravel(), dtype, kind)
    unit = 2.0**-10 if dtype == "float16" else 2.0**-7
    # A power of two has smaller units below it than above.
    smallest = 2.0**-24 if dtype == "float16" else 1e-38
    weights = weights.astype("float64")
    limits = np.maximum(abs(weights) * unit, smallest)
    assert (abs(numbers.astype("float64") - weights) <= limits).all()


@of_each_dtype
def test_kept_with_continues_from_number_of_other_master_kind(dtype):
    ties = np.arange(0, 2**20, 2**11) + 2**15
    numbers = ((127 << 23) + ties).astype(np.uint32).view(np.float32)
    number = ops.convert_to_tensor(numbers)
    rounded = REFERENCE.rounded(number, dtype)
    low = CODECS["remainder"].aux_for(backend, rounded, number)
    again = number_of(numpy_of(rounded), ops.convert_to_numpy(low), dtype)
    # At a tie of bfloat16 the weight is the lower neighbour.
    np.testing.assert_allclose(again, numbers, rtol=2.0**-23, atol=0)
    weight, _ = CODECS["remainder"].encode(backend, number, dtype)
    master = CODECS["float32"].aux_for(backend, weight, number)
    assert numpy_of(REFERENCE.rounded(master, dtype)).tobytes() == (
        numpy_of(weight).tobytes()
    )
    np.testing.assert_allclose(ops.convert_to_numpy(master), numbers, rtol=2.0**-23)


@of_each_dtype
@pytest.mark.parametrize("other", ["float32", "remainder", "remainder8"])
def test_short_remainder_continues_from_weight_of_other_kind(other, dtype):
    """Next to a tie the other weight may not be that of the rounded number."""
    numbers = numbers_next_to_short_remainders(dtype)
    # Of bfloat16's. XLA takes subnormals of float32 for 0.
    magnitudes = np.abs(numbers)
    numbers = numbers[(magnitudes >= 2.0**-126) & (magnitudes < 2.0**127)]
    if other == "remainder8":
        numbers = shortened(numbers, dtype)
    number = ops.convert_to_tensor(numbers)
    weight, _ = CODECS[other].encode(backend, number, dtype)
    low = ops.convert_to_numpy(CODECS["remainder8"].aux_for(backend, weight, number))
    again = number_of(numpy_of(weight), low, dtype, "remainder8")
    nearest = shortened(numbers, dtype)
    is_far = again != nearest
    assert is_far.any() == (other != "remainder8")
    # These are off by one place of the remainder, not by a half.
    limits = np.abs(nearest[is_far].astype(np.float64))
    limits *= 2.0**-15 if dtype == "bfloat16" else 2.0**-17
    if dtype == "float16":
        limits = np.maximum(limits, 2.0**-31)
    errors = np.abs(again[is_far].astype(np.float64) - numbers[is_far])
    assert (errors <= limits).all()
    # And no step changes the weight of a number that is kept.
    after, _ = parts_of(again, dtype, "remainder8")
    assert after.tobytes() == numpy_of(weight).tobytes()


@of_each_dtype
@pytest.mark.parametrize("low", [-(2**15), -(2**14), -5461, 0, 3, 2**14, 2**15 - 1])
def test_each_weight_assigned_over_any_remainder_stays_where_it_is(low, dtype):
    weights = np.arange(2**16, dtype=np.uint16).view(NUMPY[dtype])
    numbers = number_of(weights, np.full(2**16, low, np.int16), dtype)
    wide = weights.astype("float32")
    is_finite = np.isfinite(wide)
    np.testing.assert_array_equal(numbers[~is_finite], wide[~is_finite])
    again, _ = parts_of(numbers[is_finite], dtype)
    assert again.tobytes() == weights[is_finite].tobytes()


@of_each_dtype
def test_number_of_assigned_weight_survives_save_and_load(dtype):
    weights = np.arange(2**16, dtype=np.uint16).view(NUMPY[dtype])
    weights = weights[np.isfinite(weights.astype("float32"))]
    lows = np.random.default_rng(0).integers(-(2**15), 2**15, weights.size)
    numbers = number_of(weights, lows.astype(np.int16), dtype)
    weight, number = weights_of(weights, dtype), ops.convert_to_tensor(numbers)
    low = CODECS["remainder"].aux_for(backend, weight, number)
    again = number_of(weights, ops.convert_to_numpy(low), dtype)
    if dtype == "float16":
        # Only numbers from `2**-14` on are exact.
        is_exact = np.abs(numbers) >= 2.0**-14
        assert np.abs(again - numbers)[~is_exact].max() <= 2.0**-39
        again, numbers = again[is_exact], numbers[is_exact]
    assert again.tobytes() == numbers.tobytes()


def rounded_many(number, dtype, count=100_000):
    numbers = ops.full((count,), number, dtype="float32")
    bits = random_bits(backend, numbers, 3, ops.convert_to_tensor(11))
    weights, kept = STOCHASTIC.encode(backend, numbers, dtype, bits)
    assert kept is None
    return numpy_of(weights).astype("float64")


@of_each_dtype
@pytest.mark.parametrize("exponent", [-30, -24, -20, -15, -14, -3, 0, 7, 14])
@pytest.mark.parametrize("fraction", [1.000123, 1.3333333, 1.9995])
@pytest.mark.exhaustive
def test_stochastic_rounding_is_unbiased(exponent, fraction, dtype):
    number = float(np.float32(fraction * 2.0**exponent))
    found = rounded_many(number, dtype)
    neighbours = np.unique(found)
    assert len(neighbours) <= 2
    assert neighbours[0] <= number <= neighbours[-1] or len(neighbours) == 1
    # The standard error of the mean of 1e5 draws of two neighbours.
    is_float16 = dtype == "float16"
    unit = 2.0 ** (max(exponent, -14) - 10 if is_float16 else exponent - 7)
    error = unit * np.sqrt(0.25 / len(found))
    assert abs(found.mean() - number) <= 4 * error


@of_each_dtype
def test_stochastic_rounding_keeps_numbers_that_fit_16_bits(dtype):
    weights, _ = numbers_of(dtype, (2**12,))
    numbers = ops.convert_to_tensor(weights.astype("float32"))
    bits = random_bits(backend, numbers, 0, ops.convert_to_tensor(5))
    again, _ = STOCHASTIC.encode(backend, numbers, dtype, bits)
    assert numpy_of(again).tobytes() == weights.tobytes()


@of_each_dtype
def test_stochastic_rounding_never_rounds_finite_number_to_infinity(dtype):
    largest = {"float16": 65504.0, "bfloat16": 3.3895314e38}[dtype]
    # Between the largest number and the next one, which would be infinite.
    numbers = ops.full((1000,), largest * (1 + 2.0**-13), dtype="float32")
    bits = random_bits(backend, numbers, 0, ops.convert_to_tensor(5))
    weights, _ = STOCHASTIC.encode(backend, numbers, dtype, bits)
    assert np.isfinite(numpy_of(weights)).all()
    bad = ops.convert_to_tensor(np.float32([np.inf, -np.inf, np.nan]))
    bits = ops.convert_to_tensor(np.int32([-1, -1, -1]))
    kept, _ = STOCHASTIC.encode(backend, bad, "bfloat16", bits)
    assert str(numpy_of(kept).tolist()) == "[inf, -inf, nan]"


@pytest.mark.parametrize("dtype", ["int8", "uint8"])
def test_largest_of_a_block_has_the_highest_level_by_any_random_bits(dtype):
    # In float32 255 and the largest random number add up to 256, which wraps around.
    block = ops.convert_to_tensor(np.linspace(0.0, 1.0, 64, dtype="float32")[None])
    for drawn in (0, 2**15, 2**16 - 1):
        random = ops.convert_to_tensor(np.full((1, 64), drawn, "int32"))
        codec = SLOT_CODECS[dtype]
        codes, scales = codec.encode(backend, block, dtype, random)
        number = codec.decode(backend, codes, scales)[0, -1]
        assert ops.convert_to_numpy(codes).max() == np.iinfo(dtype).max
        assert float(number) == 1.0


@pytest.mark.parametrize("kind", ["float32", "remainder", "remainder8"])
def test_weight_and_part_are_of_one_number_next_to_tie(kind, compiled):
    """As in `ScheduleFreeAdamW`: XLA on a CPU contracts two products, each its way.

    For shapes such as this one. A master would restart from a weight that is not its
    rounded value, and a remainder of the other weight is wrong by a unit.
    """
    shape, random = (40000, 7), np.random.default_rng(0)
    ties = np.float32(1 + 2.0**-8 + random.integers(100, size=shape) * 2.0**-7)
    near = [ties.view("int32") + random.integers(-2, 3, shape) for _ in range(2)]
    values = [
        (np.zeros(shape), "bfloat16"),
        (np.zeros(shape), CODECS[kind].aux_dtype),
        *((bits.astype("int32").view("float32"), "float32") for bits in near),
        (0.25, "float32"),
        (3, "int32"),
    ]
    variables = [keras.Variable(v, dtype=t, trainable=False) for v, t in values]
    weight, kept, *read = variables

    def step():
        y, z, c, count = map(ops.convert_to_tensor, read)
        x = (y - 0.1 * z) * (1 / 0.9)
        number = 0.1 * z + 0.9 * ((1 - c) * x + c * z)
        leaf = Leaf(weight, CODECS[kind], kept)
        for variable, value in leaf.encoded(backend, number, count):
            # A step selects. What is returned as it is, XLA computes once.
            variable.assign(ops.where(c > 0, value, ops.zeros_like(value)))

    compiled(step, variables)()
    numbers = ops.convert_to_numpy(
        kept if kind == "float32" else CODECS[kind].decode(backend, weight, kept)
    )
    # Some last places of float32, of which a unit of the weight has 2**16; or the last
    # one of the remainder.
    tolerance = 2.0**-15 if kind == "remainder8" else 2.0**-20
    np.testing.assert_allclose(numbers, ties, rtol=tolerance)
    if kind == "float32":
        np.testing.assert_array_equal(
            numpy_of(weight), numbers.astype(NUMPY["bfloat16"])
        )


def test_random_bits_match_numpy_hash():
    like = ops.zeros((3, 50))
    found = random_bits(backend, like, 9, ops.convert_to_tensor(123))
    with np.errstate(over="ignore"):
        key = hashed(np.uint32([123]) + np.uint32([9]) * np.uint32(0x85EBCA77))
        places = np.arange(150, dtype=np.uint32) * np.uint32(0x9E3779B1)
        right = hashed(places + key).view(np.int32).reshape(3, 50)
    np.testing.assert_array_equal(ops.convert_to_numpy(found), right)


def test_random_bits_differ_between_weights_and_steps():
    like = ops.zeros((1000,))
    draws = [
        ops.convert_to_numpy(random_bits(backend, like, i, ops.convert_to_tensor(n)))
        for i in range(3)
        for n in range(3)
    ]
    for i, one in enumerate(draws):
        assert abs(one.astype("float64").mean()) < 4 * 2.0**32 / np.sqrt(12 * 1000)
        for other in draws[i + 1 :]:
            # Of a thousand independent pairs of signs 500 agree, give or take 63.
            assert 437 <= (np.sign(one) == np.sign(other)).sum() <= 563


def test_update_keeps_same_numbers_as_reference(way):
    same_numbers(backend.update, lambda *a: Framework.update(REFERENCE, *a))
