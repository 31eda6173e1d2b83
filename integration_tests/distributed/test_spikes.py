"""An outlier on one replica is one on all, by the norm of the whole gradient."""

import keras
import numpy as np
import pytest

from integration_tests.distributed import launch, spikes

BACKEND = keras.backend.backend()


@pytest.mark.skipif(BACKEND != "tensorflow", reason="TensorFlow's replicas")
def test_mirrored_replicas_skip_spikes_together():
    [printed] = launch.run("worker_tensorflow_spikes", [])
    right = spikes.expected(24, np.sum)
    assert right.count(False) == 2
    results = launch.lines_of(printed, "APPLIED")
    assert results == [[right, True, 2]] * 2


@pytest.mark.skipif(BACKEND != "jax", reason="JAX's devices")
def test_shard_map_devices_skip_spikes_together():
    training = pytest.importorskip("integration_tests.distributed.jax_training")
    if not training.HAS_SHARD_MAP:
        pytest.skip(training.NO_SHARD_MAP)
    flags = "--xla_force_host_platform_device_count=2"
    [printed] = launch.run("worker_jax_spikes", [], XLA_FLAGS=flags)
    right = spikes.expected(24, np.mean)
    assert launch.lines_of(printed, "AVERAGED") == [[right, 2]]
    assert launch.lines_of(printed, "SHARDS") == [[right, 2]]


@pytest.mark.skipif(BACKEND != "torch", reason="PyTorch's processes")
@pytest.mark.parametrize("word", ["AVERAGED", "SHARDS"])
def test_torch_processes_skip_spikes_together(processes, word):
    first, second = (launch.lines_of(printed, word) for printed in processes)
    assert first == second
    [[applied, skipped, _]] = first
    assert applied == spikes.expected(24, np.mean)
    assert skipped == 2


@pytest.fixture(scope="module")
def processes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("spikes")
    arguments = [[str(rank), str(folder)] for rank in range(2)]
    return launch.run("worker_torch_spikes", *arguments, OMP_NUM_THREADS="1")
