"""The ways to train on several devices that JAX has, and who trains in them."""

from integration_tests.distributed import problem

AXIS = "batch"

FEW = ["momentum", "LARS"]
# Keras's `global_clipnorm` sees a shard's norm there, and is refused.
SHARDABLE = [name for name in problem.OPTIMIZERS if name != "global_clipnorm"]

# How many have a batch of their own.
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
