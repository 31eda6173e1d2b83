"""Two processes that average gradients; against NumPy.

Sums of two numbers halved: in float32 NumPy's are the same, bit for bit.
"""

import json
import pathlib

import keras
import numpy as np
import pytest

from integration_tests.distributed import launch

BACKEND = keras.backend.backend()
ON_TENSORFLOW = BACKEND == "tensorflow"

# A name: the dtype, and the gradients on the two processes.
RANDOM = np.random.default_rng(0)
GRADIENTS = {
    "plain": ("float32", *RANDOM.normal(size=(2, 3, 2)).astype("float32").tolist()),
    "on none": ("float32", None, None),
    "large": ("float16", [60000.0, -1.0], [60000.0, 3.0]),
    "inf": ("float32", [1.0, 2.0], [np.inf, 4.0]),
}


def expected_mean(dtype, first, second):
    if first is None:
        return None
    return (np.float32(first) + np.float32(second)) / np.float32(2)


def mean_of(bits):
    if bits is None:
        return None
    dtype, shape, data = bits
    return np.frombuffer(bytes.fromhex(data), dtype).reshape(shape)


def run(name, *lists_of_arguments):
    """Returns what the worker prints, run once for each list at the same time."""
    outputs = launch.run(name, *lists_of_arguments)
    results = [r for printed in outputs for r in launch.lines_of(printed, "RESULT")]
    assert len(results) == len(outputs)
    return results


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """The file of gradients."""
    lists = [
        [None if g[1 + i] is None else [g[0], g[1 + i]] for g in GRADIENTS.values()]
        for i in range(2)
    ]
    path = tmp_path_factory.mktemp("processes") / "gradients.json"
    path.write_text(json.dumps(lists))
    return str(path)


@pytest.fixture(scope="module")
def results(path):
    """What the two processes print."""
    if ON_TENSORFLOW:
        ports = launch.free_ports(2)
        name = "worker_processes_tensorflow"
        return run(name, [path, "0", *ports], [path, "1", *ports])
    arguments = [str(pathlib.Path(path).parent), *launch.free_ports(1), path]
    return run("worker_processes", ["0", *arguments], ["1", *arguments])


def assert_is_mean(means):
    assert len(means) == len(GRADIENTS)
    for (name, grads), bits in zip(GRADIENTS.items(), means, strict=True):
        actual, expected = mean_of(bits), expected_mean(*grads)
        if expected is None:
            assert actual is None, name
            continue
        assert actual.dtype == expected.dtype, name
        np.testing.assert_array_equal(actual, expected, err_msg=name, strict=True)


def test_training_op_steps_by_mean_and_skips_on_all_processes(results):
    # By half of the mean of four batches, two on each of two processes.
    after_first = [1.0 - 0.5 * 2.0, 2.0 - 0.5 * 2.0]
    after_last = [0.0 - 0.5 * 1.0, 1.0 - 0.5 * 2.0]
    expected = [[1.0, 2.0], *[after_first] * 4, after_last]
    for result in results:
        if ON_TENSORFLOW:
            expected_here = [[values] for values in expected]
            assert "cross-replica context" in result["outside of replicas"]
            assert "`strategy.run(train_op, args)`" in result["outside of all"]
        else:
            expected_here = expected
        assert result["trained"] == expected_here
        assert result["scale"] == 2.0**13


def test_all_processes_receive_mean_of_gradients(results):
    first, second = results
    assert first["means"] == second["means"]
    assert_is_mean(first["means"][0] if ON_TENSORFLOW else first["means"])


@pytest.mark.skipif(BACKEND != "jax", reason="arrays of all processes are JAX's")
def test_jax_processes_leave_arrays_of_all_processes_as_they_are(results):
    for rank, result in enumerate(results):
        assert result["spans processes"] == [[float(rank)], [0.5, 0.5]]
