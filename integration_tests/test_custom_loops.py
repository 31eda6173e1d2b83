"""Training loops of one's own: a tape, a jitted function, plain eager calls.

A loop is written for its backend, once; all else here is the same for each. In
every loop a step either scales the loss and lets `apply` unscale (and the inner
optimizer clip), or unscales the gradients, clips them by hand, and applies those.
"""

import functools

import keras
import numpy as np
import pytest
from keras import ops

import keras_lso

CLIP = 0.05
OPTIMIZERS = {
    "SGD": lambda **clip: keras.optimizers.SGD(0.1, momentum=0.9, **clip),
    "Adam": lambda **clip: keras.optimizers.Adam(0.01, **clip),
}


def mean_squared_error(y, prediction):
    return ops.mean(ops.square(ops.cast(prediction, "float32") - y))


class Loop:
    """A model, its optimizer, and `step(x, y)`, which returns the loss."""

    step_is_one_program = False

    def __init__(self, model, optimizer, unscales_itself, clipvalue=CLIP):
        self.model = model
        self.optimizer = optimizer
        self.unscales_itself = unscales_itself
        self.clipvalue = clipvalue
        self.start()

    def start(self):
        """Makes the step."""

    def begin(self):
        """Reads the values of the variables."""

    def finish(self):
        """Writes the values after the steps to the variables."""

    def scale(self, loss):
        if self.unscales_itself:
            return self.optimizer.get_scaled_loss(loss)
        return self.optimizer.scale_loss(loss)

    def unscale_and_clip(self, gradients):
        gradients = self.optimizer.get_unscaled_gradients(gradients)
        return [ops.clip(g, -self.clipvalue, self.clipvalue) for g in gradients]

    def update(self, gradients):
        variables = self.model.trainable_variables
        if self.unscales_itself:
            gradients = self.unscale_and_clip(gradients)
            self.optimizer.apply_gradients(zip(gradients, variables, strict=True))
        else:
            self.optimizer.apply(gradients, variables)


class TensorFlowEager(Loop):
    def step(self, x, y):
        import tensorflow as tf

        with tf.GradientTape() as tape:
            loss = mean_squared_error(y, self.model(x, training=True))
            scaled = self.scale(loss)
        self.update(tape.gradient(scaled, self.model.trainable_variables))
        return loss


class TensorFlowGraph(TensorFlowEager):
    step_is_one_program = True
    xla = False

    def start(self):
        import tensorflow as tf

        self.step = tf.function(super().step, jit_compile=self.xla)

    def compilations(self):
        return self.step.experimental_get_tracing_count()


class TensorFlowXLA(TensorFlowGraph):
    xla = True


class JaxEager(Loop):
    def start(self):
        import jax

        self.events = []
        jax.monitoring.register_event_duration_secs_listener(
            lambda event, seconds, **_: self.events.append(event)
        )
        self.gradients_of = jax.grad(self.scaled_loss, has_aux=True)

    def scaled_loss(self, weights, x, y):
        prediction, _ = self.model.stateless_call(
            weights, self.model.non_trainable_variables, x, training=True
        )
        loss = mean_squared_error(y, prediction)
        return self.scale(loss), loss

    def step(self, x, y):
        weights = [v.value for v in self.model.trainable_variables]
        gradients, loss = self.gradients_of(weights, x, y)
        self.update(gradients)
        return loss

    def compilations(self):
        """Returns how many programs XLA has compiled: one for each operation."""
        return sum("backend_compile" in event for event in self.events)


class JaxJit(JaxEager):
    step_is_one_program = True

    def start(self):
        import jax

        super().start()
        self.optimizer.build(self.model.trainable_variables)
        self.variables = (self.model.trainable_variables, self.optimizer.variables)
        self.jitted = jax.jit(self.pure_step, donate_argnums=0)
        self.begin()

    def begin(self):
        self.state = tuple([v.value for v in group] for group in self.variables)

    def pure_step(self, state, x, y):
        weights, optimizer_variables = state
        mapping = zip(self.optimizer.variables, optimizer_variables, strict=True)
        with keras.StatelessScope(state_mapping=list(mapping)):
            gradients, loss = self.gradients_of(weights, x, y)
            if self.unscales_itself:
                gradients = self.unscale_and_clip(gradients)
        state = self.optimizer.stateless_apply(optimizer_variables, gradients, weights)
        return state, loss

    def step(self, x, y):
        self.state, loss = self.jitted(self.state, x, y)
        return loss

    def finish(self):
        for variables, new_values in zip(self.variables, self.state, strict=True):
            for variable, value in zip(variables, new_values, strict=True):
                variable.assign(value)

    def compilations(self):
        return self.jitted._cache_size()


