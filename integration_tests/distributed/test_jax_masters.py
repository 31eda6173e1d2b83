"""Weights of 16 bits on several JAX devices: every way to step makes the same of them.

Shards draw the random bits of their elements in the whole weight. XLA leaves out a
rounding where a processor multiplies and adds at once, in one program and not in the
other: here it takes no such instructions.
"""

import pytest

from integration_tests.distributed import launch
from integration_tests.distributed.jax_training import HAS_SHARD_MAP

FLAGS = "--xla_force_host_platform_device_count=4 --xla_cpu_max_isa=AVX"


@pytest.mark.full
def test_every_way_to_step_gives_bitwise_equal_weights():
    [printed] = launch.run("worker_jax_masters", [], XLA_FLAGS=FLAGS)
    found = launch.lines_of(printed, "WAY")
    assert len(found) == 2 * (1 + HAS_SHARD_MAP)
    assert all(is_same for *_, is_same in found), found
