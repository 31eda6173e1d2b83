"""The base class of callbacks that watch a `LossScaleOptimizer`, and event files."""

import contextlib
import io
import itertools
import os
import socket
import time
from collections.abc import Iterable, Mapping
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_lso._core.checks import check_path
from keras_lso._core.step_file import StepFile
from keras_lso._keras_internals.optimizers import chain_of
from keras_lso.loss_scale_optimizer import LossScaleOptimizer
from keras_lso.optimizers.guarded import wrapper_for


class OptimizerCallback(keras.callbacks.Callback):
    """A callback that finds the model's optimizer, and may write an event file."""

    def __init__(self, log_dir: str | os.PathLike[str] | None) -> None:
        super().__init__()
        self.log_dir = log_dir
        self._events: SummaryWriter | None = None
        if log_dir is not None:
            check_path("log_dir", log_dir)
            self._events = SummaryWriter()

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        self._find_optimizer()
        if self._events is not None:
            self._events.begin(self.log_dir)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        if self._events is not None:
            self._events.end()

    def _find_optimizer(self) -> LossScaleOptimizer:
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


# TensorBoard reads the files of one second in this order.
_numbers = itertools.count()


class SummaryWriter(StepFile):
    """Writes scalars and histograms into an event file for TensorBoard."""

    def __init__(self) -> None:
        super().__init__()
        # The file, with its name and size.
        self._file: Any = None
        self._name, self._size = "", 0
        # Check now rather than after a long training.
        _framed(b"")

    def __getstate__(self) -> dict[str, Any]:
        """Returns the state of a copy, which opens its own file."""
        return {**super().__getstate__(), "_file": None}

    def begin(self, log_dir: Any) -> None:
        """Starts a new file in a directory."""
        # A `fit` that ended with an error has left its file open.
        self._close()
        self._path = str(log_dir)
        self._open()
        self.write([])

    def end(self) -> None:
        self._close()
        super().end()

    def write(self, steps: Iterable[tuple[int, Mapping[str, Any]]]) -> None:
        """Writes the values of steps by tag: a scalar as such, others as histograms."""
        self.write_records(_event(step, reports) for step, reports in steps)

    def _append(self, records: list[bytes]) -> None:
        from tensorboard.compat import tf
        from tensorboard.compat.proto.event_pb2 import Event

        data = b"".join(records)
        try:
            is_removed = self._size and not tf.io.gfile.exists(self._name)
            if self._file is None or is_removed:
                self._open()
            if not self._size:
                header = Event(wall_time=time.time(), file_version="brain.Event:2")
                data = _framed(header.SerializeToString()) + data
            self._file.write(data)
            self._file.flush()
        # TensorFlow, which may write the file, has its own errors, as libraries for
        # remote directories have.
        except Exception as error:
            self._close()
            self._remove_unfinished()
            raise OSError(str(error)) from error
        self._size += len(data)

    def _open(self) -> None:
        """Opens a new file, whose name TensorBoard finds."""
        from tensorboard.compat import tf

        tf.io.gfile.makedirs(self._path)
        where = f"{socket.gethostname()}.{os.getpid()}.{next(_numbers):06d}"
        name = f"events.out.tfevents.{int(time.time()):010}.{where}"
        self._name, self._size = os.path.join(self._path, name), 0
        self._file = tf.io.gfile.GFile(self._name, "wb")
        # This makes the file, or shows that it cannot be made.
        self._file.write(b"")

    def _close(self) -> None:
        """Closes the file, if there is one."""
        file, self._file = self._file, None
        if file is not None:
            # After an error it may fail again. Each write has been flushed.
            with contextlib.suppress(Exception):
                file.close()

    def _remove_unfinished(self) -> None:
        """Removes what a failed attempt has written to a local file."""
        with contextlib.suppress(OSError):
            if self._size:
                os.truncate(self._name, self._size)
            else:
                os.remove(self._name)


def _event(step: int, reports: Mapping[str, Any]) -> bytes:
    """Returns the record of a step."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.plugins.histogram.summary import histogram_pb
    from tensorboard.plugins.scalar.summary import scalar_pb

    event = Event(step=step, wall_time=time.time())
    for tag, values in reports.items():
        values = np.asarray(ops.convert_to_numpy(values), "float64")
        of_tag = (histogram_pb if values.ndim else scalar_pb)(tag, values)
        event.summary.MergeFrom(of_tag)
    return _framed(event.SerializeToString())


def _framed(event: bytes) -> bytes:
    """Returns an event with its length and checksums, as files have it."""
    try:
        from tensorboard.summary.writer.record_writer import RecordWriter
    except ImportError as error:
        raise ImportError(
            "Summaries are written by TensorBoard, which is not installed. Run "
            '`pip install tensorboard`, or `pip install "keras-lso[tensorboard]"`.'
        ) from error
    buffer = io.BytesIO()
    RecordWriter(buffer).write(event)
    return buffer.getvalue()
