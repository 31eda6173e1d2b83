"""`float16_report`: numbers against NumPy, and the layer at fault by its name."""

import contextlib
import json
import math

import hypothesis
import hypothesis.strategies as st
import keras
import numpy as np
import pytest
from keras import layers, ops

import keras_lso
from keras_lso._backend import backend
from keras_lso.diagnostics.float16 import _magnitudes, _reading_of

RANDOM = np.random.default_rng(0)
MIXED = "mixed_float16"
FITS = "Every layer fits into float16."


@contextlib.contextmanager
def dtype_policy(policy):
    keras.config.set_dtype_policy(policy)
    yield
    keras.config.set_dtype_policy("float32")


def sequential(*parts, shape, policy=MIXED, name="net"):
    with dtype_policy(policy):
        return keras.Sequential([keras.Input(shape), *(p() for p in parts)], name=name)


@pytest.mark.parametrize("policy", ["float32", "mixed_float16", "float16"])
def test_float16_report_magnitudes_match_numpy(policy):
    model = sequential(
        lambda: layers.Dense(3, name="first"),
        lambda: layers.Dense(2, "relu", name="last"),
        shape=(4,),
        policy=policy,
    )
    a, b = (RANDOM.normal(size=s).astype("float16") for s in ((4, 3), (3, 2)))
    a[0, 0], b[0, 0] = 3000.0, 2.0**-24
    model.set_weights([a, np.ones(3), b, np.zeros(2)])
    x = np.full((2, 4), 32.0, "float32")
    report = keras_lso.float16_report(model, x)
    wide, last = a.astype("float32"), b.astype("float32")
    product = x @ wide
    first, found = report.layers["first"], report.layers["last"]
    # Sums of four products in float32, and of three.
    close = {"rel": 1e-6}
    assert first.inputs.largest == 32
    assert first.weights.largest == 3000
    assert first.ops["matmul"].largest == pytest.approx(abs(product).max(), **close)
    assert first.outputs.largest == pytest.approx(abs(product + 1).max(), **close)
    # A column of the outputs overflows.
    assert first.outputs.not_finite_in_float16 == 2
    assert first.outputs.largest_in_float16 == math.inf
    assert first.headroom == pytest.approx(math.log2(65504 / (product + 1).max()))
    expected = np.maximum((product + 1) @ last, 0)
    assert found.outputs.largest == pytest.approx(expected.max(), **close)
    assert (first.calls, found.calls) == (1, 1)
    assert report.layers_to_keep == ["first", "last"]


@hypothesis.given(
    st.lists(st.lists(st.floats(width=32), max_size=20), min_size=1, max_size=3)
)
# Each side of the limit of flushing, and numbers whose sum is inf in float32.
@hypothesis.example([[2.0**-25, np.nextafter(np.float32(2.0**-25), 1).item()]])
@hypothesis.example([[3e38, 3e38], [np.inf, np.nan, 0.0], []])
def test_magnitudes_match_numpy_casts_to_float16(batches):
    wide = [np.array(batch, "float32") for batch in batches]
    with np.errstate(over="ignore", invalid="ignore"):
        narrow = [batch.astype("float16") for batch in wide]
    found = magnitudes_of(zip(wide, narrow, strict=True))
    wide, narrow = np.concatenate(wide).astype("float64"), np.concatenate(narrow)
    finite = np.abs(wide[np.isfinite(wide)])
    with np.errstate(over="ignore"):
        # From float64 at once: rounding twice may end elsewhere.
        is_flushed = (finite != 0) & (finite.astype("float16") == 0)
    assert found.largest == finite.max(initial=0)
    is_finite = np.isfinite(narrow).all()
    in_float16 = np.abs(narrow).max(initial=0) if is_finite else math.inf
    assert found.largest_in_float16 == in_float16
    assert found.not_finite == (~np.isfinite(wide)).sum()
    assert found.not_finite_in_float16 == (~np.isfinite(narrow)).sum()
    assert found.flushed == is_flushed.sum() / max((finite != 0).sum(), 1)
    assert found.lost == pytest.approx(finite[is_flushed].sum() / (finite.sum() or 1))
    # Powers of two up to what float16 holds.
    has_any = found.largest > 0
    assert has_any or found.headroom == math.inf
    assert not has_any or found.largest * 2**found.headroom == pytest.approx(65504)


