"""`keep_in_float32`: other dtype policies, the same weights, also after saving."""

import keras
import numpy as np
import pytest
from keras import layers

import keras_lso
from keras_lso._keras_internals.layers import children_of

MIXED = "mixed_float16"


@pytest.fixture(autouse=True)
def mixed_float16():
    keras.config.set_dtype_policy(MIXED)
    yield
    keras.config.set_dtype_policy("float32")


def flat(model):
    """Returns all layers of a model and the model, in one order."""
    found = [model]
    for child in children_of(model):
        found += [v for v in flat(child) if not any(v is f for f in found)]
    return found


def dtypes_of(model):
    """Returns the compute and variable dtype of each layer, inputs excluded."""
    return {
        layer.name: (layer.compute_dtype, layer.variable_dtype)
        for layer in flat(model)
        if not isinstance(layer, layers.InputLayer)
    }


def in_float32(model):
    return {
        name for name, dtypes in dtypes_of(model).items() if dtypes == ("float32",) * 2
    }


def equal_weights(one, other, of="variables"):
    """Compares also the states of seeds, some of which no file has."""
    for a, b in zip(getattr(one, of), getattr(other, of), strict=True):
        np.testing.assert_array_equal(a.numpy(), b.numpy())


def block(name):
    return keras.Sequential(
        [keras.Input((4,)), layers.Dense(4, name="dense"), layers.Dropout(0.5)],
        name=name,
    )


def nested(is_shared=True):
    """Two nested models with layers of one name, and a layer that both call."""
    shared = layers.Dense(4, name="shared")
    other = shared if is_shared else layers.Dense(4, name="shared")
    inner = keras.Input((4,))
    first = keras.Model(inner, block("deep")(shared(inner)), name="first")
    inner = keras.Input((4,))
    second = keras.Model(
        inner, layers.BatchNormalization(name="norm")(other(inner)), name="second"
    )
    inputs = {"a": keras.Input((4,), name="a"), "b": keras.Input((4,), name="b")}
    a, b = first(inputs["a"]), second(inputs["b"])
    outputs = [layers.Dense(1, name="out")(a + b), layers.Dense(2, name="dense")(b)]
    return keras.Model(inputs, outputs, name="net")


def test_layer_of_nested_model_is_kept_in_float32():
    model = nested()
    model.get_layer("second").get_layer("norm").moving_mean.assign([1, 2, 3, 4])
    before = dtypes_of(model)
    copy = keras_lso.keep_in_float32(model, ["first/deep/dense", "norm"])
    first, second = copy.get_layer("first"), copy.get_layer("second")
    others = [copy.get_layer("dense"), second.get_layer("shared")]
    assert first.get_layer("deep").get_layer("dense").compute_dtype == "float32"
    assert {layer.compute_dtype for layer in others} == {"float16"}
    assert "norm" in in_float32(copy)
    assert dtypes_of(model) == before
    equal_weights(model, copy)
    # The layer that two models share is one layer again.
    assert others[1] is first.get_layer("shared")
    assert len(copy.variables) == len(model.variables)


def test_layers_can_be_selected_by_name_path_or_object():
    model = nested()
    layer = model.get_layer("first").get_layer("deep")
    for name in ("first/deep", "deep", layer, [layer], ("deep",)):
        copy = keras_lso.keep_in_float32(model, name)
        deep = copy.get_layer("first").get_layer("deep")
        assert deep.get_layer("dense").compute_dtype == "float32"
        assert copy.get_layer("dense").compute_dtype == "float16"
    # A layer in two places has two paths.
    for path in ("first/shared", "second/shared", "shared"):
        copy = keras_lso.keep_in_float32(model, path)
        assert "shared" in in_float32(copy)


class Twins(keras.Model):
    """A model with two layers of one name."""

    def __init__(self):
        super().__init__()
        self.pair = [layers.Dense(4, name="dense") for _ in range(2)]

    def call(self, x):
        return self.pair[1](self.pair[0](x))


