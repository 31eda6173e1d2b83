"""The framework functions that only the older APIs need.

The module of a framework has those functions that differ from the defaults here.
"""

import importlib
from collections.abc import Callable, Iterable
from typing import Any

import keras
from keras import ops

from keras_lso._backend import backend
from keras_lso._backend.tensors import Tensor, map_by_dtype

_name = keras.backend.backend()
_module: Any = None  # NumPy and OpenVINO load models, and do not train.
if _name in ("tensorflow", "jax", "torch"):
    _module = importlib.import_module(f"{__name__}.{_name}")

# Compiles a function of tensors that reads and assigns variables.
compile_step: Callable[[Callable[..., Any]], Callable[..., Any]]
compile_step = getattr(_module, "compile_step", lambda step: step)


def check_processes_run() -> None:
    """Raises a `RuntimeError` if nothing connects processes."""
    if _module is None or not _module.processes_run():
        nothing = f"The Keras backend {_name!r} has no processes."
        raise RuntimeError(
            "To average gradients over processes (`on_horovod=True`), something must "
            "connect the processes, and nothing does. "
            f"{getattr(_module, 'HOW_TO_START', nothing)}"
        )


def average_over_processes(grads: Iterable[Tensor | None]) -> list[Tensor | None]:
    """Returns the means of gradients over all processes, dense, in float32."""
    dense = [
        g if g is None else ops.cast(backend.to_dense(g), "float32") for g in grads
    ]
    return map_by_dtype(_module.means_of, dense)