def magnitudes_of(pairs):
    return _magnitudes(
        [[_reading_of(array, str(array.dtype)) for array in pair] for pair in pairs]
    )


def test_float16_report_combines_requested_number_of_batches():
    model = sequential(
        lambda: layers.Dense(1, kernel_initializer="ones", name="sum"), shape=(2,)
    )
    batches = [(np.full((2, 2), v, "float32"),) for v in (8.0, 512.0, 2.0, 1e6)]
    for count, largest in ((1, 16), (2, 1024), (3, 1024)):
        report = keras_lso.float16_report(model, iter(batches), batches=count)
        assert report.layers["sum"].outputs.largest == largest
        assert report.layers["sum"].calls == count


def test_dropout_overflow_is_found_only_in_training_mode():
    model = sequential(lambda: layers.Dropout(0.75, name="drop"), shape=(64,))
    x = np.full((4, 64), 20000.0, "float32")
    assert keras_lso.float16_report(model, x).layers_to_keep == ["drop"]
    report = keras_lso.float16_report(model, x, training=False)
    assert report.layers["drop"].outputs.largest == 20000
    assert report.layers_to_keep == []


def large_embedding():
    model = sequential(
        lambda: layers.Embedding(5, 16, name="embedding"),
        lambda: layers.Dense(8, "tanh", kernel_initializer="ones", name="projection"),
        lambda: layers.Dense(2, name="head"),
        shape=(3,),
    )
    model.get_layer("embedding").set_weights([np.full((5, 16), 9000.0)])
    return model, np.array([[0, 1, 4]]), ["projection"], "matmul"


def unscaled_logits():
    model = sequential(
        lambda: layers.Dense(8, kernel_initializer="ones", name="hidden"),
        lambda: layers.Dense(
            3,
            "softmax",
            kernel_initializer=keras.initializers.Constant(100.0),
            name="probabilities",
        ),
        shape=(4,),
    )
    return model, np.full((2, 4), 40.0, "float32"), ["probabilities"], "matmul"


def large_sums_of_squares():
    model = sequential(
        lambda: layers.Dense(8, kernel_initializer="ones", name="hidden"),
        lambda: SquareNorm(name="norm"),
        shape=(4,),
    )
    return model, np.full((2, 4), 100.0, "float32"), ["norm"], "sum"


class SquareNorm(layers.Layer):
    """A user's normalization, which computes squares in float16."""

    def call(self, x):
        return x / ops.sqrt(ops.sum(ops.square(x), axis=-1, keepdims=True))


CULPRITS = [large_embedding, unscaled_logits, large_sums_of_squares]


@pytest.mark.parametrize("make", CULPRITS)
def test_float16_report_names_layers_that_cause_overflow(make):
    model, x, names, what = make()
    report = keras_lso.float16_report(model, x)
    assert report.layers_to_keep == names
    found = report.layers[names[0]]
    assert f"{what} {dict(found.parts())[what].largest:.2g}" in found.reasons[0]
    # The layers after it have NaN as well, and are not to blame.
    others = [r for path, r in report.layers.items() if path not in names]
    assert not any(other.reasons for other in others)
    assert f"Keep in float32, or in bfloat16: {', '.join(names)}." in str(report)
    again = keras_lso.float16_report(report.apply(model), x)
    assert again.layers_to_keep == []
    assert not any(
        m.not_finite_in_float16 for r in again.layers.values() for _, m in r.parts()
    )


def test_float16_report_names_input_of_model_before_layers():
    def make():
        return layers.Dense(1, name="first", kernel_initializer="ones")

    model = sequential(make, lambda: layers.Dense(1, name="last"), shape=(2,))
    report = keras_lso.float16_report(model, np.array([[1e7, 1.0]], "float32"))
    text = "the model's own inputs hold 1e+07, above 65504. First look at the data"
    reasons = [r for v in report.layers.values() for r in v.reasons]
    assert text in reasons[0]
    words = " ".join(str(report).split())
    assert words.index(text) < words.index("Keep in float32")
    # The input of the last layer is a result of the first.
    assert not any("own inputs" in r for r in report.layers["last"].reasons)


