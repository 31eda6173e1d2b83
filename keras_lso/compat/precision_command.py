"""`keras-lso report`: both reports on a saved model, and the recommendation.

`saving.py` reads the model, and `batch_files.py` reads the batch.
"""

import contextlib
import json
import math
import os
from collections.abc import Iterator
from typing import Any, NamedTuple

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from keras_lso.compat.batch_files import read_batch
from keras_lso.compat.saving import load_model
from keras_lso.diagnostics.float16 import Float16Report
from keras_lso.diagnostics.hardware import check_hardware, hardware_of
from keras_lso.diagnostics.recommendation import (
    Recommendation,
    recommendation_of,
    report_of,
)
from keras_lso.diagnostics.trial_runs import batches_of, build
from keras_lso.diagnostics.underflow import UnderflowReport, underflow_report
from keras_lso.diagnostics.underflow_counts import all_finite

_STEPS = 4


class Precision(NamedTuple):
    """The result of `keras-lso report`.

    Attributes:
        float16: The `Float16Report`.
        underflow: The `UnderflowReport`. None if there are no gradients.
        recommendation: The `Recommendation`.
    """

    float16: Float16Report
    underflow: UnderflowReport | None
    recommendation: Recommendation

    @property
    def has_findings(self) -> bool:
        """Whether any value does not fit into float16 or is not finite."""
        layers = self.float16.layers.values()
        parts = (m for found in layers for _, m in found.parts())
        gradients = self.underflow.layers.values() if self.underflow else ()
        return (
            bool(self.float16.layers_to_keep)
            or any(found.reasons for found in layers)
            or any(magnitudes.not_finite for magnitudes in parts)
            or not all_finite(gradients)
        )

    def to_dict(self) -> dict[str, Any]:
        """Returns all of it, ready for JSON: non-finite numbers become strings."""
        underflow = self.underflow and self.underflow.to_dict()
        return _finite(
            {
                "recommendation": self.recommendation.to_dict(),
                "float16_report": self.float16.to_dict(),
                "underflow_report": underflow,
            }
        )

    def write(self, path: str | os.PathLike[str]) -> None:
        """Writes `to_dict()` to a file as JSON."""
        with open(path, "w", encoding="utf-8") as file:
            json.dump(self.to_dict(), file, indent=2, allow_nan=False)
            file.write("\n")

    def __str__(self) -> str:
        without = "There are no gradients: the model is not compiled, or"
        parts = [
            "float16",
            str(self.float16),
            "gradients",
            str(self.underflow or f"{without} the batch has no targets."),
            "recommendation",
            str(self.recommendation),
        ]
        return "\n\n".join(parts)


def precision_of(model_path: str, batch_path: str, hardware: str) -> Precision:
    """Returns both reports on a saved model and a batch, and the recommendation.

    A progress bar appears on the standard error if that is a terminal.

    Args:
        model_path: String, a `.keras` or `.h5` file.
        batch_path: String, a `.npz` file.
        hardware: String, as for `keras_lso.recommend`.

    Raises:
        OSError: If a file cannot be opened.
        ValueError: If a file has another format, or the model and the batch do not fit
            each other.
    """
    hardware = check_hardware(hardware)
    # The batch first, since it is read quickly.
    batch = read_batch(batch_path)
    with _progress() as advance:
        advance("loading the model")
        model = _loaded(model_path)
        what = f"{model_path!r} cannot be run on {batch_path!r}"
        with _saying(what):
            [batch] = batches_of(*batch)
            build(model, batch[0])
        if hardware == "auto":
            hardware = hardware_of(model, batch[0])
        with _saying(what):
            advance("float16")
            float16 = report_of(model, batch)
            advance("gradients")
            has_gradients = float16.recommended_scale is not None
            underflow = underflow_report(model, *batch) if has_gradients else None
            advance("recommendation")
            found = recommendation_of(model, batch, hardware, float16)
    return Precision(float16, underflow, found)


def _loaded(path):
    with open(path, "rb"):  # Its `OSError` says what is wrong.
        pass
    if path.endswith(".weights.h5") or not path.endswith((".keras", ".h5", ".hdf5")):
        raise ValueError(
            "The model must be a `.keras` or `.h5` file with a whole model in it. "
            f"Received: {path!r}"
        )
    with _saying(f"The model cannot be loaded from {path!r}"):
        return load_model(path)


@contextlib.contextmanager
def _saying(what):
    """Converts any error to a ValueError that says what has failed.

    The errors that Keras raises for a file, or for a layer in it, have no common class.
    """
    try:
        yield
    except Exception as error:
        raise ValueError(f"{what}: {type(error).__name__}: {error}") from error


@contextlib.contextmanager
def _progress() -> Iterator:
    """Shows a progress bar; yields a function that announces the next task."""
    console = Console(stderr=True)
    columns = BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    hidden = {"transient": True, "disable": not console.is_terminal}
    with Progress(*columns, console=console, **hidden) as progress:
        task = progress.add_task("", total=_STEPS)
        done = iter(range(_STEPS))
        yield lambda what: progress.update(task, description=what, completed=next(done))


def _finite(value):
    """Replaces numbers that JSON does not have by "inf", "-inf" and "nan"."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
