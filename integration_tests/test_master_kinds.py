"""Whole programs with weights of 16 bits: `fit`, files, callbacks, copies.

`tests/_core/test_master_weights_codecs.py` compares steps on the same gradients. Here
the gradients are those of the weights, which differ by a unit in the last place where
the float32 number lies in the middle of two.
"""

import keras
import numpy as np
import pytest
from keras import ops

import keras_lso
from testing.harness import bits
from testing.tiers import is_full

BACKEND = keras.backend.backend()
K = keras.optimizers
KINDS = ["float32", "remainder", "remainder8", "stochastic"]
of_each_kind = pytest.mark.parametrize("kind", KINDS[1:])


def multi():
    if not hasattr(K, "MultiOptimizer"):
        pytest.skip("Keras has a MultiOptimizer since 3.15")
    return K.MultiOptimizer(K.OptimizerMap(K.SGD(0.05), {".*kernel": K.Adam(0.02)}))


INNERS = {
    "adam": lambda: K.Adam(0.02),
    "narrow": lambda: K.Adam(0.02),
    "adadelta": lambda: K.Adadelta(1.0),
    "larc": lambda: keras_lso.LARC(K.SGD(0.1, momentum=0.9)),
    "lars": lambda: keras_lso.LARS(0.1, eeta=0.1),
    "lamb": lambda: keras_lso.LAMB(0.02),
    "novograd": lambda: keras_lso.NovoGrad(0.02),
    "accumulation": lambda: K.Adam(0.02, gradient_accumulation_steps=2),
    "averages": lambda: K.Adam(0.02, use_ema=True, ema_momentum=0.5),
    "several": multi,
}


def make_optimizer(kind, name="adam", dtype="bfloat16"):
    options = {"slot_dtype": "bfloat16"} if name == "narrow" else {}
    options["master_weights"] = kind
    if dtype == "bfloat16" and name != "several":
        return keras_lso.GuardedOptimizer(INNERS[name](), **options)
    return keras_lso.LossScaleOptimizer(
        INNERS[name](), initial_scale=2.0**10, **options
    )


def compiled(make_model, kind, name="adam", dtype="bfloat16", **options):
    model = make_model(dtype)
    options.setdefault("run_eagerly", BACKEND != "jax" and not is_full())
    model.compile(make_optimizer(kind, name, dtype), "mse", **options)
    model.optimizer.build(model.trainable_variables)
    return model


def take_steps(model, count=3, seed=0):
    """Steps by the optimizer alone: nothing is compiled."""
    random = np.random.default_rng(seed)
    variables = model.trainable_variables
    for _ in range(count):
        grads = [random.normal(size=v.shape).astype("float32") for v in variables]
        grads = [
            ops.cast(ops.convert_to_tensor(g), v.dtype)
            for g, v in zip(grads, variables, strict=True)
        ]
        model.optimizer.apply(grads, variables, scaled=False)
    return model


def numbers_of(model):
    store = {}
    model.optimizer.save_own_variables(store)
    values = [store[str(i)] for i in range(len(store))]
    return values[-len(model.trainable_variables) :]


def state_of(model):
    return bits([*model.variables, *model.optimizer.variables])


FITS = [
    (name, kind, dtype)
    for name in INNERS
    for kind in KINDS[1:]
    for dtype in ("bfloat16", "float16")
]
IN_TURN = [
    ("adam", "stochastic", "bfloat16"),
    ("adadelta", "remainder", "bfloat16"),
    ("larc", "remainder", "float16"),
]


@pytest.mark.parametrize(
    "name, kind, dtype",
    [
        *IN_TURN,
        *(pytest.param(*c, marks=pytest.mark.full) for c in FITS if c not in IN_TURN),
    ],
)
def test_fit_with_each_master_kind_ends_near_loss_of_float32_masters(
    name, kind, dtype, make_model, data, fit, with_overflows
):
    x, y = data
    losses = []
    for of_kind in (kind, "float32"):
        model = compiled(make_model, of_kind, name, dtype)
        before = model.evaluate(x, y, verbose=0)
        fit(model, with_overflows(x, [2]), y, epochs=3)
        assert int(model.optimizer.skipped_steps) == 3
        losses.append(model.evaluate(x, y, verbose=0))
        assert losses[-1] < before
        assert np.isfinite(losses[-1])
    # Of twelve steps none is larger than the unit of bfloat16 by much.
    assert losses[0] == pytest.approx(losses[1], rel=0.25, abs=0.02)


@of_each_kind
@pytest.mark.parametrize("name", ["adam", "adadelta", "averages", "several", "narrow"])
def test_model_loaded_from_checkpoint_continues_with_each_master_kind(
    name, kind, make_model, data, fit, tmp_path
):
    path = tmp_path / "model.keras"
    model = compiled(make_model, kind, name)
    fit(model, *data, callbacks=[keras.callbacks.ModelCheckpoint(path)])
    loaded = keras_lso.load_model(path)
    loaded.compile(loaded.optimizer, "mse", run_eagerly=model.run_eagerly)
    assert loaded.optimizer.master_weights == kind
    if name != "averages":
        # `fit` ends with the averages as the weights, and saves before.
        assert state_of(loaded)[:-1] == state_of(model)[:-1]
        for each in (model, loaded):
            take_steps(each)
        assert bits(loaded.weights) == bits(model.weights)
    else:
        averages = loaded.optimizer.inner_optimizer._model_variables_moving_average
        assert bits(averages) == bits(
            model.optimizer.inner_optimizer._model_variables_moving_average
        )


@of_each_kind
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_weights_swapped_for_averages_are_restored(dtype, kind, make_model):
    model = take_steps(compiled(make_model, kind, "averages", dtype))
    before, numbers = state_of(model), numbers_of(model)
    callback = keras_lso.callbacks.SwapEMAWeights()
    callback.set_model(model)
    callback.on_test_begin()
    inner = model.optimizer.inner_optimizer
    for weight, average in zip(
        model.trainable_variables, inner._model_variables_moving_average, strict=True
    ):
        found = ops.convert_to_numpy(ops.cast(weight, "float32"))
        unit = 2.0**-10 if dtype == "float16" else 2.0**-7
        np.testing.assert_allclose(
            found, ops.convert_to_numpy(average), rtol=unit, atol=2.0**-24
        )
    callback.on_test_end()
    for found, right in zip(numbers_of(model), numbers, strict=True):
        # Of float16 a small number loses a part of 2**-40.
        np.testing.assert_allclose(found, right, rtol=0, atol=2.0**-39)
    if dtype == "bfloat16":
        assert state_of(model) == before


@pytest.mark.parametrize("kind", KINDS)
def test_tied_weight_has_single_master_or_remainder(kind):
    class Tied(keras.Model):
        def __init__(self):
            super().__init__(dtype="bfloat16")
            self.embedding = keras.layers.Embedding(10, 4, dtype="bfloat16")
            self.again = self.embedding

        def call(self, x):
            x = self.embedding(x)
            return ops.matmul(x, ops.transpose(self.again.embeddings))

    tokens = np.random.default_rng(0).integers(0, 10, (16, 3))
    model = Tied()
    model(tokens)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(make_optimizer(kind), loss, run_eagerly=BACKEND != "jax")
    model.fit(tokens, tokens, batch_size=4, verbose=0)
    assert int(model.optimizer.iterations) == 4
    kept = model.optimizer._masters.variables
    assert [v.dtype for v in kept] == {
        "float32": ["float32"],
        "remainder": ["int16"],
        "remainder8": ["int8"],
        "stochastic": [],
    }[kind]