class TinyEpsilon(layers.Layer):
    """A layer whose epsilon is 0 in float16."""

    def call(self, x):
        return x / (ops.abs(x) + 1e-9)


class Masks(layers.Layer):
    """A layer with another constant in float16, like Keras's attention."""

    def call(self, x):
        return x - (3e4 if self.compute_dtype == "float16" else 1e9)


@pytest.mark.parametrize(
    "make, x, kept, remark, text",
    [
        (TinyEpsilon, [0.0, 1.0], True, "digits are lost", "Keep in float32, or in"),
        (layers.ReLU, [0.0, 30000.0], False, "inputs 3e+04: close to 65504", FITS),
        (Masks, [0.0, 1.0], False, "1e+09 in float32, but 3e+04 in float16", FITS),
        (layers.ReLU, [0.0, np.nan], False, "is not to blame", "only in float16."),
    ],
)
def test_float16_report_tells_limits_from_faults(make, x, kept, remark, text):
    model = sequential(lambda: make(name="layer"), shape=(2,))
    report = keras_lso.float16_report(model, np.array([x], "float32"))
    found = report.layers["layer"]
    assert report.layers_to_keep == ["layer"] * kept
    assert remark in (found.reasons if kept else found.notes)[0]
    assert text in str(report)


def test_float16_report_flags_vanishing_weights_but_ignores_harmless_zeros():
    model = sequential(
        lambda: layers.Dense(1, use_bias=False, name="tiny"),
        lambda: layers.Dense(64, use_bias=False, name="some"),
        shape=(2,),
    )
    some = np.r_[np.full(32, 1e-9), np.ones(32)][np.newaxis]
    model.set_weights([np.array([[1e-9], [2e-9]]), some])
    report = keras_lso.float16_report(model, np.full((1, 2), 1e6, "float32"))
    assert report.layers["tiny"].weights.flushed == 1
    assert "100% of its weights" in str(report.layers["tiny"].reasons)
    # Half of the weights are flushed, but almost nothing of their sum.
    assert report.layers["some"].weights.flushed == 0.5
    assert not report.layers["some"].reasons


def test_float16_report_covers_nested_layers_and_repeated_calls():
    starts = {"one": "ones", "two": "identity"}
    inner = [
        sequential(
            lambda start=start: layers.Dense(2, kernel_initializer=start, name="d"),
            shape=(2,),
            name=name,
        )
        for name, start in starts.items()
    ]
    with dtype_policy(MIXED):
        inputs = {name: keras.Input((2,), name=name) for name in "ab"}
        a, b = inner[0](inputs["a"]), inner[1](inner[1](inputs["b"]))
        model = keras.Model(inputs, [a * b, b], name="net")
    x = {name: np.full((1, 2), v, "float32") for name, v in (("a", 99.0), ("b", 500.0))}
    report = keras_lso.float16_report(model, x)
    assert [report.layers[p].calls for p in ("one/d", "two/d")] == [1, 2]
    assert report.layers["one/d"].outputs.largest == 198
    # The product is an op between layers, which takes their dtype.
    assert report.layers["net"].ops["multiply"].largest == 99000
    assert sorted(report.layers_to_keep) == ["one", "two"]
    again = keras_lso.float16_report(report.apply(model), x)
    assert again.layers_to_keep == []


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "SimpleRNN"])
def test_float16_report_covers_cells_of_recurrent_layers(kind):
    model = sequential(
        lambda: layers.Bidirectional(
            getattr(layers, kind)(2, kernel_initializer="ones", name="rnn"), name="both"
        ),
        shape=(2, 3),
    )
    report = keras_lso.float16_report(model, np.full((1, 2, 3), 30000.0, "float32"))
    cell = next(p for p in report.layers if p.startswith("both/forward_rnn/"))
    assert report.layers[cell].ops["matmul"].largest == pytest.approx(90000)
    # Keras's loop on PyTorch calls the cell once more, for its output shape.
    assert report.layers[cell].calls == 2 + (not backend.host.COMPILES_LOOPS)
    assert report.layers_to_keep == ["both"]
    assert not model.layers[0].forward_layer.unroll


