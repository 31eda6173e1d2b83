"""`underflow_report`: shares against NumPy's float16, gradients against formulas."""

import hypothesis
import hypothesis.strategies as st
import keras
import numpy as np
import pytest

import keras_lso
from keras_lso.diagnostics.underflow import UnderflowReport, counts_of

FLOAT16 = np.finfo("float16")


def shares_by_numpy(values, scale):
    """Casts every value to float16, and counts the results."""
    values = values[values != 0].astype("float64")
    # From float64 at once: rounding twice may end elsewhere.
    with np.errstate(over="ignore"):
        cast = np.abs((values * scale).astype("float16"))
    return (
        (cast == 0).mean(),
        ((cast > 0) & (cast < FLOAT16.smallest_normal)).mean(),
        (~np.isfinite(cast)).mean(),
    )


@hypothesis.given(
    st.lists(st.floats(width=32), min_size=1, max_size=50).filter(any),
    st.integers(-14, 24),
)
# Each side of each boundary: zero, the smallest normal number, the largest.
@hypothesis.example([2.0**-25, np.nextafter(np.float32(2.0**-25), 1).item()], 0)
@hypothesis.example([2.0**-14, 2.0**-14 - 2.0**-26, 2.0**-14 - 2.0**-24], 0)
@hypothesis.example([65504.0, 65519.0, 65520.0, 65536.0], 0)
def test_shares_match_numpy_cast_to_float16(values, exponent):
    values, scale = np.array(values, "float32"), 2.0**exponent
    counts = counts_of([values], [scale])
    [shares] = zip(counts.flushed, counts.subnormal, counts.overflowing, strict=True)
    assert shares == pytest.approx(shares_by_numpy(values, scale), abs=1e-12)


@hypothesis.given(
    st.lists(st.floats(2.0**-40, 2.0**40, width=32), min_size=1, max_size=300)
)
# Of a hundred values one may be flushed, and not two.
@hypothesis.example([2.0**-30] * 2 + [1.0] * 98)
def test_safe_scale_bounds_separate_safe_from_unsafe_scales(values):
    values = np.array(values, "float32")
    counts = counts_of([values], [1.0])
    low, high = counts.lowest_safe_scale, counts.highest_safe_scale
    # One step of float64 decides, and the last bit of a scale may be off.
    flushed, _, _ = shares_by_numpy(values, low * (1 + 1e-9))
    assert flushed <= 0.01
    flushed, _, _ = shares_by_numpy(values, low * (1 - 1e-9))
    assert flushed > 0.01
    assert shares_by_numpy(values, high * (1 - 1e-9))[2] == 0
    assert shares_by_numpy(values, high * 1.001)[2] > 0


def test_zero_gradients_are_safe_at_any_scale():
    counts = counts_of([np.zeros(3, "float32")], [1.0, 2.0])
    assert counts.values == 0
    assert counts.flushed == counts.overflowing == [0.0, 0.0]
    assert (counts.lowest_safe_scale, counts.highest_safe_scale) == (0.0, np.inf)


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_non_finite_gradients_are_safe_at_no_scale(bad):
    counts = counts_of([np.array([1.0, bad], "float32")], [1.0, 2.0])
    assert counts.overflowing == [0.5, 0.5]
    assert counts.highest_safe_scale == 0.0


def make_report(*values):
    scales = [2.0**i for i in range(0, 25, 4)]
    arrays = {f"layer {i}": np.array(v, "float32") for i, v in enumerate(values)}
    return UnderflowReport(
        scales, {n: counts_of([a], scales) for n, a in arrays.items()}
    )


TABLE = """
                  flushed  flushed  subnormal  overflow
 layer    median  at 2**0  at 2**8    at 2**8   at 2**8      safe scales
 -----------------------------------------------------------------------
 layer 0   6e-08                       100.0%             2**-1 to 2**39
 layer 1   1e+00    50.0%    <0.1%      49.9%              2**2 to 2**15
 layer 2   2e+01                                         2**-29 to 2**11

Safe for all layers: 2**2 to 2**11. Recommended initial_scale: 2**10."""


