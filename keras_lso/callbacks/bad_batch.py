"""`BadBatch`: the batch of the first step that was skipped at the lowest loss scale."""

import os
import pathlib
from collections.abc import Iterable
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_lso._backend import backend
from keras_lso._core.checks import check_path, refusal
from keras_lso._keras_internals.variables import path_of


class BadBatch:
    """Holds the batches since the last call of `look`, and writes one into a file."""

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
        self._model = model
        self.end()

    def watch(self) -> None:
        """Watches the batches of the next call of the train function.

        It watches a single call: Keras calls no callback when `fit` ends with an error.
        """
        model, function = self._model, self._model.train_function
        if function is self._watched:
            return

        def watched(*arguments):
            model.train_function = function
            *state, data = arguments
            told = self._batches.append, model.steps_per_execution
            return function(*state, backend.host.shown(data, *told))

        model.train_function = self._watched = watched

    def end(self) -> None:
        self._batches: list[Any] = []
        self._found: Any = None

    def look(self, skipped: int) -> None:
        """Keeps only the batch of the first of the last `skipped` steps.

        If this step is older than the batches, its batch was found before, or it is not
        known, because the step belongs to an earlier `fit`.
        """
        if not skipped:
            self._found = None
        elif skipped <= len(self._batches):
            self._found = self._batches[-skipped]
        self._batches.clear()

    def write(self, since: int, variables: Iterable[keras.Variable]) -> None:
        """Writes the batch that was found, if any, of the step `since`."""
        paths = np.array([path_of(variable) for variable in variables], dtype="str")
        arrays: dict[str, Any] = {"step": np.array(since), "variables": paths}
        parts = keras.utils.unpack_x_y_sample_weight(self._found)
        for name, part in zip(("x", "y", "sample_weight"), parts, strict=True):
            for path, leaf in keras.tree.flatten_with_path(part):
                if leaf is not None:
                    name_of_leaf = "/".join(map(str, (name, *path)))
                    arrays[name_of_leaf] = np.asarray(ops.convert_to_numpy(leaf))
        self._file.parent.mkdir(parents=True, exist_ok=True)
        np.savez(self._file, **arrays)
