"""Whole models in `.h5` files: the optimizer is restored, and training continues.

Keras itself loses the optimizer's state, and the first `fit` fails: it builds the
optimizer of such a file for no variables.
"""

import json

import h5py
import keras
import numpy as np
import pytest
from keras import ops

import keras_lso
from keras_lso import LossScaleOptimizer
from keras_lso.compat import open_seq2seq
from keras_lso.loss_scales import LogMaxLossScale
from testing import misuse
from testing.harness import bits
from testing.keras_versions import multi_optimizer

BACKEND = keras.backend.backend()
X = np.random.default_rng(0).normal(size=(8, 3)).astype("float32")
Y = X[:, :1]
FASTEST = {"run_eagerly": BACKEND != "jax"}


@keras.saving.register_keras_serializable("test_h5_models")
class Layout(keras.optimizers.SGD):
    """An optimizer with its own layout in files of other formats."""

    def save_own_variables(self, store):
        store["all"] = np.zeros(3)

    def load_own_variables(self, store):
        raise NotImplementedError


def sgd(**options):
    return keras.optimizers.SGD(0.05, momentum=0.9, **options)


def multi():
    return multi_optimizer(sgd(), {".*bias": keras.optimizers.Adam(0.01)})


def scaling(inner=None, **options):
    options.setdefault("initial_scale", 64.0)
    if "loss_scale" in options:
        del options["initial_scale"]
    return LossScaleOptimizer(inner or sgd(), **options)


SCALING = {
    "default": scaling,
    "Nadam": lambda: scaling(keras.optimizers.Nadam(0.05)),
    "LARC": lambda: scaling(keras_lso.LARC(sgd())),
    "averages": lambda: scaling(sgd(use_ema=True)),
    "our schedule": lambda: scaling(keras.optimizers.Adam(open_seq2seq.FixedLR(0.1))),
    "several": lambda: scaling(multi()),
    "narrow slots": lambda: scaling(slot_dtype="bfloat16"),
    "slots in 8 bits": lambda: scaling(keras.optimizers.Adam(0.01), slot_dtype="int8"),
    "no slots": lambda: scaling(keras.optimizers.SGD(0.1)),
    "a search": lambda: scaling(initial_scale="auto"),
    "LogMax": lambda: scaling(loss_scale=LogMaxLossScale()),
    "masters": lambda: scaling(master_weights="float32"),  # Of float16 weights.
    "OpenSeq2Seq": lambda: open_seq2seq.MixedPrecisionOptimizerWrapper(sgd(), 8.0),
}
BARE = {
    "SGD": sgd,
    "several": multi,
    "LARS": lambda: keras_lso.LARS(0.05),
    "a layout": lambda: Layout(0.05, momentum=0.5),
}


def new_model(optimizer, dtype=None, loss="mean_squared_error", units=2, **options):
    layers = [keras.layers.Dense(units, "tanh", dtype=dtype), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((3,)), *layers])
    model.compile(optimizer, loss=loss, **FASTEST, **options)
    return model


def take_steps(model, finite=(True, True, True)):
    model.optimizer.build(model.trainable_variables)
    variables = model.trainable_variables
    random = np.random.default_rng(1)
    is_ours = isinstance(model.optimizer, LossScaleOptimizer)
    options = {"scaled": False} if is_ours else {}
    for is_finite in finite:
        size = 1.0 if is_finite else np.inf
        grads = [random.uniform(1, 2, v.shape) * size for v in variables]
        grads = [
            ops.cast(g.astype("float32"), v.dtype)
            for g, v in zip(grads, variables, strict=True)
        ]
        model.optimizer.apply(grads, variables, **options)
    return model


def saved(model, folder):
    path = folder / "model.h5"
    model.save(path)
    return path


@pytest.fixture
def no_warnings():
    with misuse.no_warnings():
        yield


def assert_goes_on(loaded, model):
    """Checks that both take the same steps from here on."""
    assert bits(loaded.get_weights()) == bits(model.get_weights())
    for each in (loaded, model):
        take_steps(each, (True, True))
    assert bits(loaded.get_weights()) == bits(model.get_weights())
    assert bits(loaded.optimizer.variables) == bits(model.optimizer.variables)


