"""`GuardedOptimizer` does the same as `LossScaleOptimizer`, without a loss scale."""

import json

import keras
import numpy as np
import pytest
from keras import ops

import keras_lso
from keras_lso import GuardedOptimizer, LossScaleOptimizer
from testing.trained_optimizers import saved

K = keras.optimizers
BACKEND = keras.backend.backend()
SHAPES = [(4, 3), (3,), ()]
MAKERS = {
    "SGD": lambda: K.SGD(0.1, momentum=0.9),
    "AdamW": lambda: K.AdamW(0.1, global_clipnorm=1.0),
    "Adadelta": lambda: K.Adadelta(0.1),
    "LARS": lambda: keras_lso.LARS(0.1, weight_decay_rate=1e-4),
    "accumulated": lambda: K.Adam(0.1, gradient_accumulation_steps=2),
}


def at_scale_1(inner, **options):
    return LossScaleOptimizer(inner, dynamic=False, initial_scale=1.0, **options)


def variables(dtype="float32"):
    random = np.random.default_rng(0)
    return [keras.Variable(random.normal(size=s), dtype=dtype) for s in SHAPES]


def gradients(seed, bad=False):
    random = np.random.default_rng(seed)
    values = [np.asarray(random.normal(size=s), "float32") for s in SHAPES]
    if bad:
        values[0][1, 1] = np.nan
    return [ops.convert_to_tensor(v) for v in values]


def arrays(tensors):
    return [np.array(ops.convert_to_numpy(ops.cast(t, "float32"))) for t in tensors]


def assert_equal(found, expected):
    for one, other in zip(arrays(found), arrays(expected), strict=True):
        np.testing.assert_array_equal(one, other)


def make_model(optimizer, dtype="bfloat16"):
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(4, dtype=dtype), keras.layers.Dense(1, dtype=dtype)]
    model = keras.Sequential([keras.Input((3,)), *layers])
    model.compile(optimizer, loss="mse")
    return model


def data():
    x = np.random.default_rng(3).normal(size=(16, 3)).astype("float32")
    return x, x.sum(axis=1, keepdims=True)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_losses_and_gradients_are_returned_unchanged(dtype):
    optimizer = GuardedOptimizer(K.SGD(0.1))
    loss = ops.cast(ops.array(3.0), dtype)
    assert optimizer.scale_loss(loss) is loss
    assert optimizer.get_scaled_loss(loss) is loss
    assert optimizer.get_scaled_loss(lambda: loss)() is loss
    grads = [ops.cast(ops.ones(2), dtype), None]
    unscaled = optimizer.get_unscaled_gradients(grads)
    assert all(a is b for a, b in zip(unscaled, grads, strict=True))
    assert float(optimizer.loss_scale) == optimizer.initial_scale == 1.0
    assert not optimizer.dynamic


@pytest.mark.skipif(BACKEND != "jax", reason="a step is a list of operations on JAX")
def test_guarded_step_contains_no_multiplication_by_loss_scale():
    import jax

    def products(wrap):
        optimizer = wrap(K.SGD(0.1))
        trained = variables()[:1]
        optimizer.build(trained)
        state = [v.value for v in optimizer.variables]
        jaxpr = jax.make_jaxpr(optimizer.stateless_apply)(
            state, gradients(0)[:1], [v.value for v in trained]
        )
        return sum(
            line.primitive.name == "mul" and line.outvars[0].aval.shape == SHAPES[0]
            for line in jaxpr.jaxpr.eqns
        )

    # The product with the learning rate.
    assert products(GuardedOptimizer) == products(lambda inner: inner) == 1
    assert products(at_scale_1) == 2


@pytest.mark.each_backend
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", MAKERS)
def test_guarded_steps_are_bitwise_equal_to_steps_at_loss_scale_1(name, dtype):
    results = []
    for wrap in (GuardedOptimizer, at_scale_1):
        optimizer, trained = wrap(MAKERS[name]()), variables(dtype)
        for i, bad in enumerate([False, False, True, False, False]):
            optimizer.apply(gradients(i, bad), trained, scaled=False)
        results.append([*trained, *optimizer.inner_optimizer.variables])
        assert int(optimizer.skipped_steps) == 1
    assert_equal(*results)


