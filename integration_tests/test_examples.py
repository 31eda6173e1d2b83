"""The programs in `examples/`, run as a user runs them.

Each runs in a process of its own, with small settings. A custom loop belongs to one
backend and is run in that backend's turn; `train_digits.py` trains on any, and is
told to use this one.
"""

import os
import pathlib
import re
import subprocess
import sys

import keras
import matplotlib.image
import pytest

BACKEND = keras.backend.backend()
EXAMPLES = pathlib.Path(__file__).parents[1] / "examples"

NUMBER = r"(\d+(?:\.\d+)?)"


def run_example(name, *arguments, folder):
    """Runs an example in `folder` and returns what it printed."""
    environment = {
        **os.environ,
        "COLUMNS": "80",
        # Other tests may want the other cores.
        "OMP_NUM_THREADS": "1",
    }
    # Nothing says which backend to use: an example has to know.
    del environment["KERAS_BACKEND"]
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


def table_row(text, precision):
    """The cells of a row of the table, after the name of its precision."""
    return re.search(rf"{precision} +(\d.*)", text)[1].split()


# --- train_digits.py ----------------------------------------------------------


@pytest.fixture(scope="module")
def digits_run(tmp_path_factory):
    """What four epochs of `train_digits.py` print, and the folder they write to."""
    folder = tmp_path_factory.mktemp("train_digits")
    printed = run_example(
        "train_digits.py",
        *("--backends", BACKEND, "--epochs", "4", "--output", "pictures"),
        folder=folder,
    )
    return printed, folder / "pictures"


def test_train_digits_prints_a_row_for_each_precision(digits_run):
    printed, _ = digits_run
    header = printed[: printed.index(BACKEND, printed.index("LeNet-5"))]
    for word in ("precision", "accuracy", "steps", "skipped", "scale", "flushed"):
        assert word in header
    accuracy, steps, skipped, scale, flushed = table_row(printed, "float32")
    # From twelve steps nobody learns to read.
    assert 5.0 < float(accuracy.rstrip("%")) < 40.0
    assert (steps, skipped, scale, flushed) == ("12", "0", "-", "-")


def test_train_digits_flushes_gradients_without_loss_scaling_only(digits_run):
    printed, _ = digits_run
    *_, skipped, scale, flushed = table_row(printed, "float16")
    assert (skipped, scale) == ("0", "-")
    # The two convolutions, 2,572 of 15,626 values or 16 %, lose most of theirs, and
    # the dense layers some.
    assert 4.0 < float(flushed.rstrip("%")) < 40.0
    *_, skipped, scale, flushed = table_row(printed, "float16, keras_lso")
    # 2**32 is too high, and each overflow halves it.
    assert 3 <= int(skipped) <= 8
    assert scale == f"2^{32 - int(skipped)}"
    assert float(flushed.rstrip("%")) < 0.1


def test_train_digits_says_in_words_what_the_table_shows(digits_run):
    printed, _ = digits_run
    assert re.search(
        rf"{BACKEND}: against float32, plain float16 (gains|loses) ", printed
    )
    assert "Flushed to zero: of the weights" in printed


def test_train_digits_draws_a_picture(digits_run):
    _, folder = digits_run
    assert [path.name for path in folder.iterdir()] == ["demo.png"]
    picture = matplotlib.image.imread(folder / "demo.png")
    height, width, _ = picture.shape
    assert height > 800
    assert width > 600
    # Some of it is white and some of it is not.
    assert 0.5 < (picture[..., :3] == 1).all(axis=-1).mean() < 0.99


@pytest.fixture
def train_digits(monkeypatch):
    """The module itself, for what needs no training."""
    monkeypatch.syspath_prepend(EXAMPLES)
    import train_digits

    yield train_digits
    for module in ("train_digits", "digits_report"):
        del sys.modules[module]


def finished_runs(backend, plain_accuracy):
    run = {
        "backend": backend,
        "losses": [0.09, 0.01],
        "scales": [1.0, 1.0],
        "skipped": [],
        "final_scale": 1.0,
        "flushed": 0.0,
        "flushed_by_layer": {"conv 1": 0.0},
    }
    return [
        {**run, "precision": "float32", "accuracy": 0.95},
        {**run, "precision": "float16", "accuracy": plain_accuracy},
        {**run, "precision": "float16, keras_lso", "accuracy": 0.96},
    ]


@pytest.mark.parametrize(
    ("plain_accuracy", "words"),
    [(0.95, "loses nothing"), (0.10, "loses 85.0"), (0.97, "gains 2.0")],
)
def test_the_caption_is_honest_about_plain_float16(train_digits, plain_accuracy, words):
    caption = train_digits.digits_report.caption(finished_runs("jax", plain_accuracy))
    assert caption.startswith(
        f"jax: against float32, plain float16 {words}, keras_lso gains 1.0."
    )


def test_train_digits_says_which_backend_is_missing(
    train_digits, monkeypatch, tmp_path, capsys
):
    monkeypatch.setattr(train_digits, "BACKENDS", ("no_such_framework", BACKEND))
    monkeypatch.setattr(sys, "argv", ["train_digits.py", "--output", str(tmp_path)])
    trained = []

    def train_on_all(backends, epochs, console):
        trained.extend(backends)
        return finished_runs(BACKEND, 0.10)

    monkeypatch.setattr(train_digits, "train_on_all", train_on_all)
    train_digits.main()
    assert trained == [BACKEND]
    assert "no_such_framework is not installed: left out." in capsys.readouterr().out


# --- Custom loops ---------------------------------------------------------------


def test_the_custom_loop_of_this_backend_learns_to_read(tmp_path):
    printed = run_example(f"custom_loop_{BACKEND}.py", folder=tmp_path)
    steps = re.findall(
        rf"loss {NUMBER}, loss scale {NUMBER}, skipped steps {NUMBER}", printed
    )
    losses, scales, skipped = zip(*steps, strict=True)
    assert len(steps) == 12
    assert float(losses[-1]) < 0.5 < float(losses[0])
    # From 2**24 the scale comes down by one overflow at a time, and then finds its
    # level: of 168 steps, a handful are skipped.
    assert 0 < int(skipped[0]) <= int(skipped[-1]) < 20
    assert float(scales[0]) == 2.0 ** (24 - int(skipped[0]))
    # The last 397 digits are other people's; 0.89 to 0.92 on every backend.
    assert float(re.search(rf"test accuracy {NUMBER}", printed)[1]) > 0.85


@pytest.mark.skipif(BACKEND != "torch", reason="The GAN is a PyTorch program.")
def test_the_gan_keeps_both_of_its_optimizers_training(tmp_path):
    printed = run_example("gan.py", folder=tmp_path)
    last = printed.splitlines()[-1]
    fields = rf" loss +{NUMBER} scale +{NUMBER} skipped +{NUMBER}"
    discriminator = re.search("discriminator" + fields, last).groups()
    generator = re.search("generator" + fields, last).groups()
    assert "step 500" in last
    # A discriminator that answers at random has a loss of 2 log 2 = 1.39, a
    # generator that fools it half the time one of log 2 = 0.69. If an overflow in
    # either loss of the discriminator went unnoticed, that loss would be skipped for
    # ever: its own loss would rise to 5 and more, and the generator's fall to 0.
    assert 0.5 < float(discriminator[0]) < 2.0
    assert 0.3 < float(generator[0]) < 2.0
    # Of 1,000 and 500 steps.
    assert 0 < int(discriminator[2]) < 60
    assert 0 < int(generator[2]) < 30
    # Two losses of different size, two scales.
    assert float(discriminator[1]) < float(generator[1]) < 2.0**24
