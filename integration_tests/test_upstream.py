"""The programs of docs/upstream.md fail: Keras still has the faults.

When a test fails, Keras has mended a fault. Its message says what goes: that, and the
section of the page.
"""

import pathlib
import re

import keras
import pytest

from integration_tests.distributed import launch
from integration_tests.docs_blocks import blocks_of, code_in, table_of

PAGE = "docs/upstream.md"
FAULTS = {
    block.heading: block for block in blocks_of(PAGE) if block.language == "python"
}
# The last cell of each row, by the heading that it links to: the fault's other places.
GOES = {re.match(r"\[(.+?)\]", row[0])[1]: row[-1] for row in table_of(PAGE, "fault")}


def test_table_has_row_for_each_program():
    assert sorted(GOES) == sorted(FAULTS)


def test_lines_have_what_table_says():
    # A row has several lines of a file, or one line of each of several files.
    versions = ["3.15.1", "3.16.0.dev2026102704"]
    if keras.__version__ not in versions:
        pytest.skip(f"The lines are those of {versions}")
    folder = pathlib.Path(keras.__file__).parent / "src"
    for files, *columns, has in table_of(PAGE, "file in `keras/src`"):
        lines = re.findall(r"\d+", columns[versions.index(keras.__version__)])
        names = code_in(files)
        for i, line in enumerate(lines):
            text = (folder / names[i % len(names)]).read_text().splitlines()
            assert code_in(has)[0] in text[int(line) - 1], (names, line)


@pytest.mark.each_backend
@pytest.mark.parametrize("heading", [h for h, b in FAULTS.items() if b.runs_here])
def test_program_fails_on_installed_keras(heading, tmp_path):
    source = FAULTS[heading].source
    for name in re.findall(r"keras\.optimizers\.(\w+)", source):
        if not hasattr(keras.optimizers, name):
            pytest.skip(f"Keras {keras.__version__} has no {name}")
    [function] = re.findall(r"^def (\w+)", source, re.MULTILINE)
    program = tmp_path / "fault.py"
    program.write_text(f"{source}\n{function}()\n")
    # A process of its own: logical devices must be there before TensorFlow starts.
    worker = launch.Worker(program, [], {})
    _, errors = worker.communicate(launch.TIMEOUT)
    mended = f"Keras {keras.__version__} has mended it. Take out {GOES[heading]}"
    assert worker.returncode == 1, mended
    assert re.search("^AssertionError", errors, re.MULTILINE), errors
