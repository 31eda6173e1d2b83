"""The states of stateful recurrent layers, which `model.variables` does not have.

Keras's `fit` on JAX neither carries them on nor can write them: there only loops do.
"""

import keras
import numpy as np
import pytest
from keras import layers, ops

import keras_lso
from keras_lso._keras_internals.variables import layers_of
from testing.harness import bits

BACKEND = keras.backend.backend()


class Cell(layers.Layer):
    """The cell of a user: a state in which another is nested, and one that counts."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.state_size, self.output_size = [2, 1], 2

    def build(self, input_shape):
        self.kernel = self.add_weight(shape=(input_shape[-1], 2), name="kernel")
        self.built = True

    def get_initial_state(self, batch_size=None):
        return [ops.zeros((batch_size, 2)), [ops.zeros((batch_size, 1))]]

    def call(self, inputs, states, training=False):
        state, [count] = states
        new = ops.tanh(ops.matmul(inputs, self.kernel) + state)
        return new, [new, [count + 1.0]]


def simple(**options):
    return layers.SimpleRNN(2, stateful=True, **options)


def of(*cells):
    return layers.RNN(cells[0] if len(cells) == 1 else list(cells), stateful=True)


# The layer, by how many variables its states are, and the shape of an example.
SEQUENCE = (2, 1)
LAYERS = {
    "SimpleRNN": (simple, 1, SEQUENCE),
    "LSTM": (lambda: layers.LSTM(2, stateful=True), 2, SEQUENCE),
    "GRU": (lambda: layers.GRU(2, stateful=True), 1, SEQUENCE),
    "stacked cells": (lambda: of(layers.LSTMCell(2), layers.GRUCell(2)), 3, SEQUENCE),
    "a user's cell": (lambda: of(Cell()), 2, SEQUENCE),
    "Bidirectional": (
        lambda: layers.Bidirectional(of(layers.SimpleRNNCell(2), layers.LSTMCell(2))),
        6,
        SEQUENCE,
    ),
    "TimeDistributed": (
        lambda: layers.TimeDistributed(of(layers.GRUCell(2))),
        1,
        (2, *SEQUENCE),
    ),
    "ConvLSTM1D": (lambda: layers.ConvLSTM1D(1, 2, stateful=True), 2, (2, 3, 1)),
}
# Keras's fused layers of these write the states that autograd is still to read.
UNTRAINABLE = {"LSTM", "GRU"} if BACKEND == "torch" else set()
every_layer = pytest.mark.parametrize(
    "name", [n for n in LAYERS if n not in UNTRAINABLE]
)


def make(name, **options):
    """A model that ends in a layer of LAYERS and one number, and the states."""
    recurrent, count, shape = LAYERS[name]
    model = keras.Sequential(
        [
            keras.Input(shape, batch_size=1),
            recurrent(),
            layers.Flatten(),
            layers.Dense(1),
        ]
    )
    inner = keras.optimizers.SGD(0.01)
    optimizer = keras_lso.LossScaleOptimizer(inner, dynamic=False, initial_scale=8.0)
    model.compile(optimizer, loss="mean_squared_error", **options)
    states = [
        state
        for layer in layers_of(model)
        if isinstance(layer, layers.RNN)
        for state in keras.tree.flatten(layer.states)
    ]
    assert len(states) == count
    assert not {id(v) for v in states} & {id(v) for v in model.variables}
    return model, states


def batch(model, value):
    return np.full(model.input_shape, value, "float32"), np.ones((1, 1), "float32")


@pytest.mark.skipif(BACKEND == "jax", reason="Keras's `fit` on JAX carries no states")
@every_layer
@pytest.mark.parametrize(
    "mode", ["eager", pytest.param("compiled", marks=pytest.mark.full)]
)
def test_skipped_step_leaves_recurrent_states_unchanged(name, mode):
    model, states = make(name, run_eagerly=mode == "eager")
    keras_lso.protect_statistics(model)
    for skipped in range(2):
        start = bits(states)
        model.train_on_batch(*batch(model, np.nan))
        assert bits(states) == start
        assert int(model.optimizer.skipped_steps) == skipped + 1
        model.train_on_batch(*batch(model, 1.0))
        assert all(a != b for a, b in zip(bits(states), start, strict=True))


@pytest.mark.skipif(BACKEND != "tensorflow", reason="Keras cannot build it elsewhere")
def test_skipped_first_step_of_unbuilt_model_leaves_states_at_zero():
    model = keras.Sequential([simple(), layers.Flatten(), layers.Dense(1)])
    optimizer = keras_lso.LossScaleOptimizer(keras.optimizers.SGD(0.01))
    model.compile(optimizer, loss="mean_squared_error", run_eagerly=True)
    keras_lso.protect_statistics(model)
    model.train_on_batch(np.full((1, 2, 1), np.nan), np.ones((1, 1)))
    assert not np.any(ops.convert_to_numpy(model.layers[0].states[0]))


def loop(model, optimizer):
    def step(x):
        with keras_lso.restore_if_skipped(model, optimizer):
            optimizer.minimize(
                lambda: ops.mean(ops.square(model(x, training=True) - 1.0)),
                model.trainable_variables,
            )

    return step


def test_custom_loop_restores_recurrent_states(compiled):
    model, states = make("stacked cells")
    optimizer = model.optimizer
    optimizer.build(model.trainable_variables)
    variables = [*model.variables, *states, *optimizer.variables]
    step = compiled(loop(model, optimizer), variables)
    good, bad = (ops.convert_to_tensor(batch(model, v)[0]) for v in (1.0, np.nan))
    step(good)
    before = bits([*model.variables, *states])
    step(bad)
    assert bits([*model.variables, *states]) == before
    assert int(optimizer.skipped_steps) == 1
    step(good)
    first, later = before[-len(states) :], bits(states)
    assert all(a != b for a, b in zip(first, later, strict=True))
