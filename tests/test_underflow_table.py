"""The table that an underflow report prints: what is safe is not rounded up."""

import numpy as np
import pytest

from keras_lso.diagnostics.underflow import UnderflowReport
from keras_lso.diagnostics.underflow_counts import counts_of
from keras_lso.diagnostics.underflow_table import table_of

pytestmark = pytest.mark.one_backend


@pytest.mark.parametrize(
    "values, safe",
    [
        # 2**-25 of the smallest that counts is 3, and 65504 of the largest 100.
        ([2.0**-25 / 3] * 99 + [655.04], "2**2 to 2**6"),
        ([2.0**-30, 65504.0 / 2**4], "none"),
        ([0.0], "any"),
    ],
)
def test_table_rounds_safe_scales_inward_to_powers_of_two(values, safe):
    scales = [1.0, 4.0]
    report = UnderflowReport(scales, {"dense": counts_of([np.array(values)], scales)})
    [row] = [line for line in table_of(report).splitlines() if "dense" in line]
    assert row.endswith(f"  {safe}")


def test_table_in_notebook_is_plain_text(monkeypatch):
    report = UnderflowReport([1.0], {"dense": counts_of([np.array([1.0])], [1.0])})
    elsewhere = table_of(report)
    # What rich takes for a notebook, and for a terminal.
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert table_of(report) == elsewhere
    assert "dense" in elsewhere and "\x1b" not in elsewhere