def test_underflow_report_prints_shares_at_one_and_recommended_scale():
    # Of 2000 values, 1000 are flushed at 1, and the last one at 2**8 as well, the
    # report's scale closest to 2**10.
    mixed = [1.0] * 1001 + [2.0**-25] * 899 + [2.0**-27] * 99 + [2.0**-40]
    report = make_report([2.0**-24], mixed, [16.0] * 9 + [17.0])
    assert str(report) == TABLE


@pytest.mark.parametrize(
    "values, last",
    [
        # 2**-25 of the smallest that counts is 3, and 65504 of the largest 100: what is
        # safe is not rounded up.
        (
            ([2.0**-25 / 3] * 99 + [655.04],),
            "Safe for all layers: 2**2 to 2**6. Recommended initial_scale: 2**5.",
        ),
        (([1e-9], [1e9]), "No scale is safe. Recommended initial_scale: 2**-14."),
        (([0.0],), "Safe for all layers: any. Recommended initial_scale: 2**15."),
        (
            ([1.0], [1.0, np.nan]),
            "The gradients contain inf or NaN in float32 already. First look for the "
            "source.",
        ),
    ],
)
def test_underflow_report_states_scales_safe_for_all_layers(values, last):
    assert str(make_report(*values)).splitlines()[-1] == last


def test_report_escapes_control_characters_in_names():
    counts = counts_of([np.ones(1)], [1.0])
    assert r"a\x1b[2Jb" in str(UnderflowReport([1.0], {"a\x1b[2Jb": counts}))


def make_model(policy="mixed_float16", **arguments):
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((3,)),
            keras.layers.Dense(4, "tanh", dtype=policy, name="first", **arguments),
            keras.layers.BatchNormalization(dtype=policy, name="norm"),
            keras.layers.Dropout(0.5, dtype=policy, name="drop"),
            keras.layers.Dense(2, dtype=policy, name="last"),
        ]
    )
    model.compile("sgd", loss="mse", metrics=["mae"])
    return model


@pytest.fixture
def batch():
    random = np.random.default_rng(0)
    return random.normal(size=(2, 8, 3)).astype("float32")


def test_gradients_match_analytic_formula():
    policy = "mixed_float16"
    layers = [
        keras.layers.Dense(2, use_bias=False, dtype=policy, name="first"),
        keras.layers.Dense(1, use_bias=False, dtype=policy, name="last"),
    ]
    model = keras.Sequential([keras.Input((2,)), *layers])
    model.compile("sgd", loss="mse")
    a = np.array([[0.5, -1.0], [0.25, 2.0]], "float32")
    b = np.array([[1.0], [3.0]], "float32")
    model.set_weights([a, b])
    x, y = np.array([[1e-3, 2e-3]], "float32"), np.array([[1.0]], "float32")
    report = keras_lso.underflow_report(model, x, y, scales=[1.0])
    by_output = 2 * (x @ a @ b - y)
    expected = {
        "first": [x.T @ (by_output @ b.T), by_output @ b.T],
        "last": [(x @ a).T @ by_output, by_output],
    }
    for name, arrays in expected.items():
        values = np.abs(np.concatenate([v.ravel() for v in arrays]))
        found = report.layers[name]
        assert found.values == values.size
        # Sums of two products in float32.
        assert found.smallest == pytest.approx(values.min(), rel=1e-6)
        assert found.largest == pytest.approx(values.max(), rel=1e-6)


