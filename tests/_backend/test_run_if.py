"""`run_if`: a step is run whole, or leaves every bit."""

import keras
import numpy as np
import pytest
from keras import ops

from testing.primitives import implementations, in_each_way
from testing.tensors import tensor

each_run_if = in_each_way("run_if", implementations("run_if"))


@pytest.fixture
def state():
    return [
        keras.Variable(np.array([1.0, -0.0, np.inf], "float32")),
        keras.Variable(np.array(-0.0, "float32")),
        keras.Variable(7, dtype="int32", trainable=False),
    ]


@each_run_if
@pytest.mark.parametrize("finite", [True, False])
def test_run_if_runs_whole_step_or_leaves_state_bitwise_unchanged(
    run_if, compiled, snapshot, state, finite
):
    weights, slot, count = state

    def step(grads):
        gradient, nothing = grads
        assert nothing is None
        slot.assign(slot + gradient[0])
        # Reads what it has just written.
        weights.assign(weights + slot * ops.ones(3))
        count.assign_add(1)

    def run(finite, gradient):
        run_if(finite, step, [gradient, None], state=state)

    before = snapshot(state)
    compiled(run, state)(ops.convert_to_tensor(finite), tensor([0.0, np.nan]))
    if finite:
        # -0.0 + 0.0 is 0.0.
        expected = [np.array([1.0, 0.0, np.inf], "float32"), np.float32(0), np.int32(8)]
        assert snapshot(state) == [value.tobytes() for value in expected]
    else:
        assert snapshot(state) == before


@each_run_if
@pytest.mark.parametrize("finite", [True, False])
def test_run_if_step_reads_back_values_assigned_before(run_if, compiled, finite):
    a, b = keras.Variable([1.0]), keras.Variable([10.0])

    def step(grads):
        a.assign_add(grads[0])
        b.assign(b * a)
        a.assign(a * 2.0)

    def run(finite, gradient):
        run_if(finite, step, [gradient], state=[a, b])

    call = compiled(run, [a, b])
    call(ops.convert_to_tensor(finite), tensor([2.0]))
    call(ops.convert_to_tensor(True), tensor([1.0]))
    # Skipped or not at first: (1 + 2) * 2 = 6, 10 * 3 = 30.
    before = (6.0, 30.0) if finite else (1.0, 10.0)
    expected = (2 * (before[0] + 1), before[1] * (before[0] + 1))
    assert (float(a.numpy()[0]), float(b.numpy()[0])) == expected
