"""Plots of schedules, loss scales, trust ratios, underflow and overflow.

Each function returns a `matplotlib` figure; `figure.savefig(path)` writes it to a file.
A function draws in matplotlib's current style, which you choose with, for example,
`plt.style.use("dark_background")`. It uses the style's background and the first colours
of the style's cycle. If the style sets no colours, the functions use those of Okabe and
Ito, which colour-blind readers can tell apart. If it sets no grid, the grid is pale.

Only this module needs matplotlib, and imports it when a function draws.
"""

import functools
import itertools
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import keras
import numpy as np
from keras import ops
from keras.optimizers.schedules import LearningRateSchedule

from keras_lso._backend.types import FunctionT
from keras_lso._core.checks import check_int
from keras_lso._core.record_file import COLUMNS, RecordFile

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from keras_lso.diagnostics import Float16Report, UnderflowReport

# Okabe and Ito's colours.
_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
# Each entry applies if the style leaves it at matplotlib's default.
_STYLE = {
    "axes.prop_cycle": f"cycler(color={_COLORS})",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "font.size": 9,
    "figure.dpi": 150,
}
# For a style without a grid.
_GRID = {"axes.grid": True, "grid.alpha": 0.33, "grid.linewidth": 0.6}
_MOST_POINTS = 1000


def _in_style(draw: FunctionT) -> FunctionT:
    """Lets a function draw in the user's style, completed by the package's style."""

    @functools.wraps(draw)
    def draw_in_style(*args, **kwargs):
        try:
            import matplotlib
        except ImportError as error:
            raise ImportError(
                "The plots need matplotlib, which is not installed. Run "
                '`pip install matplotlib`, or `pip install "keras-lso[plot]"`.'
            ) from error
        now, default = matplotlib.rcParams, matplotlib.rcParamsDefault
        style: dict[str, object] = {} if now["axes.grid"] else {**_GRID}
        style |= {k: v for k, v in _STYLE.items() if now[k] == default[k]}
        with matplotlib.rc_context(style):
            return draw(*args, **kwargs)

    return cast(FunctionT, draw_in_style)


@_in_style
def plot_schedule(
    schedules: LearningRateSchedule
    | Sequence[LearningRateSchedule]
    | Mapping[str, LearningRateSchedule],
    steps: int,
) -> "Figure":
    """Draws the learning rate of one or more schedules.

    Args:
        schedules: A learning-rate schedule, a list of schedules, or a dict of labels to
            schedules.
        steps: At least 2. The number of steps to draw, from step 0.

    Returns:
        A `matplotlib` figure.

    Raises:
        ImportError: If matplotlib is not installed.
        ValueError, TypeError: If an argument is not valid.

    Example:

    >>> import keras_lso
    >>> warmup = keras_lso.schedules.LinearWarmup(0.1, 500, 0.0)
    >>> figure = keras_lso.plotting.plot_schedule({"warm-up": warmup}, steps=1000)
    """
    schedules = _as_dict(schedules)
    steps = check_int("steps", steps, at_least=2)
    at = np.unique(np.linspace(0, steps - 1, min(steps, _MOST_POINTS)).astype("int64"))
    figure, [axis] = _figure(1, height=3.2)
    for color, (label, schedule) in _colored(schedules):
        rates = [float(ops.convert_to_numpy(schedule(int(step)))) for step in at]
        axis.plot(at, rates, color=color, label=label, linewidth=1.6)
    axis.set_xlabel("step")
    axis.set_ylabel("learning rate")
    axis.set_xlim(0, steps - 1)
    axis.set_ylim(bottom=min(0.0, axis.get_ylim()[0]))
    if len(schedules) > 1:
        axis.legend(frameon=False)
    return figure


def _as_dict(schedules):
    kind = keras.optimizers.schedules.LearningRateSchedule
    if isinstance(schedules, kind):
        schedules = [schedules]
    if isinstance(schedules, list | tuple):
        names = [getattr(s, "name", None) or type(s).__name__ for s in schedules]
        if len(set(names)) < len(names):
            names = [f"{i}: {name}" for i, name in enumerate(names)]
        schedules = dict(zip(names, schedules, strict=True))
    is_dict = isinstance(schedules, dict) and schedules
    if not is_dict or not all(isinstance(s, kind) for s in schedules.values()):
        raise TypeError(
            "`schedules` must be a learning-rate schedule, a list of schedules, or a "
            f"dict of labels to schedules. Received: schedules={schedules!r}"
        )
    return schedules


