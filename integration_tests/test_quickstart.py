"""docs/quickstart.ipynb runs, and its results agree with its text.

It runs on a CPU in a kernel of its own, without the cell that installs, which needs
the network.
`python -m integration_tests.quickstart` renews its outputs.
"""

import re
import tomllib

import keras
import nbformat
import pytest

from integration_tests import quickstart

BACKEND = keras.backend.backend()
OTHER = "torch" if BACKEND == "jax" else "jax"


@pytest.fixture(scope="module")
def written():
    return quickstart.read()


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """The cells of code after a run."""
    notebook = quickstart.run(tmp_path_factory.mktemp("quickstart"))
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def installed(notebook):
    """Returns the cells of code, except the one that installs."""
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    return [cell for cell in cells if not quickstart.is_install(cell)]


def text_of(cell):
    """Returns the printed text of a cell."""
    outputs = quickstart.outputs_of(cell)
    return "".join(o.text for o in outputs if o.output_type == "stream")


def kinds_of(cell):
    """The kinds of a cell's outputs, and what a figure is shown as."""
    outputs = quickstart.outputs_of(cell)
    return [(o.output_type, sorted(o.get("data", ()))) for o in outputs]


def result_of(text):
    """The accuracy in percent, the loss scale and the skipped steps of a line."""
    numbers = r"accuracy (.*)%, loss scale (\d+), skipped steps (\d+)$"
    [found] = re.findall(numbers, text, re.MULTILINE)
    return tuple(map(float, found))


def test_only_install_cell_of_notebook_runs_shell_commands(written):
    nbformat.validate(written)
    [install] = [cell for cell in written.cells if quickstart.is_install(cell)]
    assert "%pip install" in install.source
    for cell in installed(written):
        assert not re.search(r"^[!%](?!%writefile)", cell.source, re.MULTILINE)


def test_notebooks_clone_repository_of_project():
    pyproject = tomllib.loads((quickstart.ROOT / "pyproject.toml").read_text())
    hook = pyproject["tool"]["hatch"]["metadata"]["hooks"]["custom"]
    for path in quickstart.ROOT.glob("docs/*.ipynb"):
        [install] = filter(quickstart.is_install, quickstart.read(path).cells)
        assert f'ADDRESS = "{hook["repository"]}"\n' in install.source, path


@pytest.mark.full
def test_notebook_results_match_its_text(ran):
    start, _, report, trained, figure, _, _, loaded = ran
    assert text_of(start).endswith(f" on {BACKEND}\n")
    # "Nearly all gradients of `conv_1` become 0", and it is the table that is printed.
    assert float(re.search(r"conv_1 +\S+ +([\d.]+)%", text_of(report))[1]) > 90
    assert kinds_of(figure) == [("execute_result", ["image/png", "text/plain"])]
    accuracy, scale, skipped = result_of(text_of(trained))
    lines = re.findall(r"accuracy ([\d.]+)%", text_of(trained))
    float32, plain, scaled = map(float, lines)
    # "Reads about as many digits as float32", and plain float16 far fewer.
    assert scaled == accuracy == pytest.approx(float32, abs=6.0)
    assert plain < float32 - 10.0
    # It begins at 2**24 and doubles at most five times in 280 steps.
    assert skipped < 10
    assert 2.0 ** (24 - skipped) <= scale <= 2.0 ** (29 - skipped)
    # Of 397 digits one may be read otherwise, by other roundings in float16.
    assert f" on {OTHER}\n" in text_of(loaded)
    there = result_of(text_of(loaded))
    assert there == (pytest.approx(accuracy, abs=0.6), scale, skipped)
