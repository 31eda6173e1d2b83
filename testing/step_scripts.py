"""Scripts of whole steps, which run with the kernels and without them.

A script defines an optimizer, its variables, and the gradients of each step.
"""

import contextlib
import dataclasses

import keras
import numpy as np
from keras import ops

from keras_lso import LossScaleOptimizer
from testing import kernels
from testing.harness import BACKEND, Harness, array
from testing.optimizers import OPTIMIZERS, OURS, WITH_NORMS


def tensor(values):
    # A copy: changes of the tensor must not reach the script.
    return ops.convert_to_tensor(np.array(values))


LAYOUTS = {
    "dense": tensor,
    # On PyTorch these are views whose elements are not in memory order, ...
    "transposed": lambda values: ops.transpose(tensor(values.T)),
    # ... have others between them, ...
    "strided": lambda values: ops.repeat(tensor(values), 2, axis=-1)[..., ::2],
    # ... or are one row in place of all.
    "expanded": lambda values: ops.broadcast_to(tensor(values[:1]), values.shape),
}


@dataclasses.dataclass
class Gradient:
    """A gradient that can be made repeatedly."""

    values: np.ndarray
    form: str = "dense"

    @property
    def rows(self):
        """The rows of a sparse gradient.

        Each row occurs once: Keras's Adam treats duplicates on TensorFlow in its own
        way.
        """
        return list(range(len(self.values)))[::-2]

    def poison(self, position, bad):
        if self.form == "sparse":
            self.values[self.rows[position % len(self.rows)], 0] = bad
        elif self.form == "expanded":
            self.values[:1].flat[position % self.values[:1].size] = bad
        else:
            self.values.flat[position % self.values.size] = bad

    def make(self, make_sparse):
        if self.form == "sparse":
            made = make_sparse(self.values[self.rows], self.rows, self.values.shape)
            if BACKEND == "jax":
                # Under `jit` Keras's Adam squares only such gradients.
                made.unique_indices = True
            return made
        return LAYOUTS[self.form](self.values)


@dataclasses.dataclass
class Script:
    """An optimizer, its variables, and a list of gradients for each step."""

    optimizer: str
    options: dict
    start: list
    scale: float
    steps: list
    skipped: tuple = ()
    assigned: dict = dataclasses.field(default_factory=dict)


NAMES = ["kernel", "bias"]


class Scripted(Harness):
    """The optimizer of a script; its steps take tensors, which are scaled."""

    def __init__(self, script, compiled=None):
        inner = self._make_inner(script.optimizer, **script.options)
        super().__init__(
            LossScaleOptimizer(
                inner, initial_scale=script.scale, dynamic_growth_steps=2
            ),
            [
                keras.Variable(w, dtype=w.dtype.name, name=NAMES[i % 2])
                for i, w in enumerate(script.start)
            ],
            compiled=compiled,
            stateless=bool(compiled) and BACKEND == "jax",
        )
        state = set(map(id, self.state))
        self.counters = [v for v in self.optimizer.variables if id(v) not in state]
        self.largest = [np.abs(array(v)).max(initial=0) for v in self.state]
        # Some ten roundings of 6e-8 per step, of numbers that are no larger than the
        # largest that the tensor has held. A norm, and a division by it, add as many
        # again. Muon makes small singular values, and their roundings, up to 3.4 times
        # as large in each of five turns.
        has_norms = (
            script.optimizer in WITH_NORMS or "global_clipnorm" in script.options
        )
        self.share = 2e-6 if has_norms else 1e-6
        if script.optimizer == "muon":
            self.share = 1e-5

    @staticmethod
    def _make_inner(name, learning_rate=0.125, excluded=None, **options):
        if excluded and name in OURS:
            options["exclude_from_weight_decay"] = excluded
        inner = OPTIMIZERS[name](learning_rate, **options)
        if excluded and name not in OURS:
            inner.exclude_from_weight_decay(var_names=excluded)
        return inner

    def scaled(self, grads, dtype=None):
        return grads

    def step(self, grads, is_skipped=False):
        """Takes a step; a skipped one leaves the state unchanged."""
        with self.unchanged() if is_skipped else contextlib.nullcontext():
            assert super().step(grads) is not is_skipped

    def assert_equals(self, reference):
        for v, e in zip(self.counters, reference.counters, strict=True):
            np.testing.assert_array_equal(array(v), array(e), err_msg=v.path)
        pairs = zip(self.state, reference.state, strict=True)
        for i, (v, e) in enumerate(pairs):
            e = array(e)
            self.largest[i] = max(self.largest[i], np.abs(e).max(initial=0))
            # A float16 variable is its rounded master, which may round to either side.
            share = 2**-10 if v.dtype == "float16" else self.share
            share = share if "float" in v.dtype else 0
            np.testing.assert_allclose(
                array(v), e, rtol=0, atol=share * self.largest[i], err_msg=v.path
            )


def compare(script, make_sparse=None, compiled=None):
    """Runs a script with the kernels and without them."""
    fast = Scripted(script, compiled)
    with kernels.off():
        # XLA takes seconds to compile a step; on JAX eager steps take longer.
        reference = Scripted(script, compiled if BACKEND == "jax" else None)
    for number, step in enumerate(script.steps):
        for run, context in (
            (fast, contextlib.nullcontext()),
            (reference, kernels.off()),
        ):
            grads = [g and g.make(make_sparse) for g in step]
            if number in script.assigned:
                variable = run.weights[script.assigned[number]]
                value = ops.convert_to_tensor(variable)
                variable.assign(value * ops.cast(value > 0, value.dtype))
            with context:
                run.step(grads, number in script.skipped)
        fast.assert_equals(reference)
