"""The warnings of both wrappers on whether a model computes in float16."""

import contextlib
import functools
import warnings

import keras
import numpy as np
import pytest
from keras import layers, ops

from keras_lso import LARC, GuardedOptimizer, LossScaleOptimizer

K = keras.optimizers
BACKEND = keras.backend.backend()
X = np.ones((8, 4), "float32")


@pytest.fixture(autouse=True)
def policy():
    before = keras.config.dtype_policy()
    yield
    keras.config.set_dtype_policy(before)


class Around(keras.Model):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def call(self, x):
        return self.inner(x)


def test_float16_variables_and_policies_warn_about_missing_loss_scale():
    guarded, variable = GuardedOptimizer(K.SGD(0.1)), keras.Variable(X, dtype="float16")
    with pytest.warns(UserWarning, match="float16 gradients need a loss scale"):
        guarded.build([variable])
    keras.config.set_dtype_policy("mixed_float16")
    with pytest.warns(UserWarning, match="the dtype policy 'mixed_float16'"):
        GuardedOptimizer(K.SGD(0.1)).build([keras.Variable(X)])


@pytest.mark.parametrize("wrap", [lambda o: o, lambda o: LARC(o, mode="scale")])
def test_layer_with_float16_policy_of_its_own_warns_in_model(wrap):
    parts = [layers.Dense(3, dtype="mixed_float16", name="narrow"), layers.Dense(1)]
    model = Around(keras.Sequential(parts))
    x = np.ones((8, 4), "float32")
    model.compile(wrap(GuardedOptimizer(K.SGD(0.1))), loss="mse")
    with pytest.warns(
        UserWarning, match="the layer 'narrow', which computes in float16"
    ):
        model.fit(x, x[:, :1], verbose=0)


@pytest.mark.parametrize(
    "dtype, received",
    [
        ("float32", "float32"),
        ("mixed_bfloat16", "bfloat16"),
        ("mixed_float16", None),
        ("float16", None),
    ],
)
def test_loss_scale_in_model_without_float16_warns_once(dtype, received):
    model = keras.Sequential([keras.Input((4,)), layers.Dense(1, dtype=dtype)])
    model.dtype_policy = keras.dtype_policies.get(dtype)
    model.compile(LossScaleOptimizer(K.SGD(0.1)), loss="mse")
    x = np.ones((8, 4), "float32")
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        model.fit(x, x[:, :1], epochs=2, verbose=0)
    texts = [str(w.message) for w in seen if "needs no loss scale" in str(w.message)]
    if received is None:
        assert not texts
    else:
        [text] = texts
        assert "Write `GuardedOptimizer(inner_optimizer)`" in text
        assert "keras.config.set_dtype_policy('mixed_float16')" in text
        assert f"Received: a model whose layers compute in {received}" in text


@pytest.mark.parametrize("wrap", [LossScaleOptimizer, GuardedOptimizer])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_floatx_of_16_bits_warns(dtype, wrap):
    variable = keras.Variable(X, dtype="float32")
    keras.config.set_floatx(dtype)
    try:
        with pytest.warns(UserWarning, match=f"floatx.*is '{dtype}'.*dtype_policy"):
            wrap(K.SGD(0.1)).build([variable])
    finally:
        keras.config.set_floatx("float32")


@pytest.mark.each_backend
def test_step_under_floatx_of_16_bits(compiled):
    # Where `ops.convert_to_tensor(True)` is a number on JAX.
    variable = keras.Variable([1.0], dtype="float32")
    keras.config.set_floatx("bfloat16")
    try:
        optimizer = GuardedOptimizer(K.SGD(0.5))
        with pytest.warns(UserWarning, match="floatx"):
            optimizer.build([variable])
        step = compiled(
            lambda g: optimizer.apply([g], [variable]), [variable, *optimizer.variables]
        )
        step(ops.ones((1,), dtype="float32"))
    finally:
        keras.config.set_floatx("float32")
    assert variable.numpy().tolist() == [0.5]


# --- Models whose dtypes are not known ------------------------------------------------


def late(make):
    """Sets the dtype policy between the layers and the model around them."""

    def made():
        layer = layers.Dense(1)
        keras.config.set_dtype_policy("mixed_float16")
        return make(layer)

    return made


