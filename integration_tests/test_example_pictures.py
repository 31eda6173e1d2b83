"""What the pictures of `examples/` show, of results that are made up here.

`test_examples.py` and `test_float16_examples.py` run the programs, which draw what they
have found by the same functions.
"""

import importlib
import pathlib
import sys

import keras
import matplotlib
import matplotlib.style
import numpy as np
import pytest
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from keras_lso import diagnostics, schedules
from keras_lso.diagnostics.underflow import counts_of
from testing.visible import assert_visible

EXAMPLES = pathlib.Path(__file__).parents[1] / "examples"


@pytest.fixture
def example(monkeypatch):
    """`example(name)`: the module itself."""
    monkeypatch.syspath_prepend(EXAMPLES)
    policy, before = keras.config.dtype_policy(), set(sys.modules)
    with matplotlib.rc_context():
        yield importlib.import_module
    for path in EXAMPLES.glob("*.py"):
        if path.stem not in before:
            sys.modules.pop(path.stem, None)
    keras.config.set_dtype_policy(policy)


@pytest.fixture(params=["default", "dark_background"])
def picture(monkeypatch, request):
    """`picture(draw, *arguments)`: the figure that `draw` saves, in either style."""
    saved = []

    def save(figure, path, **_):
        saved.append((figure, path))

    monkeypatch.setattr(Figure, "savefig", save)

    def drawn(draw, *arguments):
        draw(*arguments, "picture.png")
        [(figure, path)] = saved
        assert path == "picture.png"
        assert_visible(figure)
        return figure

    with matplotlib.style.context(request.param):
        yield drawn


def points(line):
    return [list(line.get_xdata()), list(line.get_ydata())]


def texts(items):
    return [item.get_text() for item in items]


def legend_of(holder):
    """The labels of a legend, and the colours beside them."""
    labels = texts(holder.get_texts())
    colors = [to_rgb(line.get_color()) for line in holder.get_lines()]
    return dict(zip(labels, colors, strict=True))


# --- train_digits.py ------------------------------------------------------------


def digits_runs(backend):
    run = {"backend": backend, "losses": [0.09, 0.01], "skipped": []}
    layers = {"conv 1": 0.25, "dense 1": 0.5}
    none = dict.fromkeys(layers, 0.0)
    run |= {"scales": [1.0] * 4, "flushed_by_layer": none}
    return [
        {**run, "precision": "float32"},
        {
            **run,
            "precision": "float16",
            "losses": [0.09, 0.08],
            "flushed_by_layer": layers,
        },
        {
            **run,
            "precision": "float16, keras_lso",
            "losses": [0.07, 0.02],
            "scales": [8.0, 4.0, 4.0, 2.0],
            "skipped": [0, 2],
        },
    ]


def test_train_digits_draws_losses_scales_and_flushed_shares(example, picture):
    report = example("digits_report")
    runs = digits_runs("jax") + digits_runs("torch")
    figure = picture(report.draw, runs)
    axes = np.reshape(figure.axes, (3, 2))
    assert [axis.get_title() for axis in axes[0]] == ["jax", "torch"]
    for column in axes.T:
        assert_is_a_column_of_digits(report, *column)
    labels = [axis.get_ylabel() for axis in axes[:, 0]]
    assert labels[:2] == ["training loss", "loss scale"]
    assert labels[2] == "gradient values\nflushed to zero"
    [legend] = figure.legends
    assert legend_of(legend) == {
        report.LABELS[name]: to_rgb(style["color"])
        for name, style in report.STYLES.items()
    }