@pytest.mark.parametrize("when", ["new", "trained"])
@pytest.mark.parametrize("name", SCALING)
def test_loss_scale_optimizer_resumes_with_saved_state(
    name, when, tmp_path, no_warnings
):
    has_scales, dtype = (
        name == "slots in 8 bits",
        "float16" if name == "masters" else None,
    )
    model = new_model(SCALING[name](), dtype, units=22 * 64 if has_scales else 2)
    if when == "trained":
        take_steps(model, [True, False, True, True])
    loaded = keras_lso.load_model(saved(model, tmp_path))
    optimizer = loaded.optimizer
    assert type(optimizer) is type(model.optimizer)
    assert optimizer.get_config() == model.optimizer.get_config()
    model.optimizer.build(model.trainable_variables)
    # But for the row of skips, which begins afresh.
    assert bits(optimizer._in_memory) == bits(model.optimizer._in_memory)
    assert bool(optimizer._masters.masters) is (name == "masters")
    assert bool(optimizer._masters.scales) is has_scales
    assert int(optimizer.skipped_steps) == int(model.optimizer.skipped_steps)
    assert_goes_on(loaded, model)


@pytest.mark.parametrize("name", BARE)
def test_optimizer_without_loss_scale_resumes_with_saved_state(
    name, tmp_path, no_warnings
):
    model = new_model(BARE[name]())
    for _ in range(2):
        loaded = keras_lso.load_model(saved(model, tmp_path))
        assert type(loaded.optimizer) is type(model.optimizer)
        model.optimizer.build(model.trainable_variables)
        assert bits(loaded.optimizer.variables) == bits(model.optimizer.variables)
        # The second time it is trained.
        assert_goes_on(loaded, model)


@pytest.mark.parametrize("inner", [sgd, lambda: keras.optimizers.Nadam(0.05)])
def test_keras_loss_scale_optimizer_loads_as_keras_lso_class(
    inner, tmp_path, no_warnings
):
    theirs = keras.optimizers.LossScaleOptimizer(inner(), initial_scale=64.0)
    model = new_model(theirs)
    # First it is new.
    for steps, scale in ((0, 64.0), (3, 32.0)):
        loaded = keras_lso.load_model(saved(model, tmp_path))
        ours = loaded.optimizer
        assert type(ours) is LossScaleOptimizer
        assert ours.initial_scale == 64.0
        assert (int(ours.iterations), float(ours.loss_scale)) == (steps, scale)
        if not steps:
            model.fit(X, Y, epochs=3, verbose=0)
            theirs.dynamic_scale.assign(32.0)
    slots = [v for v in theirs.inner_optimizer.variables if "momentum" in v.path]
    restored = [v for v in ours.inner_optimizer.variables if "momentum" in v.path]
    assert bits(restored) == bits(slots)
    # Keras's class does not save Nadam's product of momenta, three of them here.
    if "nadam" in theirs.inner_optimizer.name:
        momenta = 0.9 * (1 - 0.5 * 0.96 ** np.arange(1.0, 4.0))
        product = ours.inner_optimizer._u_product.numpy()
        # It is a product in float32.
        np.testing.assert_allclose(product, np.prod(momenta), rtol=1e-6)
    loaded.fit(X, Y, verbose=0)
    assert int(ours.iterations) == steps + 1


def own_loss(targets, predicted):
    return ops.mean(ops.abs(targets - predicted), axis=-1)


@keras.saving.register_keras_serializable("test_h5_models")
class OwnLoss(keras.losses.Loss):
    def call(self, targets, predicted):
        return own_loss(targets, predicted) * 3.0


@pytest.mark.parametrize(
    "arguments",
    [
        {"loss": "mse", "metrics": ["mae"]},  # which Keras's loader does not take
        {"loss": own_loss, "metrics": [own_loss, "mae"]},
        {"loss": OwnLoss(), "weighted_metrics": [keras.metrics.MeanSquaredError()]},
        {"loss": [OwnLoss()], "loss_weights": [0.5]},
    ],
)
def test_losses_and_metrics_match_saved_model(arguments, tmp_path, no_warnings):
    model = new_model(scaling(), **arguments)
    model.fit(X, Y, verbose=0)
    path = saved(model, tmp_path)
    loaded = keras_lso.load_model(path, custom_objects={"own_loss": own_loss})
    expected = model.evaluate(X, Y, verbose=0, return_dict=True)
    found = loaded.evaluate(X, Y, verbose=0, return_dict=True)
    # The file does not have `run_eagerly`, and a compiled sum rounds differently.
    assert found == pytest.approx(expected, rel=1e-6)
    loaded.fit(X, Y, verbose=0)


def test_model_loads_without_being_compiled(tmp_path, no_warnings):
    model = take_steps(new_model(scaling()))
    path = saved(model, tmp_path)
    for loaded in (
        keras_lso.load_model(path, compile=False),
        keras_lso.load_model(str(path), compile=False),
    ):
        assert not loaded.compiled
        assert bits(loaded.get_weights()) == bits(model.get_weights())
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    loaded = keras_lso.load_model(saved(model, tmp_path))
    assert not loaded.compiled


