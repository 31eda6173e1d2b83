"""A run that was saved under one backend goes on under each other one.

For each other backend that is installed, `worker_across_backends.py` trains in a
process of its own, with an overflow in every epoch, saves, and trains on. Here the
files are loaded: the scale, the counters, the slots and the weights are those that
the worker had, bit for bit, and from there training takes the course that it took
there.
"""

import importlib.util
import json
import os
import subprocess
import sys
import zipfile

import keras
import numpy as np
import pytest

import keras_lso
from keras_lso import LossScaleOptimizer

pytestmark = pytest.mark.usefixtures("no_warnings")

WORKER = "integration_tests.worker_across_backends"
HERE = keras.backend.backend()


def marks(there):
    """Those of reading what another backend wrote.

    PyTorch's classes of optimizers are private ones, so that its files are the hardest
    to read; all backends read TensorFlow's in `test_written_before.py`.
    """
    return () if (HERE, there) == ("jax", "torch") else pytest.mark.full


OTHERS = [
    pytest.param(there, marks=marks(there))
    for there in ("jax", "tensorflow", "torch")
    if there != HERE
]

OURS = ["default", "hysteresis", "fixed", "remainder", "remainder8", "stochastic"]
OURS += ["narrow slots", "int8", "24 bits, int8"]

# How far two backends may drift apart in one epoch: some of their sums have another
# order, so the last bits of the computing dtype differ, and each of four steps adds
# to that. Weights and steps are around 1 and below.
DRIFT = {
    "float32": 100 * 2.0**-24,
    "mixed_float16": 10 * 2.0**-11,
    "float16": 10 * 2.0**-11,
}


@pytest.fixture(scope="session", params=OTHERS)
def folder(request, tmp_path_factory):
    """What the other backend wrote; each is started once."""
    if importlib.util.find_spec(request.param) is None:
        pytest.skip(f"{request.param} is not installed")
    folder = tmp_path_factory.mktemp(request.param)
    finished = subprocess.run(
        [sys.executable, "-m", WORKER, str(folder)],
        env={**os.environ, "KERAS_BACKEND": request.param},
        capture_output=True,
        text=True,
    )
    assert finished.returncode == 0, finished.stderr
    return folder


class Expected:
    """The arrays of the worker when it saved, and later."""

    def __init__(self, folder, name):
        with np.load(folder / f"{name}.npz") as file:
            self.arrays = dict(file)

    def __getattr__(self, name):
        return self.arrays[name]

    def all(self, prefix):
        count = sum(key.startswith(f"{prefix}_") for key in self.arrays)
        return [self.arrays[f"{prefix}_{i}"] for i in range(count)]


def config_in(path):
    with zipfile.ZipFile(path) as archive:
        return json.loads(archive.read("config.json"))


def assert_same(actual, expected):
    """Equal bit for bit, except the width of integers, which is the backend's."""
    assert len(actual) == len(expected)
    for a, b in zip(actual, expected, strict=True):
        assert a.shape == b.shape
        if np.issubdtype(b.dtype, np.integer):
            assert a.tolist() == b.tolist()
        else:
            # NumPy's files hold the bytes of bfloat16 without the type.
            assert a.dtype == ("bfloat16" if b.dtype == "V2" else b.dtype)
            assert a.tobytes() == b.tobytes()


def assert_takes_the_same_course(model, expected):
    """Trains for another epoch, as the worker did."""
    # The file holds the other backend's choice of `jit_compile`; this one makes its
    # own. (Under PyTorch, True would take half a minute.)
    model.compile(model.optimizer, loss="mean_squared_error")
    model.fit(expected.x, expected.y, batch_size=4, shuffle=False, verbose=0)
    assert int(model.optimizer.iterations) == expected.later_iterations
    if isinstance(model.optimizer, LossScaleOptimizer):
        assert float(model.optimizer.loss_scale) == expected.later_scale
    drift = DRIFT[model.layers[0].dtype_policy.name]
    if getattr(model.optimizer, "slot_dtype", None) == "int8":
        # The codes of small moments are a tenth of them apart, at a rate of 0.05.
        drift = 2.0**-5
    for here, there in zip(
        model.get_weights(), expected.all("later_weights"), strict=True
    ):
        np.testing.assert_allclose(here, there, rtol=0, atol=drift)


def assert_resumes(model, expected, name):
    optimizer = model.optimizer
    assert_same(model.get_weights(), expected.all("weights"))
    if name == "bare":
        assert_same([v.numpy() for v in optimizer.variables], expected.all("state"))
    elif name in OURS:
        assert type(optimizer) is LossScaleOptimizer
        assert_same([v.numpy() for v in optimizer.variables], expected.all("state"))
        assert (int(optimizer.iterations), int(optimizer.skipped_steps)) == (6, 2)
    else:
        assert type(optimizer) is LossScaleOptimizer
        # Keras's class leaves the count of attempted steps, which comes first, at 0. It
        # saves the variables that the inner optimizer has added by name.
        inner = [v for v in optimizer.inner_optimizer.variables if "/" in v.path]
        state = [v.numpy() for v in [*optimizer.variables[1:4], *inner]]
        assert_same(state, expected.all("state")[1:])
        assert (int(optimizer.iterations), int(optimizer.skipped_steps)) == (6, 0)
    assert_takes_the_same_course(model, expected)


@pytest.mark.parametrize("name", [*OURS, "bare", "keras", "keras adafactor"])
def test_keras_file_resumes_under_another_backend(name, folder):
    path, expected = folder / f"{name}.keras", Expected(folder, name)
    if name in OURS or name == "bare":
        model = keras.saving.load_model(path)
        state = [v.numpy() for v in model.optimizer.variables]
        assert_same(state, expected.all("state"))
        assert_same(model.get_weights(), expected.all("weights"))
    model = keras_lso.load_model(path)
    if name == "bare":  # Keras's own loader makes one of the other backend's class.
        assert type(model.optimizer) is type(keras.optimizers.Adam())
    assert_resumes(model, expected, name)


@pytest.mark.parametrize("name", OURS)
def test_weights_file_resumes_under_another_backend(name, folder):
    # The same architecture, with other weights and an optimizer that has none yet.
    config = config_in(folder / f"{name}.keras")
    model = keras.models.clone_model(
        keras.saving.load_model(folder / f"{name}.keras", compile=False)
    )
    model.compile(
        keras_lso.deserialize(config["compile_config"]["optimizer"]),
        loss="mean_squared_error",
    )
    model.optimizer.build(model.trainable_variables)
    model.load_weights(folder / f"{name}.weights.h5")
    assert_resumes(model, Expected(folder, name), name)


@pytest.mark.parametrize("name", [*OURS, "keras", "bare"])
def test_whole_model_in_h5_resumes_under_another_backend(name, folder):
    model = keras_lso.load_model(folder / f"{name}.h5")
    assert_resumes(model, Expected(folder, name), name)


@pytest.mark.parametrize("ending", ["keras", "h5"])
def test_state_before_first_finite_step_is_restored(ending, folder):
    expected = Expected(folder, "early")
    optimizer = keras_lso.load_model(folder / f"early.{ending}").optimizer
    # All except the row of skips, which starts at zero.
    state = [v.numpy() for v in optimizer.variables[:-1]]
    assert_same(state, expected.all("state")[:-1])
    assert optimizer.loss_scale_policy.search_state.numpy() == -2
    assert int(optimizer.skipped_steps) == 1