def test_invalid_arguments_are_rejected():
    model, twins = nested(), Twins()
    twins(np.ones((1, 4)))
    inputs = keras.Input((4,))
    ambiguous = keras.Model(inputs, block("two")(block("one")(inputs)))
    keep = keras_lso.keep_in_float32
    what = "`layers` must be a list of names, paths or layers"
    for given, error, words in (
        ((model, "dens"), ValueError, "has no 'dens'. Similar are: .*dense"),
        ((model, "first/norm"), ValueError, "has no 'first/norm'"),
        ((model, 3), TypeError, what),
        ((model, [3]), TypeError, what),
        ((model, nested().get_layer("out")), ValueError, "has no <Dense name=out"),
        ((ambiguous, "dense"), ValueError, "'one/dense'.*'two/dense'"),
        ((twins, "dense"), ValueError, "'dense#1'.*'dense#2'"),
    ):
        with pytest.raises(error, match=words):
            keep(*given)
    with pytest.raises(ValueError, match="`others` must be"):
        keep(model, "out", others="float16")


# PyTorch makes no orthogonal matrix in float16 on a CPU.
SMALL = {"units": 2, "recurrent_initializer": "glorot_uniform"}


MAKERS = {
    "attention": (
        lambda name: layers.MultiHeadAttention(1, 2, dropout=0.1, name=name),
        (3, 4),
    ),
    "lstm": (lambda name: layers.LSTM(**SMALL, name=name), (3, 4)),
    "bidirectional": (
        lambda name: layers.Bidirectional(layers.GRU(**SMALL), name=name),
        (3, 4),
    ),
    "embedding": (lambda name: layers.Embedding(4, 2, name=name), (3,)),
}


@pytest.mark.parametrize("policy", [MIXED, "float16"])
@pytest.mark.parametrize("kind", MAKERS)
def test_sublayers_are_kept_in_float32_with_their_layer(kind, policy, tmp_path):
    keras.config.set_dtype_policy(policy)
    make, shape = MAKERS[kind]
    inputs = keras.Input(shape)
    kept = make("kept")
    values = kept(inputs, inputs) if kind == "attention" else kept(inputs)
    model = keras.Model(inputs, layers.Dense(1, name="other")(values), name="net")
    copy = keras_lso.keep_in_float32(model, "kept")
    copy.save(tmp_path / "model.keras")
    for found in (copy, keras.models.load_model(tmp_path / "model.keras")):
        inside = flat(found.get_layer("kept"))
        assert len(inside) == len(flat(kept))
        assert {(v.compute_dtype, v.variable_dtype) for v in inside} == {
            ("float32", "float32")
        }
        assert all(v.dtype == "float32" for v in found.get_layer("kept").weights)
        assert found.get_layer("other").compute_dtype == "float16"
        equal_weights(model, found, of="weights")
    x = np.ones((2, *shape), "float32")
    assert np.isfinite(copy.predict(x, verbose=0)).all()


@keras.saving.register_keras_serializable("keras_lso_tests")
class Block(layers.Layer):
    """A layer that passes its dtype on to the one that it makes, or does not."""

    def __init__(self, passes_on, **kwargs):
        super().__init__(**kwargs)
        self.passes_on = passes_on
        dtype = self.dtype_policy if passes_on else None
        self.dense = layers.Dense(4, dtype=dtype, name="dense")

    def call(self, x):
        return self.dense(x)

    def build(self, shape):
        self.dense.build(shape)

    def get_config(self):
        return {**super().get_config(), "passes_on": self.passes_on}


@keras.saving.register_keras_serializable("keras_lso_tests")
class Subclassed(keras.Model):
    """A subclassed model with a config."""

    def __init__(self, passes_on=True, **kwargs):
        super().__init__(**kwargs)
        self.passes_on = passes_on
        self.block = Block(passes_on, name="block")
        self.out = layers.Dense(1, name="out")

    def call(self, x):
        return self.out(self.block(x))

    def get_config(self):
        return {**super().get_config(), "passes_on": self.passes_on}


