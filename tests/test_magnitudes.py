"""Magnitudes of tensors, against NumPy's casts to float16."""

import math

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from keras_lso.diagnostics.magnitudes import Magnitudes, reading_of

pytestmark = pytest.mark.one_backend


@hypothesis.given(
    st.lists(st.lists(st.floats(width=32), max_size=20), min_size=1, max_size=3)
)
# Each side of what is flushed, and numbers of which the sum is inf in float32.
@hypothesis.example([[2.0**-25, np.nextafter(np.float32(2.0**-25), 1).item()]])
@hypothesis.example([[3e38, 3e38], [np.inf, np.nan, 0.0], []])
def test_magnitudes_match_numpy_casts_to_float16(batches):
    found = Magnitudes()
    for batch in batches:
        wide = np.array(batch, "float32")
        with np.errstate(over="ignore", invalid="ignore"):
            narrow = wide.astype("float16")
        found.add(reading_of(wide, "float32"), reading_of(narrow, "float16"))
    wide = np.concatenate([np.array(b, "float32") for b in batches])
    wide = wide.astype("float64")
    finite = np.abs(wide[np.isfinite(wide)])
    with np.errstate(over="ignore", invalid="ignore"):
        narrow = wide.astype("float32").astype("float16")
        # From float64 at once: rounding twice may end elsewhere.
        is_flushed = (finite != 0) & (finite.astype("float16") == 0)
    assert found.largest == finite.max(initial=0)
    in_float16 = np.abs(narrow[np.isfinite(narrow)]).max(initial=0)
    assert found.largest_in_float16 == (
        in_float16 if np.isfinite(narrow).all() else math.inf
    )
    assert found.not_finite == (~np.isfinite(wide)).sum()
    assert found.not_finite_in_float16 == (~np.isfinite(narrow)).sum()
    assert found.flushed == is_flushed.sum() / max((finite != 0).sum(), 1)
    total = finite.sum()
    assert found.lost == pytest.approx(finite[is_flushed].sum() / (total or 1))
    if found.largest:
        # Powers of two up to what float16 holds.
        assert found.largest * 2**found.headroom == pytest.approx(65504)
    else:
        assert found.headroom == math.inf


def test_float16_readings_take_precedence_over_float32_readings():
    large, small = np.array([1e6]), np.array([2.0])
    found = Magnitudes()
    found.add(reading_of(large, "float32"), reading_of(large, "float32"))
    assert (found.is_float16, found.largest) == (False, 1e6)
    found.add(reading_of(small, "float32"), reading_of(small, "float16"))
    found.add(reading_of(large, "float32"), reading_of(large, "float32"))
    assert (found.is_float16, found.largest) == (True, 2.0)
    assert found.largest_in_float16 == 2.0


def test_magnitudes_to_dict_returns_all_numbers():
    found = Magnitudes()
    found.add(reading_of([8.0], "float32"), reading_of([8.0], "float16"))
    assert found.to_dict() == {
        "is_float16": True,
        "largest": 8.0,
        "largest_in_float16": 8.0,
        "not_finite": 0,
        "not_finite_in_float16": 0,
        "flushed": 0.0,
        "lost": 0.0,
        "headroom": math.log2(65504 / 8),
    }
