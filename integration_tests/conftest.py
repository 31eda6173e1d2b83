"""A tiny model in any precision, its data, and functions that record and compare."""

import functools
import types

import keras
import numpy as np
import pytest

import benchmarks.model_garden
from testing import misuse

BATCH_SIZE = 8


@pytest.fixture(autouse=True, scope="module")
def fixed_seed_of_the_framework():
    """Alike whichever files run: `fit` shuffles by it."""
    keras.utils.set_random_seed(0)


@pytest.fixture
def clean(tmp_path, monkeypatch):
    """A folder to write to, and the dtype policy as it was."""
    monkeypatch.chdir(tmp_path)
    policy = keras.config.dtype_policy()
    yield
    keras.config.set_dtype_policy(policy)


@pytest.fixture
def data():
    """Four batches of a linear problem.

    Small enough for the default scale: no gradient times 2**15 overflows float16.
    """
    random = np.random.default_rng(0)
    x = random.normal(scale=0.5, size=(4 * BATCH_SIZE, 4)).astype("float32")
    y = x @ np.array([[0.5], [-0.75], [0.25], [0.5]], dtype="float32")
    return x, y


@pytest.fixture
def with_overflows():
    """Returns a copy of the inputs in which the given batches are all inf."""

    def poison(x, batches, batch_size=BATCH_SIZE):
        x = x.copy()
        for batch in batches:
            x[batch * batch_size : (batch + 1) * batch_size] = np.inf
        return x

    return poison


@pytest.fixture
def make_model():
    """Builds a model; at every call the same one, with the same weights."""

    def make(dtype_policy="mixed_float16", **hidden_layer):
        # `Model.compile` reads the dtype policy of the model, not of its layers.
        before = keras.config.dtype_policy()
        keras.config.set_dtype_policy(dtype_policy)
        first, second = (keras.initializers.GlorotUniform(seed) for seed in (1, 2))
        hidden = {"kernel_initializer": first, "name": "hidden", "units": 8}
        hidden |= {"activation": "tanh", **hidden_layer}
        try:
            return keras.Sequential(
                [
                    keras.Input((4,)),
                    keras.layers.Dense(**hidden),
                    keras.layers.Dense(1, kernel_initializer=second, name="output"),
                ]
            )
        finally:
            keras.config.set_dtype_policy(before)

    return make


@pytest.fixture
def fit():
    """Calls `model.fit` on the batches in their order, without a progress bar.

    It builds the optimizer first, as `fit` does itself: TensorFlow traces a step that
    makes variables twice, and tracing is most of what a short run takes.
    """

    def fit(model, x, y, epochs=1, callbacks=(), batch_size=BATCH_SIZE, **options):
        if model.built and not model.optimizer.built:
            model.optimizer.build(model.trainable_variables)
        return model.fit(
            x,
            y,
            batch_size=batch_size,
            epochs=epochs,
            shuffle=False,
            verbose=0,
            callbacks=list(callbacks),
            **options,
        )

    return fit


@pytest.fixture
def remember():
    """`remember(model)`: a function that restores the present state of the model.

    A restored model need not be compiled again, as a new one would be.
    """

    def remember(model):
        if not model.optimizer.built:
            model.optimizer.build(model.trainable_variables)
        variables = [*model.weights, *model.optimizer.variables]
        start = [np.array(v.numpy()) for v in variables]

        def put_back():
            for variable, value in zip(variables, start, strict=True):
                variable.assign(value)

        return put_back

    return remember


@pytest.fixture
def values():
    """Copies the values of variables to the host."""

    def copy(variables):
        # On PyTorch `numpy()` is a view of the variable.
        return [np.array(v.numpy()) for v in variables]

    return copy


@pytest.fixture
def bits(values):
    """Copies the bytes of variables: -0.0 differs from 0.0, and NaN equals NaN."""
    return lambda variables: [value.tobytes() for value in values(variables)]


@pytest.fixture
def assert_close():
    """Compares arrays within a share of the largest magnitude in each of them."""

    def check(actual, expected, share=1e-6):
        assert len(actual) == len(expected)
        for i, (a, e) in enumerate(zip(actual, expected, strict=True)):
            np.testing.assert_allclose(
                a, e, rtol=0, atol=share * np.abs(e).max(initial=0.0), err_msg=str(i)
            )

    return check


class Recorder(keras.callbacks.Callback):
    """Records the optimizer and the weights after each step.

    It reads only what Keras's own `LossScaleOptimizer` has as well.
    """

    def __init__(self):
        super().__init__()
        self.steps = []

    def on_train_batch_end(self, batch, logs=None):
        optimizer = self.model.optimizer
        # As numbers: on TensorFlow and PyTorch a variable changes in place.
        applied = int(optimizer.iterations)
        self.steps.append(
            types.SimpleNamespace(
                scale=float(optimizer.dynamic_scale),
                counter=int(optimizer.step_counter),
                skipped=len(self.steps) + 1 - applied,
                weights=[np.array(w) for w in self.model.get_weights()],
            )
        )

    def column(self, name):
        return [getattr(step, name) for step in self.steps]

    @property
    def weights_are_finite(self):
        return all(np.isfinite(w).all() for step in self.steps for w in step.weights)


@pytest.fixture
def make_recorder():
    return Recorder


@pytest.fixture(scope="session")
def model_garden():
    """`model_garden(name)`: a module of the Model Garden's optimization package."""
    return functools.cache(benchmarks.model_garden.load)


@pytest.fixture
def no_warnings():
    """A warning to the user is an error."""
    with misuse.no_warnings():
        yield


@pytest.fixture
def theirs(original, tmp_path):
    """`theirs(name, ...)`: the result of a function of `tf_keras_files.py`.

    Its files are in a folder of the test, and `path` is in that folder.
    """

    def get(*arguments, record=None, **options):
        def run():
            from integration_tests import tf_keras_files

            return tf_keras_files.run(*arguments, **options)

        saved = types.SimpleNamespace(**original(run, record))
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        for path, content in saved.files.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(content)
        if hasattr(saved, "path"):
            saved.path = str(folder / saved.path)
        return saved

    return get
