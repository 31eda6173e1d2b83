"""The pictures of `examples/` show results that are made up here, in either style.

`test_examples.py` runs the programs, which draw what they have found by the same
functions.
"""

import importlib
import pathlib
import sys

import keras
import matplotlib
import matplotlib.style
import numpy as np
import pytest
from matplotlib.figure import Figure

from keras_lso import diagnostics
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


def digits_report(module):
    run = {"backend": "jax", "losses": [0.09, 0.01], "skipped": [0, 2]}
    run |= {"scales": [8.0, 4.0, 4.0, 2.0], "flushed_by_layer": {"conv 1": 0.25}}
    names = ("float32", "float16", "float16, keras_lso")
    return [{**run, "precision": name} for name in names]


def large_batch_digits(module):
    result = {"batch_size": 100, "steps": 10, "accuracies": [0.9, 0.95, 0.91]}
    result |= {"base_rates": [1.0, 2.0], "validation": [0.91, 0.95], "best": 1}
    return [{**result, "optimizer": name} for name in module.OPTIMIZERS]


def transformer_char(module):
    run = {"losses": [3.0, 2.0], "scales": [1.0, 8.0, 4.0]}
    return [{**run, "policy": name} for name in ("float32", "mixed_float16")]


def float16_digits(module):
    run = {"backend": "jax", "optimizer": "SGD", "losses": [1.0, 0.5]}
    names = ("float32", "float16", "float16, loss scale, masters")
    return [{**run, "weights": name} for name in names]


def log_max(module):
    return {False: np.array([1.0, 8.0, 4.0]), True: np.array([1.0, 8.0, 1.0])}


def keras_beside_keras_lso(module):
    bad, nan = np.array([False, True, False, False]), float("nan")
    scales = {module.KERAS: [8.0, 0.0, 0.0, 0.0], module.OURS: [8.0, 4.0, 4.0, 4.0]}
    losses = {module.KERAS: [4.0, nan, 3.0, nan], module.OURS: [4.0, nan, 2.0, 1.0]}
    return {
        name: module.Run(np.array(losses[name]), np.array(scales[name]), bad, 0.0)
        for name in scales
    }


def float16_range(module):
    return np.array([2.0**-30, 2.0**-27, 2.0**-20, 2.0**-2], "float32")


def schedules(module):
    return {name: module.rates_of(made) for name, made in module.PANELS.items()}


def underflow(module):
    scales = [2.0**i for i in range(0, 25, 4)]
    arrays = {"one": [1.0, 2.0**-25, 2.0**-26, 1.0], "two": [1e4]}
    counts = {name: counts_of([np.array(v)], scales) for name, v in arrays.items()}
    return diagnostics.UnderflowReport(scales, counts)


def float16_report(module):
    found = diagnostics.Magnitudes(is_float16=True, largest=4.0)
    large = diagnostics.Magnitudes(is_float16=True, largest=128000.0)
    kept = diagnostics.LayerRange("float16", 1, found, found, {"matmul": large}, found)
    return diagnostics.Float16Report({"kept": kept}, ["kept"], None, None, True)


RESULTS = (
    *(digits_report, large_batch_digits, transformer_char, float16_digits, log_max),
    *(keras_beside_keras_lso, float16_range, schedules, underflow, float16_report),
)


@pytest.mark.parametrize("style", ["default", "dark_background"])
@pytest.mark.parametrize("results", RESULTS, ids=lambda results: results.__name__)
def test_example_draws_visible_curves_with_title_or_legend(
    results, style, example, monkeypatch
):
    saved = []
    monkeypatch.setattr(
        Figure, "savefig", lambda figure, path, **_: saved.append(figure)
    )
    module = example(results.__name__)
    with matplotlib.style.context(style):
        module.draw(results(module), "picture.png")
        [figure] = saved
        assert_visible(figure)
    axes = figure.axes
    assert all(a.lines or a.patches or a.images or a.collections for a in axes)
    assert figure.legends or any(a.get_legend() or a.get_title() for a in axes)
