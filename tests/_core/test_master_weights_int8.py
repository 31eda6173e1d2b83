"""`slot_dtype="int8"`: moments in 8 bits, by blocks with a scale."""

import keras
import numpy as np
import pytest
from keras import ops

import keras_lso
from keras_lso._backend import backend
from keras_lso._backend.codecs import SLOT_CODECS
from testing.harness import Harness, array, as_tensor
from testing.masters import hashed
from testing.optimizers import OPTIMIZERS, rule_of

K = keras.optimizers
BLOCK, LEVELS = 64, {"int8": 127, "uint8": 255}
WITH_SLOTS = {
    name: make
    for name, make in OPTIMIZERS.items()
    if rule_of(make).has_moments and rule_of(make).slots
}
# One weight with slots in 8 bits, one whose last axis has no blocks, one too small.
SHAPES = [(3, 24, 64), (70, 60), (64,)]


def guarded(inner, start, dtype="float32", **arguments):
    optimizer = keras_lso.GuardedOptimizer(inner, slot_dtype="int8", **arguments)
    return Harness(optimizer, start, dtype)


def scales_of(run, slot):
    """Returns the scales of a slot, a variable."""
    [scales] = [v for v in run.optimizer.variables if v.name == f"{slot.name}_scales"]
    return scales


def numbers_of(run, slot):
    """Returns the numbers that a slot holds, in float64."""
    codes, scales = array(slot).astype("float64"), array(scales_of(run, slot))
    roots = codes.reshape(*scales.shape, BLOCK) / LEVELS[slot.dtype]
    numbers = np.sign(roots) * roots**4 * scales[..., None]
    return numbers.reshape(slot.shape)


def encoded(numbers, bits, levels):
    """Returns the codes and scales of float32 numbers, computed in float32."""
    blocks = numbers.reshape(*numbers.shape[:-1], -1, BLOCK)
    scales = np.minimum(np.abs(blocks).max(-1, keepdims=True), 2.0**125)
    divisors = np.maximum(scales, 2.0**-126)
    roots = np.sqrt(np.sqrt(np.abs(blocks) / divisors)) * np.float32(levels)
    up = 0.5 if bits is None else (bits.reshape(blocks.shape) + 0.5) * 2.0**-16
    codes = np.floor(roots + np.float32(up)) * np.where(blocks < 0, -1, 1)
    if levels == LEVELS["uint8"]:
        codes = np.maximum(codes, blocks > 0)
    return codes.reshape(numbers.shape), scales[..., 0]


def bits_of(numbers, position, step, shift):
    """Returns the 16 random bits of each element of a slot in a step."""
    places = np.arange(numbers.size, dtype=np.uint32).reshape(numbers.shape)
    with np.errstate(over="ignore"):
        key = np.uint32(position + 2 * 2**24) * np.uint32(0x85EBCA77)
        random = hashed(key + np.uint32(step))
        random = hashed(places * np.uint32(0x9E3779B1) + random)
    return (random >> np.uint32(shift)) & np.uint32(0xFFFF)


# --- The codec ----------------------------------------------------------------------


@pytest.mark.parametrize("dtype", LEVELS)
def test_each_code_is_a_root_and_is_encoded_again_as_itself(dtype):
    codec, random = SLOT_CODECS[dtype], np.random.default_rng(0)
    lowest = -127 if dtype == "int8" else 0
    codes = random.integers(lowest, LEVELS[dtype], (300, BLOCK), endpoint=True)
    codes[:, 0] = LEVELS[dtype]
    codes[:256, 1] = np.clip(np.arange(256) + lowest, None, LEVELS[dtype])
    scales = (2.0 ** random.uniform(-90, 124, (300, 1))).astype("float32")
    stored = as_tensor(codes.astype(dtype), dtype), as_tensor(scales, "float32")
    numbers = codec.decode(backend, *stored)
    roots = codes / LEVELS[dtype]
    expected = np.sign(roots) * roots**4 * scales.astype("float64")
    # A quotient, two squares and a product are each rounded once.
    np.testing.assert_allclose(array(numbers), expected, rtol=16 * 2**-24)
    again = codec.encode(backend, numbers, dtype)
    assert array(again[0]).tobytes() == codes.astype(dtype).tobytes()
    np.testing.assert_allclose(array(again[1]), scales, rtol=4 * 2**-24)


