"""The framework functions that only the older APIs need. Only they import this folder.

OpenSeq2Seq's training op compiles its step, and averages gradients over processes. The
training op and TF1's optimizer find the variables that a loss reads. The functions for
a step of `fit`, or of a user's own loop, are in `keras_lso/_backend/`.

The functions below call those of the backend that Keras runs on: `tensorflow.py`,
`jax.py`, `torch.py`, or `loading_only.py` for the others. `tf_checkpoint.py` reads
TensorFlow's checkpoints under any backend.
"""

import importlib
from collections.abc import Callable, Iterable
from typing import Any

import keras

from keras_lso._backend.types import Tensor

_TRAINING = ("tensorflow", "jax", "torch")


def _module_of(backend):
    name = backend if backend in _TRAINING else "loading_only"
    return importlib.import_module(f"{__name__}.{name}")


_own = _module_of(keras.backend.backend())

# Whether a step that `compile_step` compiles may call `average_over_processes`.
AVERAGES_IN_STEP = _own.AVERAGES_IN_STEP


def trained_variables(loss_fn: Callable[[], Tensor]) -> list[keras.Variable]:
    """Returns the trainable variables that `loss_fn` reads, in that order.

    `loss_fn` runs once, and its assignments are discarded. The variables that it
    creates, as layers do, exist afterwards. A variable that is initialised from a value
    needs a second run.
    """
    return _own.trained_variables(loss_fn)


def compile_step(step: Callable[..., Any]) -> Callable[..., Any]:
    """Compiles a function of tensors that reads and assigns variables.

    The function takes and returns nested structures of tensors and None, and creates no
    variables.
    """
    return _own.compile_step(step)


def count_processes() -> int | None:
    """Returns the number of processes (TensorFlow: replicas); None if none run."""
    return _own.count_processes()


def check_processes_run() -> None:
    """Raises a `RuntimeError` if `count_processes()` is None."""
    if count_processes() is None:
        raise RuntimeError(
            "To average gradients over processes (`on_horovod=True`), something must "
            f"connect the processes, and nothing does. {_own.HOW_TO_START}"
        )


def average_over_processes(grads: Iterable[Tensor | None]) -> list[Tensor | None]:
    """Returns the means of the gradients over all processes, bitwise equal on each.

    All processes must call it equally often, with gradients of the same variables in
    the same order: tensors of any float dtype, dense or sparse, or None. The means are
    in float32 or float64. A gradient that only some processes have counts as zero on
    the others; a gradient that no process has stays None.

    Raises:
        RuntimeError: If no processes run. On all processes, if their gradients are not
            of the same variables.
    """
    check_processes_run()
    return _own.average_over_processes(grads)