def assert_is_a_column_of_digits(report, losses, scale, flushed):
    *curves, guess = losses.get_lines()
    # An epoch has two steps.
    assert [points(curve) for curve in curves] == [
        [[2, 4], [0.09, 0.01]],
        [[2, 4], [0.09, 0.08]],
        [[2, 4], [0.07, 0.02]],
    ]
    assert [curve.get_label() for curve in curves] == list(report.LABELS.values())
    # Nine digits are off by a tenth, and one by nine.
    assert guess.get_ydata() == pytest.approx([0.09, 0.09])
    assert texts(losses.texts) == ["guessing"]
    assert losses.get_yscale() == scale.get_yscale() == "log"
    assert losses.get_xlabel() == scale.get_xlabel() == "step"
    steps, skips = scale.get_lines()
    assert points(steps) == [[0, 1, 2, 3], [8.0, 4.0, 4.0, 2.0]]
    assert points(skips) == [[0, 2], [8.0, 4.0]]
    assert texts(scale.get_legend().get_texts()) == ["skipped step"]
    heights = [bar.get_height() for bar in flushed.patches]
    assert heights == [0.25, 0.5, 0.0, 0.0]
    assert texts(flushed.texts) == ["25%", "50%", "0%", "0%"]
    middles = [bar.get_x() + bar.get_width() / 2 for bar in flushed.patches]
    assert middles == pytest.approx([-0.2, 0.8, 0.2, 1.2])
    assert list(flushed.get_xticks()) == [0, 1]
    assert texts(flushed.get_xticklabels()) == ["conv\n1", "dense\n1"]


# --- large_batch_digits.py ------------------------------------------------------


def batch_result(optimizer, batch_size, accuracies, validation, best):
    return {
        "optimizer": optimizer,
        "batch_size": batch_size,
        "steps": 1000 // batch_size,
        "accuracies": accuracies,
        "base_rates": [1.0, 2.0, 4.0],
        "validation": validation,
        "best": best,
    }


def test_large_batch_draws_test_accuracy_and_choice_of_rates(example, picture):
    module = example("large_batch_digits")
    results = [
        batch_result(module.SGD, 100, [0.9, 0.95, 0.91], [0.91, 0.95, 0.9], 1),
        batch_result(module.LARS, 100, [0.96, 0.93, 0.93], [0.92, 0.93, 0.97], 2),
        batch_result(module.SGD, 500, [0.8, 0.8, 0.8], [0.99, 0.9, 0.89], 0),
        batch_result(module.LARS, 500, [0.95, 0.99, 0.97], [0.9, 0.96, 0.91], 1),
    ]
    figure = picture(module.draw, results)
    axes = {axis.get_label(): axis for axis in figure.axes}
    test = axes["test"]
    expected = {
        module.SGD: ([96, 480], [0.92, 0.8], [(0.9, 0.95), (0.8, 0.8)]),
        module.LARS: ([104, 520], [0.94, 0.97], [(0.93, 0.96), (0.95, 0.99)]),
    }
    assert [bars.get_label() for bars in test.containers] == list(expected)
    for bars in test.containers:
        sizes, means, ranges = expected[bars.get_label()]
        line, _, [spread] = bars
        np.testing.assert_allclose(points(line), [sizes, means])
        ends = [segment[:, 1] for segment in spread.get_segments()]
        np.testing.assert_allclose(ends, ranges)
        color = module.STYLES[bars.get_label()]["color"]
        assert to_rgb(line.get_color()) == to_rgb(color)
    assert texts(test.get_legend().get_texts()) == list(expected)
    assert (test.get_xscale(), test.get_xlabel()) == ("log", "batch size")
    assert list(test.get_xticks()) == [100, 500]
    assert texts(test.get_xticklabels()) == ["100\n(10 steps)", "500\n(2 steps)"]
    for optimizer in module.OPTIMIZERS:
        assert_shows_the_choice(axes[optimizer], optimizer, results)
    legend = axes[module.SGD].get_legend()
    assert legend.get_title().get_text() == "batch size"
    assert texts(legend.get_texts()) == ["100", "500"]