def test_keep_in_float32_warns_of_dtypes_that_saving_would_lose():
    inputs = keras.Input((4,))
    for passes_on in (True, False):
        model = keras.Model(inputs, Block(passes_on, name="block")(inputs))
        if passes_on:
            copy = keras_lso.keep_in_float32(model, "block")
        else:
            with pytest.warns(UserWarning, match=r"hold .* \['block/dense'\]"):
                copy = keras_lso.keep_in_float32(model, "block")
        assert copy.get_layer("block").dense.compute_dtype == "float32"
        equal_weights(model, copy)


def test_subclassed_model_is_rebuilt_from_config():
    model = Subclassed(name="net")
    with pytest.raises(ValueError, match="must be built"):
        keras_lso.keep_in_float32(model, "out")
    x = np.ones((2, 4), "float32")
    model(x)
    model.out.trainable = False  # The config of the model does not have this.
    with pytest.warns(UserWarning, match=r"\['out'\]"):
        copy = keras_lso.keep_in_float32(model, "out")
    assert not copy.out.trainable
    assert type(copy) is Subclassed
    assert in_float32(copy) == {"out"}
    equal_weights(model, copy)
    assert copy(x).dtype == copy.out(copy.block(x)).dtype


class WithoutConfig(keras.Model):
    """A subclassed model without a config."""

    def __init__(self, dense):
        super().__init__()
        self.dense = dense

    def call(self, x):
        return self.dense(x)

    def get_config(self):
        raise NotImplementedError


class Forgets(layers.Dense):
    """A layer whose config lacks an argument of its constructor."""

    def __init__(self, table, **kwargs):
        super().__init__(1, **kwargs)

    def get_config(self):
        return {"name": self.name}


def test_models_and_layers_without_whole_config_are_rejected():
    model = WithoutConfig(layers.Dense(1, name="d"))
    model(np.ones((1, 2), "float32"))
    other = keras.Sequential([keras.Input((2,)), layers.Dense(2, name="d")])
    other.layers[0].get_config = lambda: {"name": "d", "units": 1}
    sequential = keras.Sequential([keras.Input((2,)), Forgets([1], name="d")])
    for each, words in (
        (model, "WithoutConfig cannot. Write a `get_config`"),
        (sequential, "Forgets cannot. Write a `get_config`"),
        (other, "other layers or weights. Make `Sequential.get_config`"),
    ):
        with pytest.raises(ValueError, match=words):
            keras_lso.keep_in_float32(each, "d")
        assert each.layers[0].compute_dtype == "float16"


@pytest.mark.filterwarnings("ignore:Layer InputLayer does not have:UserWarning")
def test_quantized_model_is_rejected():
    keras.config.set_dtype_policy("float32")
    model = keras.Sequential([keras.Input((4,)), layers.Dense(2, name="d")])
    model.quantize("int8")
    for function in (keras_lso.keep_in_float32, keras_lso.float16_report):
        with pytest.raises(ValueError, match="`model` must not be quantized"):
            function(model, "d")


FACTOR = 0.5


def cubed(x):
    return x**3


class Tenfold(keras.regularizers.Regularizer):
    """A regularizer that is not registered."""

    def __call__(self, x):
        return 10 * keras.ops.sum(x)

    def get_config(self):
        return {}


def test_copy_preserves_user_functions_and_unregistered_classes():
    model = keras.Sequential(
        [
            keras.Input((2,)),
            layers.Lambda(lambda x: x * FACTOR, name="lambda"),
            layers.Lambda(cubed, name="named"),
            layers.Dense(2, activation=lambda x: x * FACTOR, name="a"),
            layers.Dense(2, activation=cubed, kernel_regularizer=Tenfold(), name="b"),
        ]
    )
    x = np.ones((1, 2), "float32")
    copy = keras_lso.keep_in_float32(model, ["lambda", "named", "a", "b"])
    assert {"lambda", "named", "a", "b"} <= in_float32(copy)
    # The copy of the copy has no layer of another dtype policy.
    for again in (model, keras_lso.keep_in_float32(copy, [])):
        expected, found = again.predict(x, verbose=0), copy.predict(x, verbose=0)
        # A few roundings to 11 bits.
        np.testing.assert_allclose(found, expected, rtol=0.02)
    assert len(copy.losses) == 1


