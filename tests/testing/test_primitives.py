"""Each primitive is tested in every way that it has, and in none twice."""

import keras
import pytest

from testing.primitives import implementations

# How many ways each primitive has: the reference, the framework's, an accelerator's.
WAYS = {
    "tensorflow": {"measure": 2, "run_if": 2, "fused_step": 1, "l2_norms": 1},
    "jax": {"measure": 3, "run_if": 2, "fused_step": 1, "l2_norms": 1},
    "torch": {"measure": 3, "run_if": 3, "fused_step": 3, "l2_norms": 2},
}[keras.backend.backend()]


@pytest.mark.parametrize("primitive, count", WAYS.items(), ids=WAYS)
def test_primitive_is_tested_in_every_way_exactly_once(primitive, count):
    assert len(set(implementations(primitive).values())) == count
    assert len(implementations(primitive)) == count
