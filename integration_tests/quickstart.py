"""Runs docs/quickstart.ipynb in a kernel of its own.

    KERAS_BACKEND=torch python -m integration_tests.quickstart

writes its text and pictures into the notebook; `test_quickstart.py` checks them. The
cell with the tag `install`, which downloads, is left out.
"""

import os
import pathlib
import sys
import tempfile

import nbclient
import nbformat

ROOT = pathlib.Path(__file__).parents[1]
NOTEBOOK = ROOT / "docs" / "quickstart.ipynb"


def read(path=NOTEBOOK):
    return nbformat.read(path, as_version=4)


def is_install(cell):
    return "install" in cell.metadata.get("tags", ())


def run(folder, path=NOTEBOOK):
    """Returns a notebook after it has run in `folder`, without the install cell."""
    notebook = read(path)
    notebook.cells = [cell for cell in notebook.cells if not is_install(cell)]
    client = nbclient.NotebookClient(
        notebook,
        timeout=600,
        record_timing=False,
        resources={"metadata": {"path": str(folder)}},
    )
    inherited = {**os.environ, "OMP_NUM_THREADS": "1", "IPYTHONDIR": str(folder)}
    # Elsewhere it may be set to what draws no pictures in a notebook.
    inherited.pop("MPLBACKEND", None)
    return client.execute(env=inherited)


def outputs_of(cell):
    """Returns the text and the pictures of a cell, without the log."""
    return [output for output in cell.outputs if output.get("name") != "stderr"]


def renew():
    notebook = read()
    with tempfile.TemporaryDirectory() as folder:
        cells = {cell.id: cell for cell in run(folder).cells}
    for cell in notebook.cells:
        if cell.cell_type == "code" and not is_install(cell):
            cell.outputs = outputs_of(cells[cell.id])
            cell.execution_count = cells[cell.id].execution_count
    nbformat.write(notebook, NOTEBOOK)


if __name__ == "__main__":
    sys.exit(renew())