@_in_style
def plot_loss_scale(history: keras.callbacks.History | dict[str, Any]) -> "Figure":
    """Draws the loss scale and the skipped steps of a run, below its loss.

    Args:
        history: The `History` returned by `fit` with a
            `keras_lso.callbacks.LossScaleMonitor`, or its dict of lists.

    Returns:
        A `matplotlib` figure.

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
            f"keras_lso.callbacks.LossScaleMonitor()]. Received: history={history!r}"
        )
    scales, skipped = logs["loss_scale"], logs.get("skipped_steps")
    epochs = np.arange(1, len(scales) + 1)
    losses = {name: logs[name] for name in ("loss", "val_loss") if name in logs}
    figure, axes = _figure(2 if losses else 1, height=2.2)
    if losses:
        for color, (name, values) in _colored(losses):
            axes[0].plot(epochs[: len(values)], values, color=color, label=name)
        axes[0].set_ylabel("loss")
        axes[0].legend(frameon=False)
    axis, color = axes[-1], _colors()[0]
    axis.step(epochs, scales, where="mid", color=color, linewidth=1.6)
    axis.set_yscale("log", base=2)
    axis.set_ylabel("loss scale", color=color)
    axis.set_xlabel("epoch")
    axis.xaxis.get_major_locator().set_params(integer=True)
    if skipped is not None:
        _draw_skipped(axis, epochs, skipped)
    return figure


def _draw_skipped(axis, epochs, skipped):
    new = np.diff(skipped, prepend=skipped[0])
    # The number before the first epoch of this run is unknown.
    new[0] = skipped[0]
    bars, color = axis.twinx(), _colors()[1]
    bars.grid(False)
    bars.bar(epochs, new, width=0.5, color=color, alpha=0.35)
    bars.set_ylabel("steps skipped in the epoch", color=color)
    bars.set_ylim(0, max(4, 3 * new.max()))
    bars.yaxis.get_major_locator().set_params(integer=True)
    bars.spines["right"].set_visible(True)
    # Put the line in front of the bars, and the background behind both.
    axis.set_zorder(bars.get_zorder() + 1)
    axis.patch.set_visible(False)
    bars.patch.set_visible(True)


@_in_style
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

    Returns:
        A `matplotlib` figure.

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
    figure, axes = _figure(4, height=1.6)
    norms, scales, rates, skipped = axes
    color, overflow_color, spike_color = _colors()[:3]
    _draw_steps(norms, steps, columns["gradient_norm"], color, "gradient norm")
    largest = columns["largest_gradient"]
    if np.isfinite(largest).any():
        norms.plot(steps, largest, color=color, alpha=0.5, linewidth=1, label="largest")
    _draw_steps(scales, steps, columns["loss_scale"], color, "loss scale", base=2)
    for axis, outcome, marked, name in (
        (norms, "spike", spike_color, "gradient_norm"),
        (scales, "overflow", overflow_color, "loss_scale"),
    ):
        at = outcomes == outcome
        if np.any(at):
            values = columns[name][at]
            axis.plot(steps[at], values, "x", color=marked, label=outcome)
    rates.plot(steps, columns["learning_rate"], color=color, linewidth=1.2)
    rates.set_ylabel("learning rate")
    _draw_reasons(skipped, steps, outcomes)
    for axis in (norms, scales, skipped):
        if axis.get_legend_handles_labels()[1]:
            axis.legend(frameon=False)
    return figure


def _as_record(record: Any) -> dict[str, Any]:
    """Returns a dict of arrays, given a file, a dict, or a list of dicts."""
    if isinstance(record, str | os.PathLike):
        record = RecordFile(record).read()
    parts = [record] if isinstance(record, dict) else record
    is_list = isinstance(parts, list) and parts
    if not is_list or not all(
        isinstance(p, dict) and {*COLUMNS} <= {*p} for p in parts
    ):
        raise ValueError(
            "`record` must be the path of a file that a StepRecord has written, the "
            "dict that `optimizer.read_record()` returned, or a list of such dicts. "
            f"Received: record={record!r}"
        )
    whole = {
        name: np.concatenate([np.asarray(part[name], kind) for part in parts])
        for name, kind in COLUMNS.items()
    }
    if not len(whole["step"]):
        raise ValueError("`record` has no steps. Train first.")
    return whole


def _draw_steps(axis, steps, values, color, label, base=10):
    """Draws positive numbers on a logarithmic axis; leaves out inf and NaN."""
    values = np.where(np.isfinite(values), values, np.nan)
    axis.plot(steps, values, color=color, linewidth=1.2)
    if np.nanmax(values, initial=0.0) > 0:
        axis.set_yscale("log", base=base)
    axis.set_ylabel(label)


def _draw_reasons(axis, steps, outcomes):
    """Draws the number of steps skipped so far, with a line for each reason."""
    colors = dict(zip(("overflow", "spike", "rate"), _colors()[1:], strict=False))
    for reason, color in colors.items():
        at = outcomes == reason
        if at.any() or reason == "overflow":
            axis.step(steps, np.cumsum(at), where="post", color=color, label=reason)
    axis.set_ylabel("skipped steps")
    axis.set_xlabel("step")
    axis.set_ylim(bottom=0, top=max(4, axis.get_ylim()[1]))
    axis.yaxis.get_major_locator().set_params(integer=True)


@_in_style
def plot_trust_ratios(
    ratios: dict[str, Any] | Iterable[dict[str, Any]],
) -> "Figure":
    """Draws the trust ratios by which LARS or LARC rescales each layer.

    Args:
        ratios: Dict of layers' or variables' names to their ratios, as returned by
            `LARS.trust_ratios`; or a list of such dicts, one per step. For a list, a
            dot marks the median, and a line runs from the smallest to the largest
            ratio.

    Returns:
        A `matplotlib` figure.

    Raises:
        ImportError: If matplotlib is not installed.
        ValueError: If there are no ratios.

    Example:

    >>> import keras_lso
    >>> figure = keras_lso.plotting.plot_trust_ratios({"conv": 0.002, "dense": 0.03})
    """
    snapshots: list[Any] = [ratios] if isinstance(ratios, dict) else list(ratios)
    if not snapshots or not all(isinstance(s, dict) and s for s in snapshots):
        raise ValueError(
            "`ratios` must be a dict of names to trust ratios, or a list of such "
            f"dicts. Received: ratios={ratios!r}"
        )
    names = list(dict.fromkeys(name for snapshot in snapshots for name in snapshot))
    rows = [[float(s[name]) for s in snapshots if name in s] for name in names]
    figure, [axis] = _figure(1, height=max(2.0, 0.6 + 0.17 * len(names)))
    at, color = np.arange(len(names)), _colors()[0]
    ends = [min(row) for row in rows], [max(row) for row in rows]
    axis.hlines(at, *ends, color=color, alpha=0.35, linewidth=3)
    axis.plot([np.median(row) for row in rows], at, "o", color=color, markersize=4)
    axis.set_xscale("log")
    axis.set_xlabel("trust ratio")
    axis.set_yticks(at, names, fontsize=8 if len(names) <= 40 else 5)
    axis.set_ylim(len(names) - 0.5, -0.5)
    axis.grid(axis="y", visible=False)
    return figure


@_in_style
def plot_underflow(report: "UnderflowReport") -> "Figure":
    """Draws the underflow and overflow of each layer's gradients against the scale.

    Args:
        report: The `UnderflowReport` that `keras_lso.underflow_report` returned.

    Returns:
        A `matplotlib` figure.

    Raises:
        ImportError: If matplotlib is not installed.
    """
    names, layers = list(report.layers), list(report.layers.values())
    figure, [axis] = _figure(1, height=max(2.2, 1.3 + 0.24 * len(names)))
    # A subnormal value keeps some of its digits, so it counts half.
    lost = np.array([np.add(c.flushed, np.divide(c.subnormal, 2)) for c in layers])
    overflowing = np.array([c.overflowing for c in layers])
    axis.imshow(_cells(lost, overflowing), aspect="auto", interpolation="nearest")
    axis.set_yticks(range(len(names)), names, fontsize=8)
    exponents = [math.log2(scale) for scale in report.scales]
    every = max(1, math.ceil(len(exponents) / 8))
    axis.set_xticks(
        range(0, len(exponents), every),
        [f"$2^{{{exponent:g}}}$" for exponent in exponents[::every]],
    )
    axis.set_xlabel("loss scale")
    axis.grid(False)
    _mark_safe_scales(axis, exponents, report.safe_scales)
    _add_legend(figure)
    return figure


@_in_style
def plot_float16(report: "Float16Report") -> "Figure":
    """Draws the largest magnitudes of each layer against the range of float16.

    The names of the layers to keep in float32 are coloured.

    Args:
        report: The `Float16Report` that `keras_lso.float16_report` returned.

    Returns:
        A `matplotlib` figure.

    Raises:
        ImportError: If matplotlib is not installed.
    """
    from matplotlib import rcParams

    ink, (below, above, *_) = rcParams["text.color"], _colors()
    names, layers = list(report.layers), list(report.layers.values())
    figure, [axis] = _figure(1, height=max(2.2, 1.3 + 0.24 * len(names)))
    for kind, marker, size in _KINDS:
        points = [
            (value, row)
            for row, found in enumerate(layers)
            for value in _largest(found, kind)
        ]
        values, rows = zip(*points, strict=True) if points else ((), ())
        # Hollow markers do not hide the ones below.
        style = {"markersize": size, "markerfacecolor": "none", "label": kind}
        axis.plot(values, rows, marker, color=ink, **style)
    axis.set_xscale("log", base=2)
    low, high = axis.get_xlim()
    axis.set_xlim(min(low, 2.0**-26), max(high, 2.0**20))
    low, high = axis.get_xlim()
    axis.axvspan(low, 2.0**-25, color=below, alpha=0.25, label="flushed to zero")
    axis.axvspan(65504.0, high, color=above, alpha=0.25, label="overflow")
    axis.set_xlabel("largest magnitude in float32")
    axis.set_yticks(range(len(names)), names, fontsize=8)
    axis.set_ylim(max(len(names), 1) - 0.5, -0.5)
    for name, label in zip(names, axis.get_yticklabels(), strict=True):
        if any(f"{name}/".startswith(f"{path}/") for path in report.layers_to_keep):
            label.set(color=above, fontweight="bold")
    place = {"loc": "outside upper left", "ncols": 6}
    figure.legend(frameon=False, fontsize=7, **place)
    return figure


_KINDS = ("inputs", "|", 9), ("weights", "s", 3), ("ops", "x", 5), ("outputs", "o", 6)


def _largest(found, kind):
    """Returns the largest nonzero magnitudes of a kind in float16."""
    of_kind = found.ops.values() if kind == "ops" else [getattr(found, kind)]
    return [m.largest for m in of_kind if m is not None and m.is_float16 and m.largest]


def _cells(lost, overflowing):
    """Returns an image in the colours of both; rarer values are more transparent."""
    from matplotlib.colors import to_rgb

    # The square root makes a share of 1% visible.
    opacities = np.sqrt(np.clip([lost, overflowing], 0, 1))[..., np.newaxis]
    colors = np.array([to_rgb(color) for color in _colors()[:2]])[:, None, None]
    # If both are 0, any colour will do.
    whole = np.maximum(opacities.sum(axis=0), np.finfo("float64").tiny)
    mixed = (opacities * colors).sum(axis=0) / whole
    return np.concatenate([mixed, 1 - np.prod(1 - opacities, axis=0)], axis=-1)


def _mark_safe_scales(axis, exponents, safe):
    if safe is None or len(exponents) < 2:
        return
    low, high = (np.interp(_log2(s), exponents, range(len(exponents))) for s in safe)
    axis.plot([low, high], [-0.62] * 2, color=_colors()[2], linewidth=4, clip_on=False)


def _log2(scale):
    return math.log2(scale) if 0 < scale < math.inf else math.copysign(99, scale - 1)


def _add_legend(figure):
    from matplotlib.lines import Line2D

    labels = (
        "flushed to zero, or subnormal (fainter)",
        "overflow",
        "safe for all layers",
    )
    lines = [Line2D([], [], color=color, linewidth=4) for color in _colors()[:3]]
    place = {"loc": "outside upper left", "ncols": 3}
    figure.legend(lines, labels, frameon=False, fontsize=8, **place)


def _figure(rows, height):
    """Returns a figure, and its axes one above the other."""
    import matplotlib.pyplot as plt

    shape = {"figsize": (6.4, height * rows), "layout": "constrained"}
    figure, axes = plt.subplots(rows, sharex=rows > 1, squeeze=False, **shape)
    # Otherwise pyplot keeps the figure, and a notebook shows it twice.
    plt.close(figure)
    return figure, list(axes[:, 0])


def _colors():
    """Returns the colours of the style: three or more.

    Not as "C0", which matplotlib resolves in the style that is current when the figure
    is saved.
    """
    from matplotlib import rcParams

    colors = rcParams["axes.prop_cycle"].by_key().get("color", ())
    return colors if len(colors) >= 3 else _COLORS


def _colored(items):
    """Returns the items of a dict, each with a colour."""
    return zip(itertools.cycle(_colors()), items.items(), strict=False)


__all__ = [
    "plot_float16",
    "plot_loss_scale",
    "plot_record",
    "plot_schedule",
    "plot_trust_ratios",
    "plot_underflow",
]
