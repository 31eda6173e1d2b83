"""Weights of 16 bits on several JAX devices: every way to step makes the same of them.

Shards draw the random bits of their elements in the whole weight. XLA leaves out a
rounding where a processor multiplies and adds at once, in one program and not in the
other: here it takes no such instructions.
"""

import functools

import numpy as np
import pytest

from integration_tests.distributed import launch
from integration_tests.distributed.jax_training import HAS_SHARD_MAP
from testing.tiers import is_full

# `make test` has a run of each kind elsewhere.
pytestmark = pytest.mark.full

FLAGS = "--xla_force_host_platform_device_count=4 --xla_cpu_max_isa=AVX"


@pytest.fixture(scope="module")
def printed():
    [text] = launch.run("worker_jax_masters", [], XLA_FLAGS=FLAGS)
    return functools.partial(launch.lines_of, text)


def test_every_way_to_step_gives_bitwise_equal_weights(printed):
    found = printed("WAY")
    ways = (5 if is_full() else 1) + 2 * HAS_SHARD_MAP
    assert len(found) == ways * 2 * (8 if is_full() else 1)
    for name, dtype, kind, way, are_same, skipped in found:
        # A norm of shards is added up in another order.
        has_norm = name in ("LARS", "NovoGrad") and way in ("sharded", "distributed")
        assert all(are_same) or has_norm, (name, dtype, kind, way, are_same)
        assert skipped == 1


def test_remainders_match_float32_masters_in_compiled_step(printed):
    for name, dtype, numbers in printed("NUMBERS"):
        pairs = zip(numbers["remainder"], numbers["float32"], strict=True)
        for ours, right in pairs:
            ours, right = np.float32(ours), np.float32(right)
            is_normal = (np.abs(right) >= 2.0**-14) | (dtype == "bfloat16")
            np.testing.assert_array_equal(
                ours[is_normal], right[is_normal], err_msg=f"{name}, {dtype}"
            )