def loss_of_mine(y_true, y_pred):
    return keras.ops.mean(keras.ops.square(y_true - y_pred))


def compiled():
    model = keras.Sequential(
        [
            keras.Input((4,)),
            layers.Dense(3, name="first"),
            layers.BatchNormalization(name="norm"),
            layers.Dropout(0.5, name="drop"),
            layers.Dense(1, dtype="float32", name="last"),
        ]
    )
    optimizer = keras_lso.LossScaleOptimizer(
        keras.optimizers.Adam(0.25), initial_scale=2.0**5
    )
    metrics = [loss_of_mine, keras.metrics.MeanAbsoluteError(name="mae")]
    model.compile(optimizer, loss_of_mine, metrics=metrics)
    return model


# JAX's `fit` gives away the arrays of its model.
def test_copy_is_compiled_alike_and_trains_independently():
    x, y = np.ones((8, 4), "float32"), np.ones((8, 1), "float32")
    model = compiled()
    model.get_layer("norm").trainable = False
    model.fit(x, y, verbose=0)
    copy = keras_lso.keep_in_float32(model, "first")
    equal_weights(model, copy)
    assert model.compiled
    assert [v.trainable for v in copy.layers] == [v.trainable for v in model.layers]
    assert type(copy.optimizer) is keras_lso.LossScaleOptimizer
    assert copy.optimizer is not model.optimizer
    assert float(copy.optimizer.learning_rate) == 0.25
    assert (float(copy.optimizer.loss_scale), int(copy.optimizer.iterations)) == (32, 0)
    assert copy.loss is loss_of_mine
    before = [v.numpy() for v in model.variables]
    logs = copy.fit(x, y, verbose=0).history
    assert len(logs) == 3
    # The old model keeps its weights, and can train on.
    for variable, value in zip(model.variables, before, strict=True):
        np.testing.assert_array_equal(variable.numpy(), value)
    model.fit(x, y, verbose=0)


class NoConfig(keras.metrics.Mean):
    """A metric whose config lacks an argument."""

    def __init__(self, factor):
        super().__init__(name="mine")
        self.factor = factor

    def get_config(self):
        return {}


def test_metric_without_config_leaves_copy_uncompiled():
    model = keras.Sequential([keras.Input((4,)), layers.Dense(1, name="d")])
    model.compile("sgd", loss="mse", metrics=[NoConfig(2)])
    with pytest.warns(UserWarning, match="The new model is not compiled: call its"):
        copy = keras_lso.keep_in_float32(model, "d")
    assert not copy.compiled
    assert model.compiled
    equal_weights(model, copy)
    metric = keras.metrics.MeanMetricWrapper(loss_of_mine, name="mine")
    model.compile("sgd", loss="mse", metrics=[metric])
    assert keras_lso.keep_in_float32(model, "d").compiled


def test_copy_preserves_lookup_vocabulary():
    lookup = layers.IntegerLookup(name="lookup")
    lookup.adapt(np.array([7, 7, 9]))
    inputs = keras.Input((1,), dtype="int64")
    model = keras.Model(inputs, layers.Embedding(3, 2, name="e")(lookup(inputs)))
    copy = keras_lso.keep_in_float32(model, "e")
    assert copy.get_layer("lookup").get_vocabulary() == lookup.get_vocabulary()


def test_float32_model_converts_to_mixed_float16_with_exceptions():
    keras.config.set_dtype_policy("float32")
    model = nested()
    copy = keras_lso.keep_in_float32(model, "first/deep", others=MIXED)
    names = in_float32(copy)
    assert "deep" in names
    assert copy.dtype_policy.name == MIXED
    assert {"first", "second", "norm", "shared", "out"}.isdisjoint(names)
    equal_weights(model, copy)
    x = {name: np.full((2, 4), 1e5, "float32") for name in "ab"}
    report = keras_lso.float16_report(model, x)
    applied = report.apply(model)
    assert applied.dtype_policy.name == MIXED
    assert not keras_lso.float16_report(applied, x).layers_to_keep