def assert_shows_the_choice(axis, optimizer, results):
    assert axis.get_title().startswith(f"Tuning {optimizer}:")
    assert axis.get_xscale() == "log"
    assert axis.get_ylabel() == "validation accuracy"
    assert texts(axis.get_xticklabels()) == ["1", "2", "4"]
    drawn = [points(line) for line in axis.get_lines()]
    expected = []
    for result in results:
        if result["optimizer"] == optimizer:
            rates, accuracies = result["base_rates"], result["validation"]
            best = result["best"]
            expected += [[rates, accuracies], [[rates[best]], [accuracies[best]]]]
    assert drawn == expected


# --- transformer_char.py --------------------------------------------------------


def test_transformer_draws_both_losses_and_loss_scale(example, picture):
    module = example("transformer_char")
    runs = [
        {"policy": "float32", "losses": [3.0, 2.0], "scales": [1.0] * 3},
        {"policy": "mixed_float16", "losses": [3.1, 2.1], "scales": [1.0, 8.0, 4.0]},
    ]
    figure = picture(module.draw, runs)
    losses, scales = figure.axes
    assert [points(line) for line in losses.get_lines()] == [
        [[10, 20], [3.0, 2.0]],
        [[10, 20], [3.1, 2.1]],
    ]
    assert legend_of(losses.get_legend()) == {
        policy: to_rgb(style["color"]) for policy, style in module.STYLES.items()
    }
    [scale] = scales.get_lines()
    assert points(scale) == [[0, 1, 2], [1.0, 8.0, 4.0]]
    assert scales.get_yscale() == "log"
    assert losses.get_ylabel() == "training loss (nats a character)"
    assert scales.get_ylabel() == "loss scale"
    assert losses.get_xlabel() == scales.get_xlabel() == "step"


# --- float16_digits.py ----------------------------------------------------------


@pytest.mark.parametrize(
    ("optimizers", "names"),
    [
        (
            {"SGD": "SGD: training loss", "Adam": "Adam: training loss"},
            [
                "float32",
                "float16",
                "float16, loss scale",
                "float16, loss scale, masters",
                "float16, loss scale, remainder",
                "float16, loss scale, stochastic",
            ],
        ),
        (
            {"Adam, beta_2=0.99": "Adam,\nbeta_2=0.99: training loss"},
            [
                "float32",
                "bfloat16",
                "bfloat16, masters",
                "bfloat16, remainder",
                "bfloat16, stochastic",
            ],
        ),
    ],
    ids=["float16", "bfloat16"],
)
def test_float16_digits_draws_losses_of_each_backend_and_optimizer(
    example, picture, optimizers, names
):
    module = example("float16_digits")
    runs = [
        {
            "backend": backend,
            "optimizer": optimizer,
            "weights": weights,
            # Each another one.
            "losses": [1.0 + i, 0.5 + 10 * j + 100 * k],
        }
        for i, backend in enumerate(["jax", "torch"])
        for j, optimizer in enumerate(optimizers)
        for k, weights in enumerate(names)
    ]
    figure = picture(module.draw, runs)
    axes = np.reshape(figure.axes, (len(optimizers), 2))
    assert [axis.get_title() for axis in axes[0]] == ["jax", "torch"]
    assert [axis.get_xlabel() for axis in axes[-1]] == ["step", "step"]
    for j, (row, label) in enumerate(zip(axes, optimizers.values(), strict=True)):
        assert row[0].get_ylabel() == label
        for i, axis in enumerate(row):
            drawn = {line.get_label(): points(line) for line in axis.get_lines()}
            assert drawn == {
                weights: [[90, 180], [1.0 + i, 0.5 + 10 * j + 100 * k]]
                for k, weights in enumerate(names)
            }
            assert axis.get_yscale() == "log"
    [legend] = figure.legends
    assert legend_of(legend) == {
        weights: to_rgb(module.STYLES[weights]["color"]) for weights in names
    }


# --- log_max.py -----------------------------------------------------------------


