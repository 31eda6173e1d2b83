"""A harness for tests of steps: an optimizer, its weights, and gradients for them."""

import contextlib

import keras
import numpy as np
import pytest
from keras import ops

from keras_lso import LossScaleOptimizer
from keras_lso._backend import backend

BACKEND = keras.backend.backend()
SCALE = 1024.0
# Small and large tensors, with more elements than are added up one by one.
SHAPES = [(3,), (2, 2), (200, 100)]
# On the host, which can read flags, and on a device whose tensors the host must not
# read.
WAYS = ["host", "accelerator"] if BACKEND == "torch" else ["host"]


def take(way, monkeypatch):
    """Makes PyTorch treat the CPU as an accelerator if `way` is "accelerator"."""
    if way == "accelerator":
        name = "keras_lso._backend.torch.measure.is_on_host"
        monkeypatch.setattr(name, lambda tensor: False)


def array(value):
    dense = backend.to_dense(value)
    # Keras does not convert TensorFlow's tensors in bfloat16.
    is_convertible = BACKEND != "tensorflow"
    # A copy: on PyTorch the array and the tensor share their memory.
    return np.array(ops.convert_to_numpy(dense) if is_convertible else dense.numpy())


def as_tensor(values, dtype):
    return ops.cast(ops.convert_to_tensor(values), dtype)


def bits(values):
    return [None if v is None else array(v).tobytes() for v in values]


def steps_by_rule(optimizer):
    """Whether a `LossScaleOptimizer` updates variables by a rule on this backend."""
    updates = filter(None, optimizer._step._updates.values())
    both = [(update, update.weights.stored()) for update in updates]
    return any(backend.takes_update(u.rule, w, w.variables) for u, w in both)


