"""The float16 programs in `examples/`, run as a user runs them, with small settings."""

import itertools
import os
import pathlib
import re
import subprocess
import sys

import keras
import matplotlib.image
import numpy as np
import pytest

import keras_lso

BACKEND = keras.backend.backend()
EXAMPLES = pathlib.Path(__file__).parents[1] / "examples"

NUMBER = r"(\d+(?:\.\d+)?(?:e[-+]\d+)?)"


def run_example(name, *arguments, folder):
    environment = {**os.environ, "COLUMNS": "80", "OMP_NUM_THREADS": "1"}
    finished = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


def assert_is_a_picture(path, width, height):
    """What is in it: `test_example_pictures.py`."""
    assert matplotlib.image.imread(path).shape[:2] == (height, width)


# --- transformer_char.py --------------------------------------------------------


@pytest.mark.full
def test_transformer_learns_in_float16_as_well_as_in_float32(tmp_path):
    printed = run_example("transformer_char.py", "--steps", "20", folder=tmp_path)
    rows = [
        re.search(rf"{policy} +{NUMBER} +20 +{NUMBER} +(\S+)", printed).groups()
        for policy in ("float32", "mixed_float16")
    ]
    (float32_loss, _, no_scale), (float16_loss, skipped, scale) = rows
    # That of a guess is log 103 = 4.6, that of the characters' shares 3.2.
    assert 2.0 < float(float32_loss) < 3.6
    # Rounding to 11 bits (0.0005) at each of two dozen layers, partly averaged out.
    assert float(float16_loss) == pytest.approx(float(float32_loss), abs=0.01)
    most, _ = re.search(
        rf"differ by {NUMBER} at most, by {NUMBER} on", printed
    ).groups()
    assert float(most) < 0.02
    # From 1, in one step, to a level that needs no overflow to be found.
    assert no_scale == "-"
    assert 10.0 < float(scale.removeprefix("2^")) < 24.0
    assert int(skipped) <= 1
    assert f"Trained on {BACKEND}." in printed
    [sample] = re.findall(r"writes:\n\n(.*)\n\nTrained", printed, re.DOTALL)
    assert sample.startswith("If a class defines a method that")
    assert len(sample) > 120
    assert_is_a_picture(tmp_path / "transformer_char.png", 900, 360)


@pytest.mark.full
def test_spikes_example_skips_damaged_batches_with_spike_guard(tmp_path):
    printed = run_example("spikes.py", "--steps", "120", folder=tmp_path)
    without, guarded = (
        re.search(rf"{name} +{NUMBER} +{NUMBER} +(\d+) +(\d+)", printed).groups()
        for name in ("without a guard", "with SpikeGuard")
    )
    assert without[2:] == ("120", "0")
    # One in a hundred of the other batches may be an outlier as well.
    applied, skipped = map(int, guarded[2:])
    assert applied + skipped == 120 and 4 <= skipped <= 6
    assert float(guarded[0]) < float(without[0])
    assert_is_a_picture(tmp_path / "spikes.png", 720, 360)
    assert_is_a_picture(tmp_path / "spikes_record.png", 640, 640)