def around(layer):
    return keras.Sequential([keras.Input((4,)), layer, layers.Dense(1)])


def functional(layer):
    inputs = keras.Input((4,))
    return keras.Model(inputs, layer(inputs))


class Casts(layers.Dense):
    def call(self, inputs):
        return ops.cast(super().call(ops.cast(inputs, "float16")), "float32")


def halved(x):
    return ops.cast(ops.cast(x, "float16") / 2, "float32")


MODELS = {
    "late, sequential": late(lambda layer: keras.Sequential([layer])),
    "late, functional": late(functional),
    "late, subclassed": late(Around),
    "a layer that casts": lambda: around(Casts(3)),
    "a function that casts": lambda: around(layers.Lambda(halved)),
    "subclassed": lambda: Around(layers.Dense(1)),
}
# Around `fit`.
SETTINGS = {}
if BACKEND == "torch":
    import torch

    class Net(torch.nn.Linear):
        def forward(self, x):
            with torch.autocast("cpu", dtype=torch.float16):
                return super().forward(x).float()

    wrapped = layers.TorchModuleWrapper
    MODELS["a module"] = lambda: around(wrapped(Net(4, 2), output_shape=(None, 2)))
    SETTINGS = {
        d: lambda d=d: torch.autocast("cpu", getattr(torch, d))
        for d in ("float16", "bfloat16")
    }
elif BACKEND == "jax":

    def scaled_by(params, inputs):
        return halved(inputs * params["w"])

    foreign = functools.partial(layers.JaxLayer, scaled_by, params={"w": X[0]})
    MODELS["a function of JAX"] = lambda: around(foreign())
else:
    import tensorflow as tf

    @contextlib.contextmanager
    def rewritten():
        switch = tf.config.optimizer.set_experimental_options
        switch({"auto_mixed_precision": True})
        yield
        switch({"auto_mixed_precision": False})

    SETTINGS = {"float16": rewritten}


def warnings_in_fit(wrap, model):
    model.compile(wrap(K.SGD(0.1)), loss="mse", run_eagerly=BACKEND == "tensorflow")
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        model.fit(X, X[:, :1], verbose=0)
    texts = [str(w.message) for w in seen]
    return [t for t in texts if "without float16" in t or "float16 gradients" in t]


@pytest.mark.each_backend
@pytest.mark.parametrize("name", MODELS)
def test_only_a_model_that_is_known_to_be_without_float16_warns(name):
    scaled = warnings_in_fit(LossScaleOptimizer, MODELS[name]())
    keras.config.set_dtype_policy("float32")
    assert warnings_in_fit(GuardedOptimizer, MODELS[name]()) == []
    if not name.startswith("late"):
        assert scaled == []
    else:
        [text] = scaled
        assert "compute in float32, and the dtype policy 'mixed_float16'" in text


@pytest.mark.skipif(BACKEND == "jax", reason="JAX has no such setting")
@pytest.mark.parametrize("name", SETTINGS)
def test_setting_that_casts_to_float16_counts_as_float16(name):
    plain = lambda: keras.Sequential([keras.Input((4,)), layers.Dense(1)])  # noqa: E731
    with SETTINGS[name]():
        scaled = warnings_in_fit(LossScaleOptimizer, plain())
        guarded = warnings_in_fit(GuardedOptimizer, plain())
    assert (bool(scaled), bool(guarded)) == (name != "float16", name == "float16")


@pytest.mark.parametrize("kind", ["remainder8", "float32"])
@pytest.mark.parametrize("dtype", ["float32", "mixed_bfloat16", "bfloat16"])
def test_smaller_masters_of_float32_weights_warn_in_fit(kind, dtype, recwarn):
    keras.config.set_dtype_policy(dtype)
    model = keras.Sequential([keras.Input((4,)), layers.Dense(1)])
    model.compile(GuardedOptimizer(K.SGD(0.1), master_weights=kind), loss="mse")
    for _ in range(2):
        model.fit(X, X[:, :1], verbose=0)
    told = [w for w in recwarn if "is for weights of 16 bits" in str(w.message)]
    assert len(told) == (kind == "remainder8" and dtype != "bfloat16")
