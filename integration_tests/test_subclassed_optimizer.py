"""`fit` in float16 with an optimizer that a user has made of a known one.

Such an optimizer may do anything, so that no rule speaks for it, and no kernel for the
known one may take its steps. These descend by the signs of the gradients. The reference
is NumPy in float64: the data are small multiples of powers of two, with which float16
computes exactly.
"""

import keras
import numpy as np
import pytest
from keras import ops

import keras_lso
from keras_lso._keras_internals.rules import fitting_rule

RATE, BATCH_SIZE = 0.125, 8


@keras.saving.register_keras_serializable("keras_lso_tests")
class SignSGD(keras.optimizers.SGD):
    """Descends by signs, with SGD's momentum."""

    def update_step(self, gradient, variable, learning_rate):
        super().update_step(ops.sign(gradient), variable, learning_rate)

    def in_numpy(self, g, w, m):
        m = self.momentum * m - RATE * np.sign(g)
        return w + m, m


@keras.saving.register_keras_serializable("keras_lso_tests")
class SignAdam(keras.optimizers.Adam):
    """Descends by the average of the signs."""

    def update_step(self, gradient, variable, learning_rate):
        m = self._momentums[self._get_variable_index(variable)]
        self.assign(m, (m + ops.sign(gradient)) / 2)
        self.assign_sub(variable, m * learning_rate)

    def in_numpy(self, g, w, m):
        m = (m + np.sign(g)) / 2
        return w - RATE * m, m


@keras.saving.register_keras_serializable("keras_lso_tests")
class SignLARS(keras_lso.LARS):
    """LARS of the signs."""

    def update_step(self, gradient, variable, learning_rate):
        super().update_step(ops.sign(gradient), variable, learning_rate)

    def in_numpy(self, g, w, m):
        d = np.sign(g)
        norm = np.linalg.norm(w)
        ratio = self.eeta * norm / np.linalg.norm(d) if norm else 1.0
        m = self.momentum * m + RATE * ratio * d
        return w - m, m


# The optimizer, what it was made of, and its arguments.
CASES = {
    "SGD": (SignSGD, keras.optimizers.SGD, {}),
    "SGD with momentum": (SignSGD, keras.optimizers.SGD, {"momentum": 0.5}),
    "Adam": (SignAdam, keras.optimizers.Adam, {}),
    "LARS": (SignLARS, keras_lso.LARS, {"eeta": 0.25, "momentum": 0.5}),
}


def make_data(batches):
    random = np.random.default_rng(2)
    size = batches * BATCH_SIZE
    x = random.choice([-1.0, -0.5, 0.5, 1.0], size=(size, 3))
    y = x @ np.array([[2.0], [-1.5], [1.0]]) + random.choice([0.25, 0.5], (size, 1))
    return x.astype("float32"), y.astype("float32")


def gradients_of(x, y, kernel, bias):
    """The derivatives of the mean squared error of `x @ kernel + bias`."""
    of_output = 2 * (x @ kernel + bias - y) / len(x)
    return x.T @ of_output, of_output.sum(axis=0)


def fit_in_numpy(optimizer, weights, x, y):
    weights = [w.astype("float64") for w in weights]
    slots = [np.zeros_like(w) for w in weights]
    for start in range(0, len(x), BATCH_SIZE):
        batch = slice(start, start + BATCH_SIZE)
        grads = gradients_of(x[batch], y[batch], *weights)
        for i, g in enumerate(grads):
            # A float16 of 5 is off by 0.002; that must turn no sign.
            assert np.abs(g).min() > 0.05
            weights[i], slots[i] = optimizer.in_numpy(g, weights[i], slots[i])
    return weights


@pytest.fixture
def model():
    layer = keras.layers.Dense(1, kernel_initializer="zeros", dtype="mixed_float16")
    model = keras.Sequential([keras.Input((3,)), layer])
    layer.kernel.assign([[0.5], [0.25], [-1.0]])
    return model


@pytest.mark.parametrize("cls, known, options", CASES.values(), ids=CASES)
def test_fit_takes_steps_of_subclassed_optimizer(
    cls, known, options, model, fit, with_overflows, values, assert_close
):
    inner = cls(RATE, **options)
    x, y = make_data(batches=4)
    start = values(model.trainable_variables)
    expected = fit_in_numpy(inner, start, x, y)
    # After the first batch one more, which overflows and is skipped.
    x, y = (np.concatenate([part[:BATCH_SIZE], part]) for part in (x, y))
    x = with_overflows(x, [1])

    optimizer = keras_lso.LossScaleOptimizer(inner, initial_scale=2.0**10)
    model.compile(optimizer, loss="mse")
    fit(model, x, y)

    assert type(optimizer.inner_optimizer) is cls
    assert fitting_rule(inner, model.trainable_variables) is None
    assert fitting_rule(known(RATE), model.trainable_variables) is not None
    assert (int(optimizer.iterations), int(optimizer.skipped_steps)) == (4, 1)
    # Norms are rounded; signs, and what they add up to, are not.
    share = 1e-6 if cls is SignLARS else 0
    assert_close(values(model.trainable_variables), expected, share)
