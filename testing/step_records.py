"""The columns of a record of steps, and whether two records are alike."""

import numpy as np

COLUMNS = (
    "step",
    "outcome",
    "loss_scale",
    "gradient_norm",
    "learning_rate",
    "largest_gradient",
)


def assert_alike(actual, expected, rtol, atol=0.0):
    assert tuple(actual) == COLUMNS
    for name in ("step", "outcome", "loss_scale"):
        assert actual[name].tolist() == expected[name].tolist()
    for name in COLUMNS[3:]:
        is_known = np.isfinite(expected[name])
        np.testing.assert_array_equal(np.isfinite(actual[name]), is_known)
        values = actual[name][is_known], expected[name][is_known]
        np.testing.assert_allclose(*values, rtol=rtol, atol=atol)
