"""Weights and slots of 16 and 8 bits on several JAX devices: all ways step alike.

Shards draw the random bits of their elements in the whole weight. XLA leaves out a
rounding where a processor multiplies and adds at once, in one program and not in the
other: here it takes no such instructions.
"""

import pytest

from integration_tests.distributed import launch
from integration_tests.distributed.jax_training import HAS_SHARD_MAP

FLAGS = "--xla_force_host_platform_device_count=4 --xla_cpu_max_isa=AVX"


@pytest.mark.full
def test_every_way_to_step_gives_bitwise_equal_weights_and_slots():
    [printed] = launch.run("worker_jax_masters", [], XLA_FLAGS=FLAGS)
    found = launch.lines_of(printed, "WAY")
    assert len(found) == 6 * (1 + 2 * HAS_SHARD_MAP)
    assert all(is_same for *_, is_same in found), found
