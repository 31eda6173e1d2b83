"""Plots of a run: its loss scale, and its record of steps."""

import os
from typing import TYPE_CHECKING, Any

import keras
import numpy as np

from keras_lso._backend.tensors import shown
from keras_lso._core.step_record import COLUMNS, RecordFile

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def plot_loss_scale(history: keras.callbacks.History | dict[str, Any]) -> "Figure":
    """Draws the loss scale and the skipped steps of a run, below its loss.

    One batch that overflows makes the mean loss of its epoch NaN. The legend counts
    such epochs, which have no point.

    Args:
        history: The `History` returned by `fit` with a
            `keras_lso.callbacks.LossScaleMonitor`, or its dict of lists.

    Raises:
        ImportError: If matplotlib is not installed.
        ValueError: If the history contains no loss scale.

    Example:

    >>> import keras_lso
    >>> figure = keras_lso.plotting.plot_loss_scale(
    ...     {"loss_scale": [32768.0, 16384.0, 16384.0], "skipped_steps": [0, 1, 1]}
    ... )
    """
    logs = getattr(history, "history", history)
    if not isinstance(logs, dict) or not logs.get("loss_scale"):
        raise ValueError(
            "`history` must hold 'loss_scale': call `fit` with callbacks=["
            "keras_lso.callbacks.LossScaleMonitor()]. "
            f"Received: history={shown(history)}"
        )
    scales = logs["loss_scale"]
    epochs = np.arange(1, len(scales) + 1)
    losses = {name: logs[name] for name in ("loss", "val_loss") if name in logs}
    figure, axes = _figure(2 if losses else 1, height=2.2)
    if losses:
        _draw_losses(axes[0], epochs, losses)
    axis = axes[-1]
    axis.step(epochs, scales, where="mid", color="C0")
    axis.set_yscale("log", base=2)
    axis.set_ylabel("loss scale", color="C0")
    axis.set_xlabel("epoch")
    axis.xaxis.get_major_locator().set_params(integer=True)
    if "skipped_steps" in logs:
        # The number before the first epoch of this run is unknown.
        new = np.diff(logs["skipped_steps"], prepend=0)
        bars = axis.twinx()
        bars.grid(False)
        bars.bar(epochs, new, width=0.5, color="C1", alpha=0.35)
        bars.set_ylabel("steps skipped in the epoch", color="C1")
        bars.set_ylim(0, max(4, 3 * new.max()))
        bars.yaxis.get_major_locator().set_params(integer=True)
        # Put the line in front of the bars, and the background behind both.
        axis.set_zorder(bars.get_zorder() + 1)
        axis.patch.set_visible(False)
        bars.patch.set_visible(True)
    return figure


def _draw_losses(axis: Any, epochs: Any, losses: dict[str, list[float]]) -> None:
    """Draws the losses of the epochs, and says which are not finite."""
    for name, values in losses.items():
        finite, count = np.isfinite(values), len(values)
        if not finite.all():
            name += f": NaN or inf in {np.sum(~finite)} of {count} epochs"
        # The dots show an epoch between two that have no number.
        points = np.where(finite, values, np.nan)
        axis.plot(epochs[:count], points, ".-", label=name)
    axis.set_ylabel("loss")
    axis.legend()
    if not any(np.isfinite(values).any() for values in losses.values()):
        axis.set_yticks([])


