"""The training of JAX's workers, in each way to train on several devices."""

import functools

import jax
import keras
import numpy as np

from integration_tests.distributed import problem
from integration_tests.distributed.jax_meshes import NAMES
from testing import tiers

AXIS = "batch"

# JAX 0.5 has neither the map nor the types that show over which axes an array varies.
HAS_SHARD_MAP = hasattr(jax, "shard_map") and hasattr(jax.lax, "pcast")
NO_SHARD_MAP = f"JAX {jax.__version__} has no jax.shard_map with jax.lax.pcast"

# The number of participants of each way.
PARTICIPANTS = {
    "data": 4,
    "data on 8": 8,
    "model": 2,
    "shard_map": 4,
    "shard_map, unchecked": 4,
    "shard_map, reduced": 4,
    "shard_map, shards": 4,
    "pmap": 4,
    "pmap, reduced": 4,
}

# The optimizers of each way. Compiling a step takes longer than all steps; those that
# take norms are most likely to go wrong.
ALL, ONE = [*problem.OPTIMIZERS, problem.SPIKES], ["LARS"]
CLIPPED, LARC = ["global_clipnorm"], ["LARC"]
OPTIMIZERS = {
    "data": CLIPPED,
    "data on 8": ONE,
    "model": LARC,
    "shard_map": [*CLIPPED, problem.SPIKES],
    "shard_map, unchecked": ONE,
    "shard_map, reduced": ONE,
    # Keras's `global_clipnorm` sees the norm of a shard there, and is refused.
    "shard_map, shards": [*LARC, problem.SPIKES],
    "pmap": CLIPPED,
    "pmap, reduced": ONE,
}
if tiers.is_full():
    OPTIMIZERS |= {
        **dict.fromkeys(("data", "model", "shard_map"), ALL),
        "shard_map, shards": [name for name in ALL if name not in CLIPPED],
        "pmap": CLIPPED + LARC,
    }


class Training:
    """An optimizer, its variables, and all steps as one function of their values."""

    axis_name: str | None = None

    def __init__(self, name):
        values = zip(problem.initial_weights(), NAMES, strict=True)
        self.variables = [keras.Variable(v, name=name) for v, name in values]
        self.optimizer = problem.make_optimizer(name)
        self.optimizer.build(self.variables)
        self.state = (
            [v.value for v in self.variables],
            [v.value for v in self.optimizer.variables],
        )

    def loss(self, trainable, own, batch):
        x, y, weights = batch
        loss = problem.loss_of(y, problem.predict(trainable, x), weights)
        mapping = list(zip(self.optimizer.variables, own, strict=True))
        with keras.StatelessScope(mapping):
            return self.optimizer.scale_loss(loss)

    def gradients(self, *args):
        return jax.grad(self.loss)(*args)

    def step(self, state, batch):
        trainable, own = state
        trainable, own = self.optimizer.stateless_apply(
            own,
            self.gradients(trainable, own, batch),
            trainable,
            axis_name=self.axis_name,
        )
        state = trainable, list(own)
        return state, state

    def steps(self, state, batches):
        return jax.lax.scan(self.step, state, batches)[1]


def batches(pattern, participants):
    """Returns the batches of all steps, as arrays whose first axis is the step."""
    each = [
        problem.whole_batch(pattern, step, participants)
        for step in range(problem.STEPS)
    ]
    return [np.stack(column) for column in zip(*each, strict=True)]


@functools.cache
def _steps(optimizer):
    training = Training(optimizer)
    return functools.partial(jax.jit(training.steps), training.state)


@functools.cache
def reference(optimizer, pattern, participants):
    """Returns the record of one device that takes the batches of all participants."""
    assert jax.device_count() == 1
    states = _steps(optimizer)(batches(pattern, participants))
    return jax.device_get(jax.tree.leaves(states))


# The calls of `fit` of two processes.
FITS = {
    "data": {
        "participants": 4,
        "optimizer": "LARS",
        "patterns": problem.PATTERNS if tiers.is_full() else ("all", "last"),
    },
    "tf.data": {"participants": 4, "optimizer": "Adam", "patterns": ["random"]},
    "model": {
        "participants": 2,
        "optimizer": "global_clipnorm",
        "patterns": ("all", "first", "random") if tiers.is_full() else ("first",),
    },
}