def test_input_layer_is_not_listed_among_layers_to_keep():
    inputs = keras.Input((2,))
    hidden = layers.Dense(
        2, kernel_initializer="ones", dtype="mixed_float16", name="hidden"
    )(inputs)
    model = keras.Model(inputs, hidden * ops.cast(inputs, "float16"))
    report = keras_lso.float16_report(model, np.full((1, 2), 300.0, "float32"))
    assert report.layers_to_keep == ["hidden"]


class Subclassed(keras.Model):
    """A model that casts its inputs itself, and adds without `keras.ops`."""

    def __init__(self):
        super().__init__(dtype=MIXED, name="net")
        self.dense = layers.Dense(2, kernel_initializer="ones", dtype=MIXED, name="d")

    def call(self, x):
        return self.dense(x) + self.dense(x)


def test_float16_report_covers_unbuilt_subclassed_model():
    model = Subclassed()
    report = keras_lso.float16_report(model, np.full((1, 2), 20000.0, "float32"))
    assert report.layers["d"].calls == 2
    assert report.layers["d"].outputs.largest == 40000
    assert report.layers["net"].outputs.largest == 80000
    assert "outputs 8e+04" in report.layers["net"].reasons[0]
    assert "No layer can be kept in float32 instead." in str(report)


def test_overflow_of_inputs_cast_by_model_is_attributed_to_model():
    report = keras_lso.float16_report(Subclassed(), np.full((1, 2), 1e5, "float32"))
    data, overflow = report.layers["net"].reasons
    assert "the model's own inputs hold 1e+05, above 65504. First look at" in data
    assert "inputs 1e+05" in overflow
    assert "net" not in report.layers_to_keep


def stateful_model(policy=MIXED):
    model = sequential(
        lambda: layers.Dense(4, name="first"),
        lambda: layers.BatchNormalization(name="norm"),
        lambda: layers.Dropout(0.5, name="drop"),
        lambda: layers.Dense(1, dtype="float32", name="last"),
        shape=(3,),
        policy=policy,
    )
    model.compile("sgd", loss="mse", metrics=["mae"])
    return model


@pytest.mark.parametrize("policy", ["float32", "mixed_float16", "float16"])
def test_gradients_are_counted_at_recommended_scale(policy):
    x, y = RANDOM.normal(size=(2, 8, 3)).astype("float32")
    model = stateful_model(policy)
    report = keras_lso.float16_report(model, x, y[:, :1] * 1e-3)
    assert report.loss_scale == report.recommended_scale
    counts = {path: found.gradients for path, found in report.layers.items()}
    # A float32 layer allows any scale.
    assert (counts["last"] is None) == (policy != "float32")
    counts = {path: c for path, c in counts.items() if c}
    highest = min(c.highest_safe_scale for c in counts.values())
    # Room for one doubling, within the bounds of a dynamic scale.
    assert report.recommended_scale == min(
        2.0 ** math.floor(math.log2(highest / 2)), 2.0**24
    )
    assert f"initial_scale: 2**{math.log2(report.recommended_scale):.0f}" in str(report)
    assert not any(c.overflowing[0] for c in counts.values())


def test_float16_report_mentions_gradient_overflow_at_given_scale():
    x, y = RANDOM.normal(size=(2, 8, 3)).astype("float32")
    model = stateful_model()
    report = keras_lso.float16_report(model, x, y[:, :1], loss_scale=2.0**30)
    assert "of its gradients overflow at the loss scale" in str(report)
    assert (report.loss_scale, report.recommended_scale < 2.0**30) == (2.0**30, True)
    # No scale fits both halves of the examples.
    weights = np.r_[np.full(4, 1e-13), np.ones(4)].astype("float32")
    report = keras_lso.float16_report(model, x, y[:, :1], sample_weight=weights)
    assert "of its gradients are flushed to zero at the loss scale" in str(report)


def test_float16_report_without_targets_has_no_gradients():
    x = RANDOM.normal(size=(8, 3)).astype("float32")
    # The regularizer alone gives a loss, but the model is trained with both.
    model = sequential(lambda: layers.Dense(1, kernel_regularizer="l2"), shape=(3,))
    model.compile("sgd", loss="mse")
    report = keras_lso.float16_report(model, x)
    assert report.loss_scale is None
    assert report.recommended_scale is None
    assert "gradients" not in str(report)
    with pytest.raises(ValueError, match="`loss_scale` is for the gradients"):
        keras_lso.float16_report(model, x, loss_scale=8.0)
    with pytest.raises(ValueError, match="`y` must be the targets"):
        keras_lso.underflow_report(model, x)


