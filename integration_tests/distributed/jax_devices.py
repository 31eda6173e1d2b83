"""What the devices of a JAX program hold of one array."""

import jax
import numpy as np


def whole(array, devices):
    """Puts an array together from what some devices hold of it."""
    shards = [s for s in array.addressable_shards if s.device in devices]
    assert {s.device for s in shards} == set(devices)
    found = np.zeros(array.shape, array.dtype)
    seen = np.zeros(array.shape, bool)
    for shard in shards:
        data = np.asarray(shard.data)
        if seen[shard.index].any():
            assert found[shard.index].tobytes() == data.tobytes(), shard.device
        found[shard.index] = data
        seen[shard.index] = True
    assert seen.all()
    return found


def save(path, states, devices):
    """Writes what some devices hold of all arrays, as `problem.save` does."""
    np.savez(path, *[whole(column, devices) for column in jax.tree.leaves(states)])
