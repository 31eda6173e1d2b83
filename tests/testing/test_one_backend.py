"""The mark `one_backend` is refused where a backend's own code runs."""

import keras
import pytest

import keras_lso
from keras_lso._backend import backend
from testing import one_backend


def refuse_an_argument():
    with pytest.raises(ValueError, match="initial_scale"):
        keras_lso.LossScaleOptimizer(keras.optimizers.SGD(), initial_scale=-1.0)


def read_a_config():
    config = keras_lso.LossScaleOptimizer(keras.optimizers.SGD()).get_config()
    keras_lso.LossScaleOptimizer.from_config(config)


def take_a_step():
    variable = keras.Variable([1.0, 2.0])
    optimizer = keras_lso.LossScaleOptimizer(keras.optimizers.SGD())
    optimizer.apply([keras.ops.ones(2)], [variable])


def measure():
    backend.measure([keras.ops.ones(2)])


@pytest.mark.parametrize("call", [refuse_an_argument, read_a_config])
def test_backend_independent_call_is_not_recorded(call):
    with one_backend.calls_of_a_backend() as found:
        call()
    assert not found


@pytest.mark.parametrize("call, name", [(take_a_step, "measure"), (measure, "measure")])
def test_backend_dependent_call_is_recorded(call, name):
    with one_backend.calls_of_a_backend() as found:
        call()
    assert any(name in each for each in found)


def test_marked_test_that_depends_on_backend_fails(request):
    hook = one_backend.pytest_runtest_call(request.node)
    request.node.add_marker("one_backend")
    next(hook)
    measure()
    with pytest.raises(AssertionError, match="Remove the mark"):
        hook.send(None)


def test_marked_test_that_is_backend_independent_passes(request):
    hook = one_backend.pytest_runtest_call(request.node)
    request.node.add_marker("one_backend")
    next(hook)
    with pytest.raises(StopIteration) as end:
        hook.send("result")
    assert end.value.value == "result"
