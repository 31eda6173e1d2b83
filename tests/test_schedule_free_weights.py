"""`SwapScheduleFreeWeights`; the reference is the paper's algorithm in float64."""

import keras
import numpy as np
import pytest
from keras import ops

import keras_lso
from keras_lso.callbacks import SwapScheduleFreeWeights
from testing.trained_optimizers import bits_of

BACKEND = keras.backend.backend()
if not hasattr(keras.optimizers, "ScheduleFreeAdamW"):
    pytest.skip("This Keras has no ScheduleFreeAdamW.", allow_module_level=True)

RATE, BETA_1, BETA_2, EPSILON = 0.25, 0.75, 0.5, 1e-8
# Units in the last place of a weight of 1.
UNITS = {"float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}
SHAPE = (3, 2)
# Numbers that bfloat16 has.
START = np.random.default_rng(0).integers(64, 128, SHAPE) / 128
GRADIENTS = np.random.default_rng(1).normal(size=(6, *SHAPE))


def inner(**options):
    return keras.optimizers.ScheduleFreeAdamW(
        RATE, beta_1=BETA_1, beta_2=BETA_2, epsilon=EPSILON, **options
    )


def scaled(kind=True):
    return lambda: keras_lso.LossScaleOptimizer(inner(), master_weights=kind)


def guarded(kind):
    return lambda: keras_lso.GuardedOptimizer(inner(), master_weights=kind)


OPTIMIZERS = {
    "bare": (inner, "float32"),
    "scaled": (scaled(), "float32"),
    "scaled, float16 by float32": (scaled("float32"), "float16"),
    "scaled, float16 by remainder": (scaled("remainder"), "float16"),
    "guarded": (guarded("auto"), "float32"),
    "guarded, bfloat16 by float32": (guarded("float32"), "bfloat16"),
    "guarded, bfloat16 by remainder": (guarded("remainder"), "bfloat16"),
}
ROUNDED = [name for name, (_, dtype) in OPTIMIZERS.items() if dtype != "float32"]


class Paper:
    """Schedule-free AdamW in float64; `x` is the point that training is for."""

    reads_new_z = BACKEND != "jax"

    def __init__(self):
        self.x, self.y, self.z = START, START, START
        self.v, self.steps = np.zeros(SHAPE), 0

    def step(self, gradient):
        self.steps += 1
        self.v = BETA_2 * self.v + (1 - BETA_2) * gradient**2
        root = np.sqrt(self.v / (1 - BETA_2**self.steps)) + EPSILON
        old, self.z = self.z, self.z - RATE * gradient / root
        if self.reads_new_z:
            old = self.z
        x = (self.y - (1 - BETA_1) * old) / BETA_1
        self.x = x + (self.z - x) / self.steps
        self.y = (1 - BETA_1) * self.z + BETA_1 * self.x


def make_model(optimizer, dtype="float32"):
    dense = keras.layers.Dense(SHAPE[1], use_bias=False, dtype=dtype)
    model = keras.Sequential([keras.Input(SHAPE[:1]), dense])
    model.set_weights([START])
    model.compile(optimizer, loss="mse")
    return model


def apply(model, gradient):
    optimizer = model.optimizer
    scale = getattr(optimizer, "loss_scale", 1.0)
    gradients = [ops.convert_to_tensor(gradient, "float32") * scale]
    optimizer.apply(gradients, model.trainable_variables)


def take_steps(model):
    """Takes steps, of which one is skipped if the optimizer skips any."""
    paper = Paper()
    for number, gradient in enumerate(GRADIENTS):
        if number == 3 and isinstance(model.optimizer, keras_lso.LossScaleOptimizer):
            apply(model, np.full(SHAPE, np.nan))
        apply(model, gradient)
        paper.step(gradient)
    return paper


def weights_of(model):
    [kernel] = model.trainable_variables
    return np.array(ops.convert_to_numpy(ops.cast(kernel, "float32")))


def of_model(model, **arguments):
    swap = SwapScheduleFreeWeights(**arguments)
    swap.set_model(model)
    return swap


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_evaluation_uses_average_that_matches_paper(name):
    make, dtype = OPTIMIZERS[name]
    model = make_model(make(), dtype)
    paper = take_steps(model)
    unit = UNITS[dtype]
    # The tests below can tell the three points apart.
    assert np.abs(paper.x - paper.y).max() > 4 * unit
    np.testing.assert_allclose(weights_of(model), paper.y, rtol=unit, atol=1e-6)
    before, swap = bits_of(model), of_model(model)
    swap.on_test_begin()
    np.testing.assert_allclose(weights_of(model), paper.x, rtol=unit, atol=1e-6)
    swap.on_test_end()
    if name == "scaled, float16 by remainder":
        # A small number may lose a part of 2**-40.
        np.testing.assert_allclose(weights_of(model), paper.y, rtol=unit, atol=1e-6)
    else:
        assert bits_of(model) == before


@pytest.mark.skipif(BACKEND != "tensorflow", reason="Others have no `tf.function`.")
@pytest.mark.parametrize("name", [n for n in OPTIMIZERS if n != "bare"])
def test_optimizer_built_in_function_matches_paper(name):
    import tensorflow as tf

    make, dtype = OPTIMIZERS[name]
    model, paper = make_model(make(), dtype), Paper()
    step = tf.function(lambda gradient: apply(model, gradient))
    for gradient in GRADIENTS:
        step(tf.constant(gradient))
        paper.step(gradient)
    np.testing.assert_allclose(weights_of(model), paper.y, rtol=UNITS[dtype], atol=1e-6)


@pytest.mark.parametrize("name", ROUNDED)
def test_average_is_computed_from_master_weights(name):
    # Of weights that were rounded it would differ by `1 / beta_1` of their units.
    make, dtype = OPTIMIZERS[name]
    model = make_model(make(), dtype)
    paper = take_steps(model)
    of_model(model).on_predict_begin()
    rounded = ops.convert_to_tensor(paper.x, "float32")
    rounded = ops.convert_to_numpy(ops.cast(ops.cast(rounded, dtype), "float32"))
    np.testing.assert_array_equal(weights_of(model), rounded)


def test_stochastically_rounded_weights_are_averaged():
    model = make_model(guarded("stochastic")(), "bfloat16")
    take_steps(model)
    before = bits_of(model)
    [z] = model.optimizer.inner_optimizer._momentums
    y, z = weights_of(model), ops.convert_to_numpy(z)
    swap = of_model(model)
    swap.on_test_begin()
    expected = (y - (1 - BETA_1) * z) / BETA_1
    np.testing.assert_allclose(weights_of(model), expected, rtol=UNITS["bfloat16"])
    swap.on_test_end()
    assert bits_of(model) == before


def test_swap_does_nothing_before_first_applied_step():
    model = make_model(scaled()())
    swap = of_model(model)
    swap.on_test_begin()
    swap.on_test_end()
    apply(model, np.full(SHAPE, np.inf))
    before = bits_of(model)
    swap.on_test_begin()
    assert bits_of(model) == before
    swap.on_test_end()
    assert bits_of(model) == before


X = np.random.default_rng(2).normal(size=(32, SHAPE[0])).astype("float32")
Y = (X @ np.random.default_rng(3).normal(size=SHAPE)).astype("float32")


def fit(model, *callbacks, **arguments):
    arguments = {"epochs": 2, "batch_size": 8, "shuffle": False, **arguments}
    return model.fit(X, Y, verbose=0, callbacks=list(callbacks), **arguments).history


def kernel_of(model):
    return weights_of(model).astype("float64")


def average_of(model):
    """Returns `x` by the formula, of a model that holds `y`."""
    found = [v for v in model.optimizer.variables if v.path.endswith("_momentum")]
    z = ops.convert_to_numpy(found[0]).astype("float64")
    return (kernel_of(model) - (1 - BETA_1) * z) / BETA_1


def loss_at(kernel):
    return np.mean((X @ kernel - Y) ** 2)


@pytest.mark.parametrize("make", [inner, scaled()], ids=["bare", "scaled"])
def test_fit_validates_at_average_without_changing_training(make):
    plain, model = make_model(make()), make_model(make())
    fit(plain, epochs=3)
    losses = fit(model, SwapScheduleFreeWeights(), epochs=3, validation_data=(X, Y))
    assert bits_of(model) == bits_of(plain)
    average = average_of(plain)
    assert losses["val_loss"][-1] == pytest.approx(loss_at(average), rel=1e-5)
    assert losses["val_loss"][-1] != pytest.approx(loss_at(kernel_of(plain)), rel=1e-3)


@pytest.mark.parametrize(
    "make, dtype", [(inner, "float32"), (guarded("remainder"), "bfloat16")]
)
def test_run_ends_at_average_and_next_run_resumes_training(make, dtype):
    plain, model = make_model(make(), dtype), make_model(make(), dtype)
    fit(plain)
    fit(model, SwapScheduleFreeWeights(swap_on_epoch=True), validation_data=(X, Y))
    if dtype == "float32":
        np.testing.assert_allclose(kernel_of(model), average_of(plain), rtol=1e-5)
    ended = kernel_of(model)
    # Another callback knows where the model is, in an evaluation and in a run.
    loss = model.evaluate(X, Y, verbose=0, callbacks=[SwapScheduleFreeWeights()])
    assert loss == pytest.approx(loss_at(ended), rel=4 * UNITS[dtype])
    np.testing.assert_array_equal(kernel_of(model), ended)
    fit(plain)
    fit(model, SwapScheduleFreeWeights())
    assert bits_of(model) == bits_of(plain)


@pytest.mark.parametrize("hook", ["on_test_begin", "on_predict_begin", "on_epoch_end"])
def test_swap_rejects_other_optimizers(hook):
    model = make_model(keras_lso.LossScaleOptimizer(keras.optimizers.Adam()))
    swap = of_model(model, swap_on_epoch=True)
    arguments = [0] if hook == "on_epoch_end" else []
    with pytest.raises(ValueError, match=r"`LossScaleOptimizer\(keras.optimizers.Sch"):
        getattr(swap, hook)(*arguments)


def test_swap_rejects_zero_beta_1():
    optimizer = keras.optimizers.ScheduleFreeAdamW(beta_1=0.0)
    with pytest.raises(ValueError, match="`beta_1=0.9`. Received: beta_1=0.0"):
        of_model(make_model(optimizer)).on_test_begin()
