"""The programs in `examples/`, run as a user runs them.

Each runs in a process of its own, with small settings. It is forked from one that has
imported Keras, which takes longer than most of them, unless the program has to find its
backend by itself. A custom loop belongs to one backend and is run in that backend's
turn; `train_digits.py` and `large_batch_digits.py` train on any, and are told to use
this one.
"""

import os
import pathlib
import re
import subprocess
import sys

import keras
import matplotlib.image
import pytest

from integration_tests.distributed import launch
from testing import misuse
from testing.tiers import is_full

BACKEND = keras.backend.backend()
EXAMPLES = pathlib.Path(__file__).parents[1] / "examples"

NUMBER = r"(\d+(?:\.\d+)?)"


def run_example(name, *arguments, folder, backend=None):
    """Runs an example in `folder` and returns what it printed."""
    # Other tests may want the other cores.
    added = {"COLUMNS": "80", "OMP_NUM_THREADS": "1", **misuse.ENVIRONMENT}
    if backend == BACKEND:
        worker = launch.Worker(EXAMPLES / name, arguments, added, folder)
        [printed] = launch.finish([worker])
        misuse.check_output(worker.communicate()[1])
        return printed
    # If nothing says which backend to use, an example has to know.
    environment = {**os.environ, **added}
    del environment["KERAS_BACKEND"]
    if backend is not None:
        environment["KERAS_BACKEND"] = backend
    finished = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert finished.returncode == 0, finished.stderr
    misuse.check_output(finished.stderr)
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


def test_train_digits_prints_header_and_row_of_float32(digits_run):
    printed, _ = digits_run
    header = printed[: printed.index(BACKEND, printed.index("LeNet-5"))]
    for word in ("precision", "accuracy", "steps", "skipped", "scale", "flushed"):
        assert word in header
    accuracy, steps, skipped, scale, flushed = table_row(printed, "float32")
    # From twelve steps nobody learns to read.
    assert 5.0 < float(accuracy.rstrip("%")) < 40.0
    assert (steps, skipped, scale, flushed) == ("12", "0", "-", "-")


def test_train_digits_flushes_gradients_only_without_loss_scaling(digits_run):
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


def test_train_digits_describes_table_in_words(digits_run):
    printed, _ = digits_run
    assert re.search(
        rf"{BACKEND}: against float32, plain float16 (gains|loses) ", printed
    )
    assert "Flushed to zero: of the weights" in printed


def test_train_digits_writes_picture_of_expected_size(digits_run):
    # What is in it: `test_example_pictures.py`.
    _, folder = digits_run
    assert [path.name for path in folder.iterdir()] == ["demo.png"]
    # One column for one backend.
    assert matplotlib.image.imread(folder / "demo.png").shape[:2] == (1200, 750)


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
def test_caption_states_loss_or_gain_of_plain_float16(
    train_digits, plain_accuracy, words
):
    caption = train_digits.caption(finished_runs("jax", plain_accuracy))
    assert caption.startswith(
        f"jax: against float32, plain float16 {words}, keras_lso gains 1.0."
    )