@pytest.mark.parametrize("make", [scaling, sgd])
def test_optimizer_built_for_other_layers_starts_with_new_state(make, tmp_path):
    model = take_steps(new_model(make()))
    model.layers[0].trainable = False
    path = saved(model, tmp_path)
    words = r"new state|Skipping variable loading"
    with pytest.warns(UserWarning, match=words) as record:
        loaded = keras_lso.load_model(path)
    assert [warning.filename for warning in record] == [__file__]
    assert int(loaded.optimizer.iterations) == 0
    loaded.fit(X, Y, verbose=0)
    assert int(loaded.optimizer.iterations) == 1


def as_of_tf_keras(path, **training):
    """Turns a file of Keras 3 into one that tf.keras 2 might write, with an Adam."""
    with h5py.File(path, "r+") as file:
        file.attrs["keras_version"] = "2.15.0"
        config = {"class_name": "Adam", "config": {"learning_rate": 0.05, "decay": 0.0}}
        training = {"loss": "mse", "metrics": ["mae"], **training}
        file.attrs["training_config"] = json.dumps(
            {"optimizer_config": config, **training}
        )
        del file["optimizer_weights"]
        group = file.create_group("optimizer_weights")
        weights = {"Adam/iter:0": np.int64(7)}
        for slot in "mv":
            for i, width in enumerate([3, 2]):
                layer = ("dense", "dense_1")[i]
                for name, shape in (("kernel", (width, 2 - i)), ("bias", (2 - i,))):
                    value = np.full(shape, 0.5, "float32")
                    weights[f"Adam/{layer}/{name}/{slot}:0"] = value
        group.attrs["weight_names"] = [name.encode() for name in weights]
        for name, value in weights.items():
            group[name] = value


def test_tf_keras_file_restores_adam_state(tmp_path, no_warnings):
    path = saved(new_model(sgd()), tmp_path)
    as_of_tf_keras(path)
    loaded = keras_lso.load_model(path)
    assert isinstance(loaded.optimizer, keras.optimizers.Adam)
    assert int(loaded.optimizer.iterations) == 7
    assert np.all(ops.convert_to_numpy(loaded.optimizer._momentums[0]) == 0.5)
    loaded.fit(X, Y, verbose=0)
    assert int(loaded.optimizer.iterations) == 8
    # State that does not fit is replaced by a new one.
    with h5py.File(path, "r+") as file:
        file["optimizer_weights"].attrs["weight_names"] = ["Adam/iter:0"]
    with pytest.warns(UserWarning, match="begins with a new state"):
        loaded = keras_lso.load_model(path)
    assert int(loaded.optimizer.iterations) == 0


def test_tf_keras_metric_config_leaves_model_uncompiled(tmp_path):
    path = saved(new_model(sgd()), tmp_path)
    metric = {"class_name": "MeanMetricWrapper", "config": {"fn": "mae"}}
    as_of_tf_keras(path, metrics=[[metric]])
    with pytest.warns(UserWarning, match="not compiled.*load_optimizer_state"):
        loaded = keras_lso.load_model(path)
    assert not loaded.compiled
    loaded.predict(X, verbose=0)


def replace(name, value):
    def damage(file):
        group = file["optimizer_weights"]
        path = next(n for n in group.attrs["weight_names"] if str(n).endswith(name))
        del group[path]
        group[path] = value

    return damage


def set_training(value):
    def damage(file):
        file.attrs["training_config"] = value

    return damage


DAMAGE = {
    "NaN": (replace("kernel_momentum", np.full((3, 2), np.nan)), "must not be NaN"),
    "a shape": (replace("kernel_momentum", np.zeros((2, 2))), "has shape"),
    "no array": (lambda file: file["optimizer_weights"].clear(), "is damaged"),
    "no JSON": (set_training("{"), "must be JSON"),
    "no optimizer": (set_training("{}"), "a dict as its `optimizer_config`"),
}


@pytest.mark.parametrize("damage, words", DAMAGE.values(), ids=DAMAGE.keys())
def test_damaged_training_state_is_rejected(damage, words, tmp_path):
    path = saved(take_steps(new_model(scaling())), tmp_path)
    with h5py.File(path, "r+") as file:
        damage(file)
    with pytest.raises((TypeError, ValueError), match=words):
        keras_lso.load_model(path)
    # The model alone loads nevertheless.
    keras_lso.load_model(path, compile=False)
