"""Two processes, or replicas, that average gradients; against NumPy.

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
    "small": ("bfloat16", 2.0**-100, 2.0**-99),
    "inf": ("float32", [1.0, 2.0], [np.inf, 4.0]),
    "nan": ("float16", [np.nan, 2.0], [1.0, 4.0]),
    "empty": ("float32", [], []),
    # JAX has no float64 by default.
    "double": ("float64", [1.0, 0.1], [1.0, 0.2]) if BACKEND != "jax" else None,
    # What TensorFlow's graphs hold is fixed before they run.
    "on one": ("float32", [1.0, -2.0], None) if not ON_TENSORFLOW else None,
}
GRADIENTS = {name: grads for name, grads in GRADIENTS.items() if grads}


def expected_mean(dtype, *values):
    if values == (None, None):
        return None
    wide = "float64" if dtype == "float64" else "float32"
    arrays = [np.zeros(np.shape(values[0])) if v is None else v for v in values]
    # What `dtype` cannot hold is none of the values.
    arrays = [np.array(a, wide) for a in arrays]
    return (arrays[0] + arrays[1]) / np.array(2, wide)


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
    """What the two processes print: of replicas, on TensorFlow."""
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
    assert first["count"] == second["count"] == 2
    assert first["means"] == second["means"]
    assert_is_mean(first["means"][0] if ON_TENSORFLOW else first["means"])


@pytest.mark.skipif(ON_TENSORFLOW, reason="its graphs are checked when they run")
def test_processes_with_different_variables_are_rejected_on_all(results):
    for result in results:
        assert "Gradient 1 differs between them: " in result["other shape"]
        assert "['float32', [2]], ['float32', [3]]" in result["other shape"]
        assert "lists of [1, 2] gradients" in result["other number"]
        assert result["none"] == [None]


@pytest.mark.skipif(BACKEND != "jax", reason="arrays and sparse tensors of JAX")
def test_jax_processes_average_sparse_gradients_and_raise_in_jit(results):
    for rank, result in enumerate(results):
        # (60000 + 120000) / 2, which float16 cannot hold.
        assert result["sparse"] == [[90000.0], [2.0], [0.0]]
        # An array of all processes stays what it is; others are averaged beside it.
        assert result["spans processes"] == [[float(rank)], [0.5, 0.5]]
        assert "outside `jax.jit`" in result["in jit"]


@pytest.mark.skipif(not ON_TENSORFLOW, reason="replicas are TensorFlow's")
def test_tensorflow_processes_average_sparse_gradients_and_compare_variables(results):
    own = ["float32 (2,), None", "None, float32 (2,)"]
    for result, variables in zip(results, own, strict=True):
        assert result["sparse"] == [["IndexedSlices", [[90000.0], [2.0], [0.0]], None]]
        assert f"This one has: {variables}" in result["other variables"]


@pytest.mark.skipif(not ON_TENSORFLOW, reason="replicas are TensorFlow's")
def test_replicas_of_one_process_average_gradients_and_train_alike(path):
    [result] = run("worker_processes_tensorflow", [path])
    assert result["count"] == 2
    first, second = result["means"]
    assert first == second
    assert_is_mean(first)
    assert result["trained"][-1] == 2 * [[-0.5, 0.0]]
    assert result["sparse"] == 2 * [["IndexedSlices", [[90000.0], [2.0], [0.0]], None]]
    assert "`strategy.run(train_op, args)`" in result["no replica"]
