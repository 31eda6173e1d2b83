"""How a step of a Keras optimizer runs on TensorFlow, and how it is timed there."""

import gc
import time
from functools import partial

import keras
import tensorflow as tf

from benchmarks import machine
from benchmarks.inner import SCALE
from benchmarks.timing import Step, wall_clock

MODES = ("graph", "XLA")
"""`jit_compile=False` and `jit_compile=True`."""
MORE_ROWS = {}
"""See `rows_torch.MORE_ROWS`."""

# Each row makes a new tf.function, which TensorFlow takes for retracing.
tf.get_logger().setLevel("ERROR")


def gpu():
    """Returns the name of the GPU that is used, or None."""
    devices = tf.config.list_physical_devices("GPU")
    if not devices:
        return None
    return tf.config.experimental.get_device_details(devices[0])["device_name"]


class Tensors:
    """The tensors of a group. Its rows share the gradients, which never change."""

    def __init__(self, data):
        self.dtype = getattr(tf, data.kind)
        self._weights = data.weights
        self.gradients = {
            True: [tf.cast(tf.constant(g) * SCALE, self.dtype) for g in data.gradients],
            False: [tf.cast(tf.constant(g), self.dtype) for g in data.gradients],
        }

    def weights(self):
        """Returns new float32 tensors."""
        return [tf.constant(w) for w in self._weights]

    def variables(self):
        """Returns new Keras variables, in the dtype of the group."""
        dtype = keras.backend.standardize_dtype(self.dtype)
        return [keras.Variable(w, dtype=dtype) for w in self.weights()]


def keras_step(mode, optimizer, variables, tensors, scaled):
    """Builds a Keras optimizer and returns its `Step`, in a tf.function."""
    optimizer.build(variables)
    gradients = tensors.gradients[scaled]

    def apply():
        optimizer.apply(gradients, variables)
        return optimizer.iterations

    def state():
        return [[v.numpy() for v in vs] for vs in (variables, optimizer.variables)]

    return function_step(mode, apply, state)


def function_step(mode, apply, state):
    """Returns the `Step` of a function that returns the variable it counts steps in."""
    step = tf.function(lambda: apply() + 0, jit_compile=mode == "XLA")
    return Step(lambda: step().numpy(), state)


seconds = wall_clock


def first_seconds(step):
    """Returns the seconds of the first step: tracing, compiling and running it."""
    start = time.perf_counter()
    step.run()
    return time.perf_counter() - start


def stream_clocks(mebibytes):
    """Returns clocks of ways to move memory, and the bytes that each moves."""
    streams, bytes_ = machine.streams(2**20 * mebibytes)
    return {n: partial(wall_clock, Step(s)) for n, s in streams.items()}, bytes_


def extra_bytes(step):
    """Returns the most memory that a step needs besides what is there, or None.

    As TensorFlow counts it: it keeps what it has once had of the system.
    """
    device, memory = "GPU:0" if gpu() else "CPU:0", tf.config.experimental
    try:
        memory.reset_memory_stats(device)
        before = memory.get_memory_info(device)["current"]
        step.run()
        peak = memory.get_memory_info(device)["peak"]
    except ValueError:
        return None
    # An allocator that does not count says 0.
    return peak - before if before else None


def counted_step(mode, optimizer, variables):
    """Returns a step on gradients, and a function that counts its traces."""
    optimizer.build(variables)

    @tf.function(jit_compile=mode == "XLA")
    def step(gradients):
        optimizer.apply(gradients, variables)

    return step, step.experimental_get_tracing_count


def release():
    """Frees what a group has left."""
    keras.utils.clear_session()
    gc.collect()
