"""The table of docs/api/schedules.md about transformers, with recorded rates.

`make setup` does not install the package. If it is on the path, this file runs the
originals: with `--full` to compare them with the record, with `--record` to write it.

    pip install --no-deps --target build/transformers transformers==5.23.0
    PYTHONPATH=build/transformers python -m pytest --record \
        integration_tests/test_schedules_of_transformers.py
"""

import importlib.util

import pytest

from integration_tests import named_originals
from integration_tests.test_schedules_by_name import (
    assert_same_rates,
    rows_of,
    steps_of,
)

ROWS = rows_of("transformers")
IS_INSTALLED = importlib.util.find_spec("transformers") is not None


@pytest.mark.parametrize("theirs, ours", ROWS)
def test_both_calls_of_table_row_have_same_rates(theirs, ours, original):
    steps = steps_of(theirs)

    def run():
        return named_originals.rates(named_originals.transformers, theirs, steps)

    expected = original(run, theirs, is_installed=IS_INSTALLED)
    assert_same_rates(ours, expected, steps)
