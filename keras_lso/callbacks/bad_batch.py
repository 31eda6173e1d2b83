"""`BadBatch`: a file with the batch that a stall began with."""

import contextlib
import os
import pathlib
from typing import Any

import keras
import numpy as np
from keras import ops
from numpy.typing import NDArray

from keras_lso._backend import backend
from keras_lso._core.checks import check_path, refusal
from keras_lso._keras_internals.variables import path_of


class BadBatch:
    """Holds the batches since the last call of `select`, and writes one into a file."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        if pathlib.Path(check_path("save_bad_batch", path)).suffix != ".npz":
            raise refusal("save_bad_batch", path, "be a path that ends with '.npz'")
        self._file = pathlib.Path(path)
        self._model: Any = None
        self._watched: Any = None
        self.end()

    def __reduce__(self) -> Any:
        """Copies only the path."""
        return type(self), (self._file,)

    def begin(self, model: keras.Model) -> None:
        """Begins a `fit` of a model."""
        self._model = model
        self.end()

    def watch(self) -> None:
        """Watches the batches of the next call of the train function.

        It watches a single call: Keras calls no callback when `fit` ends with an error.
        """
        model, function = self._model, self._model.train_function
        if function is self._watched:
            return

        def watched(*arguments: Any) -> Any:
            model.train_function = function
            *state, data = arguments
            args = self._batches.append, model.steps_per_execution
            return function(*state, backend.host.shown(data, *args))

        model.train_function = self._watched = watched

    def end(self) -> None:
        """Forgets all batches."""
        self._batches: list[Any] = []
        self._selected: Any = None

    def select(self, skipped: int) -> None:
        """Keeps only the batch of the first of the last `skipped` steps.

        If this step is older than the batches, its batch is the one selected before, or
        it is not known, because the step belongs to an earlier `fit`.
        """
        if not skipped:
            self._selected = None
        elif skipped <= len(self._batches):
            self._selected = self._batches[-skipped]
        self._batches.clear()

    def write(self, since: int, variables: list[keras.Variable]) -> list[str]:
        """Writes the selected batch, if any, of the step `since`.

        Returns what to say if it cannot be written, a list of at most one paragraph.
        """
        paths = np.array([path_of(variable) for variable in variables], dtype="str")
        arrays: dict[str, Any] = {"step": np.array(since), "variables": paths}
        try:
            arrays |= _arrays_of(self._selected)
            self._file.parent.mkdir(parents=True, exist_ok=True)
            np.savez(self._file, **arrays)
        # Whatever a batch may be, and whatever its disk does: the stall matters more.
        except Exception as error:
            with contextlib.suppress(OSError):
                # NumPy cannot read a part of a file.
                self._file.unlink()
            return [
                f"The bad batch could not be saved to {str(self._file)!r}: "
                f"{type(error).__name__}: {error}."
            ]
        return []


def _arrays_of(batch: Any) -> dict[str, NDArray[Any]]:
    """Returns the arrays of a batch by their names in a file."""
    arrays = {}
    parts = keras.utils.unpack_x_y_sample_weight(batch)
    for name, part in zip(("x", "y", "sample_weight"), parts, strict=True):
        for path, leaf in keras.tree.flatten_with_path(part):
            if leaf is not None:
                key = "/".join(map(str, (name, *path)))
                arrays[key] = np.asarray(ops.convert_to_numpy(leaf))
    return arrays