def test_frozen_layers_before_first_trainable_layer_have_no_gradients(batch):
    model = make_model("float32")
    model.get_layer("first").trainable = False
    model.compile("sgd", loss="mse")
    x, y = batch[0], batch[1][:, :2]
    report = keras_lso.underflow_report(model, x, y, scales=[1.0])
    assert list(report.layers) == ["norm", "drop", "last"]
    # Gradients do pass through one that is frozen behind them.
    model.get_layer("first").trainable = True
    model.get_layer("last").trainable = False
    report = keras_lso.underflow_report(model, x, y, scales=[1.0])
    assert list(report.layers) == ["first", "norm", "drop", "last"]
    model.trainable = False
    assert not keras_lso.underflow_report(model, x, y, scales=[1.0]).layers


@pytest.mark.parametrize("argument", ["kernel_regularizer", "activity_regularizer"])
@pytest.mark.parametrize("policy", ["mixed_float16", "float16"])
def test_underflow_report_is_same_for_each_policy(batch, policy, argument):
    x, y = batch[0], batch[1][:, :2] * 1e-6
    # A strong one: the gradients are its own.
    arguments = {argument: keras.regularizers.L2(1e4)}
    narrow, wide = (make_model(p, **arguments) for p in (policy, "float32"))
    wide.set_weights(narrow.get_weights())
    # In a scope without state PyTorch's masks are other ones.
    narrow.get_layer("drop").rate = wide.get_layer("drop").rate = 0
    reports = [keras_lso.underflow_report(model, x, y) for model in (narrow, wide)]
    assert reports[0].to_dict() == reports[1].to_dict()


def test_underflow_report_covers_nested_layers_and_repeated_calls(batch):
    shared = keras.layers.Dense(3, name="shared", dtype="mixed_float16")
    inner = keras.Sequential(
        [keras.Input((3,)), keras.layers.Dense(2, name="deep", dtype="mixed_float16")],
        name="inner",
    )
    inputs = keras.Input((3,))
    # Integers have no gradients.
    of_floats = keras.layers.Lambda(lambda x: (x, keras.ops.cast(x, "int32")))
    model = keras.Model(inputs, inner(shared(shared(of_floats(inputs)[0]))))
    model.compile("sgd", loss="mse")
    report = keras_lso.underflow_report(model, batch[0], batch[1][:, :2])
    assert set(report.layers) == {"shared", "inner/deep"}
    # Kernel, bias, and the outputs of two calls on 8 examples.
    assert report.layers["shared"].values == 9 + 3 + 2 * 8 * 3


class Subclassed(keras.Model):
    """A model that has no weights before it is called, and two layers of one name."""

    def __init__(self):
        super().__init__(dtype="mixed_float16", name="model")
        self.normalize = keras.layers.BatchNormalization(
            dtype="mixed_float16", name="normalize"
        )
        self.hidden, self.out = (
            keras.layers.Dense(2, dtype="mixed_float16", name="dense") for _ in range(2)
        )

    def call(self, inputs):
        return self.out(self.hidden(self.normalize(inputs)))


def test_underflow_report_builds_unbuilt_model(batch):
    x, y = batch[0], batch[1][:, :2]
    model = Subclassed()
    model.compile("sgd", loss="mse")
    report = keras_lso.underflow_report(model, x, y)
    assert set(report.layers) == {"normalize", "dense#1", "dense#2"}
    # Kernel, bias, and the outputs for 8 examples.
    assert report.layers["dense#1"].values == 6 + 2 + 16
    assert report.layers["dense#2"].values == 4 + 2 + 16
    assert not model.normalize.moving_mean.numpy().any()
    again = keras_lso.underflow_report(model, x, y)
    assert again.to_dict() == report.to_dict()


def test_float32_layers_of_float16_model_do_not_count():
    parts = {"first": "mixed_float16", "last": "float32"}
    layers = [keras.layers.Dense(2, dtype=d, name=n) for n, d in parts.items()]
    model = keras.Sequential([keras.Input((3,)), *layers])
    # Each gradient of `last` is far above those of `first`.
    layers[1].kernel.assign(layers[1].kernel * 1e-4)
    model.compile("sgd", loss="mse")
    x = np.random.default_rng(0).normal(size=(8, 3)).astype("float32")
    report = keras_lso.underflow_report(model, x, 8 * x[:, :2])
    assert set(report.layers) == {"first"}
    found = keras_lso.float16_report(model, x, 8 * x[:, :2]).recommended_scale
    assert found == report.initial_scale


