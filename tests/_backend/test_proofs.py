"""Some of the patterns that `make prove` takes, with each backend.

And that each of its claims can fail: faults are put into what it tries.
"""

import pathlib
import re

import keras
import numpy as np
import pytest
from keras import ops

from keras_lso._backend import backend
from keras_lso._backend.codecs import CODECS, hashed
from testing.integers import power
from testing.masters import NUMPY

prove = pytest.importorskip("tools.prove")

on_torch_alone = pytest.mark.skipif(
    keras.backend.backend() != "torch", reason="The checks are the same everywhere."
)
# The patterns next to which numbers change: 0, 2**-39, 2**-25, 2**-14, 1, the largest
# of each dtype, infinities; places and ties of weights and of short remainders.
UPPER = [0, 1, 0x7F, 0x80, 0x2C00, 0x32FF, 0x3300, 0x3380, 0x387F, 0x3880, 0x3F80]
UPPER += [0x477F, 0x4780, 0x7F7F, 0x7F80, 0x7FFF]
UPPER += [upper | 0x8000 for upper in UPPER]
TIES = [0x20, 0x80, 0x100, 0x1000, 0x2000, 0x7F80, 0x8000, 0xE000]
LOWER = [0, *(tie + more for tie in TIES for more in (-1, 0, 1)), 0xFFFE, 0xFFFF]
# The last states of loss scales.
LOWER += [1999, 5999, 11999]


def some(halves, edges, count):
    """Returns some of the halves: edges, both ends, and others in equal distances."""
    others = halves[:: -(-len(halves) // count)]
    chosen = halves[np.isin(halves, edges)], others, halves[[0, -1]]
    return np.unique(np.concatenate(chosen))


def sample(check):
    # Outside of JAX, a policy takes its steps one by one.
    count = 10 if "loss scale" in check.name else 60
    upper, lower = some(check.upper, UPPER, count), some(check.lower, LOWER, count)
    return check._replace(upper=upper, lower=lower)


CHECKS = [sample(check) for check in prove.checks()]
# The first of each name.
BY_NAME = {check.name: check for check in reversed(CHECKS)}


def faults_of(check):
    found = prove.counted([check], rows=len(check.upper))
    assert found
    return {claim: faults for claim, (_, faults, _) in found.items()}


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
def test_sample_of_patterns_has_no_fault(check):
    assert not any(faults_of(check).values())


@on_torch_alone
def test_page_has_each_claim_with_its_cases():
    page = pathlib.Path(__file__).parents[2] / "docs" / "proved.md"
    rows = re.findall(r"^ *([\d,]+) +0  ([^:\n]+: .+|a .+)$", page.read_text(), re.M)
    cases = {claim: int(count.replace(",", "")) for count, claim in rows}
    claims = {f"{check.name} {claim}" for check in CHECKS for claim in faults_of(check)}
    assert cases.keys() == claims
    # Each number is a case of one claim.
    for name in BY_NAME:
        if name.endswith(": a number"):
            of_name = [count for row, count in cases.items() if row.startswith(name)]
            assert sum(of_name) == 2**32, name


def test_powers_of_two_are_exact():
    exponents = np.arange(-126, 128)
    np.testing.assert_array_equal(power(exponents), 2.0**exponents)


# --- Faults ---------------------------------------------------------------------------

RANDOM = [name for name in BY_NAME if "stochastic" in name]
EXACT = [name for name in BY_NAME if "16, " in name and name not in RANDOM]


class Faulty:
    """A codec with a fault."""

    def __init__(self, codec):
        self.codec, self.aux_dtype = codec, codec.aux_dtype

    def decode(self, framework, stored, aux):
        return self.codec.decode(framework, stored, aux)

    def encode(self, framework, master, dtype, bits=None):
        return self.codec.encode(framework, master, dtype, bits)


class NextNumber(Faulty):
    """Reads the next number, in the last place of float32."""

    def decode(self, framework, stored, aux):
        bits = prove.bits_of(super().decode(framework, stored, aux))
        return framework.bitcast(bits + 1, "float32")


def moved(weights, by):
    """Returns the next weights, or those before."""
    dtype = NUMPY[keras.backend.standardize_dtype(weights.dtype)]
    wide = ops.convert_to_numpy(ops.cast(weights, "float32"))
    other = (wide.astype(dtype).view(np.int16) + np.int16(by)).view(dtype)
    return ops.cast(ops.convert_to_tensor(other.astype("float32")), weights.dtype)


class NextWeight(Faulty):
    """Stores the next weight, and reads the one before."""

    def encode(self, framework, master, dtype, bits=None):
        weight, aux = super().encode(framework, master, dtype, bits)
        return moved(weight, 1), aux

    def decode(self, framework, stored, aux):
        return super().decode(framework, moved(stored, -1), aux)


class EvenDraws(Faulty):
    """Rounds up in an even number of draws."""

    def encode(self, framework, master, dtype, bits=None):
        return super().encode(framework, master, dtype, ops.bitwise_or(bits, 1))


@pytest.fixture
def faults_with(monkeypatch):
    """`faults_with(check, fault)`: those of a check whose codecs have a fault."""

    def faults_with(check, fault):
        faulty = {name: fault(codec) for name, codec in CODECS.items()}
        monkeypatch.setattr(prove, "CODECS", faulty)
        return faults_of(check)

    return faults_with


@on_torch_alone
@pytest.mark.parametrize("name", EXACT)
def test_number_that_is_off_by_a_last_place_is_found(name, faults_with):
    assert all(faults_with(BY_NAME[name], NextNumber).values())


@on_torch_alone
@pytest.mark.parametrize(
    "name", [name for name in [*EXACT, *RANDOM] if "over" not in name]
)
def test_weight_that_is_not_nearest_is_found(name, faults_with):
    assert all(faults_with(BY_NAME[name], NextWeight).values())


@on_torch_alone
@pytest.mark.parametrize("name", [name for name in RANDOM if ": a" in name])
def test_share_of_draws_that_is_off_by_one_is_found(name, faults_with):
    found = faults_with(BY_NAME[name], EvenDraws)
    assert all(faults for claim, faults in found.items() if "large" not in claim)


@on_torch_alone
def test_places_that_share_their_random_bits_fail_the_program(monkeypatch, capsys):
    monkeypatch.setattr(prove, "checks", lambda: [BY_NAME["a place of a tensor"]])
    assert prove.main(["place"]) == 0
    assert prove.main(["no such check"]) == 1
    monkeypatch.setattr(prove, "hashed", lambda bits: hashed(bits & -2))
    assert prove.main([]) == 1
    assert "random bits of its own (first: 0x0, 0x" in capsys.readouterr().out


@on_torch_alone
@pytest.mark.parametrize(
    "name, fault",
    [
        ("a loss scale", lambda *arguments: (*arguments[:-1], (0.0, 2.0**127))),
        ("a state of the loss scale", lambda *a: (*a[:-2], a[-2] + 1, a[-1])),
    ],
)
def test_step_of_loss_scale_without_bounds_or_too_late_is_found(
    name, fault, monkeypatch
):
    move = backend.move_scale
    monkeypatch.setattr(backend, "move_scale", lambda *a: move(*fault(*a)))
    assert all(faults_of(BY_NAME[name]).values())