@pytest.fixture
def transformer_char(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    import transformer_char

    yield transformer_char
    del sys.modules["transformer_char"]


def test_transformer_uses_log_max_scale_and_transformer_policy(transformer_char):
    optimizer = transformer_char.make_optimizer("mixed_float16", steps=400)
    assert isinstance(
        optimizer.loss_scale_policy, keras_lso.loss_scales.LogMaxLossScale
    )
    rate = optimizer.inner_optimizer.get_config()["learning_rate"]
    assert rate["class_name"] == "TransformerPolicy"
    assert rate["config"]["d_model"] == transformer_char.WIDTH


def test_transformer_text_holds_license_manual_and_prompt_characters(transformer_char):
    text = transformer_char.load_text()
    assert "Python Software Foundation" in text[:5000]
    assert "Customizing class creation" in text
    # Every character of the prompt occurs in it.
    assert set(transformer_char.PROMPT) <= set(text)


def test_targets_are_inputs_shifted_by_one_character(transformer_char):
    inputs, targets = transformer_char.windows_at(np.array([3, 5]), np.arange(100))
    assert inputs.shape == targets.shape == (2, transformer_char.LENGTH)
    np.testing.assert_array_equal(inputs[:, 0], [3, 5])
    np.testing.assert_array_equal(targets, inputs + 1)


# --- float16_digits.py ----------------------------------------------------------


def run_digits(dtype, folder):
    """Returns the table of a short `float16_digits.py`, which writes to the folder."""
    printed = run_example(
        *("float16_digits.py", "--dtype", dtype, "--backends", BACKEND),
        *("--epochs", "4"),
        folder=folder,
    )
    optimizers = ["SGD", "Adam"] + ["Adam, beta_2=0.99"] * (dtype == "bfloat16")
    names = [f"{o} {what}" for o in optimizers for what in ("accuracy", "loss")]
    cells = len(optimizers) * rf" +{NUMBER}% +{NUMBER}"
    rows = re.findall(rf"\b(b?float\d+(?:,[a-z ]+)*){cells}", printed)
    return {
        name.strip(): dict(zip(names, map(float, numbers), strict=True))
        for name, *numbers in rows
    }


@pytest.fixture(scope="module")
def digits_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("float16_digits")
    return run_digits("float16", folder), folder


PLAIN = ("float16", "float16, loss scale")
MASTERS, REMAINDER, STOCHASTIC = (
    f"float16, loss scale, {kind}" for kind in ("masters", "remainder", "stochastic")
)


@pytest.mark.full
def test_float16_with_masters_reaches_accuracy_of_float32(digits_run):
    table, folder = digits_run
    kinds = MASTERS, REMAINDER, STOCHASTIC
    assert list(table) == ["float32", *PLAIN, *kinds]
    for kind, (optimizer, least) in itertools.product(
        kinds, (("SGD", 50.0), ("Adam", 94.0))
    ):
        column = f"{optimizer} accuracy"
        float32, float16 = table["float32"][column], table[kind][column]
        assert float32 > least
        # One digit is 0.2: five of 450.
        assert float16 == pytest.approx(float32, abs=1.2)
    assert_is_a_picture(folder / "float16_digits.png", 380, 540)


@pytest.mark.full
def test_remainders_reach_same_loss_as_float32_masters(digits_run):
    table, _ = digits_run
    for optimizer in ("SGD", "Adam"):
        column = f"{optimizer} loss"
        assert table[REMAINDER][column] == table[MASTERS][column]
        assert table[STOCHASTIC][column] == pytest.approx(table[MASTERS][column], 0.03)


@pytest.mark.full
@pytest.mark.parametrize("weights", PLAIN)
def test_float16_without_masters_is_less_accurate_than_float32(digits_run, weights):
    table, _ = digits_run
    assert table[weights]["Adam accuracy"] < table["float32"]["Adam accuracy"] - 3.0
    assert table[weights]["Adam loss"] > 10 * table[MASTERS]["Adam loss"]
    # SGD has only begun to slow down: by 0.02 to 0.03.
    lag = table[weights]["SGD loss"] - table["float32"]["SGD loss"]
    assert lag > 0.015
    assert abs(table[MASTERS]["SGD loss"] - table["float32"]["SGD loss"]) < 0.5 * lag


@pytest.mark.full
def test_bfloat16_with_masters_reaches_accuracy_of_float32(tmp_path):
    table = run_digits("bfloat16", tmp_path)
    kinds = [f"bfloat16, {kind}" for kind in ("masters", "remainder", "stochastic")]
    assert list(table) == ["float32", "bfloat16", *kinds]
    float32, bare, masters, *_ = table.values()
    for kind, optimizer in itertools.product(
        kinds, ("SGD", "Adam", "Adam, beta_2=0.99")
    ):
        accuracy, loss = f"{optimizer} accuracy", f"{optimizer} loss"
        assert table[kind][accuracy] == pytest.approx(float32[accuracy], abs=1.2)
        assert table[kind][loss] == pytest.approx(float32[loss], rel=0.1)
    # 0.999 is 1 in bfloat16.
    assert bare["Adam accuracy"] < 20.0 < 94.0 < float32["Adam accuracy"]
    assert bare["Adam loss"] > 2.0
    assert bare["SGD loss"] > 1.2 * masters["SGD loss"]
    # "It reads as many test digits as with masters. Its loss ends higher".
    accuracy, loss = "Adam, beta_2=0.99 accuracy", "Adam, beta_2=0.99 loss"
    assert bare[accuracy] == pytest.approx(masters[accuracy], abs=2.0)
    assert bare[loss] > 1.2 * masters[loss]
    assert_is_a_picture(tmp_path / "bfloat16_digits.png", 380, 780)


# --- log_max.py -----------------------------------------------------------------


def test_one_overflow_keeps_only_original_log_max_scale_down(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(EXAMPLES)
    import log_max

    monkeypatch.delitem(sys.modules, "log_max")
    monkeypatch.setattr(log_max, "OVERFLOW", 100)
    ours, original = (
        log_max.trace(is_original, steps=200) for is_original in (False, True)
    )
    np.testing.assert_array_equal(ours[:101], original[:101])
    assert (original[101:] == 1.0).all()
    # One logarithm of 16 among a hundred of 2, give or take 1, adds 0.7 to the spread
    # and 0.2 to the mean: a factor of 2**(3.09 * 0.7 + 0.2), 5 or 6.
    assert (ours[101:] > ours[100] / 10).all()
    log_max.draw({False: ours, True: original}, tmp_path / "log_max.png")
    assert_is_a_picture(tmp_path / "log_max.png", 750, 360)