def plot_record(
    record: str | os.PathLike[str] | dict[str, Any] | list[dict[str, Any]],
) -> "Figure":
    """Draws the record of a `keras_lso.callbacks.StepRecord` in four panels.

    The panels show the norm of the gradients (and the largest gradient, if it is
    known), the loss scale, the learning rate, and the number of steps skipped so far
    for each reason. Spikes are marked at their norm, overflows at their loss scale.

    Args:
        record: The path of the file; a dict of arrays from
            `LossScaleOptimizer.read_record`; or a list of such dicts, of arrays or of
            lists, like `history.history["step_record"]`.

    Raises:
        ImportError: If matplotlib is not installed.
        ValueError: If the record has other columns, or no steps.

    Example:

    >>> import numpy as np, keras, keras_lso
    >>> model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    >>> optimizer = keras_lso.LossScaleOptimizer(keras.optimizers.SGD(0.1))
    >>> model.compile(optimizer, loss="mse")
    >>> x, record = np.ones((8, 1)), keras_lso.callbacks.StepRecord()
    >>> history = model.fit(x, x, batch_size=2, callbacks=[record], verbose=0)
    >>> figure = keras_lso.plotting.plot_record(history.history["step_record"])
    """
    columns = _as_record(record)
    steps, outcomes = columns["step"], columns["outcome"]
    figure, (norms, scales, rates, skipped) = _figure(4, height=1.6)
    for axis, name, base in (norms, "gradient_norm", 10), (scales, "loss_scale", 2):
        values = np.where(np.isfinite(columns[name]), columns[name], np.nan)
        axis.plot(steps, values, color="C0")
        if np.nanmax(values, initial=0.0) > 0:
            axis.set_yscale("log", base=base)
        axis.set_ylabel(name.replace("_", " "))
    largest = columns["largest_gradient"]
    if np.isfinite(largest).any():
        norms.plot(steps, largest, color="C0", alpha=0.5, label="largest")
    rates.plot(steps, columns["learning_rate"])
    rates.set_ylabel("learning rate")
    # Otherwise a constant looks like one that hardly moves.
    rates.set_ylim(bottom=0.0)
    marked = {"overflow": (scales, "loss_scale"), "spike": (norms, "gradient_norm")}
    for reason, color in {"overflow": "C1", "spike": "C2", "rate": "C3"}.items():
        at = outcomes == reason
        if at.any() or reason == "overflow":
            count = np.cumsum(at)
            skipped.step(steps, count, where="post", color=color, label=reason)
        if at.any() and reason in marked:
            axis, name = marked[reason]
            axis.plot(steps[at], columns[name][at], "x", color=color, label=reason)
    skipped.set_ylabel("skipped steps")
    skipped.set_xlabel("step")
    skipped.set_ylim(bottom=0, top=max(4, skipped.get_ylim()[1]))
    skipped.yaxis.get_major_locator().set_params(integer=True)
    for axis in (norms, scales, skipped):
        if axis.get_legend_handles_labels()[1]:
            # Above the panel, where it hides no mark.
            place = {"loc": "lower right", "bbox_to_anchor": (1.0, 1.0)}
            axis.legend(**place, ncols=3, frameon=False, borderaxespad=0.0)
    return figure


def _as_record(record: Any) -> dict[str, Any]:
    """Returns a dict of arrays, given a file, a dict, or a list of dicts."""
    if isinstance(record, str | os.PathLike):
        record = RecordFile(record).read()
    parts = [record] if isinstance(record, dict) else record
    try:
        whole = {
            name: np.concatenate([np.asarray(part[name], kind) for part in parts])
            for name, kind in COLUMNS.items()
        }
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            "`record` must be the path of a file that a StepRecord has written, the "
            "dict that `optimizer.read_record()` returned, or a list of such dicts. "
            f"Received: record={shown(record)}"
        ) from error
    if not len(whole["step"]):
        raise ValueError("`record` has no steps. Train first.")
    return whole


def _figure(rows: int, height: float) -> tuple["Figure", list[Any]]:
    """Returns a figure, and its axes one above the other."""
    try:
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise ImportError(
            "The plots need matplotlib, which is not installed. Run "
            '`pip install matplotlib`, or `pip install "keras-lso[plot]"`.'
        ) from error
    shape = {"figsize": (6.4, height * rows), "layout": "constrained"}
    figure, axes = plt.subplots(rows, sharex=rows > 1, squeeze=False, **shape)
    # Otherwise pyplot keeps the figure, and a notebook shows it twice.
    plt.close(figure)
    return figure, list(axes[:, 0])


__all__ = ["plot_loss_scale", "plot_record"]


def __dir__() -> list[str]:
    return __all__