class TorchEager(Loop):
    def step(self, x, y):
        import torch

        self.model.zero_grad()
        loss = mean_squared_error(torch.from_numpy(y), self.model(x, training=True))
        self.scale(loss).backward()
        with torch.no_grad():
            self.update([v.value.grad for v in self.model.trainable_variables])
        return loss.detach()


LOOPS = {
    "tensorflow": [TensorFlowEager, TensorFlowGraph, TensorFlowXLA],
    "jax": [JaxEager, JaxJit],
    "torch": [TorchEager],
}[keras.backend.backend()]

COMPILED_LOOPS = [loop for loop in LOOPS if hasattr(loop, "compilations")]


@pytest.fixture
def batches(data, with_overflows):
    """Eight batches; the third and the fourth overflow."""
    x, y = (np.concatenate([array, array]) for array in data)
    x = with_overflows(x, [2, 3])
    return list(zip(np.split(x, 8), np.split(y, 8), strict=True))


def run(loop, batches):
    loop.begin()
    losses = [float(loop.step(x, y)) for x, y in batches]
    loop.finish()
    return losses


def built(model, optimizer):
    """Makes the variables; a graph that makes them is traced twice."""
    optimizer.build(model.trainable_variables)
    return model


@pytest.mark.exhaustive
@pytest.mark.parametrize("inner", OPTIMIZERS)
@pytest.mark.parametrize("loop_class", LOOPS)
def test_both_loop_idioms_match_bare_inner_optimizer(
    loop_class, inner, make_model, batches, values, assert_close
):
    # The same loop without the wrapper and without the batches that overflow.
    bare = OPTIMIZERS[inner](clipvalue=CLIP)
    expected = loop_class(built(make_model("float32"), bare), bare, False)
    run(expected, batches[:2] + batches[4:])
    expected = values(expected.model.trainable_variables)

    for unscales_itself in (False, True):
        options = {} if unscales_itself else {"clipvalue": CLIP}
        optimizer = keras_lso.LossScaleOptimizer(
            OPTIMIZERS[inner](**options), dynamic_growth_steps=2
        )
        model = built(make_model("float32"), optimizer)
        loop = loop_class(model, optimizer, unscales_itself)
        run(loop, batches)
        # Up once, down twice, up twice.
        assert float(optimizer.loss_scale) == 2.0 ** (15 + 1 - 2 + 2)
        assert (int(optimizer.iterations), int(optimizer.skipped_steps)) == (6, 2)
        assert_close(values(loop.model.trainable_variables), expected)


@pytest.mark.skipif(not COMPILED_LOOPS, reason="A PyTorch loop is not compiled.")
@pytest.mark.exhaustive
@pytest.mark.parametrize("unscales_itself", [False, True])
@pytest.mark.parametrize("loop_class", COMPILED_LOOPS)
def test_overflow_and_scale_growth_do_not_recompile_step(
    loop_class, unscales_itself, make_model, batches
):
    optimizer = keras_lso.LossScaleOptimizer(
        keras.optimizers.Adam(0.01), dynamic_growth_steps=2
    )
    model = make_model("float32")
    # In a graph variables can only be made the first time that it is traced.
    optimizer.build(model.trainable_variables)
    loop = loop_class(model, optimizer, unscales_itself)
    # Where each operation is a program, all of them must have been met.
    run(loop, batches[:1] if loop.step_is_one_program else batches)
    compilations = loop.compilations()
    if loop.step_is_one_program:
        assert compilations == 1
    scales = set()
    for x, y in batches:
        loop.step(x, y)
        loop.finish()
        scales.add(float(optimizer.loss_scale))
    assert len(scales) >= 3
    assert loop.compilations() == compilations


def _scanned_step(loop, state, batch):
    return loop.pure_step(state, *batch)


@pytest.mark.skipif(keras.backend.backend() != "jax", reason="JAX's own loop")
@pytest.mark.parametrize("x64", [False, True])
def test_scan_over_steps_ends_as_steps_one_by_one(
    x64, make_model, batches, values, assert_close
):
    import jax

    ends, counts = [], []
    for scans in (False, True):
        optimizer = keras_lso.LossScaleOptimizer(
            keras.optimizers.Adam(0.01), dynamic_growth_steps=2
        )
        loop = JaxJit(built(make_model("float32"), optimizer), optimizer, False)
        if scans:
            jax.config.update("jax_enable_x64", x64)
            try:
                stacked = [np.stack(arrays) for arrays in zip(*batches, strict=True)]
                step = functools.partial(_scanned_step, loop)
                loop.state, losses = jax.lax.scan(step, loop.state, stacked)
            finally:
                jax.config.update("jax_enable_x64", False)
            assert losses.shape == (len(batches),)
            loop.finish()
        else:
            run(loop, batches)
        ends.append(values(loop.model.trainable_variables))
        counts.append((int(optimizer.skipped_steps), float(optimizer.loss_scale)))
    assert counts[0] == counts[1] == (2, 2.0**16)
    assert_close(*ends)
