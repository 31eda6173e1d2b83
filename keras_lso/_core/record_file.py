"""`RecordFile`: the steps of a run in a file, as JSON lines."""

import json
import math
import os
import pathlib

import numpy as np

from keras_lso._core.checks import check_path

# The numbers of a step.
NUMBERS = ("loss_scale", "gradient_norm", "learning_rate", "largest_gradient")
# The columns, with their types.
COLUMNS = {"step": int, "outcome": str} | dict.fromkeys(NUMBERS, float)


class RecordFile:
    """A file with a line for each step, in the order of `COLUMNS`."""

    def __init__(self, path):
        self._file = pathlib.Path(check_path("path", path))
        if self._file.suffix not in (".jsonl", ".json"):
            raise ValueError(
                "`path` must end with '.jsonl' or '.json', for one JSON object per "
                f"line. Received: path={path!r}"
            )

    def begin(self):
        """Makes the file and its folder, or checks an existing file."""
        # An unfinished last line, from a process that was killed, is removed.
        self._file.parent.mkdir(parents=True, exist_ok=True)
        self._file.touch()
        self._check_columns()
        with self._file.open("rb+") as file:
            # These 4096 bytes are more than a line.
            file.seek(-min(4096, self._file.stat().st_size), os.SEEK_END)
            end = file.read()
            file.seek(end.rfind(b"\n") + 1 - len(end), os.SEEK_END)
            file.truncate()

    def append(self, rows):
        """Appends rows: dicts from names in `COLUMNS` to values, with None for NaN."""
        with self._file.open("a", encoding="utf-8", newline="") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)

    def read(self):
        """Returns a dict of arrays, without steps that were trained again later."""
        self._check_columns()
        kept: list[dict] = []
        with self._file.open(encoding="utf-8") as file:
            # A process has not finished a line without an end.
            for row in (json.loads(line) for line in file if line.endswith("\n")):
                # Training went back to a checkpoint.
                while kept and kept[-1]["step"] >= row["step"]:
                    kept.pop()
                kept.append(row)
        return {
            # None becomes NaN.
            name: np.array([row[name] for row in kept], kind)
            for name, kind in COLUMNS.items()
        }

    def _check_columns(self):
        with self._file.open(encoding="utf-8") as file:
            first = file.readline()
        try:
            names = list(json.loads(first))
        except (ValueError, TypeError):
            names = [first.strip()]
        if first and names != list(COLUMNS):
            raise ValueError(
                "The file is not a record of steps, which has the columns "
                f"{', '.join(COLUMNS)}. Give the path of a new file. Received: "
                f"path={str(self._file)!r}, with {', '.join(map(str, names))[:200]}"
            )


def as_list(values):
    """Returns a list of Python objects, for a float32 with the fewest digits."""
    if values.dtype.kind == "f":
        values = values.astype("str").astype("float64")
    return values.tolist()


def plain(values):
    """Returns `as_list` with None for inf and NaN, which JSON does not have."""
    numbers = as_list(values)
    if values.dtype.kind != "f":
        return numbers
    return [number if math.isfinite(number) else None for number in numbers]
