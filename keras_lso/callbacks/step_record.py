"""`StepRecord`: a line for each step of `fit`, without a synchronisation for each."""

import os
import weakref
from typing import Any

import keras
import numpy as np
from numpy.typing import NDArray

from keras_lso._core.checks import check_positive_int, warn
from keras_lso._core.step_record import TAKEN, RecordFile, as_json, as_list
from keras_lso._keras_internals.variables import have_values
from keras_lso.callbacks.optimizer_callback import OptimizerCallback
from keras_lso.loss_scale_optimizer import LossScaleOptimizer

# The least number of steps that are read at once.
_LENGTH = 512


class StepRecord(OptimizerCallback):
    """Records each step of a `LossScaleOptimizer` in `fit`, and why some are skipped.

    The record of a step holds its number (from 1), the outcome, the loss scale, the
    norm of the unscaled gradients before clipping, the learning rate, and, if the loss
    scale uses it, the largest gradient. `LossScaleOptimizer.read_record` describes each
    of them.

    The callback reads the records from the device every 512 steps, or every `length`
    steps after a shorter `optimizer.record_steps(length)`, and at the end of an epoch;
    `fit` does not wait in between. The `History` that `fit` returns gets an entry
    `step_record`, a dict of lists for each epoch, which `json.dumps` writes.
    `keras_lso.plotting.plot_record` draws the file. The logs of an epoch get
    `gradient_norm_median` and `gradient_norm_max`, the median and the largest of the
    finite norms, for the callbacks that come later in the list, such as `CSVLogger`.

    If an error ends `fit`, the last steps are written by `flush`, or by the next `fit`
    with this callback. So are steps that cannot be written, as on a full disk: training
    goes on, a warning says how many steps wait in memory, and the last 65,536 of them
    are written as soon as that succeeds.

    A step can be read only once, so pass a single `StepRecord` to `fit`. If several
    processes train together, give a path or a directory to only one: the record is the
    same in all of them.

    Args:
        path: The path of a file that ends with `.jsonl` or `.json`, with one JSON
            object per line. Steps are appended to an existing file. If training went
            back to a checkpoint and a step is in the file twice, the last entry counts.
            A value that is not finite or not known is `null`. Defaults to `None`: no
            file is written.
        log_dir: The directory of an event file for TensorBoard, with a scalar for each
            number. Each `fit` writes its own file. Defaults to `None`: no file is
            written.
        every: The interval, in steps, at which steps are written. Skipped steps are
            always written. Defaults to `1`.

    Raises:
        ValueError, TypeError: If an argument is not valid, if an existing file has
            other columns, or if the model's optimizer is not a `LossScaleOptimizer`.
        ImportError: If there is a `log_dir` and TensorBoard is not installed.

    Example:

    >>> import keras, keras_lso
    >>> model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    >>> optimizer = keras_lso.LossScaleOptimizer(keras.optimizers.SGD(0.1))
    >>> model.compile(optimizer, loss="mse")
    >>> x = keras.ops.ones((4, 1))
    >>> history = model.fit(
    ...     x, x, batch_size=2, callbacks=[keras_lso.callbacks.StepRecord()], verbose=0
    ... )
    >>> [record] = history.history["step_record"]
    >>> record["step"], record["outcome"]
    ([1, 2], ['applied', 'applied'])
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        log_dir: str | os.PathLike[str] | None = None,
        every: int = 1,
    ) -> None:
        super().__init__(log_dir)
        self.path = path
        self.every: int = check_positive_int("every", every)
        self._file = None if path is None else RecordFile(path)
        self._files = [f for f in (self._file, self._events) if f is not None]
        self._epoch: list[dict[str, NDArray[Any]]] = []
        self._length = self._per_execution = self._unread = 0
        self._has_warned = False
        # The optimizer of a `fit` that has not ended yet, or that an error has ended.
        self._recorded: weakref.ref[keras.Optimizer] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Returns the state of a copy, which has no part in a `fit` so far."""
        return {**vars(self), "_recorded": None}

    def flush(self) -> None:
        """Writes the steps since the record was last read, and those that wait.

        Call it where you catch an error of `fit`: Keras does not tell a callback that
        training ended with an error. If it cannot write, it warns.
        """
        for file in self._files:
            file.remind()
        self._catch_up()

    def _catch_up(self) -> None:
        """Writes the steps that wait, and those of a `fit` that an error has ended."""
        optimizer = None if self._recorded is None else self._recorded()
        if optimizer is not None and have_values(optimizer.variables):
            self._read(optimizer)
            return
        # On JAX the error may have deleted the variables, which the step has donated.
        lost, self._unread = self._unread - self._per_execution, 0
        if optimizer is not None and lost > 0:
            warn(
                f"Up to {lost} steps are missing from the record: the error that ended "
                "`fit` has deleted the optimizer's variables, which held them."
            )
        for file in self._files:
            file.write([])

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        optimizer = self._find_optimizer()
        record = optimizer._counters.record
        self._per_execution = self.model.steps_per_execution
        self._length = self._default_length()
        if record is not None and record.length < self._per_execution:
            raise ValueError(
                "The optimizer already records its steps, but fewer than the "
                f"`steps_per_execution={self._per_execution}` of `compile`, which "
                "StepRecord reads at once. Write `optimizer.record_steps("
                f"{self._length})` where you call that method, or leave that call out. "
                f"Received: length={record.length}"
            )
        other = None if record is None or record.reader is None else record.reader()
        # Keras gives the callbacks of one `fit` the same dict.
        if other not in (None, self) and other.params is self.params is not None:
            raise ValueError(
                "A step can be read only once: pass one `StepRecord` to `fit`, such as "
                "`StepRecord('steps.jsonl', log_dir='logs')`. Received: two of them"
            )
        if record is not None:
            self._length = min(record.length, self._length)
        super().on_train_begin(logs)
        if self._file is not None:
            self._file.begin()
        self._catch_up()
        self._epoch = []
        if record is None:
            optimizer.record_steps(self._length)
            self.model.make_train_function(force=True)
        # Discard the steps from before this `fit`.
        optimizer.read_record()
        self._unread = 0
        self._recorded = weakref.ref(optimizer)
        optimizer._counters.record.reader = weakref.ref(self)

    def _default_length(self) -> int:
        """Returns how many steps to record between two reads."""
        return max(_LENGTH, 2 * self._per_execution)

    # Not at the end of a batch, which would make Keras synchronise after each batch.
    def on_train_batch_begin(
        self, batch: int, logs: dict[str, Any] | None = None
    ) -> None:
        if self._unread + self._per_execution > self._length:
            self._read(self._find_optimizer())
        self._unread += self._per_execution

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._read(self._find_optimizer())
        records, self._epoch = self._epoch, []
        whole = {n: np.concatenate([r[n] for r in records]) for n in records[0]}
        history = getattr(self.model, "history", None)
        if history is not None:
            # As lists, since `json.dumps` takes no arrays.
            lists = {name: as_list(values) for name, values in whole.items()}
            history.history.setdefault("step_record", []).append(lists)
        if logs is not None:
            norms = whole["gradient_norm"]
            finite = norms[np.isfinite(norms)] if np.isfinite(norms).any() else np.nan
            logs["gradient_norm_median"] = float(np.median(finite))
            logs["gradient_norm_max"] = float(np.max(finite))

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        self._read(self._find_optimizer())
        self._recorded = None
        if self._file is not None:
            self._file.end()
        super().on_train_end(logs)

    def _read(self, optimizer: LossScaleOptimizer) -> None:
        """Reads the steps since the last time, and writes them."""
        record = optimizer.read_record()
        self._epoch.append(record)
        self._unread = 0
        missed = optimizer._counters.record.missed
        if missed and not self._has_warned:
            self._has_warned = True
            warn(
                f"{missed} steps before step {record['step'][0]} are missing from the "
                "record: the model makes several steps per batch. Call "
                "`optimizer.record_steps(length)` before `fit`, with a length of "
                f"{self._default_length()} times the number of steps per batch."
            )
        if not self._files:
            return
        written = record["step"] % self.every == 0
        written |= ~np.isin(record["outcome"], TAKEN)
        columns = [as_json(values[written]) for values in record.values()]
        rows = [
            dict(zip(record, row, strict=True)) for row in zip(*columns, strict=True)
        ]
        if self._file is not None:
            self._file.write(rows)
        if self._events is not None:
            self._events.write((row["step"], _scalars_of(row)) for row in rows)


def _scalars_of(row: dict[str, Any]) -> dict[str, float]:
    """Returns the numbers of a step for TensorBoard."""
    scalars = {"skipped": float(row["outcome"] not in TAKEN)}
    return scalars | {name: v for name, v in row.items() if isinstance(v, float)}
