"""How a step of a Keras optimizer runs on PyTorch, and how it is timed there."""

import contextlib
import gc
import time
from functools import partial
from unittest import mock

import keras
import torch

import keras_lso
from benchmarks import machine, memory
from benchmarks.inner import SCALE
from benchmarks.timing import Step, wall_clock
from keras_lso._backend.torch import captured
from keras_lso._backend.torch import compiled as compiled_steps

MODES = ("eager",)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def gpu():
    """Returns the name of the GPU that is used, or None."""
    return torch.cuda.get_device_name() if DEVICE == "cuda" else None


class Tensors:
    """The tensors of a group. Its rows share the gradients, not the weights.

    A step may leave what it likes in the gradients (GradScaler unscales them in
    place). `refresh` fills them again before each, as a backward pass would.
    """

    def __init__(self, data):
        self.dtype = getattr(torch, data.kind)
        self._weights = data.weights
        unscaled = [torch.tensor(g, device=DEVICE) for g in data.gradients]
        self._fresh = {
            True: [(g * SCALE).to(self.dtype) for g in unscaled],
            False: [g.to(self.dtype) for g in unscaled],
        }
        self.gradients = [torch.empty_like(g) for g in self._fresh[True]]

    def weights(self):
        """Returns new float32 tensors."""
        return [torch.tensor(w, device=DEVICE) for w in self._weights]

    def variables(self):
        """Returns new Keras variables, in the dtype of the group."""
        dtype = keras.backend.standardize_dtype(self.dtype)
        return [keras.Variable(w, dtype=dtype) for w in self.weights()]

    def refresh(self, scaled):
        """Returns a function that fills the gradients, scaled or not."""
        fresh = self._fresh[scaled]
        return lambda: torch._foreach_copy_(self.gradients, fresh)


def keras_step(mode, optimizer, variables, tensors, scaled):
    """Builds a Keras optimizer and returns its `Step`, eager as `fit` runs it."""
    optimizer.build(variables)

    def run():
        with torch.no_grad():
            optimizer.apply(tensors.gradients, variables)

    def state():
        both = variables, optimizer.variables
        return [[to_numpy(v.value) for v in some] for some in both]

    return Step(run, state, prepare=tensors.refresh(scaled))


def compiled(run, is_on):
    """Returns a function that runs with steps compiled by Inductor, or without."""

    def run_compiled():
        with mock.patch.object(compiled_steps, "is_on", lambda tensor: is_on):
            run()

    return run_compiled


def _captured_step(mode, make_inner, tensors):
    """Returns our step, captured in a CUDA graph; None without a GPU."""
    if DEVICE == "cpu":
        return None
    optimizer = keras_lso.LossScaleOptimizer(make_inner())
    with mock.patch.object(captured, "IS_ON", True):
        step = keras_step(mode, optimizer, tensors.variables(), tensors, scaled=True)
    step.prepare()
    for _ in range(4):  # It is captured after three.
        step.run()
    return step


MORE_ROWS = {
    "keras_lso, CUDA graph": _captured_step,
}
"""Rows beside the usual ones: a name, and what makes its `Step`.

Called as `make(mode, make_inner, tensors)`; it returns None where there is no such row.
"""


def to_numpy(tensor):
    if tensor.dtype == torch.bfloat16:
        tensor = tensor.float()
    return tensor.detach().cpu().numpy()


def seconds(step):
    """Returns the seconds of one step.

    On a GPU those between two events in its queue, behind the refresh: the host has
    as much of a start as it has in training, where a backward pass is still running
    when the step is queued. What waits for the GPU, or starts its kernels more slowly
    than they run, loses that start, and is seen to.
    """
    if DEVICE == "cpu":
        return wall_clock(step)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    step.prepare()
    start.record()
    step.run()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1e3


@contextlib.contextmanager
def one_thread():
    """Keeps PyTorch on one thread: of tensors that are small it would use no more."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def first_seconds(step):
    """Returns the seconds of the first step, by the host's clock."""
    step.prepare()
    synchronize()
    start = time.perf_counter()
    step.run()
    synchronize()
    return time.perf_counter() - start


def synchronize():
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def stream_clocks(mebibytes):
    """Returns clocks of ways to move memory, and the bytes that each moves."""
    if DEVICE == "cpu":
        streams, bytes_ = machine.streams(2**20 * mebibytes)
        return {n: partial(wall_clock, Step(s)) for n, s in streams.items()}, bytes_
    source = torch.ones(2**18 * mebibytes, device=DEVICE)
    target = torch.zeros_like(source)
    steps = {"copy": lambda: target.copy_(source), "in place": source.neg_}
    return {n: partial(seconds, Step(s)) for n, s in steps.items()}, 2 * source.nbytes


def extra_bytes(step):
    """Returns the most memory that a step needs besides what is there, or None."""
    step.prepare()
    if DEVICE == "cpu":
        return memory.peak_extra_bytes(step.run)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step.run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def counted_step(mode, optimizer, variables):
    """Returns a step on gradients, and nothing: there is no compiler to count."""

    def step(gradients):
        with torch.no_grad():
            optimizer.apply(gradients, variables)

    return step, None


def release():
    """Frees what a group has left."""
    gc.collect()
    if DEVICE == "cuda":
        torch.cuda.empty_cache()
