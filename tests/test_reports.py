"""A report leaves the model and the states of random generators unchanged."""

import functools
import random

import keras
import numpy as np
import pytest
from keras import layers, ops

import keras_lso
from keras_lso._backend import backend
from keras_lso._keras_internals.layers import BACKEND_OP_MODULES
from testing.harness import bits

BACKEND = keras.backend.backend()
X = np.random.default_rng(0).normal(size=(8, 4)).astype("float32")
Y = X[:, :1]


def report_both(model, x, y):
    keras_lso.float16_report(model, x, y)
    keras_lso.underflow_report(model, x, y)


@pytest.mark.parametrize("columns", [20, 80, 120])
@pytest.mark.parametrize(
    "report", [keras_lso.float16_report, keras_lso.underflow_report]
)
def test_tables_have_width_of_terminal_and_whole_words(report, columns, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    parts = [layers.Dense(1, name="global_average_of_a_backbone_with_words")]
    model = keras.Sequential([keras.Input((4,)), *parts])
    model.compile("sgd", loss="mse")
    text = str(report(model, X, Y))
    width = max(80, columns)
    assert max(map(len, text.splitlines())) <= width
    heads = [line.split()[0] for line in text.splitlines() if line.strip()]
    first = next(i for i, h in enumerate(heads) if h.startswith("--")) + 1
    pieces = [h for h in heads[first:] if "_" in h or h == "words"]
    assert "".join(pieces) == parts[0].name
    assert all(piece.endswith(("_", "words")) for piece in pieces)
    assert (len(pieces) == 1) == (columns == 120)


class Raises(layers.Layer):
    """A layer that fails if `fails` is set."""

    fails = False

    def call(self, x):
        if self.fails:
            raise ArithmeticError("mine")
        return ops.relu(x)


def modules():
    return [{**vars(module)} for module in (keras.src.ops, *BACKEND_OP_MODULES)]


@pytest.mark.filterwarnings("ignore:overflow encountered in cast:RuntimeWarning")
@pytest.mark.parametrize("fails", [False, True])
def test_report_leaves_model_unchanged(fails):
    parts = [
        layers.Reshape((2, 2)),
        layers.SimpleRNN(2, stateful=True),
        layers.BatchNormalization(),
        # It divides its kernel by the largest singular value, at each call.
        layers.SpectralNormalization(layers.Dense(2)),
        layers.Dropout(0.5),
        Raises(),
        layers.Dense(1, dtype="float32"),
    ]
    model = keras.Sequential([keras.Input((4,), batch_size=8), *parts])
    model.compile("sgd", loss="mse", metrics=["mae"])
    model.evaluate(X, Y, batch_size=8, verbose=0)
    variables = [
        *parts[1].states,
        *model.variables,
        *model.optimizer.variables,
        *model.metrics_variables,
    ]
    policies = [layer.dtype_policy.name for layer in model.layers]
    before, functions = bits(variables), modules()
    parts[5].fails = fails
    for report in (keras_lso.float16_report, keras_lso.underflow_report):
        if fails:
            with pytest.raises(ArithmeticError, match="mine"):
                report(model, X, Y)
        else:
            report(model, X, Y)
        assert bits(variables) == before
        assert modules() == functions
        assert [layer.dtype_policy.name for layer in model.layers] == policies
        assert not any("call" in vars(layer) for layer in [model, *model.layers])
        assert not parts[1].unroll


@pytest.mark.skipif(BACKEND != "torch", reason="PyTorch's modules")
def test_report_restores_buffers_of_torch_module():
    import torch

    module = torch.nn.BatchNorm1d(4)
    layer = layers.TorchModuleWrapper(module, output_shape=(None, 4))
    model = keras.Sequential([keras.Input((4,)), layer])
    model.compile("sgd", loss="mse")
    before = [np.array(buffer) for buffer in module.buffers()]
    keras_lso.underflow_report(model, X, X)
    for buffer, value in zip(module.buffers(), before, strict=True):
        np.testing.assert_array_equal(buffer, value)


def test_report_leaves_metrics_of_several_losses_at_zero():
    inputs = keras.Input((4,))
    outputs = [layers.Dense(1, name=name)(inputs) for name in "ab"]
    model = keras.Model(inputs, outputs)
    model.compile("sgd", loss=["mse", "mae"])
    report_both(model, X, [Y, Y])
    assert len(model.metrics_variables) == 6  # A sum and a count of each, and of all.
    assert not any(v.numpy().any() for v in model.metrics_variables)


@keras.saving.register_keras_serializable("keras_lso_tests")
class Noise(layers.Layer):
    """Noise without a seed, which Keras draws from a generator of all layers."""

    def call(self, x):
        if ops.is_tensor(x) and backend.host.has_values(x):
            return x + ops.cast(keras.random.normal((1,), stddev=100.0), x.dtype)
        return x

    def compute_output_shape(self, shape):
        return shape


def noisy():
    model = keras.Sequential([keras.Input((4,)), Noise(name="noise")])
    model.compile("sgd", loss="mse")
    return model


@pytest.mark.parametrize("is_fresh", [True, False])
def test_report_does_not_change_unseeded_random_numbers(is_fresh):
    found = []
    for reports in (False, True):
        keras.utils.clear_session()
        model = noisy()
        keras.utils.set_random_seed(0)
        if not is_fresh:
            keras.random.normal((1,))
        if reports:
            found_noise = keras_lso.float16_report(model, X).layers["noise"].outputs
        drawn = ops.convert_to_numpy(keras.random.normal((3,)))
        dropped = ops.convert_to_numpy(layers.Dropout(0.5)(np.ones(64), training=True))
        found.append((random.random(), drawn.tolist(), dropped.tolist()))
    assert found[0] == found[1]
    # Both passes saw the same noise; 11 bits of it, of which the sum rounds one.
    assert found_noise.largest_in_float16 == pytest.approx(
        found_noise.largest, rel=2.0**-10
    )


class Cell(layers.SimpleRNNCell):
    """A cell that fails in the middle of a sequence."""

    fails = False

    def call(self, sequence, states, training=False):
        if self.fails:
            raise ArithmeticError("mine")
        return super().call(sequence, states, training)


def test_error_during_report_leaves_no_dropout_mask_in_cell():
    cell = Cell(2, dropout=0.5, recurrent_dropout=0.5)
    model = keras.Sequential([keras.Input((3, 4)), layers.RNN(cell)])
    model.compile("sgd", loss="mse")
    cell.fails = True
    x, y = np.ones((5, 3, 4), "float32"), np.ones((5, 1), "float32")
    for function in (keras_lso.float16_report, keras_lso.underflow_report):
        with pytest.raises(ArithmeticError, match="mine"):
            function(model, x, y)
    cell.fails = False
    # A mask of five examples would not fit.
    assert model(x[:2], training=True).shape == (2, 2)


@pytest.mark.parametrize("kind", ["arrays", "dict", "generator"])
def test_reports_reject_batch_without_examples(kind):
    model = keras.Sequential([keras.Input((4,)), layers.Dense(1)])
    model.compile("sgd", loss="mse")
    x, y = X[:0], Y[:0]
    batch = {
        "arrays": lambda: (x, y),
        "dict": lambda: ({"a": X, "b": x}, Y),
        "generator": lambda: (iter([(x, y)]),),
    }[kind]
    expected = r"`x` must hold at least one example.*Received: x of shape \(0, 4\)"
    for function in (
        keras_lso.float16_report,
        keras_lso.underflow_report,
        functools.partial(keras_lso.recommend, hardware="cpu"),
    ):
        with pytest.raises(ValueError, match=expected):
            function(model, *batch())