def test_train_digits_reports_missing_backend(
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


# --- large_batch_transformer.py -------------------------------------------------


def test_lamb_and_adamw_train_small_encoder(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    import large_batch_transformer as example

    settings = example.Settings((512,), pieces=2, factors=(1.0, 2.0), seeds=(1,))
    results = example.compare(settings)
    assert [result["optimizer"] for result in results] == ["AdamW", "LAMB"]
    for result in results:
        assert result["steps"] == 8
        # As good as always white after so few steps.
        assert result["accuracies"][0] > result["guess"] - 0.02
        assert len(result["validation"]) == 2 and len(result["accuracies"]) == 1
    # They are other optimizers.
    assert results[0]["validation"] != results[1]["validation"]
    [row] = example.rows_of(results)
    assert row[:2] == ["512", "8"]
    example.draw(results, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 10_000


def test_encoder_schedule_rises_to_peak_and_falls(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    import large_batch_transformer as example

    schedule = example.make_schedule(1.0, pieces=24)
    rates = [float(schedule(i + 1)) for i in range(24)]
    assert rates[:3] == pytest.approx([1 / 3, 2 / 3, 1.0])
    assert max(rates) == rates[2]
    # To 0 one piece later.
    assert rates[-1] == pytest.approx(1 / 22, rel=0.05)


# --- large_batch_digits.py ------------------------------------------------------

large_batch_runs = pytest.mark.full


@pytest.fixture(scope="module")
def large_batch_run(tmp_path_factory):
    """What `large_batch_digits.py --fast` prints, and the folder it writes to."""
    folder = tmp_path_factory.mktemp("large_batch")
    printed = run_example(
        "large_batch_digits.py",
        *("--fast", "--output", "pictures"),
        folder=folder,
        backend=BACKEND,
    )
    return printed, folder / "pictures"


def large_batch_row(printed, optimizer):
    """The numbers in the row of an optimizer."""
    row = rf"{optimizer} +{NUMBER}\*? +{NUMBER} +{NUMBER} \({NUMBER} to {NUMBER}\)"
    return [
        float(number)
        for number in re.search(rf"{row} +{NUMBER} +(\d+)\s", printed).groups()
    ]


@large_batch_runs
@pytest.mark.parametrize(
    ("optimizer", "base_rates"), [("SGD, Nesterov", (0.2, 0.4)), ("LARS", (8.0, 16.0))]
)
def test_large_batch_with_short_settings_learns_with_each_optimizer(
    large_batch_run, optimizer, base_rates
):
    printed, _ = large_batch_run
    # Three batches an epoch, eight epochs.
    assert re.search(r" 384 +24 +SGD, Nesterov ", printed)
    row = large_batch_row(printed, optimizer)
    base_rate, peak_rate, mean, lowest, highest, training_loss, skipped = row
    assert base_rate in base_rates
    assert peak_rate == pytest.approx(base_rate * 384 / 256)
    assert lowest <= mean <= highest <= 100.0
    # A guess gets 10 %; 24 steps are enough to read most digits with either.
    assert mean > 60.0
    # That of a guess is log 10 = 2.3.
    assert 0.0 < training_loss < 1.5
    # 24 steps with each of two seeds.
    assert skipped < 48
    assert f"Trained on {BACKEND}." in printed


@large_batch_runs
def test_large_batch_comparison_in_words_matches_table(large_batch_run):
    printed, _ = large_batch_run
    _, _, sgd, *_ = large_batch_row(printed, "SGD, Nesterov")
    _, _, lars, *_ = large_batch_row(printed, "LARS")
    comparison = rf"LARS (?:equals|is {NUMBER} points (above|below)) SGD"
    points, side = re.search(f"Batches of 384: {comparison}", printed).groups()
    gain = {"above": 1, "below": -1, None: 0}[side] * float(points or 0)
    # Both means and their difference are rounded to a tenth.
    assert gain == pytest.approx(lars - sgd, abs=0.16)
    for finding in ("arXiv:1708.03888", "arXiv:2102.06356"):
        assert finding in printed


@large_batch_runs
def test_large_batch_writes_picture_of_expected_size(large_batch_run):
    # What is in it: `test_example_pictures.py`.
    _, folder = large_batch_run
    assert [path.name for path in folder.iterdir()] == ["large_batch.png"]
    picture = matplotlib.image.imread(folder / "large_batch.png")
    assert picture.shape[:2] == (1000, 1900)


@pytest.fixture
def large_batch(monkeypatch):
    """The module itself, for what needs no process of its own."""
    monkeypatch.syspath_prepend(EXAMPLES)
    policy = keras.config.dtype_policy()
    import large_batch_digits

    yield large_batch_digits
    del sys.modules["large_batch_digits"]
    keras.config.set_dtype_policy(policy)


@pytest.mark.full
@pytest.mark.parametrize(
    ("optimizer", "base_rate"), [("SGD, Nesterov", 1.0), ("LARS", 16.0)]
)
def test_trial_is_reproducible_for_each_seed(large_batch, optimizer, base_rate):
    keras.config.set_dtype_policy("mixed_float16")
    train_data, valid_data, test_data = large_batch.load_data()
    assert [len(data[0]) for data in (train_data, valid_data, test_data)] == [
        *(1152, 285, 360)
    ]
    trial = large_batch.Trial(optimizer, 384, base_rate, epochs=1)
    # What Keras builds in the first run draws random numbers, too.
    _, first, other, again = (
        trial.run(seed, train_data, valid_data) for seed in (0, 1, 2, 1)
    )
    for measure in ("training_loss", "cross_entropy"):
        from_other_seed = abs(other[measure] - first[measure])
        assert from_other_seed > 0.0
        # Not 0: a multithreaded float16 convolution may round otherwise.
        assert abs(again[measure] - first[measure]) < 0.1 * from_other_seed
    assert int(trial.optimizer.iterations) == 3


def test_merit_prefers_accuracy_and_then_lower_cross_entropy(large_batch):
    runs = [
        {"accuracy": 0.9, "cross_entropy": 0.1},
        {"accuracy": 0.95, "cross_entropy": float("nan")},
        {"accuracy": 0.95, "cross_entropy": 0.4},
        {"accuracy": 0.95, "cross_entropy": 0.3},
    ]
    assert max(runs, key=large_batch.merit) == runs[3]
    assert max(reversed(runs[:3]), key=large_batch.merit) == runs[2]


@pytest.mark.parametrize(
    ("lars", "words"),
    [
        ([0.90, 0.95], "equals SGD; their ranges overlap"),
        ([0.92, 0.98], "is 2.5 points above SGD; their ranges overlap"),
        ([0.80, 0.88], "is 8.5 points below SGD; their ranges do not overlap"),
        ([0.96, 0.98], "is 4.5 points above SGD; their ranges do not overlap"),
    ],
)
def test_comparison_in_words_states_which_optimizer_is_better(large_batch, lars, words):
    sgd = {"accuracies": [0.90, 0.95], "batch_size": 1152}
    assert large_batch.compare_in_words(sgd, {"accuracies": lars}) == (
        f"Batches of 1,152: LARS {words}."
    )


# --- Custom loops ---------------------------------------------------------------


def test_custom_loop_of_current_backend_learns_digits(tmp_path):
    # In a process of its own it has to say which backend to use.
    backend = None if is_full() else BACKEND
    name = f"custom_loop_{BACKEND}.py"
    printed = run_example(name, folder=tmp_path, backend=backend)
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


@pytest.mark.full
@pytest.mark.skipif(BACKEND != "torch", reason="The GAN is a PyTorch program.")
def test_gan_keeps_both_optimizers_training(tmp_path):
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
    # Of 1,000 and 500 steps in the longer run.
    assert 0 < int(discriminator[2]) < 60
    assert 0 < int(generator[2]) < 30
    # Two losses of different size, two scales.
    assert float(discriminator[1]) < float(generator[1]) < 2.0**24
