"""The programs in `examples/`, run as a user runs them, with small settings.

Each runs in a process of its own. It is forked from one that has imported Keras, unless
the program has to find its backend on its own. `make test` runs one that trains on any
backend, and the custom loop of PyTorch.
"""

import importlib
import math
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

NUMBER = r"(\d+(?:\.\d+)?(?:e[-+]\d+)?)"


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
        # Float16 on TensorFlow's CPU takes 440 seconds.
        timeout=1800,
    )
    assert finished.returncode == 0, finished.stderr
    misuse.check_output(finished.stderr)
    return finished.stdout


def assert_is_a_picture(path, width, height):
    assert matplotlib.image.imread(path).shape[:2] == (height, width)


def test_train_digits_flushes_gradients_only_without_loss_scaling(tmp_path):
    printed = run_example(
        "train_digits.py",
        *("--backends", BACKEND, "--epochs", "2", "--output", "pictures"),
        folder=tmp_path,
    )
    # A line a run, also where there is no terminal.
    runs = re.findall(rf"^{BACKEND} +(float\S+(?: keras_lso)?) +seed", printed, re.M)
    precisions = ["float32", "float16", "float16, keras_lso"]
    assert runs == [precision for precision in precisions for _ in range(4)]
    cells = r" +([\d.]+)% \(([\d.]+) to ([\d.]+)\) +(\S+) +(\d+) +(\S+)"
    rows = {
        name: re.search(rf"\b{name}{cells}", printed).groups() for name in precisions
    }
    for mean, low, high, loss, skipped, _ in rows.values():
        # From twelve steps nobody learns to read.
        assert float(low) <= float(mean) <= float(high) < 40.0
        assert 0.08 < float(loss) < 0.1 and skipped == "0"
    flushed = [row[-1] for row in rows.values()]
    assert flushed[0] == "-"
    assert float(flushed[1].rstrip("%")) > 1.0 > 0.1 > float(flushed[2].rstrip("%"))
    told = " ".join(printed.split())
    for name in ("plain float16", "keras_lso"):
        assert f"{BACKEND}: {name} against float32: " in told
    # One column for one backend.
    assert_is_a_picture(tmp_path / "pictures" / "demo.png", 750, 1200)


@pytest.fixture
def digits_report(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module("digits_report")


def test_demo_tells_noise_from_difference(digits_report):
    def runs(*right):
        """Runs that have read so many of the 450 digits."""
        return [{"accuracy": number / 450} for number in right]

    float32 = runs(400, 410, 405, 395)
    # Of the differences 4, -2, 1, 1 the mean is 1 and the standard deviation sqrt(6).
    margin = 3.182 * math.sqrt(6.0 / 4) / 4.5
    told = digits_report.difference(runs(404, 408, 406, 396), float32)
    interval = f"({1 / 4.5 - margin:+.1f} to {1 / 4.5 + margin:+.1f})"
    assert told == f"+0.2 {interval}, within the noise"
    # Equal differences do not make one digit a finding, but two.
    one_less = digits_report.difference(runs(399, 409, 404, 394), float32)
    assert one_less == "-0.2 (-0.4 to +0.0), within the noise"
    two_less = digits_report.difference(runs(398, 408, 403, 393), float32)
    assert two_less == "-0.4 (-0.7 to -0.2)"


@pytest.mark.full
def test_spikes_example_skips_damaged_batches_with_spike_guard(tmp_path):
    arguments = ("--steps", "120", "--seeds", "1")
    printed = run_example("spikes.py", *arguments, folder=tmp_path)
    without, guarded = (
        re.search(rf"{name} +{NUMBER} +{NUMBER} +(\d+) +(\d+)", printed).groups()
        for name in ("without a guard", "with SpikeGuard")
    )
    assert without[2:] == ("120", "0")
    # One in a hundred of the other batches may be an outlier as well.
    assert 4 <= int(guarded[3]) <= 6
    assert float(guarded[0]) < float(without[0])


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_16_bits_with_masters_reach_accuracy_of_float32(dtype, tmp_path):
    printed = run_example(
        *("float16_digits.py", "--dtype", dtype, "--backends", BACKEND),
        *("--epochs", "4"),
        folder=tmp_path,
    )
    rows = re.findall(
        rf"\b(b?float\d+(?:,[a-z ]+)*) +{NUMBER}% +{NUMBER} +{NUMBER}%", printed
    )
    adam = {name.strip(): float(accuracy) for name, _, _, accuracy in rows}
    scaled = "float16, loss scale" if dtype == "float16" else dtype
    for kind in ("masters", "remainder", "stochastic"):
        # One digit is 0.2: five of 450.
        found = adam[f"{scaled}, {kind}"]
        assert found == pytest.approx(adam["float32"], abs=1.2)
    assert adam[scaled] < adam["float32"] - 3.0


@pytest.mark.full
def test_keras_loses_every_weight_and_keras_lso_none(tmp_path):
    name = "keras_beside_keras_lso.py"
    printed = run_example(name, "--steps", "1700", folder=tmp_path, backend=BACKEND)

    def row(title):
        [line] = [line for line in printed.splitlines() if title in line]
        return re.split(r"  +", line.strip())[1:]

    assert row("weights that are NaN") == ["0%", "100%", "0%"]
    assert row("lowest loss scale") == ["-", "0.0", "2**-14"]
    before, end = (row(f"loss {when}") for when in ("before the spell", "at the end"))
    assert end[1] == "nan"
    # 2**-14 is enough for this model, up to the noise of its batches.
    assert float(end[0]) < float(before[0])
    assert float(end[2]) == pytest.approx(float(end[0]), rel=0.15)
    assert_is_a_picture(tmp_path / "keras_beside_keras_lso.png", 960, 810)


# What each prints in the end, or what it is about.
PRINTED = {
    "float16_range.py": r"15: \d\.\d% become 0",
    "underflow.py": r"Safe for all layers: 2\*\*\d+ to",
    "keras_hub_finetune.py": r"frozen weights LoRA has changed 0\.",
    "large_batch_digits.py --fast": "Batches of 384: LARS ",
    "bfloat16_transformer.py --fast": r"remainder +\| 14 +\| 3\.",
    "transformer_char.py --steps 20": r"mixed_float16 +3\.[0-5]",
    "one_curve.py": r"FSDP2 +. 1 +. 131072 +. \d\.\d+ +. 0\.000",
    "gan.py": rf"step 500(?s:.*)generator loss +{NUMBER} scale +{NUMBER} skipped +1?\d",
}


@pytest.mark.full
@pytest.mark.parametrize("command", PRINTED)
def test_example_prints_its_finding(command, tmp_path):
    # The GAN is a PyTorch program.
    printed = run_example(*command.split(), folder=tmp_path, backend="torch")
    assert re.search(PRINTED[command], printed), printed


@pytest.mark.full
def test_float16_report_example_learns_once_report_is_applied(tmp_path):
    printed = run_example("float16_report.py", folder=tmp_path, backend="torch")
    assert re.search(r"^norm: overflow, above 65504: square", printed, re.MULTILINE)
    before, after = map(float, re.findall(r": loss (\S+),", printed))
    # As docs/troubleshooting.md says: it guesses one of ten, and no loss is NaN.
    assert before == pytest.approx(math.log(10), abs=0.05)
    assert after < 1.9


@pytest.mark.full
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
