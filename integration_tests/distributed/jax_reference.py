"""What one device records on the concatenated batches of all participants."""

import functools

import jax

from integration_tests.distributed import jax_training


@functools.cache
def _steps(optimizer):
    training = jax_training.Training(optimizer)
    return functools.partial(jax.jit(training.steps), training.state)


@functools.cache
def record(optimizer, pattern, participants):
    """Returns what `problem.load` would, of the one device of this process."""
    assert jax.device_count() == 1
    states = _steps(optimizer)(jax_training.batches(pattern, participants))
    return jax.device_get(jax.tree.leaves(states))
