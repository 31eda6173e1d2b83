"""Every schedule at the largest and the lowest steps, as tensors of each dtype.

`keras.ops` change the dtypes of steps on some backends: `ops.floor` of PyTorch returns
float32 for float64, in which the largest int32 is 2**31.
"""

import keras
import numpy as np
import pytest
from keras import ops

from keras_lso.compat.model_garden import PolynomialDecayWithOffset
from keras_lso.schedules import LinearWarmup, PerUpdate
from testing.schedule_cases import CASES, LAST, tensor_of
from testing.schedules import ALL

STEPS = [0, 1, 5, 2**24 + 1, 2**31 - 129, LAST, 2**31, 2**40]
LOW_STEPS = [-1, -7, -(2**24) - 1, 129 - 2**31, -LAST, -(2**31), -(2**40)]

every_dtype = pytest.mark.parametrize("dtype", ["int32", "int64", "float32", "float64"])


def given(steps, dtype):
    """The tensor of steps of a dtype, and the whole steps that it stands for."""
    if dtype == "int32":
        steps = [step for step in steps if -LAST <= step <= LAST]
    tensor = tensor_of(dtype)(steps)
    # JAX has neither int64 nor float64 by default.
    actual = keras.backend.standardize_dtype(tensor.dtype)
    largest = 2**31 - 128 if actual == "float32" else LAST
    whole = ops.convert_to_numpy(tensor).astype("float64")
    return tensor, np.clip(whole, -largest, largest)


def rates(schedule, steps):
    found = ops.broadcast_to(schedule(steps), steps.shape)
    return ops.convert_to_numpy(found)


@every_dtype
def test_rates_at_largest_steps_match_float64_formula(dtype):
    tensor, steps = given(STEPS, dtype)
    is_counted = steps >= 0  # On JAX an int64 of 2**31 wraps around.
    for name, (make, n) in CASES.items():
        case = make(n)
        expected = case.formula(steps[is_counted])
        found = rates(case.schedule, tensor)[is_counted]
        # Some roundings of 6e-8.
        np.testing.assert_allclose(
            found, expected, rtol=2e-6, atol=case.absolute, err_msg=name
        )


@every_dtype
def test_rates_at_lowest_steps_are_those_of_int32_steps(dtype):
    tensor, steps = given(LOW_STEPS, dtype)
    whole = ops.convert_to_tensor(steps.astype("int32"))
    made = {name: make(n).schedule for name, (make, n) in CASES.items()}
    for name, schedule in {**made, **{k: make() for k, make in ALL.items()}}.items():
        found = rates(schedule, tensor)
        assert not np.isnan(found).any(), (name, found)
        np.testing.assert_array_equal(found, rates(schedule, whole), err_msg=name)


@every_dtype
def test_rates_long_before_offset_do_not_begin_again(dtype):
    """The difference from the offset must not wrap around."""
    tensor, _ = given(LOW_STEPS, dtype)
    n = 2**20
    for name in ("piecewise", "power later", "polynomial cycle"):
        make, _ = CASES[name]
        case = make(n)
        [first] = set(rates(case.schedule, tensor).tolist())
        assert first == np.float32(case.formula(np.array([0]))[0]), name


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_fractional_steps_before_first_are_rounded_down(dtype):
    warmup = LinearWarmup(0.5, 4, 0.1)
    line = PolynomialDecayWithOffset(
        initial_learning_rate=1.0, decay_steps=4, end_learning_rate=0.0
    )
    updates = PerUpdate(line, 1)
    steps = tensor_of(dtype)([-2.75, -0.5, 0.25])
    # 0.1 for each step of the line.
    np.testing.assert_allclose(rates(warmup, steps), [-0.175, 0.05, 0.125], rtol=1e-6)
    # An update is a whole step, and the line goes on before the first.
    np.testing.assert_allclose(rates(updates, steps), [1.75, 1.25, 1.0], rtol=1e-6)


@pytest.mark.parametrize("dtype", ["uint8", "uint32", "bfloat16", "bool"])
def test_step_of_another_dtype_counts(dtype):
    assert float(LinearWarmup(0.5, 4)(ops.ones((), dtype))) == 0.125
    half = PolynomialDecayWithOffset(
        initial_learning_rate=1.0, decay_steps=2 * LAST, end_learning_rate=0.0
    )
    assert float(half(LAST)) == 0.5
