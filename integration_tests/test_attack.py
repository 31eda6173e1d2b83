"""A slice of the random attack that `make attack` makes, and what it is worth."""

import dataclasses
import math

import keras
import pytest
from keras import ops

from integration_tests.attack import campaign as campaigns
from integration_tests.attack import long, run
from integration_tests.attack.__main__ import MODES
from integration_tests.attack.campaign import Campaign
from integration_tests.attack.policies import ExpectedDynamic
from integration_tests.attack.reference import Fault
from keras_lso._core.counters import StepCounters

BACKEND = keras.backend.backend()
# How many fit into some seconds, of the modes that need no environment variable.
CASES = {
    ("torch", "eager"): {"steps": 30, "schedules": 20, "models": 4},
    ("tensorflow", "eager"): {"steps": 15, "schedules": 10, "models": 1},
    ("tensorflow", "graph"): {"steps": 3},
    ("tensorflow", "xla"): {"steps": 2},
    ("jax", "eager"): {"steps": 2, "schedules": 10},
    ("jax", "jit"): {"steps": 12, "schedules": 5, "models": 1},
}
HERE = [
    (part, mode, count)
    for mode in MODES[BACKEND]
    for part, count in CASES.get((BACKEND, mode), {}).items()
]


@pytest.mark.parametrize(("part", "mode", "count"), HERE)
def test_attack_finds_no_fault_in_some_cases(part, mode, count):
    campaign = Campaign(part, mode, seed=0)
    for number in range(count):
        campaign.case(number)
    assert not campaign.faults and campaign.tally["steps"]


def test_thousand_steps_match_numpy_without_growth(monkeypatch):
    # In so few steps the pieces that an allocator takes are larger than a leak.
    monkeypatch.setattr(long, "MORE_BYTES", math.inf)
    scales, skipped = long.run(1000)
    assert 20 < skipped < 80
    assert (min(scales), max(scales)) == (long.MIN_SCALE, long.MAX_SCALE)


# --- What it detects ----------------------------------------------------------------

# It is the comparison that is tried, which is NumPy's on each backend.
on_one_backend = pytest.mark.skipif(BACKEND != "torch", reason="alike on each backend")


def faults_of(count):
    campaign = Campaign("steps", "eager", seed=0)
    for number in range(count):
        campaign.case(number)
    return [str(fault) for fault in campaign.faults]


@on_one_backend
def test_attack_stops_when_process_is_full(monkeypatch):
    monkeypatch.setattr(campaigns, "is_full", lambda: True)
    assert Campaign("schedules", "eager", seed=0).until(math.inf, 3) == 4


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


@on_one_backend
def test_long_run_detects_drift_of_scale(monkeypatch):
    step = ExpectedDynamic.step

    def step_off_by_one(model, finite, amax):
        step(model, finite, amax)
        model.counter += model.counter == 7

    monkeypatch.setattr(ExpectedDynamic, "step", step_off_by_one)
    with pytest.raises(Fault, match="^Step [0-9]+: .* is right"):
        long.run(60)


@on_one_backend
@pytest.mark.parametrize(
    "more", [{"objects": 9_000}, {"bytes": 90_000 * 500 // 10}, {"arrays": 1}]
)
def test_long_run_detects_growth(more):
    start = long.Footprint(bytes=400 * 2**20, objects=250_000, arrays=12)
    start.check_against(start)
    end = {name: getattr(start, name) + by for name, by in more.items()}
    with pytest.raises(Fault, match="has grown"):
        dataclasses.replace(start, **end).check_against(start)
