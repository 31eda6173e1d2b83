"""The tables of docs/api/schedules.md: another library's call, ours, and their rates.

Both calls of each row run, and the rates of all steps agree within a millionth. Those
of transformers are compared in `test_schedules_of_transformers.py`.
"""

import numpy as np
import pytest
from keras import ops

from integration_tests.docs_blocks import code_in, table_of
from integration_tests.named_originals import NUMBERS, ORIGINALS, rates
from keras_lso import schedules
from keras_lso.compat import model_garden

PAGE = "docs/api/schedules.md"
# Float32 rounds the rates of optax, of which those near 0 are differences.
ROUNDED = {"optax", "levanter.optim"}


def rows_of(heading):
    """Returns the calls of a table: theirs and ours."""
    rows = table_of(PAGE, heading)
    return [(code_in(theirs)[0], code_in(ours)[0]) for theirs, ours, _ in rows]


ROWS = [(heading, *row) for heading in ORIGINALS for row in rows_of(heading)]


def steps_of(call):
    """Returns the steps to compare: far beyond the run, unless the rate rises again."""
    n = NUMBERS["n"]
    if "OneCycleLR" in call or "lr_rate(" in call:
        return list(range(n))
    if "CosineAnnealingLR" in call or ("cosine_" in call and "optimizer" in call):
        return list(range(n + 1))
    far = [9_999, 10_000, 10_001, 25_000] if "inv_sqrt" in call else []
    return [*range(2 * n), *far]


def assert_same_rates(ours, expected, steps, absolute=1e-12):
    schedule = eval(ours, {**vars(model_garden), **vars(schedules), **NUMBERS})
    found = ops.convert_to_numpy(schedule(ops.convert_to_tensor(steps, dtype="int32")))
    assert len(set(expected)) > 3
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=absolute, err_msg=ours)


@pytest.mark.parametrize("heading, theirs, ours", ROWS)
def test_both_calls_of_table_row_have_same_rates(heading, theirs, ours, original):
    steps = steps_of(theirs)
    expected = original(
        lambda: rates(ORIGINALS[heading], theirs, steps), f"{heading}.{theirs}"
    )
    absolute = 1e-7 * NUMBERS["lr"] if heading in ROUNDED else 1e-12
    assert_same_rates(ours, expected, steps, absolute)
