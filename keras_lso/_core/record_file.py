"""`RecordFile`: the steps of a run in a file, as JSON lines or as CSV.

A callback writes the file, and a plot reads it.
"""

import csv
import json
import math
import os
import pathlib

import numpy as np

from keras_lso._core.option_checks import check_path

# The columns, with their types.
COLUMNS = {
    "step": int,
    "outcome": str,
    "loss_scale": float,
    "gradient_norm": float,
    "learning_rate": float,
    "largest_gradient": float,
}


class RecordFile:
    """A file with a line for each step, in the order of `COLUMNS`.

    Args:
        path: String or path that ends with `.jsonl`, `.json` or `.csv`.
    """

    def __init__(self, path):
        self._file = pathlib.Path(check_path("path", path))
        if self._file.suffix not in (".jsonl", ".json", ".csv"):
            raise ValueError(
                "`path` must end with '.jsonl' or '.json', for one JSON object per "
                f"line, or with '.csv'. Received: path={path!r}"
            )
        self._is_csv = self._file.suffix == ".csv"

    def begin(self):
        """Makes the file and its folder, or checks an existing file.

        An unfinished last line, from a process that was killed, is removed.
        """
        self._file.parent.mkdir(parents=True, exist_ok=True)
        self._file.touch()
        self._check_columns()
        with self._file.open("rb+") as file:
            # These 4096 bytes are more than a line.
            file.seek(-min(4096, self._file.stat().st_size), os.SEEK_END)
            end = file.read()
            file.seek(end.rfind(b"\n") + 1 - len(end), os.SEEK_END)
            file.truncate()
        if self._is_csv and not self._file.stat().st_size:
            self._file.write_text(",".join(COLUMNS) + "\n", "utf-8")

    def append(self, rows):
        """Appends rows: dicts from names in `COLUMNS` to values, with None for NaN."""
        with self._file.open("a", encoding="utf-8", newline="") as file:
            if self._is_csv:
                csv.DictWriter(file, COLUMNS, lineterminator="\n").writerows(rows)
            else:
                file.writelines(json.dumps(row) + "\n" for row in rows)

    def read(self):
        """Returns a dict of arrays, without steps that were trained again later."""
        self._check_columns()
        with self._file.open(encoding="utf-8", newline="") as file:
            # Skip a line that a process has not finished.
            lines = [line for line in file if line.endswith("\n")]
        rows = csv.DictReader(lines) if self._is_csv else map(json.loads, lines)
        kept: list[dict] = []
        for row in rows:
            step = int(row["step"])
            # Training went back to a checkpoint.
            while kept and int(kept[-1]["step"]) >= step:
                kept.pop()
            kept.append(row)
        return {
            name: np.array([_number(row[name], kind) for row in kept], kind)
            for name, kind in COLUMNS.items()
        }

    def _check_columns(self):
        with self._file.open(encoding="utf-8", newline="") as file:
            first = file.readline()
        try:
            names = (
                first.strip().split(",") if self._is_csv else list(json.loads(first))
            )
        except (ValueError, TypeError):
            names = [first.strip()]
        if first and names != list(COLUMNS):
            raise ValueError(
                "The file is not a record of steps, which has the columns "
                f"{', '.join(COLUMNS)}. Give the path of a new file. Received: "
                f"path={str(self._file)!r}, with {', '.join(map(str, names))[:200]}"
            )


def _number(value, kind):
    if kind is float:
        return math.nan if value in (None, "") else float(value)
    return kind(value)


def as_list(values):
    """Returns a list of Python objects, for a float32 with the fewest digits."""
    if values.dtype.kind == "f":
        values = values.astype("str").astype("float64")
    return values.tolist()


def plain(values):
    """Returns `as_list` with None for inf and NaN, which JSON does not have."""
    found = as_list(values)
    if values.dtype.kind != "f" or np.isfinite(values).all():
        return found
    return [number if math.isfinite(number) else None for number in found]
