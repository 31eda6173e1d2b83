"""`SummaryWriter`: event files for TensorBoard, without TensorFlow."""

import os
import time
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from keras import ops


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
