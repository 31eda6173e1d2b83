"""A slice of the random attack that `make attack` makes, and what it is worth."""

import math

import keras
import pytest
from keras import ops

from integration_tests.attack import long, run
from integration_tests.attack.campaign import Campaign
from keras_lso._core.counters import StepCounters

BACKEND = keras.backend.backend()
# How many fit into some seconds, of the modes that need no environment variable.
CASES = {
    "torch": {"eager": 30},
    "tensorflow": {"eager": 15, "graph": 3, "xla": 2},
    "jax": {"eager": 2, "jit": 12},
}[BACKEND]


@pytest.mark.parametrize("mode, count", CASES.items())
def test_attack_finds_no_fault_in_some_cases(mode, count):
    campaign = Campaign(mode, seed=0)
    for number in range(count):
        campaign.case(number)
    assert not campaign.faults and campaign.tally["steps"]


def test_thousand_steps_match_numpy_without_growth(monkeypatch):
    # In so few steps the pieces that an allocator takes are larger than a leak.
    monkeypatch.setattr(long, "MORE_BYTES", math.inf)
    scales, skipped = long.run(1000)
    assert 20 < skipped < 80
    assert (min(scales), max(scales)) == (long.MIN_SCALE, long.MAX_SCALE)


# It is the comparison that is tried, which is NumPy's on each backend.
on_one_backend = pytest.mark.skipif(BACKEND != "torch", reason="alike on each backend")


def faults_of(count):
    campaign = Campaign("eager", seed=0)
    for number in range(count):
        campaign.case(number)
    return [str(fault) for fault in campaign.faults]


@on_one_backend
def test_attack_detects_skipped_step_counted_as_applied(monkeypatch):
    monkeypatch.setattr(
        StepCounters, "last_was_applied", property(lambda _: ops.ones((), "bool"))
    )
    assert any("False is right" in fault for fault in faults_of(10))


@on_one_backend
def test_attack_detects_relative_error_of_one_thousandth(monkeypatch):
    bare_step = run.reference.bare_step

    def bare_step_off(*arguments, **options):
        found = bare_step(*arguments, **options)
        return [a * 1.001 if a.dtype.kind == "f" else a for a in found]

    monkeypatch.setattr(run.reference, "bare_step", bare_step_off)
    assert any("elements are wrong" in fault for fault in faults_of(5))
