"""The examples that show why loss scaling is needed: what they find, and what is said.

What is in the pictures of `keras_beside_keras_lso.py` and `float16_range.py`:
`test_example_pictures.py`.
"""

import contextlib
import io
import math
import pathlib
import re
import sys

import keras
import matplotlib.image
import pytest

from integration_tests.docs_blocks import PAGES
from integration_tests.test_examples import run_example

BACKEND = keras.backend.backend()
EXAMPLES = pathlib.Path(__file__).parents[1] / "examples"


@pytest.fixture(scope="module")
def comparison(request, tmp_path_factory):
    """What the example prints of a spell in a short run, and the folder of a picture.

    In `make test-full` of 1,700 steps, 800 of them in the spell.
    """
    folder = tmp_path_factory.mktemp("comparison")
    if not request.config.getoption("full"):
        return run_with_a_short_spell(folder), folder
    arguments = ("--steps", "1700", "--output", "pictures")
    name = "keras_beside_keras_lso.py"
    return run_example(name, *arguments, folder=folder, backend=BACKEND), folder


def run_with_a_short_spell(folder):
    """Runs the example with fewer steps, of which more overflow; returns its output."""
    arguments = ["", "--steps", "460", "--output", str(folder / "pictures")]
    policy = keras.config.dtype_policy()
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(EXAMPLES)
        import keras_beside_keras_lso as example

        patch.delitem(sys.modules, "keras_beside_keras_lso")
        patch.setattr(example, "SPELL", (100, 400))
        patch.setattr(example, "SHARE", 0.7)
        patch.setattr(sys, "argv", arguments)
        patch.setenv("COLUMNS", "80")
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            example.main()
    keras.config.set_dtype_policy(policy)
    return printed.getvalue()


def row(printed, title):
    """Returns the two cells of a row: Keras's, and ours."""
    [line] = [line for line in printed.splitlines() if title in line]
    return re.split(r"  +", line.strip())[1:]


@pytest.mark.full
@pytest.mark.slow
def test_keras_loses_every_weight_and_keras_lso_none(comparison):
    printed, _ = comparison
    assert row(printed, "weights that are NaN") == ["100%", "0%"]
    assert row(printed, "lowest loss scale") == ["0.0", "2**-14"]
    assert row(printed, "loss scale at the end") == ["0.0", "2**-14"]
    assert len(set(row(printed, "bad batches"))) == 1


@pytest.mark.full
@pytest.mark.slow
def test_keras_lso_keeps_learning_after_bad_batches(comparison):
    printed, _ = comparison
    before = [float(cell) for cell in row(printed, "loss before the spell")]
    end = [float(cell) for cell in row(printed, "loss at the end")]
    # They follow the same course, as far as float16 rounds alike.
    assert before[0] == pytest.approx(before[1], rel=0.05)
    assert end[1] < before[1]
    assert str(end[0]) == "nan"


@pytest.mark.full
@pytest.mark.slow
def test_comparison_prints_summary_and_writes_picture(comparison):
    printed, folder = comparison
    words = " ".join(printed.split())
    # From 2**15 to below 2**-126, or to below 2**-149 where float32 goes on so far.
    overflows = 165 if BACKEND == "torch" else 142
    assert (
        "keras.optimizers.LossScaleOptimizer: the scale is 0.0 after "
        f"{overflows} overflows, and step "
    ) in words
    assert "keras_lso.LossScaleOptimizer: the scale falls to 2**-14" in words
    assert f"Trained on {BACKEND}." in words
    picture = folder / "pictures" / "keras_beside_keras_lso.png"
    assert matplotlib.image.imread(picture).shape[:2] == (572, 880)


@pytest.mark.full
def test_page_states_share_of_gradients_that_become_zero(tmp_path):
    printed = run_example("float16_range.py", folder=tmp_path, backend="torch")
    before, after = [float(s) for s in re.findall(r"([\d.]+)% become 0", printed)]
    text = " ".join(PAGES["docs/how-loss-scaling-works.md"].read_text().split())
    said = re.search(r"float16 makes (\d+)% of them 0", text)[1]
    assert before == pytest.approx(float(said), abs=1.0)
    assert "the default first scale, less than 0.1% become 0" in text
    assert after < 0.1
    # Those that are exactly 0 in float32 are left out: a few, more or less.
    [count] = re.findall(r"([\d,]+) values", printed)
    said = re.search(r"are the ([\d,]+) gradients", text)[1]
    count, said = (int(number.replace(",", "")) for number in (count, said))
    assert count == pytest.approx(said, rel=1e-3)
    assert matplotlib.image.imread(tmp_path / "float16_range.png").shape[2] == 4


@pytest.mark.full
@pytest.mark.slow
def test_underflow_example_network_needs_loss_scaling(tmp_path):
    printed = run_example("underflow.py", folder=tmp_path, backend="torch")
    low = re.search(r"Safe for all layers: 2\*\*(-?\d+) to", printed)[1]
    assert int(low) > 4
    assert (tmp_path / "underflow.png").exists()


@pytest.mark.full
def test_float16_report_example_learns_once_report_is_applied(tmp_path):
    printed = run_example("float16_report.py", folder=tmp_path, backend="torch")
    assert re.search(r"^norm: overflow, above 65504: square", printed, re.MULTILINE)
    before, after = map(float, re.findall(r": loss (\S+),", printed))
    # As docs/troubleshooting.md says: it guesses one of ten, and no loss is NaN.
    assert before == pytest.approx(math.log(10), abs=0.05)
    assert after < 1.9
    assert (tmp_path / "float16_report.png").exists()


def test_readme_states_steps_and_value_of_bad_batches():
    source = (EXAMPLES / "keras_beside_keras_lso.py").read_text()
    assert "SPELL, SHARE = (600, 1400), 0.25" in source
    assert "MISSING = 9.96921e36" in source
    words = " ".join(PAGES["README.md"].read_text().split())
    assert "steps 600 and 1400, one batch in four contains 9.97e36" in words
    assert '--8<-- "README.md:picture"' in PAGES["docs/index.md"].read_text()
