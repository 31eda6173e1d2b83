"""Several devices of one JAX process skip together, and step as one."""

import pytest

from integration_tests.distributed import jax_training, launch, problem
from integration_tests.distributed.jax_training import (
    HAS_SHARD_MAP,
    NO_SHARD_MAP,
    OPTIMIZERS,
    PARTICIPANTS,
)

EIGHT_DEVICES = "--xla_force_host_platform_device_count=8"

# How many copies of the model there are, where not each participant has one.
COPIES = {"shard_map, shards": 1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("jax_devices")
    launch.run("worker_jax_devices", [str(folder)], XLA_FLAGS=EIGHT_DEVICES)
    return folder


@pytest.mark.parametrize("pattern", [*problem.PATTERNS, problem.SPIKES])
@pytest.mark.parametrize("way", PARTICIPANTS)
def test_all_jax_devices_step_and_skip_like_single_device(folder, way, pattern):
    if way.startswith("shard_map") and not HAS_SHARD_MAP:
        pytest.skip(NO_SHARD_MAP)
    participants = PARTICIPANTS[way]
    names = [n for n in OPTIMIZERS[way] if pattern in problem.patterns_of(n)]
    for name in names:
        copies = [
            problem.load(folder / f"{way}-{name}-{pattern}-{i}.npz")
            for i in range(COPIES.get(way, participants))
        ]
        for copy in copies:
            problem.assert_bitwise_equal(copy, copies[0])
        expected = jax_training.reference(name, pattern, participants)
        problem.assert_right(copies[0], pattern, participants, expected)
