"""Compares steps of a `LossScaleOptimizer` with steps of the inner optimizer alone.

Keras's own optimizer is the reference. It gets the same gradients, unscaled, and only
the finite ones.
"""

import keras
import numpy as np
from keras import ops

import keras_lso
from keras_lso._backend import backend

SCALE = 1024.0
# Small and large tensors, with more elements than are added up one by one.
SHAPES = [(3,), (2, 2), (200, 100)]
# On the host, which can read flags, and on a device whose tensors the host must not
# read.
WAYS = ["host", "accelerator"] if keras.backend.backend() == "torch" else ["host"]


def take(way, monkeypatch):
    """Makes PyTorch treat the CPU as an accelerator, if `way` says so."""
    if way == "accelerator":
        name = "keras_lso._backend.torch.measure.is_on_host"
        monkeypatch.setattr(name, lambda tensor: False)


class Pair:
    """Our optimizer and Keras's, each with its own variables."""

    def __init__(self, make, dtype="float32", scale=SCALE, **options):
        self.random = np.random.default_rng(1)
        start = [self.random.normal(size=s) for s in SHAPES]
        self.ours, self.theirs = (
            [keras.Variable(w.astype(dtype).astype(d), dtype=d) for w in start]
            for d in (dtype, "float32")
        )
        self.inner = make(0.125, **options)
        self.optimizer = keras_lso.LossScaleOptimizer(
            make(0.125, **options), initial_scale=scale
        )
        self.optimizer.build(self.ours)

    def gradients(self, size=1.0):
        return [(self.random.normal(size=s) * size).astype("float32") for s in SHAPES]

    def apply(self, grads, dtype="float32"):
        scale = float(self.optimizer.loss_scale)
        scaled = [(g * scale).astype(dtype) for g in grads]
        tensors = [ops.convert_to_tensor(g) for g in scaled]
        self.optimizer.apply(tensors, self.ours, scaled=True)

    def apply_to_keras(self, grads):
        self.inner.apply([ops.convert_to_tensor(g) for g in grads], self.theirs)

    def step(self, size=1.0):
        self.step_by(self.gradients(size))

    def step_by(self, grads, dtype="float32"):
        self.apply(grads, dtype)
        self.apply_to_keras(grads)

    def step_in_float16(self):
        grads = [g.astype("float16").astype("float32") for g in self.gradients()]
        self.step_by(grads, "float16")

    def step_without(self, missing):
        """Takes a step in which variable number `missing`, if any, has no gradient."""
        grads = self.gradients()
        ours, theirs = ([*map(ops.convert_to_tensor, grads)] for _ in "ab")
        if missing is not None:
            ours[missing] = theirs[missing] = None
        self.optimizer.apply(ours, self.ours, scaled=False)
        self.inner.apply(theirs, self.theirs)

    def overflow(self, bad):
        """Applies a gradient that is not finite, and checks that nothing moves."""
        grads = self.gradients()
        grads[2][7, 5] = bad
        before = bits(self.state())
        self.apply(grads)
        assert bits(self.state()) == before

    def state(self):
        return [*self.ours, *self.optimizer.inner_optimizer.variables]

    def assert_alike(self, rtol=2e-6):
        """Compares weights, slots, sums and averages, and the count of steps."""
        expected = [*self.theirs, *self.inner.variables]
        for ours, theirs in zip(self.state(), expected, strict=True):
            a, b = map(ops.convert_to_numpy, (ours, theirs))
            atol = rtol * np.abs(b).max(initial=0)
            np.testing.assert_allclose(a, b, rtol=0, atol=atol, err_msg=ours.path)

    def assert_weights_alike_in_float16(self):
        for ours, theirs in zip(self.ours, self.theirs, strict=True):
            a, b = (ops.convert_to_numpy(v).astype("float32") for v in (ours, theirs))
            # Half a unit in the last place of a float16.
            np.testing.assert_allclose(a, b, rtol=2.0**-11, atol=1e-7)

    def assert_stateless_steps_are_those_of(self, twin, count):
        """Takes stateless steps, and a twin's steps; arguments stay unchanged."""
        weights = [v.value for v in self.ours]
        state = [v.value for v in self.optimizer.variables]
        for _ in range(count):
            grads = [ops.convert_to_tensor(g) for g in self.gradients()]
            kept = bits([*weights, *state])
            new = self.optimizer.stateless_apply(state, grads, weights)
            assert bits([*weights, *state]) == kept
            weights, state = new
            twin.optimizer.apply([ops.copy(g) for g in grads], twin.ours)
        assert bits(weights) == bits(twin.ours)
        assert bits(state) == bits(twin.optimizer.variables)


def bits(variables):
    return [np.array(ops.convert_to_numpy(v)).tobytes() for v in variables]


def steps_by_rule(optimizer):
    """Whether a `LossScaleOptimizer` updates variables by a rule on this backend."""
    updates = filter(None, optimizer._step._updates.values())
    both = [(update, update.stored("weights")) for update in updates]
    return any(backend.takes_update(u.rule, w, w.variables) for u, w in both)
