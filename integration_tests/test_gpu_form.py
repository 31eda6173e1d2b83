"""docs/gpu-bench.ipynb measures on a GPU, and fills the form for its result.

Here it runs each row at toy size, as `make bench-gpu-dry` does, and not the cell that
installs.
"""

import json
import os
import pathlib
import re
import sys

import pytest

from benchmarks import form
from integration_tests import quickstart
from integration_tests.docs_blocks import BACKEND, ROOT

NOTEBOOK = ROOT / "docs" / "gpu-bench.ipynb"


def test_every_field_of_form_has_an_answer(tmp_path):
    result = tmp_path / "torch-card.json"
    result.write_text(json.dumps({"backend": "torch"}, indent=1))
    found = form.answers(
        f" 10% torch\nWrote {result}\nSGD  1.2\n{ROOT}/tests: 3 passed"
    )
    assert list(form.labels()) == list(found)
    assert form.labels()["info"] == "What `keras-lso info` prints"
    assert found["printed"] == f"Wrote {result}\nSGD  1.2\ntests: 3 passed"
    assert f"backend    {BACKEND}, kernels" in found["info"]
    assert found["results"] == 'torch-card.json\n```json\n{"backend":"torch"}\n```'


@pytest.mark.full
@pytest.mark.skipif(BACKEND != "torch", reason="it runs both backends itself")
def test_notebook_prints_filled_form(tmp_path, monkeypatch):
    monkeypatch.setenv("SIZE", "--smoke")
    monkeypatch.setenv("GPU_DRY_RUN", "1")
    folder = pathlib.Path(sys.executable).parent
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    # A clone, without the folder that the notebook writes to.
    for path in ROOT.iterdir():
        if path.name != "build":
            (tmp_path / path.name).symlink_to(path)
    report = quickstart.run(tmp_path, NOTEBOOK).cells[-1]
    printed = "".join(output.text for output in report.outputs).replace("\r", "")
    for label in form.labels().values():
        assert f"### {label}\n" in printed
    assert len(re.findall(r"\d+ passed", printed)) == 2
    assert "backend    torch, kernels" in printed