@pytest.mark.parametrize("dtype", LEVELS)
def test_codes_are_those_of_the_reference(dtype):
    random = np.random.default_rng(0)
    numbers = np.exp(4 * random.normal(size=(5, 7, 2 * BLOCK))).astype("float32")
    if dtype == "int8":
        numbers *= random.choice([-1, 1], numbers.shape)
    bits = random.integers(2**16, size=numbers.shape)
    # Bits above the sixteen are those of another slot.
    others = (bits + (random.integers(-9, 9, bits.shape) << 16)).astype("int32")
    codec = SLOT_CODECS[dtype]
    for drawn, of_slot in ((None, None), (bits, ops.convert_to_tensor(others))):
        codes, scales = codec.encode(backend, as_tensor(numbers, None), dtype, of_slot)
        expected = encoded(numbers, drawn, LEVELS[dtype])
        # Where a root ends next to a whole number, its roundings may decide.
        off_by = array(codes).astype(int) - expected[0]
        assert np.abs(off_by).max() <= 1 and (off_by != 0).mean() < 1e-3
        np.testing.assert_array_equal(array(scales), expected[1])


@pytest.mark.parametrize("dtype", LEVELS)
def test_zeros_and_extremes(dtype):
    codec = SLOT_CODECS[dtype]
    rows = np.zeros((5, BLOCK), "float32")
    rows[1, :3] = 2.0**125, 1.0, 1e-20
    rows[2, :2] = 2.0**-126, 0.0
    rows[3, 5] = np.finfo("float32").max
    rows[4, 7] = np.inf
    # With the largest random bits, no code is beyond the last level.
    bits = ops.full(rows.shape, -1, "int32")
    codes, scales = codec.encode(backend, as_tensor(rows, "float32"), dtype, bits)
    numbers = array(codec.decode(backend, codes, scales))
    assert np.all(np.isfinite(numbers)) and not numbers[0].any()
    largest = np.minimum(rows.max(axis=1), 2.0**125)
    np.testing.assert_allclose(numbers.max(axis=1), largest, rtol=2**-20)
    # No second moment becomes 0, by which a step would divide.
    assert (array(codes)[1, :3] != 0).all() == (dtype == "uint8")
    assert not array(codes)[rows == 0].any()


@pytest.mark.parametrize("dtype", LEVELS)
def test_rounding_is_unbiased_in_the_code(dtype):
    numbers = np.full((1, BLOCK), 0.3, "float32")
    numbers[0, 0] = 1.0
    bits = np.random.default_rng(0).integers(2**16, size=(2000, BLOCK)).astype("int32")
    same = as_tensor(np.repeat(numbers, 2000, axis=0), "float32")
    codec = SLOT_CODECS[dtype]
    codes, _ = codec.encode(backend, same, dtype, ops.convert_to_tensor(bits))
    root = LEVELS[dtype] * 0.3**0.25
    # A standard deviation of the mean of 126,000 draws is at most 0.0014.
    assert abs(array(codes)[:, 1:].mean() - root) < 0.006


