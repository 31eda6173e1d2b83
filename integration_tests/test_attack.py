"""A slice of the random attack that `make attack` makes, and what it is worth."""

import math
import re

import hypothesis
import keras
import pytest
from hypothesis import strategies as st
from keras import ops

from integration_tests.attack import long, machine, optimizers, reference, setups
from integration_tests.attack.reference import Fault
from keras_lso import loss_scales
from keras_lso._core.counters import StepCounters

BACKEND = keras.backend.backend()
# How many fit into some seconds, of the modes that need no environment variable.
PROGRAMS = {
    "torch": {"eager": 8},
    "tensorflow": {"eager": 3, "graph": 2, "xla": 1},
    "jax": {"eager": 1, "jit": 3},
}[BACKEND]


@pytest.mark.parametrize("mode, count", PROGRAMS.items())
def test_attack_finds_no_fault_in_some_programs(mode, count):
    machine.attack(mode, range(count))


def test_thousand_steps_match_numpy_without_growth(monkeypatch):
    # In so few steps the pieces that an allocator takes are larger than a leak.
    monkeypatch.setattr(long, "MORE_BYTES", math.inf)
    scales, skipped = long.run(1000)
    assert 20 < skipped < 80
    assert (min(scales), max(scales)) == (long.MIN_SCALE, long.MAX_SCALE)


# It is the comparison that is tried, which is NumPy's on each backend.
on_one_backend = pytest.mark.skipif(BACKEND != "torch", reason="alike on each backend")


@pytest.fixture
def shrunk(monkeypatch):
    """Returns the steps of the shortest program whose fault has a message.

    All are short, train alike and step alike, since shrinking runs a hundred of them.
    """
    monkeypatch.setattr(machine, "RULES", 4)
    weight = setups.Weight((3,), "float32", "float32", size=1.0, is_special=False)
    setup = setups.Setup(
        optimizers.Optimizer("SGD", ("constant", 0.1, 1), {"momentum": 0.5}),
        policy=loss_scales.DynamicLossScale(8.0),
        weights=[weight, weight],
        seed=0,
        master_weights="auto",
        slot_dtype=None,
        guard=None,
        records=[],
        execution="eager",
    )
    step = setups.Step("scale_loss", "apply", update_scale=True, layouts=["plain"])
    monkeypatch.setattr(setups, "SEEDS", st.just(0))
    monkeypatch.setattr(setups, "setups", lambda mode: st.just(setup))
    monkeypatch.setattr(setups, "steps", lambda is_compiled=False: st.just(step))

    def run(message):
        with pytest.raises(Fault, match=message) as caught:
            machine.attack(
                "eager",
                range(50),
                report_multiple_bugs=False,
                phases=[hypothesis.Phase.generate, hypothesis.Phase.shrink],
            )
        program = "\n".join(caught.value.__notes__)
        names = re.findall(r"^state\.([a-z_]+)\(", program, re.MULTILINE)
        return [name for name in names if name.startswith("apply")]

    return run


@on_one_backend
def test_attack_detects_skipped_step_counted_as_applied(monkeypatch, shrunk):
    monkeypatch.setattr(
        StepCounters, "last_was_applied", property(lambda _: ops.ones((), "bool"))
    )
    steps = shrunk("False is right")
    assert steps in (["apply_overflow"], ["apply_at_bad_rate"])


@on_one_backend
def test_attack_detects_relative_error_of_one_thousandth(monkeypatch, shrunk):
    bare_step = reference.bare_step

    def bare_step_off(*arguments, **options):
        found = bare_step(*arguments, **options)
        return [a * 1.001 if a.dtype.kind == "f" else a for a in found]

    monkeypatch.setattr(reference, "bare_step", bare_step_off)
    # Each trial takes a step.
    monkeypatch.setattr(reference, "PAIRS", 1)
    assert shrunk("elements are wrong") == ["apply"]
