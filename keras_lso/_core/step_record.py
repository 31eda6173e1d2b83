"""The record of steps: a ring on the device, read rarely, and a file of JSON lines."""

import io
import json
import math
import pathlib
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
from keras import ops
from numpy.typing import NDArray

from keras_lso._backend import backend
from keras_lso._backend.framework import GradientStats
from keras_lso._backend.tensors import Tensor
from keras_lso._core.checks import check_path
from keras_lso._core.flag import Flag
from keras_lso._core.step_file import StepFile
from keras_lso._keras_internals.optimizers import (
    bases_of,
    iteration_variable,
    most_accumulation_steps,
)
from keras_lso._keras_internals.rules import rate_of
from keras_lso._keras_internals.variables import read, storage_of

if TYPE_CHECKING:
    from keras_lso.loss_scale_optimizer import LossScaleOptimizer

# The numbers of a step.
NUMBERS = ("loss_scale", "gradient_norm", "learning_rate", "largest_gradient")
# The columns, with their types.
COLUMNS = {"step": int, "outcome": str} | dict.fromkeys(NUMBERS, float)
OUTCOMES = ("applied", "accumulated", "overflow", "spike", "rate")
APPLIED, ACCUMULATED, OVERFLOW, SPIKE, RATE = OUTCOMES
# The steps that are not skipped.
TAKEN = (APPLIED, ACCUMULATED)

# How a line of a file begins, and a number of bytes that no line has.
_START = b'{"step": '
_LONGEST_LINE = 4096


def steps_attempted(optimizer: "LossScaleOptimizer") -> int:
    """Returns the number of steps so far, applied or not, read from the device."""
    # With accumulated gradients, steps are micro-batches. A sum of them that a spike
    # guard has dropped counts as one skipped step, and its other micro-batches no
    # longer count as applied: see `undo_accumulation`.
    counters = optimizer._counters
    counts = counters.skipped, counters.applied, optimizer.skipped_spikes
    # By NumPy, since `int` does not accept a value that replicas share.
    skipped, applied, spikes = (int(ops.convert_to_numpy(count)) for count in counts)
    undone = max(most_accumulation_steps(optimizer.inner_optimizer) - 1, 0)
    return skipped + applied + spikes * undone


class StepRecord:
    """The last `length` steps; `missed` were overwritten before they were read."""

    def __init__(
        self,
        length: int,
        optimizer: "LossScaleOptimizer",
        add: Callable[..., keras.Variable],
    ):
        self.length = length
        self._optimizer, self._inner = optimizer, optimizer.inner_optimizer
        self._policy = optimizer.loss_scale_policy
        self._rows = add("step_record", "float32", (length, 1 + len(NUMBERS)))
        self._count = add("steps_recorded", "int", ())
        self.missed = self._missed = 0
        # A weak reference to the callback that read it last.
        self.reader: Any = None
        # The number of rows read, and the step before the first row. Variables restored
        # from a checkpoint of TensorFlow hold its rows as soon as they exist.
        self._read, steps = self._numbers()
        self._before: int | None = steps - self._read
        # The rows that were written before a state was loaded, and are not read yet.
        self._unread: list[dict[str, NDArray[Any]]] = []

    def restart(self) -> None:
        """Prepares for a new start, before the variables become zeros."""
        self._unread.append(self._new_rows())
        self._read, self._before = 0, None

    def _numbers(self) -> tuple[int, int]:
        """Returns the number of rows and the number of steps so far, two ints."""
        count = int(ops.convert_to_numpy(self._count))
        return count, steps_attempted(self._optimizer)

    # --- On the device --------------------------------------------------------

    def snapshot(self) -> tuple[Tensor, Tensor | float]:
        """Returns the values for `write` that the step is about to change."""
        # The first rate, if there are several optimizers. A `MultiOptimizer` may know
        # them only after `build`.
        rate = rate_of(bases_of(self._inner)[0])
        return backend.xp.copy(read(self._policy.scale)), rate

    def write(
        self,
        snapshot: Any,
        stats: GradientStats,
        rates: Flag,
        is_inlier: Flag,
        amax: Tensor | None,
    ) -> None:
        """Writes a row, once the step is counted, given the result of `snapshot`."""
        scale, rate = snapshot
        outcome = self._outcome(stats.finite, rates, is_inlier)
        row = [outcome, scale, stats.norm, rate, 0.0 if amax is None else amax]
        rows, count = storage_of([self._rows, self._count])
        backend.append_row(rows, count, row, self._inner.assign)

    def _outcome(self, finite: Tensor, rates: Flag, is_inlier: Flag) -> Tensor:
        """Returns the position in `OUTCOMES`, a scalar tensor."""
        where = backend.xp.where
        code = OUTCOMES.index
        taken = code(APPLIED)
        bases = bases_of(self._inner)
        accumulating = [o for o in bases if o.gradient_accumulation_steps]
        if accumulating:
            count = accumulating[0].gradient_accumulation_steps
            goes_on = read(iteration_variable(accumulating[0])) % count != 0
            taken = where(goes_on, code(ACCUMULATED), taken)
        for accepts, reason in (rates, RATE), (is_inlier, SPIKE):
            if not accepts.known:
                taken = where(accepts.tensor, taken, code(reason))
        return where(finite, taken, code(OVERFLOW))

    # --- On the host ----------------------------------------------------------

    def read(self) -> dict[str, NDArray[Any]]:
        """Returns the steps since the last call; see `read_record`."""
        parts, self._unread = [*self._unread, self._new_rows()], []
        self.missed, self._missed = self._missed, 0
        return {name: np.concatenate([p[name] for p in parts]) for name in parts[0]}

    def _new_rows(self) -> dict[str, NDArray[Any]]:
        """Returns the rows since the last call or reset, a dict of arrays."""
        count, attempted = self._numbers()
        rows = np.array(ops.convert_to_numpy(self._rows))
        if count < self._read:
            # A checkpoint with fewer rows was restored.
            self._read, self._before = 0, None
        if self._before is None:
            self._before = attempted - count
        start = max(self._read, count - self.length)
        new = np.arange(start, count)
        self._missed += start - self._read
        self._read = count
        if not self._policy.needs_amax:
            # On the host only: JAX's `jax_debug_nans` raises at a NaN on the device.
            rows[:, -1] = np.nan
        codes, *numbers = rows[new % self.length].T
        outcomes = np.array(OUTCOMES)[codes.astype("int")]
        columns = self._before + 1 + new, outcomes, *numbers
        return dict(zip(COLUMNS, columns, strict=True))