class AddsLoss(layers.Layer):
    """A layer with a loss, which its model has only after a call."""

    def call(self, x):
        self.add_loss(ops.mean(x))
        return x


@pytest.mark.parametrize("policy", [MIXED, "float16"])
def test_loss_added_by_layer_has_gradients(policy):
    parts = (lambda: layers.Dense(1, name="d"), lambda: AddsLoss())
    model = sequential(*parts, shape=(3,), policy=policy)
    model.compile("sgd")
    x = RANDOM.normal(size=(8, 3)).astype("float32")
    report = keras_lso.float16_report(model, x)
    assert report.layers["d"].gradients.values == 3 + 1 + 8  # Kernel, bias, outputs.


class OwnLoss(keras.Sequential):
    def compute_loss(self, x=None, y=None, y_pred=None, **kwargs):
        return ops.mean(y_pred)


def test_loss_computed_by_model_has_gradients_without_targets():
    model = OwnLoss([keras.Input((3,)), layers.Dense(1, name="d", dtype=MIXED)])
    model.compile("sgd", loss="mse")
    report = keras_lso.float16_report(model, np.ones((8, 3), "float32"))
    assert report.layers["d"].gradients.values == 3 + 1 + 8


ON_TORCH = pytest.mark.skipif(
    keras.backend.backend() != "torch", reason="PyTorch's modules"
)


def around_module(policy=None):
    import torch

    inputs = keras.Input((3,))
    hidden = layers.Dense(4, dtype=policy)(inputs)
    wrapper = layers.TorchModuleWrapper(
        torch.nn.Linear(4, 2), name="plain", output_shape=(None, 2), dtype=policy
    )
    model = keras.Model(inputs, layers.Dense(1, dtype=policy)(wrapper(hidden)))
    model.compile("sgd", loss="mse")
    return model


@ON_TORCH
@pytest.mark.parametrize(
    "examine",
    [
        keras_lso.float16_report,
        lambda *data: keras_lso.recommend(*data, hardware="gpu:7.5"),
        lambda *data: keras_lso.recommend(*data, hardware="gpu:8.0"),
    ],
    ids=["report", "float16", "bfloat16"],
)
def test_layer_around_plain_module_stays_in_float32(examine):
    x = RANDOM.normal(size=(8, 3)).astype("float32")
    model = around_module()
    found = examine(model, x, x[:, :1])
    text = " ".join(str(found).split())
    assert "plain" in text and "dtypes of their own" in text
    assert "or in bfloat16" not in text
    applied = found.apply(model)
    dtypes = {layer.name: layer.compute_dtype for layer in applied.layers}
    assert dtypes.pop("plain") == "float32"
    assert "float32" not in dtypes.values()
    applied.fit(x, x[:, :1], verbose=0)


@ON_TORCH
def test_layer_that_cannot_compute_in_float16_is_named():
    x = RANDOM.normal(size=(8, 3)).astype("float32")
    model = around_module(MIXED)
    with pytest.raises(Exception, match="layer 'plain' does not compute in float16"):
        keras_lso.float16_report(model, x)


def test_float16_report_converts_to_dict_and_table():
    model, x, _, _ = unscaled_logits()
    report = keras_lso.float16_report(model, x)
    numbers = json.loads(json.dumps(report.to_dict()))
    assert numbers["layers_to_keep"] == ["probabilities"]
    found = numbers["layers"]["probabilities"]
    assert found["ops"]["matmul"]["largest"] == 128000
    assert found["ops"]["matmul"]["headroom"] == math.log2(65504 / 128000)
    assert found["compute_dtype"] == "float16"
    [row] = [line for line in str(report).splitlines() if line.startswith(" proba")]
    assert " ".join(row.split()) == "probabilities 1.3e+05 matmul 0.51x 24"
    assert max(map(len, str(report).splitlines())) <= 80
    assert str(report).isascii()
