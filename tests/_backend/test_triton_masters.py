"""The kinds of masters in Triton, by its interpreter: formulas, and random bits.

`make test-triton` runs them. The references are the formulas of `_backend/masters.py`.
"""

import os

import keras
import numpy as np
import pytest

if keras.backend.backend() != "torch":
    pytest.skip("JAX and TensorFlow compile a step", allow_module_level=True)
pytest.importorskip("triton", reason="`make test-triton` installs Triton")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("`make test-triton` sets TRITON_INTERPRET=1", allow_module_level=True)

import torch  # noqa: E402
import triton  # noqa: E402
import triton.language as tl  # noqa: E402

from keras_lso._backend.masters import KINDS  # noqa: E402
from keras_lso._backend.targets import Narrow  # noqa: E402
from keras_lso._backend.torch.chunks import Chunk, Draws  # noqa: E402
from keras_lso._backend.torch.triton import masters as triton_masters  # noqa: E402
from keras_lso._backend.torch.triton import steps as torch_triton  # noqa: E402
from keras_lso._keras_internals import rules  # noqa: E402
from testing.triton_steps import EDGES, REFERENCE  # noqa: E402

pytestmark = pytest.mark.usefixtures("rounding_of_a_gpu")
LOWER_HALVES = [0, 1, 0x1000, 0x1234, 0x7FFF, 0x8000, 0x8001, 0xF000, 0xFFFF]
of_each_dtype = pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
REMAINDER, STOCHASTIC = KINDS["remainder"], KINDS["stochastic"]
# So many at once.
COUNT = 2**16


@triton.jit
def split(numbers, weights, low, WEIGHT: tl.constexpr, N: tl.constexpr):
    at = tl.arange(0, N)
    weight, remainder = triton_masters.parts(tl.load(numbers + at), WEIGHT)
    tl.store(weights + at, weight)
    tl.store(low + at, remainder)


@triton.jit
def join(weights, low, numbers, WEIGHT: tl.constexpr, N: tl.constexpr):
    at = tl.arange(0, N)
    weight, remainder = tl.load(weights + at), tl.load(low + at)
    tl.store(numbers + at, triton_masters.joined(weight, remainder, WEIGHT))


@triton.jit
def draw(numbers, bits, weights, WEIGHT: tl.constexpr, N: tl.constexpr):
    at = tl.arange(0, N)
    drawn = tl.load(bits + at).to(tl.uint32, bitcast=True)
    tl.store(weights + at, triton_masters.drawn(tl.load(numbers + at), drawn, WEIGHT))


def new(dtype):
    return torch.empty(COUNT, dtype=getattr(torch, dtype))


def run(kernel, *tensors, dtype):
    with np.errstate(all="ignore"):
        kernel[(1,)](*tensors, WEIGHT=getattr(tl, dtype), N=COUNT)


def assert_same(actual, expected):
    """The same bits, but for those of NaNs."""
    assert actual.dtype == expected.dtype
    if actual.is_floating_point():
        assert torch.equal(actual.isnan(), expected.isnan())
        zeros = torch.zeros((), dtype=actual.dtype)
        actual, expected = (
            torch.where(t.isnan(), zeros, t).view(
                torch.int16 if t.element_size() == 2 else torch.int32
            )
            for t in (actual, expected)
        )
    assert torch.equal(actual, expected)


def numbers_of(lower):
    """Each pattern of the upper half of a float32, with one of the lower."""
    upper = np.arange(2**16, dtype=np.uint32) << 16
    return torch.tensor((upper | np.uint32(lower)).view(np.float32))


@of_each_dtype
@pytest.mark.parametrize("lower", LOWER_HALVES)
def test_numbers_split_like_formula(dtype, lower):
    numbers, weights, low = numbers_of(lower), new(dtype), new("int16")
    run(split, numbers, weights, low, dtype=dtype)
    expected = REMAINDER.parts(REFERENCE, numbers, dtype)
    assert_same(weights, expected[0])
    assert_same(low, torch.where(numbers.isnan(), 0, expected[1]))


@of_each_dtype
@pytest.mark.parametrize("low", [*EDGES, 12345, -54])
def test_weights_and_remainders_join_like_formula(dtype, low):
    """Each pattern of a weight, with remainders that no number has with it as well."""
    weights = torch.arange(2**16).to(torch.int16).view(getattr(torch, dtype))
    low, numbers = torch.full((COUNT,), low, dtype=torch.int16), new("float32")
    run(join, weights, low, numbers, dtype=dtype)
    assert_same(numbers, REMAINDER.number(REFERENCE, weights, low))


@of_each_dtype
@pytest.mark.parametrize("lower", LOWER_HALVES)
def test_numbers_round_stochastically_like_formula(dtype, lower):
    numbers, weights = numbers_of(lower), new(dtype)
    random = np.random.default_rng(lower)
    bits = torch.tensor(random.integers(-(2**31), 2**31, COUNT, dtype=np.int32))
    bits[::3], bits[1::3] = 0, -1
    run(draw, numbers, bits, weights, dtype=dtype)
    expected, _ = STOCHASTIC.parts(REFERENCE, numbers, dtype, bits)
    assert_same(weights, expected)


# --- Random bits ----------------------------------------------------------------------


@pytest.fixture(autouse=True)
def kernels(monkeypatch):
    found = torch_triton.import_kernels()
    monkeypatch.setattr(torch_triton, "kernels", lambda: found)


def stepped(positions, places, sizes, iterations):
    """Weights of 1.0 after a step of SGD by random numbers, those of all as one."""
    random = np.random.default_rng(0)
    grads = torch.tensor(random.normal(size=sum(sizes)), dtype=torch.float32)
    grads = list(grads.split(sizes))
    weights = [torch.ones(size, dtype=torch.bfloat16) for size in sizes]
    narrow = [
        Narrow(STOCHASTIC, w, None, position)
        for w, position in zip(weights, positions, strict=True)
    ]
    draws = Draws(narrow, weights)
    draws.places = places
    chunk = Chunk(True, list(range(len(sizes))), weights, [], narrow, draws)
    rule, steps = rules.SGD(torch.tensor(0.125)), torch.tensor(iterations)
    assert torch_triton._step_by_itself(chunk, rule, grads, 1.0, None, steps)
    return torch.cat(weights), torch.cat(grads)


@pytest.mark.parametrize("iterations", [0, 7, 2**31 - 1, -(2**31)])
@pytest.mark.parametrize("position", [0, 3, 10**6])
def test_random_bits_match_reference(position, iterations):
    found, grads = stepped([position], [0], [5000], iterations)
    narrow = Narrow(STOCHASTIC, torch.ones(5000, dtype=torch.bfloat16), None, position)
    numbers, steps = 1.0 - grads * 0.125, torch.tensor(iterations)
    [(_, expected)] = narrow.parts(REFERENCE, numbers, steps)
    assert torch.equal(found, expected)
    assert not torch.equal(found, REFERENCE.rounded(numbers, "bfloat16"))


def test_shards_draw_random_bits_of_their_places():
    whole, _ = stepped([4], [0], [9000], 11)
    shards, _ = stepped([4] * 3, [0, 1, 3000], [1, 2999, 6000], 11)
    assert torch.equal(shards, whole)
    others, _ = stepped([4] * 3, [0, 0, 0], [1, 2999, 6000], 11)
    assert not torch.equal(others, whole)