class RecordFile(StepFile):
    """A file with a line for each step, in the order of `COLUMNS`."""

    def __init__(self, path: Any):
        super().__init__(pathlib.Path(check_path("path", path)))
        if self._path.suffix not in (".jsonl", ".json"):
            raise ValueError(
                "`path` must end with '.jsonl' or '.json', for one JSON object per "
                f"line. Received: path={path!r}"
            )

    def begin(self) -> None:
        """Makes the file and its folder, or checks an existing file."""
        if self._path.exists():
            self._check_first_line()
        self._open().close()

    def write(self, rows: Iterable[dict[str, Any]]) -> None:
        """Appends rows: dicts from names in `COLUMNS` to values, with None for NaN."""
        self.write_records(json.dumps(row).encode() + b"\n" for row in rows)

    def _append(self, records: list[bytes]) -> None:
        """Writes records, and removes those from the list that were written."""
        data = b"".join(records)
        left = memoryview(data)
        try:
            with self._open() as file:
                while left:
                    left = left[file.write(left) :]
        except OSError:
            if left:
                del records[: data.count(b"\n", 0, len(data) - len(left))]
                self._open().close()
            raise

    def _open(self) -> io.FileIO:
        """Opens the file for appending, without an unfinished last line."""
        # A process that was killed leaves one, and so does a full disk.
        self._path.parent.mkdir(parents=True, exist_ok=True)
        file = self._path.open("ab+", buffering=0)
        size = file.tell()
        start = max(0, size - _LONGEST_LINE)
        file.seek(start)
        end = file.read(size - start)
        if end and not end.endswith(b"\n"):
            file.truncate(start + end.rfind(b"\n") + 1)
        return file

    def read(self) -> dict[str, NDArray[Any]]:
        """Returns a dict of arrays, without steps that were trained again later."""
        self._check_first_line()
        rows: list[dict[str, Any]] = []
        with self._path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    break  # A process has not finished it.
                row = self._row(line, number)
                # Training went back to a checkpoint.
                while rows and rows[-1]["step"] >= row["step"]:
                    rows.pop()
                rows.append(row)
        return {
            # None becomes NaN.
            name: np.array([row[name] for row in rows], kind)
            for name, kind in COLUMNS.items()
        }

    def _check_first_line(self) -> None:
        """Raises a ValueError if it is neither of a record nor the start of one."""
        with self._path.open("rb") as file:
            # A device that is always full has no size, and no end either.
            line = file.readline(min(_LONGEST_LINE, self._path.stat().st_size))
        is_start = line[: len(_START)] == _START[: len(line)]
        is_unfinished = len(line) < _LONGEST_LINE and not line.endswith((b"}", b"\n"))
        if not (is_start and is_unfinished):
            self._row(line, 1)

    def _row(self, line: bytes, number: int) -> dict[str, Any]:
        """Returns the dict of a line of bytes, or raises a ValueError."""
        try:
            row = json.loads(line)
            names = list(row)
        except (ValueError, TypeError):
            row, names = None, [line.strip()]
        if names != list(COLUMNS):
            raise ValueError(
                "The file is not a record of steps, which has the columns "
                f"{', '.join(COLUMNS)}. Give another path. Received: "
                f"path={str(self._path)!r}, with {', '.join(map(str, names))[:200]} in "
                f"line {number}"
            )
        return row


def as_list(values: NDArray[Any]) -> list[Any]:
    """Returns a list of Python objects, for a float32 with the fewest digits."""
    if values.dtype.kind == "f":
        values = values.astype("str").astype("float64")
    return values.tolist()


def as_json(values: NDArray[Any]) -> list[Any]:
    """Returns `as_list` with None for inf and NaN, which JSON lacks."""
    numbers = as_list(values)
    if values.dtype.kind != "f":
        return numbers
    return [number if math.isfinite(number) else None for number in numbers]