def test_log_max_draws_both_scales_and_overflowing_step(example, picture):
    module = example("log_max")
    scales = {False: np.array([1.0, 8.0, 4.0]), True: np.array([1.0, 8.0, 1.0])}
    [axis] = picture(module.draw, scales).axes
    ours, original, overflow = axis.get_lines()
    assert points(ours) == [[0, 1, 2], [1.0, 8.0, 4.0]]
    assert points(original) == [[0, 1, 2], [1.0, 8.0, 1.0]]
    assert legend_of(axis.get_legend()) == {
        "LogMaxLossScale()": to_rgb("C0"),
        "LogMaxLossScale(original_overflow=True)": to_rgb("C1"),
    }
    assert list(overflow.get_xdata()) == [module.OVERFLOW] * 2
    assert texts(axis.texts) == ["one step overflows"]
    assert axis.get_yscale() == "log"
    assert (axis.get_xlabel(), axis.get_ylabel()) == ("step", "loss scale")


# --- keras_beside_keras_lso.py ----------------------------------------------------


def run_of_overflows(module, scales, losses, bad):
    return module.Run(np.array(losses), np.array(scales), np.array(bad), 0.0)


def test_comparison_draws_both_scales_and_marks_lost_run(example, picture, monkeypatch):
    module = example("keras_beside_keras_lso")
    monkeypatch.setattr(module, "SMOOTHED", 2)
    bad = [False, True, False, False]
    nan = float("nan")
    lost = run_of_overflows(module, [8.0, 0.0, 0.0, 0.0], [4.0, nan, 3.0, nan], bad)
    ours = run_of_overflows(module, [8.0, 4.0, 4.0, 4.0], [4.0, nan, 2.0, 1.0], bad)
    # Step 1 makes the scale 0.0, step 2 divides by it, step 3 shows it.
    assert (lost.lost_at, ours.lost_at) == (2, None)
    figure = picture(module.draw, {module.KERAS: lost, module.OURS: ours})
    scale, loss = figure.axes
    theirs, zero, own, _ = scale.get_lines()
    np.testing.assert_array_equal(theirs.get_ydata(), [8.0, nan, nan, nan])
    assert points(zero) == [[1], [8.0]]
    assert points(own) == [[0, 1, 2, 3], [8.0, 4.0, 4.0, 4.0]]
    theirs, end, own = loss.get_lines()
    np.testing.assert_array_equal(theirs.get_ydata(), [4.0, 4.0, 3.0, nan])
    assert points(end) == [[2], [3.0]]
    # The median of the last two, without those of bad batches.
    assert list(own.get_ydata()) == [4.0, 4.0, 2.0, 1.5]
    assert texts(loss.texts) == ["every weight is NaN"]
    assert texts(scale.texts) == ["the scale is 0.0", "min_scale of keras_lso, 2**-14"]
    assert scale.get_yscale() == loss.get_yscale() == "log"
    [legend] = figure.legends
    assert legend_of(legend) == {
        style["label"]: to_rgb(style["color"]) for style in module.STYLES.values()
    }


# --- float16_range.py -------------------------------------------------------------


def test_float16_range_draws_values_before_and_after_scaling(example, picture):
    module = example("float16_range")
    values = np.array([2.0**-30, 2.0**-27, 2.0**-20, 2.0**-2], "float32")
    assert module.shares(values) == (0.5, 0.25, 0.0)
    # 2**13 is the largest of them after that.
    assert module.shares(values * module.SCALE) == (0.0, 0.25, 0.0)
    assert module.shares(values * 2.0**20) == (0.0, 0.0, 0.25)
    figure = picture(module.draw, values)
    for axis, exponents in zip(
        figure.axes, ([-30, -27, -20, -2], [-15, -12, -5, 13]), strict=True
    ):
        bars = [b for b in axis.patches if b.get_width() == 1.0 and b.get_height() == 1]
        assert [bar.get_x() for bar in bars] == exponents
        assert texts(axis.texts) == [text for _, _, text, _ in module.ZONES]
    assert [axis.get_title() for axis in figure.axes] == [
        "gradients of loss: 50% become 0",
        "gradients of loss * 2**15: 0% become 0",
    ]