# --- Steps --------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [30, pytest.param(1000, marks=pytest.mark.full)])
def test_steps_are_those_of_the_reference(steps, each_way):
    # Products with powers of two are exact, so that each sum is rounded once.
    run = guarded(K.SGD(2.0**-7, momentum=0.5), [(9, 8, 64), (64, 128)])
    weights, applied, differences = run.values(), 0, 0
    for step in range(steps):
        if step % 7 == 3:
            run.overflow()
            continue
        # From what is there: one code that differs would change all later ones.
        slots = [numbers_of(run, s).astype("float32") for s in run.inner.momentums]
        grads = run.gradients()
        run.step(grads)
        for i, grad in enumerate(grads):
            number = slots[i] * np.float32(0.5) - grad * np.float32(2.0**-7)
            expected = weights[i] + number
            # The old number is a product of rounded factors.
            tolerance = 2**-20 * np.abs(number).max()
            np.testing.assert_allclose(run.values()[i], expected, 2**-22, tolerance)
            weights[i] = run.values()[i]
            bits = bits_of(number, i, applied, 0)
            slot = run.inner.momentums[i]
            codes = encoded(number, bits, 127)[0]
            off_by = array(slot) - codes
            # The root of what a difference that is nearly 0 is rounded by is up to 2.
            assert (np.abs(off_by) <= np.where(np.abs(codes) <= 1, 3, 1)).all()
            differences += np.count_nonzero(off_by)
        applied += 1
    assert differences < 1e-3 * applied * sum(w.size for w in weights)


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("make", WITH_SLOTS.values(), ids=WITH_SLOTS)
def test_skipped_steps_change_no_bit(make, dtype, each_way):
    kinds = ["float32", "remainder", "remainder8", "stochastic"]
    for kind in kinds if dtype == "bfloat16" else kinds[:1]:
        run = guarded(make(0.01), SHAPES, dtype, master_weights=kind)
        for bad in (np.nan, np.inf):
            run.steps(2)
            run.overflow(bad)


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("make", WITH_SLOTS.values(), ids=WITH_SLOTS)
def test_training_stays_near_that_with_float32_slots(make, dtype, each_way):
    moves = []
    for slot_dtype in ("int8", None):
        optimizer = keras_lso.LossScaleOptimizer(make(0.01), slot_dtype=slot_dtype)
        run = Harness(optimizer, [(64, 64), (64,)], dtype)
        start = run.values()
        for _ in range(10):
            run.step([1 + g for g in run.gradients(size=0.1)], dtype="float32")
        pairs = zip(run.values(), start, strict=True)
        moves.append(np.mean(np.concatenate([(a - b).ravel() for a, b in pairs])))
    # A level is 3% of a first moment, and 1.6% of a second one.
    np.testing.assert_allclose(*moves, rtol=0.02)


def test_moments_decay_where_nearest_rounding_freezes_them():
    # One gradient of each block goes on, the others end.
    run, shape = guarded(K.Adam(1e-4, beta_2=0.999), [(64, 64)]), (64, 64)
    first, second = np.zeros(shape), np.zeros(shape)
    for step in range(400):
        grad = np.full(shape, float(step < 50), "float32")
        grad[:, 0] = 1.0
        run.step([grad])
        first = first + 0.1 * (grad - first)
        second = second + 0.001 * (grad**2 - second)
    rest = np.s_[:, 1:]
    moment = numbers_of(run, run.inner._momentums[0])
    assert moment[:, 0] == pytest.approx(1.0)
    # 0.9**350 is 0. The smallest code but 0 is 1 / 127**4.
    assert np.abs(moment[rest]).max() < 100 / 127**4
    velocity = numbers_of(run, run.inner._velocities[0])
    # Each element deviates by some percent, the mean of 4032 by a 64th of that.
    np.testing.assert_allclose(velocity[rest].mean(), second[0, 1], rtol=0.01)
    assert 0.01 < velocity[rest].std() / second[0, 1] < 0.3


