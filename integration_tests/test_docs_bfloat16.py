"""What docs/bfloat16.md says of training in bfloat16."""

import importlib
import json
import sys

import numpy as np
import pytest

from integration_tests.docs_blocks import PAGES, ROOT, table_of


@pytest.fixture
def example(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(ROOT / "examples"), *sys.path])
    return importlib.import_module("bfloat16_transformer")


@pytest.fixture
def results():
    return json.loads((ROOT / "examples/bfloat16_transformer.json").read_text())[
        "results"
    ]


def test_table_of_set_ups_equals_recorded_results(example, results):
    cells = [column.cells for column in example.make_table(results).columns]
    rows = [[str(c).strip() for c in row] for row in zip(*cells, strict=True)]
    said = table_of("docs/bfloat16.md", "backend")
    names = {"JAX": "jax", "PyTorch": "torch"}
    assert [[names[row[0]], *row[1:]] for row in said] == rows


def test_every_kind_ends_within_what_page_says_of_float32(example, results):
    with_masters = [r for r in results if "alone" not in r["setup"]]
    apart = np.abs([example.above_float32(r, results) for r in with_masters])
    text = PAGES["docs/bfloat16.md"].read_text()
    assert f"within {apart.max():.3f} of float32" in text
    [last] = [
        np.array(r["losses"])[:, -1]
        for r in results
        if (r["backend"], r["setup"]) == ("jax", example.FLOAT32)
    ]
    assert f"are {np.ptp(last):.3f} apart" in " ".join(text.split())