# --- schedules.py -----------------------------------------------------------------


def test_schedules_example_draws_one_panel_per_class(example, picture):
    module = example("schedules")
    panels = {name: module.rates_of(made) for name, made in module.PANELS.items()}
    figure = picture(module.draw, panels)
    assert [axis.get_title() for axis in figure.axes] == list(module.PANELS)
    for axis, curves in zip(figure.axes, panels.values(), strict=True):
        lines = axis.get_lines()
        assert [line.get_label() for line in lines] == list(curves)
        assert set(legend_of(axis.get_legend())) == set(curves)
        for line, rates in zip(lines, curves.values(), strict=True):
            # In thousandths; all but one of them reach the same rate.
            np.testing.assert_allclose(line.get_ydata(), 1e3 * rates)
            assert line.get_xdata()[-1] == 10
            is_lowered = "gamma" in line.get_label()
            assert (max(rates) == np.float32(module.RATE)) != is_lowered
    assert all(name.startswith("Linear") or name in dir(schedules) for name in panels)


# --- underflow.py, float16_report.py ------------------------------------------------


def test_underflow_draws_lost_shares_and_safe_scales(example, picture):
    module = example("underflow")
    scales = [2.0**i for i in range(0, 25, 4)]
    # At 2**0 two in four of "one" are flushed; at 2**4 these are subnormal, which
    # counts half. From 2**16 on the other two overflow.
    arrays = {"one": [1.0, 2.0**-25, 2.0**-26, 1.0], "two": [1e4]}
    counts = {name: counts_of([np.array(v)], scales) for name, v in arrays.items()}
    report = diagnostics.UnderflowReport(scales, counts)
    figure = picture(module.draw, report)
    [axis] = figure.axes
    lost, overflowing = (image.get_array() for image in axis.get_images())
    np.testing.assert_allclose(lost[0, :2, 3] ** 2, [1 / 2, 1 / 4])
    np.testing.assert_allclose(overflowing[:, 3:, 3] ** 2, [[0, *[0.5] * 3], [1] * 4])
    for image, color in ((lost, "C0"), (overflowing, "C1")):
        np.testing.assert_allclose(image[0, 0, :3], to_rgb(color))
    assert texts(axis.get_yticklabels()) == ["one", "two"]
    assert texts(axis.get_xticklabels()) == [f"$2^{{{i}}}$" for i in (0, 8, 16, 24)]
    # From 2**1 to 2**2.7, in steps of 2**4.
    ends = [np.log2(scale) / 4 for scale in report.safe_scales]
    np.testing.assert_allclose(axis.get_lines()[0].get_xdata(), ends)
    assert len(legend_of(figure.legends[0])) == 3


def test_float16_report_draws_magnitudes_and_layers_to_keep(example, picture):
    module = example("float16_report")
    found = diagnostics.Magnitudes(is_float16=True, largest=4.0)
    large = diagnostics.Magnitudes(is_float16=True, largest=128000.0)
    kept = diagnostics.LayerRange("float16", 1, found, found, {"matmul": large}, found)
    wide = diagnostics.LayerRange("float32", 1, diagnostics.Magnitudes(largest=4.0))
    report = diagnostics.Float16Report(
        {"kept": kept, "kept/in": kept, "wide": wide}, ["kept"], None, None, True
    )
    [axis] = picture(module.draw, report).axes
    drawn = {line.get_label(): points(line) for line in axis.get_lines()}
    assert drawn["ops"] == [[128000.0, 128000.0], [0, 1]]
    assert (
        drawn["inputs"] == drawn["weights"] == drawn["outputs"] == [[4.0] * 2, [0, 1]]
    )
    bold = [t.get_text() for t in axis.get_yticklabels() if t.get_weight() == "bold"]
    assert bold == ["kept", "kept/in"]
