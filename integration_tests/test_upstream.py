"""The programs of docs/upstream.md fail: Keras still has the faults.

When a test fails, Keras has mended a fault. Its message says what goes: that, and the
section of the page.
"""

import re

import keras
import pytest

from integration_tests.distributed import launch
from integration_tests.docs_blocks import blocks_of, table_of

PAGE = "docs/upstream.md"
FAULTS = {
    block.heading: block for block in blocks_of(PAGE) if block.language == "python"
}
# The last cell of each row, by the heading that it links to: the fault's other places.
GOES = {re.match(r"\[(.+?)\]", row[0])[1]: row[-1] for row in table_of(PAGE, "fault")}


def test_table_has_row_for_each_program():
    assert sorted(GOES) == sorted(FAULTS)


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