class Harness:
    """An optimizer and its weights, which take steps by given or random gradients.

    `start` has a shape or a variable for each weight. `compiled` is a value of the
    fixture of that name. With `stateless`, steps call `stateless_apply` and assign its
    results. Every `overflow_every`-th list of random gradients is not finite.
    """

    def __init__(
        self,
        optimizer,
        start=SHAPES,
        dtype="float32",
        compiled=None,
        stateless=False,
        overflow_every=None,
    ):
        random = np.random.default_rng(0)
        self.weights = [
            keras.Variable(random.normal(size=s).astype("float32") / 2, dtype=dtype)
            if isinstance(s, tuple)
            else s
            for s in start
        ]
        self.optimizer = optimizer
        self.inner = getattr(optimizer, "inner_optimizer", optimizer)
        self.random, self.drawn = np.random.default_rng(1), 0
        self.overflow_every = overflow_every
        optimizer.build(self.weights)
        self._arguments = (
            {"scaled": True} if isinstance(optimizer, LossScaleOptimizer) else {}
        )
        self._apply = self._take
        if stateless:
            compiled = compiled or (lambda function, variables: function)
            self._stateless_apply = compiled(optimizer.stateless_apply, [])
            self._apply = self._take_stateless
        elif compiled:
            self._apply = compiled(self._take, [*self.weights, *optimizer.variables])

    # --- Gradients ------------------------------------------------------------------

    def gradients(self, size=1.0, norm=None):
        """Draws unscaled gradients as arrays, with a joint norm if it is given."""
        grads = [self.random.normal(size=w.shape) for w in self.weights]
        if norm is not None:
            size = norm / np.sqrt(sum(np.square(g).sum() for g in grads))
        grads = [np.asarray(g * size, "float32") for g in grads]
        self.drawn += 1
        if self.overflow_every and self.drawn % self.overflow_every == 0:
            grads[1] = grads[1] * np.float32(np.inf)
        return grads

    def scaled(self, grads, dtype=None):
        """Returns tensors of gradients times the loss scale, if there is one.

        By default, each has the dtype of its weight.
        """
        scale = np.float32(getattr(self.optimizer, "loss_scale", 1.0))
        return [
            None if g is None else as_tensor(g * scale, dtype or w.dtype)
            for g, w in zip(grads, self.weights, strict=False)
        ]

    # --- Steps ----------------------------------------------------------------------

    def apply(self, tensors, *variables, **arguments):
        """Applies scaled gradients to variables, or to the first weights."""
        self._apply(tensors, *variables, **arguments)

    def _take(self, tensors, variables=None, **arguments):
        variables = variables or self.weights[: len(tensors)]
        self.optimizer.apply(tensors, variables, **self._arguments | arguments)

    def _take_stateless(self, tensors):
        variables = self.optimizer.variables
        weights, state = ([v.value for v in vs] for vs in (self.weights, variables))
        new = self._stateless_apply(state, tensors, weights)
        for variable, value in zip(
            [*self.weights, *variables], [*new[0], *new[1]], strict=True
        ):
            variable.assign(value)

    def step(self, grads=None, dtype=None, **drawn):
        """Takes a step by unscaled gradients; returns whether it was applied."""
        grads = self.gradients(**drawn) if grads is None else grads
        tensors = self.scaled(grads, dtype)
        before = bits(tensors)
        self.apply(tensors)
        assert bits(tensors) == before, "The step changed a gradient."
        return bool(getattr(self.optimizer, "last_step_applied", True))

    def steps(self, count):
        """Takes random steps; returns the harness."""
        for _ in range(count):
            self.step()
        return self

    def overflow(self, bad=np.inf):
        """Takes a step with an element that is not finite, which must be skipped."""
        grads, skipped = self.gradients(), self.skipped
        grads[-1].flat[grads[-1].size // 2] = bad
        with self.unchanged():
            assert not Harness.step(self, grads)
        assert self.skipped == skipped + 1

    # --- The results of steps -------------------------------------------------------

    @property
    def skipped(self):
        return int(self.optimizer.skipped_steps)

    @property
    def scale(self):
        return float(self.optimizer.loss_scale)

    @property
    def state(self):
        """The variables that a skipped step leaves unchanged."""
        masters = getattr(self.optimizer, "_masters", None)
        return [
            *self.weights,
            *self.inner.variables,
            *([] if masters is None else masters.variables),
        ]

    def values(self):
        """The weights in float32."""
        return [array(ops.cast(w, "float32")) for w in self.weights]

    def bits(self):
        """The bits of the weights, and of all variables of the optimizer."""
        return bits(self.weights), bits(self.optimizer.variables)

    @contextlib.contextmanager
    def unchanged(self, *more):
        """Expects that no bit of the state changes, nor of more variables."""
        variables = [*self.state, *more]
        before = bits(variables)
        yield
        pairs = zip(variables, before, bits(variables), strict=True)
        assert [v.path for v, old, new in pairs if old != new] == []

    def assert_stateless_steps_equal_those_of(
        self, twin, steps, compiled=None, **arguments
    ):
        """Compares `stateless_apply` with `apply` of a twin, by the same gradients.

        It changes neither its arguments nor the variables.
        """
        if BACKEND == "tensorflow":
            pytest.skip("Keras has no `stateless_apply` on TensorFlow")
        arguments = self._arguments | arguments

        def apply(state, tensors, weights):
            return self.optimizer.stateless_apply(state, tensors, weights, **arguments)

        if compiled is not None:
            apply = compiled(apply, [])
        weights = [v.value for v in self.weights]
        state = [v.value for v in self.optimizer.variables]
        assert self.bits() == twin.bits()
        with self.unchanged(*self.optimizer.variables):
            for grads in steps:
                tensors = twin.scaled(grads)
                before = bits([*state, *tensors, *weights])
                new = apply(state, tensors, weights)
                assert bits([*state, *tensors, *weights]) == before
                weights, state = new
                twin.apply(tensors, **arguments)
                assert (bits(weights), bits(state)) == twin.bits()


class BesideKeras(Harness):
    """A `LossScaleOptimizer` beside its inner optimizer alone, which is the reference.

    The reference trains float32 weights, and takes each step that is not skipped.
    """

    def __init__(self, make, dtype="float32", scale=SCALE, **options):
        optimizer = LossScaleOptimizer(make(0.125, **options), initial_scale=scale)
        super().__init__(optimizer, dtype=dtype)
        copies = [keras.Variable(value) for value in self.values()]
        self.keras = Harness(make(0.125, **options), copies)

    def step(self, grads=None, **drawn):
        grads = self.gradients(**drawn) if grads is None else grads
        if "16" in self.weights[0].dtype:
            grads = [array(as_tensor(g, self.weights[0].dtype)) for g in grads]
            grads = [g.astype("float32") for g in grads]
        super().step(grads)
        self.keras.step(grads)

    def set(self, **attributes):
        """Sets attributes of both inner optimizers."""
        for inner in (self.inner, self.keras.optimizer):
            for name, value in attributes.items():
                setattr(inner, name, value)

    def assert_alike(self, rtol=2e-6):
        """Compares weights, slots, sums and averages, and the count of steps."""
        for ours, theirs in zip(self.state, self.keras.state, strict=True):
            a, b = array(ours), array(theirs)
            atol = rtol * np.abs(b).max(initial=0)
            np.testing.assert_allclose(a, b, rtol=0, atol=atol, err_msg=ours.path)

    def assert_weights_alike_in_float16(self):
        # Half a unit in the last place of a float16.
        for ours, theirs in zip(self.values(), self.keras.values(), strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=2.0**-11, atol=1e-7)