FOR_A_SCALE = "For a loss scale write `LossScaleOptimizer`"


@pytest.mark.parametrize(
    "argument, words",
    [
        *(
            (name, f"does not support arguments: `{name}`. {FOR_A_SCALE}")
            for name in ("initial_scale", "dynamic", "loss_scale", "init_scale")
        ),
        ("clipnorm", "GuardedOptimizer does not support `clipnorm`"),
        ("masters", "Did you mean `master_weights`"),
    ],
)
def test_unsupported_argument_is_rejected(argument, words):
    with pytest.raises(ValueError, match=words):
        GuardedOptimizer(K.SGD(0.1), **{argument: 8.0})


def test_master_weights_cannot_be_replaced():
    with pytest.raises(AttributeError, match="of a GuardedOptimizer cannot be replac"):
        GuardedOptimizer(K.SGD(0.1)).master_weights = False


@pytest.mark.parametrize(
    "options", [{}, {"master_weights": False}, {"slot_dtype": "bfloat16"}]
)
def test_guarded_optimizer_round_trips_through_config(options):
    optimizer = GuardedOptimizer(K.Adam(0.1), **options, name="g")
    config = optimizer.get_config()
    assert json.loads(json.dumps(config)) == config
    assert config.keys() == {"name", "inner_optimizer", *options}
    for route in (
        GuardedOptimizer.from_config(config),
        keras.optimizers.deserialize(keras.optimizers.serialize(optimizer)),
        keras_lso.deserialize(keras.optimizers.serialize(optimizer)),
    ):
        assert type(route) is GuardedOptimizer
        assert route.get_config() == config


# Keras itself restores no optimizer from an .h5 file.
@pytest.mark.parametrize(
    "suffix, load",
    [
        ("keras", keras.saving.load_model),
        ("keras", keras_lso.load_model),
        ("h5", keras_lso.load_model),
    ],
)
def test_saved_model_restores_optimizer_and_continues_training_identically(
    suffix, load, tmp_path
):
    # Keras itself reads no bfloat16 from an .h5 file.
    dtype = "float32" if suffix == "h5" else "bfloat16"
    model = make_model(GuardedOptimizer(K.Adam(0.1)), dtype)
    x, y = data()
    model.fit(x, y, batch_size=4, verbose=0)
    path = str(tmp_path / f"model.{suffix}")
    model.save(path)
    loaded = load(path)
    assert type(loaded.optimizer) is GuardedOptimizer
    for one in (model, loaded):
        one.fit(x, y, batch_size=4, shuffle=False, verbose=0)
    assert int(loaded.optimizer.iterations) == 8
    assert_equal(loaded.weights, model.weights)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_guarded_and_loss_scale_optimizers_load_state_of_each_other(dtype):
    """A loss scale that the source lacks starts at its initial value."""
    guarded, scaled = GuardedOptimizer(K.Adam(0.1)), LossScaleOptimizer(K.Adam(0.1))
    for optimizer in (guarded, scaled):
        trained = variables(dtype)
        optimizer.apply(gradients(0), trained, scaled=False)
        optimizer.apply(gradients(1, bad=True), trained, scaled=False)
        optimizer.apply(gradients(2), trained, scaled=False)
    assert float(scaled.loss_scale) == 2.0**14
    for source, make in ((guarded, LossScaleOptimizer), (scaled, GuardedOptimizer)):
        for route in ("file", "weights"):
            target = make(K.Adam(0.1))
            target.build(variables(dtype))
            if route == "file":
                target.load_own_variables(saved(source))
            else:
                target.set_weights(source.get_weights())
            assert int(target.iterations) == 2
            # tf.keras's weights have no count of skipped steps.
            assert int(target.skipped_steps) == (route == "file")
            expected = 2.0**15 if make is LossScaleOptimizer else 1.0
            assert float(target.loss_scale) == float(target.dynamic_scale) == expected
            # The mark of the class is not loaded.
            [mark] = {float(make(K.SGD())._variables[1]), float(target._variables[1])}
            assert mark == (0.0 if make is LossScaleOptimizer else -1.0)
            assert_equal(
                target.inner_optimizer.variables, source.inner_optimizer.variables
            )
