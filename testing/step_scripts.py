"""Scripts of whole steps, which run with the kernels and without them.

A script defines an optimizer, its variables, and the gradients of each step.
"""

import contextlib
import dataclasses

import keras
import numpy as np
from keras import ops

from keras_lso import LossScaleOptimizer
from keras_lso._backend import backend
from testing import kernels
from testing.optimizers import OPTIMIZERS, OURS, WITH_NORMS

BACKEND = keras.backend.backend()


def tensor(values):
    # A copy: changes of the tensor must not reach the script.
    return ops.convert_to_tensor(np.array(values))


def array(value):
    # A copy: on PyTorch the array and the tensor share their memory.
    return np.array(ops.convert_to_numpy(backend.to_dense(value)))


def bits(values):
    return [None if v is None else array(v).tobytes() for v in values]


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


class Run:
    """The variables of a script and their optimizer."""

    def __init__(self, script, compiled=None):
        self.variables = [
            keras.Variable(w, dtype=w.dtype.name, name=NAMES[i % 2])
            for i, w in enumerate(script.start)
        ]
        self.inner = self._make_inner(script.optimizer, **script.options)
        self.optimizer = LossScaleOptimizer(
            self.inner, initial_scale=script.scale, dynamic_growth_steps=2
        )
        self.optimizer.build(self.variables)
        own = f"{self.optimizer.name}/"
        of_the_optimizer = self.optimizer.variables
        self.counters = [v for v in of_the_optimizer if v.path.startswith(own)]
        # Weights, slots, averages, accumulators, masters and the count of steps.
        self.trained = self.variables + [
            v for v in of_the_optimizer if not v.path.startswith(own)
        ]
        self.largest = [np.abs(array(v)).max(initial=0) for v in self.trained]
        # Some ten roundings of 6e-8 per step, of numbers that are no larger than the
        # largest that the tensor has held. A norm, and a division by it, add as many
        # again.
        has_norms = (
            script.optimizer in WITH_NORMS or "global_clipnorm" in script.options
        )
        self.share = 2e-6 if has_norms else 1e-6
        self.apply = self._compile(compiled) if compiled else self._apply

    @staticmethod
    def _make_inner(name, learning_rate=0.125, excluded=None, **options):
        if excluded and name in OURS:
            options["exclude_from_weight_decay"] = excluded
        inner = OPTIMIZERS[name](learning_rate, **options)
        if excluded and name not in OURS:
            inner.exclude_from_weight_decay(var_names=excluded)
        return inner

    def _apply(self, grads):
        self.optimizer.apply(grads, self.variables)

    def _compile(self, compiled):
        state = [*self.variables, *self.optimizer.variables]
        function = compiled(self._apply, state)
        if BACKEND != "jax" or function == self._apply:
            return function
        import jax

        stateless_apply = jax.jit(self.optimizer.stateless_apply)

        def apply(grads):
            own = self.optimizer.variables
            values = [[v.value for v in vs] for vs in (own, self.variables)]
            weights, state = stateless_apply(values[0], grads, values[1])
            for v, new in zip([*self.variables, *own], [*weights, *state], strict=True):
                v.assign(new)

        return apply

    def step(self, grads, is_skipped=False):
        """A step that leaves the gradients unchanged; a skipped one, all variables."""
        given, before = bits(grads), bits(self.trained)
        self.apply(grads)
        assert bits(grads) == given
        assert bool(self.optimizer.last_step_applied) is not is_skipped
        if is_skipped:
            assert bits(self.trained) == before

    def assert_equals(self, reference):
        for v, e in zip(self.counters, reference.counters, strict=True):
            np.testing.assert_array_equal(array(v), array(e), err_msg=v.path)
        pairs = zip(self.trained, reference.trained, strict=True)
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
    fast = Run(script, compiled)
    with kernels.off():
        # XLA takes seconds to compile a step; on JAX eager steps take longer.
        reference = Run(script, compiled if BACKEND == "jax" else None)
    for number, step in enumerate(script.steps):
        for run, context in (
            (fast, contextlib.nullcontext()),
            (reference, kernels.off()),
        ):
            grads = [g and g.make(make_sparse) for g in step]
            if number in script.assigned:
                variable = run.variables[script.assigned[number]]
                value = ops.convert_to_tensor(variable)
                variable.assign(value * ops.cast(value > 0, value.dtype))
            with context:
                run.step(grads, number in script.skipped)
        fast.assert_equals(reference)
