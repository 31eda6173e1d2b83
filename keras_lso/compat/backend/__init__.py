"""The framework functions that only the older APIs need."""

import importlib
from collections.abc import Callable, Iterable
from typing import Any

import keras
from keras import ops

from keras_lso._backend import backend
from keras_lso._backend.types import Tensor


def _module_of(name):
    name = name if name in ("tensorflow", "jax", "torch") else "loading_only"
    return importlib.import_module(f"{__name__}.{name}")


_own = _module_of(keras.backend.backend())

# Whether a step that `compile_step` compiles may call `average_over_processes`.
AVERAGES_IN_STEP = _own.AVERAGES_IN_STEP


def trained_variables(loss_fn: Callable[[], Tensor]) -> list[keras.Variable]:
    """Returns the trainable variables that `loss_fn` reads, by running it once."""
    return _own.trained_variables(loss_fn)


def compile_step(step: Callable[..., Any]) -> Callable[..., Any]:
    """Compiles a function of tensors that reads and assigns variables."""
    return _own.compile_step(step)


def check_processes_run() -> None:
    """Raises a `RuntimeError` if nothing connects processes."""
    if _own.count_processes() is None:
        raise RuntimeError(
            "To average gradients over processes (`on_horovod=True`), something must "
            f"connect the processes, and nothing does. {_own.HOW_TO_START}"
        )


def average_over_processes(grads: Iterable[Tensor | None]) -> list[Tensor | None]:
    """Returns the means of gradients over all processes, dense, in float32."""
    check_processes_run()
    dense = [
        g if g is None else ops.cast(backend.to_dense(g), "float32") for g in grads
    ]
    means = iter(_own.means_of([g for g in dense if g is not None]))
    return [None if g is None else next(means) for g in dense]
