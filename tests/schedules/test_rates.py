"""The rates of schedules: worked examples, kinds of steps, dtypes, traces.

Anybody can check the examples by hand. Comparisons with the Model Garden, optax and
training runs are in `integration_tests/test_schedules.py`.
"""

import inspect

import keras
import numpy as np
import pytest

from keras_lso import schedules
from keras_lso.compat import model_garden, open_seq2seq
from keras_lso.schedules import (
    Cyclical,
    InverseSquareRoot,
    JoinedSchedules,
    LinearWarmup,
    OneCycle,
    PerUpdate,
    PolynomialWarmup,
    Scaled,
    WarmupCosine,
    WarmupStableDecay,
)
from testing.schedules import ALL, STEPS, TOLERANCE, assert_rates, every_schedule, rates


def test_every_public_schedule_has_rate_tests():
    classes = {
        item.__qualname__
        for module in (schedules, model_garden, open_seq2seq)
        for name in module.__all__
        if inspect.isclass(item := getattr(module, name))
        and issubclass(item, keras.optimizers.schedules.LearningRateSchedule)
    }
    assert classes == ALL.keys()


@pytest.mark.parametrize(
    "schedule, expected",
    [
        (LinearWarmup(0.0, 2, 0.4), {0: 0.4, 1: 0.2, 2: 0.0, 3: 0.0}),
        (LinearWarmup(0.5, 0, 0.1), {-1: 0.1 - 0.4, 0: 0.5}),
        (LinearWarmup(0.5, 1), {0: 0.0, 1: 0.5}),
        (PolynomialWarmup(1.6, 0), {0: 1.6, 1: 1.6}),
        (WarmupStableDecay(0.8, 0, 0, 1), {0: 0.8, 1: 0.0}),
        (WarmupCosine(0.8, 0, 2), {0: 0.8, 1: 0.4, 2: 0.0}),
        (InverseSquareRoot(0.8, 0), {0: 0.8, 30_000: 0.4}),
        (InverseSquareRoot(0.8, 0, 1), {0: 0.8, 3: 0.4, 15: 0.2}),
        # The rate rises for 0.3 * 10 - 1 steps, and falls for 7.
        (
            OneCycle(0.8, 10, div_factor=4, final_div_factor=2, anneal="linear"),
            {0: 0.2, 1: 0.5, 2: 0.8, 3: 0.7, 8: 0.2, 9: 0.1, 10: 0.1},
        ),
        # From step -1 on it falls, or it never does; 0.25 * 4 - 1 is no step.
        (OneCycle(0.8, 7, 0.0, 4, 2, "linear"), {0: 0.7, 6: 0.1}),
        (OneCycle(0.8, 7, 1.0, 4, 2, "linear"), {0: 0.2, 3: 0.5, 6: 0.8, 7: 0.8}),
        (OneCycle(0.8, 4, 0.25, 4, 2), {0: 0.8, 3: 0.1}),
        (OneCycle(0.8, 1, 0.3, 4, 2), {0: 0.1, 1: 0.1}),
        (OneCycle(0.8, 1, 1.0, 4, 2), {0: 0.8, 1: 0.8}),
        (Cyclical(0.2, 0.6, 1, "triangular2"), {2: 0.2, 3: 0.4, 5: 0.3, 401: 0.2}),
        (Cyclical(0.0, 0.8, 1, "exponential", 0.5), {0.5: 0.8 * 0.5**1.5, 3: 0.1}),
        (Cyclical(0.2, 0.8, 2**31 - 1), {0: 0.2, 2**30: 0.5, 2**31 - 1: 0.8}),
        (
            PerUpdate(keras.optimizers.schedules.ExponentialDecay(0.8, 1, 0.5), 3),
            {0: 0.8, 2: 0.8, 3: 0.4, 5: 0.4, 6: 0.2},
        ),
        (Scaled(LinearWarmup(0.8, 4), 0.5), {0: 0.0, 1: 0.1, 3: 0.3, 4: 0.4, 9: 0.4}),
        (Scaled(0.8, 0.0), {3: 0.0}),
        (JoinedSchedules([0.25], []), {0: 0.25, 1: 0.25}),
        (JoinedSchedules([0.5, 0.25], [0]), {-1: 0.5, 0: 0.25}),
    ],
)
def test_rates_match_worked_examples(schedule, expected):
    assert_rates(schedule, expected)


@pytest.mark.exhaustive
@pytest.mark.parametrize("floatx", ["bfloat16", "float16", "float64"])
@every_schedule
def test_rates_are_float32_for_every_floatx(make, floatx):
    steps = [*STEPS, 70_000]
    expected = rates(make(), steps)
    default = keras.config.floatx()
    keras.config.set_floatx(floatx)
    try:
        result = make()(3)
        actual = rates(make(), steps)
    finally:
        keras.config.set_floatx(default)
    assert keras.backend.standardize_dtype(result.dtype) == "float32"
    np.testing.assert_array_equal(actual, expected)


# Each backend has its own ways to compile.
@pytest.mark.exhaustive
@every_schedule
def test_compiled_schedule_is_not_retraced_for_other_steps(make, compiled):
    schedule = make()
    variable = keras.Variable(0, dtype="int32", trainable=False)
    traces = []

    def rate():
        traces.append(1)
        return schedule(variable)

    compiled_rate = compiled(rate, [variable])

    def at(step):
        variable.assign(step)
        return compiled_rate()

    # XLA may fuse a product and a sum, which saves one rounding.
    np.testing.assert_allclose(rates(at), rates(schedule), **TOLERANCE)
    # An eager function runs again at each step, a traced one only while it is traced.
    is_eager = compiled_rate is rate
    assert len(traces) in ([len(STEPS)] if is_eager else [1, 2])


@pytest.mark.skipif(
    keras.backend.backend() != "torch",
    reason="a traced function cannot read a value on TensorFlow and JAX",
)
@every_schedule
def test_schedule_reads_no_value_back_from_device(make):
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    class NoReads(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if function is torch.ops.aten._local_scalar_dense.default:
                raise AssertionError("a value was read back")
            return function(*args, **(kwargs or {}))

    step = torch.tensor(3)
    with pytest.raises(AssertionError, match="read back"), NoReads():
        bool(step)
    with NoReads():
        make()(step)