def steps_of_adam(hold, beta_2, spread, steps=400):
    """Returns by how much Adam's steps differ, in float64, with held moments.

    That is the deviation of a step, that of the sum of all, each relative to those of
    steps with exact moments, and the ratio of the longest steps. `hold` returns what is
    kept of the moments. The logarithms of the gradients' sizes have a standard
    deviation of `spread`.
    """
    random, shape = np.random.default_rng(0), (100, BLOCK)
    sizes = np.exp(spread * random.normal(size=shape)) * 1e-3
    mean = 0.1 * sizes * random.normal(size=shape)
    moments = [np.zeros((2, *shape)) for _ in range(2)]
    sums, squares, largest = np.zeros((2, *shape)), [], np.zeros(2)
    for step in range(1, steps + 1):
        gradient = mean + sizes * random.normal(size=shape)
        for i in range(2):
            first, second = moments[i]
            first = 0.9 * first + 0.1 * gradient
            second = beta_2 * second + (1 - beta_2) * gradient**2
            moments[i] = np.stack([first, second])
        root = np.sqrt(1 - beta_2**step) / (1 - 0.9**step)
        both = np.stack([root * m / (np.sqrt(v) + 1e-8) for m, v in moments])
        sums += both
        squares.append([np.mean((both[1] - both[0]) ** 2), np.mean(both[0] ** 2)])
        largest = np.maximum(largest, np.abs(both).max(axis=(1, 2)))
        moments[1] = hold(*moments[1], random)
    of_step = np.sqrt(np.divide(*np.mean(squares[steps // 2 :], axis=0)))
    of_sum = np.sqrt(np.mean((sums[1] - sums[0]) ** 2) / np.mean(sums[0] ** 2))
    return of_step, of_sum, largest[1] / largest[0]


def in_roots(first, second, random):
    """Returns moments as `encoded` holds them."""
    held = []
    for moment, levels in ((first, 127), (second, 255)):
        bits = random.integers(2**16, size=moment.shape)
        codes, scales = encoded(moment.astype("float32"), bits, levels)
        held.append(np.sign(codes) * (codes / levels) ** 4 * scales)
    return np.stack(held)


def in_linear_codes(first, second, random):
    """Returns moments, the second as its root, in linear codes to the nearest."""
    held = []
    for number, levels in ((first, 127), (np.sqrt(second), 255)):
        unit = np.abs(number).max(-1, keepdims=True) / levels
        held.append(np.round(number / unit) * unit)
    return np.stack([held[0], held[1] ** 2])


def test_noise_is_what_the_page_says():
    # docs/bfloat16.md: sizes within two standard deviations of their logarithms.
    near, far = np.log(50) / 4, np.log(100_000) / 4
    assert steps_of_adam(in_roots, 0.999, near)[0] < 0.11
    assert steps_of_adam(in_roots, 0.95, near)[0] < 0.07
    for beta_2 in (0.999, 0.95):
        of_step, of_sum, longest = steps_of_adam(in_roots, beta_2, near)
        assert of_sum < 0.65 * of_step and longest < 1.5
    assert steps_of_adam(in_roots, 0.999, far)[0] < 0.5
    assert steps_of_adam(in_linear_codes, 0.999, near)[2] > 100


# --- Which slots --------------------------------------------------------------------


def test_large_tensors_with_blocks_have_slots_in_8_bits():
    run = guarded(K.Adam(), [(64, 64), (63, 64), (70, 60), (8192,), (2, 32, 64), ()])
    dtypes = [(m.dtype, v.dtype) for m, v in zip(*_adam_slots(run), strict=True)]
    narrow, wide = ("int8", "uint8"), ("bfloat16", "bfloat16")
    assert dtypes == [narrow, wide, wide, wide, narrow, wide]
    scales = [v for v in run.optimizer.variables if v.name.endswith("_scales")]
    assert [v.shape for v in scales] == [(64, 1)] * 2 + [(2, 32, 1)] * 2
    assert {v.dtype for v in scales} == {"float32"}
    paths = [v.path for v in run.optimizer.variables]
    assert len(set(paths)) == len(paths)


def _adam_slots(run):
    return run.inner._momentums, run.inner._velocities


@pytest.mark.parametrize(
    "kind, expected",
    [("stochastic", 4), ("remainder8", 5), ("remainder", 6), ("float32", 8)],
)
def test_bytes_of_a_weight_with_adam(kind, expected):
    # With the gradient, in bfloat16: 6, 7, 8 and 10, and 2 * 4 / 64 for the scales.
    run = guarded(K.Adam(), [(256, 512)], "bfloat16", master_weights=kind)
    sizes = {"int8": 1, "uint8": 1, "int16": 2, "bfloat16": 2, "float32": 4}
    kept = [v for v in [*run.weights, *run.optimizer.variables] if len(v.shape) == 2]
    size = sum(sizes[v.dtype] * np.prod(v.shape) for v in kept) / (256 * 512)
    assert size == expected + 0.125


# --- Files --------------------------------------------------------------------------


def trained(slot_dtype, dtype="bfloat16", wrap=keras_lso.GuardedOptimizer):
    optimizer = wrap(K.Adam(0.01), slot_dtype=slot_dtype)
    return Harness(optimizer, SHAPES, dtype)


def stored(optimizer):
    store = {}
    optimizer.save_own_variables(store)
    return store


def test_file_has_float32_numbers_and_loads_to_the_bit():
    run, again = trained("int8"), trained("int8")
    run.steps(5)
    store = stored(run.optimizer)
    for i, slot in enumerate(_adam_slots(run)):
        number = store[str(6 + i)]
        assert number.dtype == "float32"
        np.testing.assert_allclose(number, numbers_of(run, slot[0]), rtol=2**-20)
    for weight, other in zip(again.weights, run.weights, strict=True):
        weight.assign(other)
    again.optimizer.load_own_variables(store)
    assert again.bits() == run.bits()


@pytest.mark.parametrize("other", [None, "bfloat16", "bare"])
def test_slots_of_other_dtypes_are_read(other):
    run = Harness(K.Adam(0.01), SHAPES) if other == "bare" else trained(other)
    run.steps(5)
    narrow = trained("int8", "float32" if other == "bare" else "bfloat16")
    narrow.optimizer.load_own_variables(stored(run.optimizer))
    for ours, theirs in zip(_adam_slots(narrow), _adam_slots(run), strict=True):
        numbers = numbers_of(narrow, ours[0])
        exact = array(ops.cast(theirs[0], "float32"))
        largest = np.abs(exact).reshape(-1, BLOCK).max(-1).reshape(*exact.shape[:-1], 1)
        # To the nearest code: half a level of the root is four of them of the number.
        share = (np.abs(exact) / largest) ** 0.75
        assert np.all(np.abs(numbers - exact) <= largest * (share * 2.1 + 1e-4) / 127)
    back = trained(None, "float32" if other == "bare" else "bfloat16")
    back.optimizer.load_own_variables(stored(narrow.optimizer))
    for ours, theirs in zip(_adam_slots(narrow), _adam_slots(back), strict=True):
        np.testing.assert_allclose(
            array(theirs[0]), numbers_of(narrow, ours[0]), rtol=2**-20
        )


def test_raw_variables_are_set_back():
    run = trained("int8")
    run.steps(3)
    values = [array(v) for v in run.optimizer.variables]
    before = run.bits()
    run.steps(2)
    run.optimizer.set_weights(values)
    after = [array(v) for v in run.optimizer.variables]
    assert run.bits() != before
    for value, new in zip(values, after, strict=True):
        assert value.tobytes() == new.tobytes()


def test_fit_trains():
    x = np.random.default_rng(0).normal(size=(64, 64)).astype("float32")
    keras.utils.set_random_seed(0)
    dense = keras.layers.Dense
    layers = [keras.Input((64,)), dense(64, "relu"), dense(64), dense(1)]
    for layer in layers[1:]:
        layer.dtype_policy = keras.DTypePolicy("bfloat16")
    model = keras.Sequential(layers)
    optimizer = keras_lso.GuardedOptimizer(
        K.Adam(0.003), master_weights="remainder8", slot_dtype="int8"
    )
    model.compile(optimizer, loss="mse")
    history = model.fit(x, x[:, :1], batch_size=16, epochs=15, verbose=0)
    assert history.history["loss"][-1] < 0.2 * history.history["loss"][0]
    dtypes = {v.dtype for v in optimizer.inner_optimizer._velocities}
    assert dtypes == {"uint8", "bfloat16"}
