"""Files that get a record of each step while a model trains."""

import abc
from collections.abc import Iterable
from typing import Any

from keras_lso._core.checks import warn

# As lines of a `StepRecord`, about 12 MB.
_MOST_WAITING = 2**16


class StepFile(abc.ABC):
    """A file of an observer, which never decides how training ends.

    Steps that cannot be written wait in memory for the next attempt. The first failed
    attempt warns, and so does `end` if that warning counted fewer.
    """

    def __init__(self, path: Any = None) -> None:
        self._path = path
        self._waiting: list[bytes] = []
        # How many were dropped, and how many of those that wait a warning has counted.
        self._dropped = self._warned_of = 0
        self._failure: OSError | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Returns the state of a copy, for which no step waits."""
        return {**vars(self), "_waiting": [], "_dropped": 0, "_warned_of": 0}

    @abc.abstractmethod
    def _append(self, records: list[bytes]) -> None:
        """Writes records. With an `OSError`, those left in the list are not written."""

    def write_records(self, records: Iterable[bytes]) -> None:
        """Writes the steps that wait and then these, a record each."""
        self._waiting += records
        if not self._waiting:
            return
        try:
            self._append(self._waiting)
        except OSError as failure:
            self._failure = failure
            dropped = max(0, len(self._waiting) - _MOST_WAITING)
            del self._waiting[:dropped]
            self._dropped += dropped
            if not self._warned_of:
                self._warn()
        else:
            self._waiting.clear()
            self._warned_of = 0

    def remind(self) -> None:
        """Lets the next attempt warn again if it fails."""
        self._warned_of = 0

    def end(self) -> None:
        """Warns if steps are missing that no warning has counted."""
        if self._dropped or len(self._waiting) > self._warned_of:
            self._warn()

    def _warn(self) -> None:
        """Warns of the steps that wait, and of those that were dropped since."""
        waiting, dropped, self._dropped = len(self._waiting), self._dropped, 0
        self._warned_of = waiting
        warn(
            f"{str(self._path)!r} could not be written: {self._failure}. Training goes "
            f"on: {waiting} steps wait in memory, where {_MOST_WAITING} have room, and "
            f"{dropped} older ones are lost. Free space, or make the path writable: "
            "they are written before later steps, by the next `fit` with this "
            "callback, or by `flush` of a `StepRecord`."
        )
