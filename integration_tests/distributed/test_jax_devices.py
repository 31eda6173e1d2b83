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


LAST_BATCH = """
import keras, numpy as np
import keras_lso

keras.distribution.set_distribution(keras.distribution.DataParallel())
for wrap in (lambda inner: inner, keras_lso.GuardedOptimizer):
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile(wrap(keras.optimizers.Adam()), loss="mse")
    x = np.ones((5, 4), "float32")
    try:
        model.fit(x, x[:, :1], batch_size=4, verbose=0)
    except Exception as error:
        print(type(error).__name__)
"""


@pytest.mark.full
def test_batch_that_devices_do_not_divide_is_error_of_every_optimizer(tmp_path):
    program = tmp_path / "last_batch.py"
    program.write_text(LAST_BATCH)
    flags = "--xla_force_host_platform_device_count=2"
    worker = launch.Worker(program, [], {"XLA_FLAGS": flags})
    printed, errors = worker.communicate(launch.TIMEOUT)
    assert printed.split() == ["IndivisibleError"] * 2, errors
