"""A slice of the random attack that `make attack` makes, and what it is worth."""

import math

import keras
import pytest
from keras import ops

from integration_tests.attack import campaign as campaigns
from integration_tests.attack import run
from integration_tests.attack.__main__ import MODES
from integration_tests.attack.campaign import Campaign
from keras_lso._core.counters import StepCounters

BACKEND = keras.backend.backend()
# Those that need no environment variable, and how many cases fit into some seconds.
EAGER = {"torch": 40, "tensorflow": 4, "jax": 1}
CASES = {"eager": EAGER[BACKEND], "graph": 1, "xla": 1, "jit": 1}
HERE = [mode for mode in MODES[BACKEND] if mode in CASES]


@pytest.mark.parametrize("mode", HERE)
def test_attack_finds_no_fault_in_some_step_cases(mode):
    campaign = Campaign("steps", mode, seed=0)
    for number in range(CASES[mode] + 9):
        campaign.case(number)
        # A case takes no step if this version of Keras lacks what it is made of.
        is_stepped = campaign.tally["steps"] and campaign.tally["weights close"]
        if number + 1 >= CASES[mode] and is_stepped:
            break
    assert not campaign.faults and is_stepped


@pytest.mark.parametrize("mode", HERE)
def test_attack_finds_no_fault_in_some_schedules(mode):
    campaign = Campaign("schedules", mode, seed=0)
    for number in range(20 if mode == "eager" else 2):
        campaign.case(number)
    assert not campaign.faults and campaign.tally["steps"]


@pytest.mark.default_backend("torch")
def test_attack_stops_when_process_is_full(monkeypatch):
    monkeypatch.setattr(campaigns, "is_full", lambda: True)
    assert Campaign("schedules", "eager", seed=0).until(math.inf, 3) == 4


def faults_of(count):
    campaign = Campaign("steps", "eager", seed=0)
    for number in range(count):
        campaign.case(number)
    return [str(fault) for fault in campaign.faults]


# It is the comparison that is tried, which is NumPy's on each of them.
@pytest.mark.default_backend("torch")
def test_attack_detects_skipped_step_counted_as_applied(monkeypatch):
    monkeypatch.setattr(
        StepCounters, "last_was_applied", property(lambda _: ops.ones((), "bool"))
    )
    assert any("False is right" in fault for fault in faults_of(10))


@pytest.mark.default_backend("torch")
def test_attack_detects_relative_error_of_one_thousandth(monkeypatch):
    bare_step = run.reference.bare_step

    def bare_step_off(*arguments, **options):
        found = bare_step(*arguments, **options)
        return [a * 1.001 if a.dtype.kind == "f" else a for a in found]

    monkeypatch.setattr(run.reference, "bare_step", bare_step_off)
    assert any("elements are wrong" in fault for fault in faults_of(5))
