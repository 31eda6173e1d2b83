"""Importing the package, in a process of its own.

It imports no framework that Keras did not, and loads where nothing can be trained.
"""

import importlib.util
import os
import subprocess
import sys

import pytest

LIST_FRAMEWORKS = """
import sys
def print_frameworks():
    roots = {name.partition(".")[0] for name in sys.modules}
    print(*sorted(roots & {"tensorflow", "jax", "torch"}))
import keras
print_frameworks()
import keras_lso, keras_lso.backend, keras_lso.saving
print_frameworks()
"""

# What a model that was trained elsewhere needs: its optimizer is made, built and
# given its state.
LOAD_AN_OPTIMIZER = """
optimizer = keras_lso.deserialize(
    keras.optimizers.serialize(
        keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.5))
    )
)
assert type(optimizer) is keras_lso.LossScaleOptimizer
optimizer.build([keras.Variable([1.0, 2.0])])
store = {}
optimizer.save_own_variables(store)
store["3"] = store["3"] * 0 + 64
optimizer.load_own_variables(store)
print("scale:", float(optimizer.loss_scale))
print("loss:", float(optimizer.scale_loss(keras.ops.convert_to_tensor(2.0))))
"""


def run(code, backend, **environment):
    environment = {
        **os.environ,
        "KERAS_BACKEND": backend,
        "TF_CPP_MIN_LOG_LEVEL": "3",
        **environment,
    }
    return subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )


def output(code, backend, **environment):
    result = run(code, backend, **environment)
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()


def skip_unless_installed(backend):
    if backend != "numpy" and importlib.util.find_spec(backend) is None:
        pytest.skip(f"{backend} is not installed")


# The backend under test; the three runs of the suite cover all of them.
BACKEND = os.environ["KERAS_BACKEND"]


def test_no_framework_is_imported_that_keras_did_not_import():
    keras_alone, with_ours = output(LIST_FRAMEWORKS, BACKEND)
    assert with_ours == keras_alone
    assert BACKEND in with_ours.split()


@pytest.mark.parametrize("backend", ["numpy", "openvino"])
def test_an_optimizer_is_loaded_where_nothing_can_be_trained(backend):
    skip_unless_installed(backend)
    lines = output(LIST_FRAMEWORKS + LOAD_AN_OPTIMIZER, backend)
    keras_alone, with_ours, *results = lines
    assert with_ours == keras_alone
    assert results == ["scale: 64.0", "loss: 128.0"]


SHOW_KERNELS = """
from keras_lso import backend
from keras_lso.backend import generic
print(backend.KERNELS, backend.measure is generic.measure,
      backend.fused_step_takes(None, [], []))
"""


def test_the_environment_turns_the_fast_paths_off():
    lines = output(SHOW_KERNELS, BACKEND, KERAS_LSO_KERNELS="generic")
    assert lines == ["generic True False"]


def test_a_misspelt_environment_variable_is_refused():
    result = run("import keras_lso", "numpy", KERAS_LSO_KERNELS="fast")
    assert result.returncode == 1
    message = result.stderr.splitlines()[-1]
    for word in ("KERAS_LSO_KERNELS='fast'", "'auto'", "'generic'", "ValueError"):
        assert word in message
