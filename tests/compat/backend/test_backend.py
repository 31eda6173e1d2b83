"""Means over a single process.

`integration_tests/distributed/test_processes.py` runs two.
"""

import keras
import numpy as np
import pytest
from keras import ops

from keras_lso.compat import backend

BACKEND = keras.backend.backend()
HOW_TO_START = {
    "tensorflow": ["tf.distribute.MirroredStrategy()", "strategy.run"],
    "jax": ["jax.distributed.initialize(", "num_processes"],
    "torch": ["init_process_group()", "torchrun --nproc-per-node"],
}


def test_error_without_running_processes_says_how_to_start_them(monkeypatch):
    with pytest.raises(RuntimeError, match="nothing does") as error:
        backend.check_processes_run()
    for words in HOW_TO_START[BACKEND]:
        assert words in str(error.value)
    monkeypatch.setattr(backend, "_module", None)
    with pytest.raises(RuntimeError, match="has no processes"):
        backend.check_processes_run()


@pytest.fixture
def one_process(monkeypatch, tmp_path):
    """Starts one process, and returns the function that calls another there."""
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

        # `initialize` must come before anything else that is done with JAX. JAX 0.5.0
        # has no `is_initialized`.
        monkeypatch.setattr(
            jax.distributed, "is_initialized", lambda: True, raising=False
        )
        yield lambda fn, args: fn(*args)


def test_single_process_keeps_its_own_gradients_in_float32(one_process):
    values = [60000.0, -1.0], None, [[1.0, np.inf]], 2.0
    dtypes = "float16", None, "float32", "bfloat16"
    grads = [
        None if value is None else ops.convert_to_tensor(value, dtype=dtype)
        for value, dtype in zip(values, dtypes, strict=True)
    ]
    backend.check_processes_run()
    means = one_process(backend.average_over_processes, (grads,))
    for mean, value in zip(means, values, strict=True):
        assert (mean is None) == (value is None)
        if mean is not None:
            assert keras.backend.standardize_dtype(mean.dtype) == "float32"
            np.testing.assert_array_equal(ops.convert_to_numpy(mean), value)
    assert list(one_process(backend.average_over_processes, ([None],))) == [None]
