"""Gradients averaged over processes, as far as one process can show it.

`integration_tests/distributed/test_processes.py` runs two.
"""

import json
import sys
import types

import keras
import numpy as np
import pytest
from keras import ops

from keras_lso.compat import backend
from keras_lso.compat.backend import loading_only, processes

BACKEND = keras.backend.backend()
GRADIENTS = [
    ([60000.0, -1.0], "float16"),
    ([1.0, np.inf], "float32"),
    (2.0, "bfloat16"),
]


@pytest.fixture
def grads():
    grads = [ops.convert_to_tensor(g, dtype=dtype) for g, dtype in GRADIENTS]
    return [*grads[:1], None, *grads[1:]]


def assert_means(means, factor):
    assert means[1] is None
    means = [means[0], *means[2:]]
    for mean, (values, _) in zip(means, GRADIENTS, strict=True):
        assert keras.backend.standardize_dtype(mean.dtype) == "float32"
        np.testing.assert_array_equal(
            ops.convert_to_numpy(mean), factor * np.array(values, "float32")
        )


# --- nothing runs -----------------------------------------------------------

HOW_TO_START = {
    "tensorflow": ["tf.distribute.MirroredStrategy()", "strategy.run", "hvd.init()"],
    "jax": ["jax.distributed.initialize(", "num_processes"],
    "torch": ["init_process_group()", "torchrun --nproc-per-node", "hvd.init()"],
}


def test_error_without_running_processes_says_how_to_start_them(grads):
    assert backend.count_processes() is None
    for refused in (
        backend.check_processes_run,
        lambda: backend.average_over_processes(grads),
    ):
        with pytest.raises(RuntimeError, match="nothing does") as error:
            refused()
        for words in HOW_TO_START[BACKEND]:
            assert words in str(error.value)


def test_backend_that_cannot_train_has_no_processes(grads, monkeypatch):
    monkeypatch.setattr(backend, "_own", loading_only)
    assert backend.count_processes() is None
    with pytest.raises(RuntimeError, match="has no processes"):
        backend.average_over_processes(grads)


# --- Horovod ----------------------------------------------------------------


def not_initialized():
    raise ValueError("Horovod has not been initialized; use hvd.init().")


@pytest.fixture
def horovod(monkeypatch):
    """Horovod as two processes have it, of which the other's gradients are tripled.

    It has what `backend` calls, and what that returns.
    """
    module = types.ModuleType(f"horovod.{BACKEND}")
    module.size = lambda: 2
    module.messages = lambda message: [message, message]
    if BACKEND == "tensorflow":
        import tensorflow as tf

        def allgather(tensor):
            return tf.concat(module.messages(tensor), axis=0)

        def allreduce(tensor):
            if isinstance(tensor, tf.IndexedSlices):
                values = tf.concat([tensor.values, tensor.values * 3], axis=0) / 2
                return tf.IndexedSlices(values, allgather(tensor.indices))
            return (tensor + tensor * 3) / 2

        module.allgather = allgather
    else:

        def allreduce(tensor):
            return (tensor + tensor * 3) / 2

        module.allgather_object = lambda message: module.messages(message)
    module.allreduce = allreduce
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


has_horovod = pytest.mark.skipif(BACKEND == "jax", reason="Horovod knows no JAX")


@has_horovod
def test_horovod_averages_gradients_over_processes(horovod, grads):
    assert backend.count_processes() == 2
    backend.check_processes_run()
    # 60000 and 180000: they are added up in float32.
    assert_means(backend.average_over_processes(grads), factor=2)


@has_horovod
def test_uninitialized_horovod_counts_as_no_processes(horovod, grads):
    horovod.size = not_initialized
    assert backend.count_processes() is None
    with pytest.raises(RuntimeError, match="nothing does"):
        backend.average_over_processes(grads)


@pytest.mark.skipif(BACKEND != "jax", reason="Horovod knows no JAX")
def test_jax_ignores_horovod(horovod):
    assert backend.count_processes() is None


@pytest.mark.skipif(BACKEND != "torch", reason="a process of PyTorch alone may differ")
def test_gradient_missing_in_one_process_counts_as_zero(horovod):
    answers = iter(
        [
            lambda mine: [mine, mine[:32][::-1] + (40).to_bytes(8, "big")],
            lambda mine: [mine, b'[["float32", [2]]]'.ljust(40)],
        ]
    )
    horovod.messages = lambda mine: next(answers)(mine)
    [mean] = backend.average_over_processes([None])
    assert mean.tolist() == [0.0, 0.0]


@pytest.mark.parametrize(
    "others, words",
    [
        ([["float32", [3]]], r"Gradient 0 differs.*\[2\].*\[3\]"),
        ([["float16", [2]]], "Gradient 0 differs.*float16"),
        ([["float32", [2]]] * 2, r"lists of \[1, 2\] gradients"),
    ],
)
def test_different_variables_in_another_process_are_rejected(others, words):
    text = json.dumps(others).encode().ljust(60)
    answers = iter([b"another digest".ljust(32) + len(text).to_bytes(8, "big"), text])
    with pytest.raises(RuntimeError, match=f"same variables.*{words}"):
        processes.agree([ops.zeros(2)], lambda mine: [mine, next(answers)])


@pytest.mark.skipif(BACKEND != "tensorflow", reason="graphs are TensorFlow's")
def test_horovod_averages_in_graph_and_rejects_other_variables(horovod, grads):
    import tensorflow as tf

    sparse = tf.IndexedSlices(ops.cast([60000.0], "float16"), [1], [2])

    @tf.function
    def average():
        return backend.average_over_processes([*grads, sparse])

    *means, mean = average()
    assert_means(means, factor=2)
    assert isinstance(mean, tf.IndexedSlices)
    np.testing.assert_array_equal(mean.values, [30000.0, 90000.0])
    np.testing.assert_array_equal(mean.indices, [1, 1])

    horovod.messages = lambda message: [message, message + 1]
    average = tf.function(average.python_function)
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"float32 \(2,\), None"):
        average()


# --- the framework's own engine comes first ---------------------------------


@pytest.fixture
def one_process(monkeypatch, tmp_path):
    """An engine that was started with one process."""
    if BACKEND == "tensorflow":
        import tensorflow as tf

        strategy = tf.distribute.OneDeviceStrategy("/cpu:0")
        with strategy.scope():
            yield strategy.run
    elif BACKEND == "torch":
        import torch.distributed

        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1
        )
        yield lambda fn, args: fn(*args)
        torch.distributed.destroy_process_group()
    else:
        import jax

        # It can be started before anything else is done with JAX only. JAX 0.5.0 has
        # no such function.
        monkeypatch.setattr(
            jax.distributed, "is_initialized", lambda: True, raising=False
        )
        yield lambda fn, args: fn(*args)


def test_single_process_keeps_its_own_gradients(one_process, horovod, grads):
    assert backend.count_processes() == 1
    backend.check_processes_run()
    assert_means(one_process(backend.average_over_processes, (grads,)), factor=1)
