"""The base class of callbacks that watch a `LossScaleOptimizer`, and event files."""

import os
import time
from collections.abc import Iterable, Mapping
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_lso._core.checks import check_path
from keras_lso._keras_internals.optimizers import chain_of
from keras_lso.loss_scale_optimizer import LossScaleOptimizer
from keras_lso.optimizers.guarded import wrapper_for


class OptimizerCallback(keras.callbacks.Callback):
    """A callback that finds the model's optimizer, and may write an event file."""

    def __init__(self, log_dir: str | os.PathLike[str] | None) -> None:
        super().__init__()
        self.log_dir = log_dir
        self._writer: Any = None
        if log_dir is not None:
            check_path("log_dir", log_dir)
            # Check now rather than after a long training.
            event_file_writer()

    def __getstate__(self) -> dict[str, Any]:
        """Returns the state of a copy, which opens its own file."""
        return {**vars(self), "_writer": None}

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        self._find_optimizer()
        # A `fit` that ended with an error has left its file open.
        self._close()
        self._write_scalars([])

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        self._close()

    def _write_scalars(self, steps):
        """Writes pairs of a step and its numbers, if there is a `log_dir`."""
        if self.log_dir is not None:
            if self._writer is None:
                self._writer = SummaryWriter(self.log_dir)
            self._writer.write(steps)

    def _close(self):
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _find_optimizer(self):
        """Returns the model's `LossScaleOptimizer`, which may be wrapped."""
        optimizer = getattr(self.model, "optimizer", None)
        for inner in () if optimizer is None else chain_of(optimizer):
            if isinstance(inner, LossScaleOptimizer):
                return inner
        hint = ""
        if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
            hint = (
                " This model has Keras's own, which `compile` uses by default under "
                "'mixed_float16'."
            )
        wrapper = f"keras_lso.{wrapper_for(self.model)}"
        raise ValueError(
            f"{type(self).__name__} needs a model that was compiled with a {wrapper}."
            f"{hint} Write `model.compile({wrapper}(optimizer), ...)`. "
            f"Received: optimizer={optimizer!r}"
        )


class SummaryWriter:
    """Writes scalars and histograms into an event file, with TensorBoard's writer."""

    def __init__(self, log_dir: str | os.PathLike[str]) -> None:
        self._file = event_file_writer()(str(log_dir))

    def close(self) -> None:
        self._file.close()

    def write(self, steps: Iterable[tuple[int, Mapping[str, Any]]]) -> None:
        """Writes the values of steps by tag: a scalar as such, others as histograms."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.plugins.histogram.summary import histogram_pb
        from tensorboard.plugins.scalar.summary import scalar_pb

        for step, reports in steps:
            for tag, values in reports.items():
                values = np.asarray(ops.convert_to_numpy(values), "float64")
                summary = (histogram_pb if values.ndim else scalar_pb)(tag, values)
                event = Event(step=step, wall_time=time.time(), summary=summary)
                self._file.add_event(event)
        self._file.flush()


def event_file_writer() -> Any:
    """Returns TensorBoard's class; raises an ImportError if it is not installed."""
    try:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter
    except ImportError as error:
        raise ImportError(
            "Summaries are written by TensorBoard, which is not installed. Run "
            '`pip install tensorboard`, or `pip install "keras-lso[tensorboard]"`.'
        ) from error
    return EventFileWriter