def test_long_names_are_folded_to_80_columns():
    counts = counts_of([np.ones(1)], [1.0])
    text = str(UnderflowReport([1.0], {"encoder/" * 20 + "dense": counts}))
    assert max(map(len, text.splitlines())) <= 80


def test_recommended_scale_causes_no_skipped_step(batch):
    x, y = batch[0] * 1e-4, batch[1][:, :2] * 1e-4
    model = make_model()
    report = keras_lso.underflow_report(model, x, y)
    low, high = report.safe_scales
    assert low <= report.initial_scale <= high / 2
    assert 2 * report.initial_scale > high / 2
    assert f"2**{int(np.log2(report.initial_scale))}" in str(report)

    def skipped(scale):
        optimizer = keras_lso.LossScaleOptimizer(
            keras.optimizers.SGD(0.0), dynamic=False, initial_scale=scale
        )
        optimizer.minimize(
            lambda: model.compute_loss(x=x, y=y, y_pred=model(x, training=True)),
            model.trainable_variables,
        )
        return int(optimizer.skipped_steps)

    assert skipped(report.initial_scale) == 0
    # Above `high`, and twice as far as another mask of the dropout may make up for.
    assert skipped(8 * report.initial_scale) == 1


class Batches(keras.utils.PyDataset):
    """The batches of a list."""

    def __init__(self, batches):
        super().__init__()
        self.batches = batches

    def __len__(self):
        return len(self.batches)

    def __getitem__(self, index):
        return self.batches[index]


def data_loader(batches):
    torch = pytest.importorskip("torch")
    columns = map(np.concatenate, zip(*batches, strict=True))
    dataset = torch.utils.data.TensorDataset(*map(torch.from_numpy, columns))
    # Dropout uses PyTorch's generator, which must not move.
    return torch.utils.data.DataLoader(
        dataset, batch_size=len(batches[0][0]), generator=torch.Generator()
    )


DATA = {"PyDataset": Batches, "DataLoader": data_loader, "generator": iter}


@pytest.mark.parametrize("is_weighted", [False, True])
@pytest.mark.parametrize("make", DATA.values(), ids=DATA)
def test_underflow_report_reads_first_batch_of_dataset(make, is_weighted, batch):
    first = batch[0], batch[1][:, :2]
    if is_weighted:
        first += (np.linspace(0.0, 1.0, len(batch[0]), dtype="float32"),)
    second = tuple(7 * array for array in first)
    of_arrays = keras_lso.underflow_report(make_model(), *first)
    of_dataset = keras_lso.underflow_report(make_model(), make([first, second]))
    assert of_dataset.to_dict() == of_arrays.to_dict()


def test_targets_beside_dataset_and_empty_dataset_are_rejected(batch):
    with pytest.raises(ValueError, match="`y` and `sample_weight` must not be given"):
        keras_lso.underflow_report(make_model(), Batches([batch]), batch[1])
    with pytest.raises(ValueError, match="must yield a batch"):
        keras_lso.underflow_report(make_model(), iter([]))


def test_underflow_report_rejects_uncompiled_model_and_invalid_scales(batch):
    x, y = batch[0], batch[1][:, :2]
    with pytest.raises(ValueError, match="compiled"):
        keras_lso.underflow_report(keras.Sequential([keras.layers.Dense(1)]), x, y)
    for scales in ([], [0.0], ["a"], [np.inf]):
        with pytest.raises((ValueError, TypeError), match="scales"):
            keras_lso.underflow_report(make_model(), x, y, scales=scales)
