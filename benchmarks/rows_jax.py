"""How a step of a Keras optimizer runs on JAX, and how it is timed there."""

import gc
import time
from functools import partial

import jax
import jax.numpy as jnp
import keras

from benchmarks import machine
from benchmarks.inner import SCALE
from benchmarks.timing import Step

MODES = ("jit",)
MORE_ROWS = {}
"""See `rows_torch.MORE_ROWS`."""

_DEVICE = jax.devices()[0]
# A GPU runs what was queued before. As in training, the host need not wait for it.
_BURST = 1 if _DEVICE.platform == "cpu" else 10


def gpu():
    """Returns the name of the GPU that is used, or None."""
    return None if _DEVICE.platform == "cpu" else _DEVICE.device_kind


class Tensors:
    """The tensors of a group. Its rows share the gradients, which never change."""

    def __init__(self, data):
        self.dtype = getattr(jnp, data.kind)
        self._weights = data.weights
        self.gradients = {
            True: [jnp.asarray(g * SCALE, self.dtype) for g in data.gradients],
            False: [jnp.array(g, self.dtype) for g in data.gradients],
        }

    def weights(self):
        """Returns new float32 arrays. Copies: a step is given them to overwrite."""
        return [jnp.array(w, copy=True) for w in self._weights]

    def variables(self):
        """Returns new Keras variables, in the dtype of the group."""
        dtype = keras.backend.standardize_dtype(self.dtype)
        return [keras.Variable(w, dtype=dtype) for w in self.weights()]


def keras_step(mode, optimizer, variables, tensors, scaled):
    """Builds a Keras optimizer and returns its `Step`, jitted as `fit` jits it."""
    optimizer.build(variables)

    def step(state, gradients):
        trainable, own = state
        return optimizer.stateless_apply(own, gradients, trainable)

    state = [v.value for v in variables], [v.value for v in optimizer.variables]
    return jitted_step(step, state, tensors.gradients[scaled])


def jitted_step(function, state, gradients):
    """Returns the `Step` of a function from state and gradients to the new state.

    The state is donated, and leaves in the order it came in, weights first. It goes in
    and out as a flat list, so that what classes do when JAX builds them anew (jmp's
    looks at dtypes) is not timed.
    """
    values, structure = jax.tree.flatten(state)
    weights = len(state[0])
    del state

    def flat(values, gradients):
        return jax.tree.leaves(function(structure.unflatten(values), gradients))

    jitted = jax.jit(flat, donate_argnums=0)

    def run():
        nonlocal values
        values = jitted(values, gradients)
        return values

    def current():
        arrays = jax.device_get(values)
        return arrays[:weights], arrays[weights:]

    def extra():
        memory = jitted.lower(values, gradients).compile().memory_analysis()
        new = memory.output_size_in_bytes - memory.alias_size_in_bytes
        return memory.temp_size_in_bytes + new

    return Step(run, current, extra_bytes=extra)


def seconds(step):
    """Returns the seconds of one step; on a GPU the mean of several in its queue."""
    start = time.perf_counter()
    for _ in range(_BURST):
        result = step.run()
    jax.block_until_ready(result)
    return (time.perf_counter() - start) / _BURST


def first_seconds(step):
    """Returns the seconds of the first step: tracing, compiling and running it."""
    start = time.perf_counter()
    jax.block_until_ready(step.run())
    return time.perf_counter() - start


def stream_clocks(mebibytes):
    """Returns clocks of ways to move memory, and the bytes that each moves."""
    if gpu() is None:
        streams, bytes_ = machine.streams(2**20 * mebibytes)
        return {n: partial(seconds, Step(s)) for n, s in streams.items()}, bytes_
    source = jnp.ones(2**18 * mebibytes, "float32")
    copy = jax.jit(jnp.negative)
    return {"copy": partial(seconds, Step(lambda: copy(source)))}, 2 * source.nbytes


def extra_bytes(step):
    """Returns the bytes of temporaries and of results that take no argument's place."""
    return step.extra_bytes()


def counted_step(mode, optimizer, variables):
    """Returns a step on gradients, and a function that counts its compilations."""
    optimizer.build(variables)

    @jax.jit
    def stateless(trainable, own, gradients):
        return optimizer.stateless_apply(own, gradients, trainable)

    def step(gradients):
        own = optimizer.variables
        new = stateless([v.value for v in variables], [v.value for v in own], gradients)
        for variable, value in zip([*variables, *own], sum(new, []), strict=True):
            variable.assign(value)

    return step, stateless._cache_size


def release():
    """Frees what a group has left."""
    jax.clear_caches()
    gc.collect()
