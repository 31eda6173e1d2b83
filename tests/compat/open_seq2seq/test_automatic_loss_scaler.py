"""`AutomaticLossScaler` against OpenSeq2Seq's formulas in NumPy."""

import hypothesis
import keras
import numpy as np
import pytest
from hypothesis import strategies as st
from keras import ops

from keras_lso.compat.open_seq2seq import AutomaticLossScaler
from keras_lso.loss_scales import DynamicLossScale, LogMaxLossScale


def backoff(overflows, low=1.0, high=2.0**14, factor=2.0, window=2000):
    """Yields the scale before the first step and after each."""
    scale, last = high, -1
    yield scale
    for i, overflow in enumerate(overflows):
        if overflow:
            scale, last = max(scale / factor, low), i
        elif (i - last) % window == 0:
            scale = min(scale * factor, high)
        yield scale


def trace(scaler, steps):
    """Returns the scales along steps of (has_nan, amax)."""
    scales = [float(scaler.loss_scale)]
    for has_nan, amax in steps:
        scaler.update_op(
            *(ops.convert_to_tensor(x) for x in (has_nan, np.float32(amax)))
        )
        scales.append(float(scaler.loss_scale))
    return scales


@hypothesis.given(
    overflows=st.lists(st.booleans(), min_size=1, max_size=40),
    window=st.integers(1, 6),
    factor=st.sampled_from([2.0, 4.0]),
)
def test_backoff_matches_open_seq2seq(overflows, window, factor):
    scaler = AutomaticLossScaler(
        "Backoff", {"scale_max": 256.0, "step_factor": factor, "step_window": window}
    )
    expected = list(backoff(overflows, 1.0, 256.0, factor, window))
    assert trace(scaler, [(overflow, 1.0) for overflow in overflows]) == expected


def test_logmax_is_policy_with_overflow_fault_of_original():
    """`tests/test_log_max_loss_scale.py` compares it with OpenSeq2Seq's formula."""
    for params in ({}, {"original_overflow": False}):
        policy = AutomaticLossScaler("LogMax", params).policy
        expected = LogMaxLossScale(**{"original_overflow": True, **params})
        assert policy.get_config() == expected.get_config()


@pytest.mark.parametrize(
    "has_nan, amax", [(True, 1.0), (False, np.inf), (False, np.nan), (True, np.nan)]
)
@pytest.mark.parametrize("algorithm", ["Backoff", "LogMax"])
def test_nan_flag_or_non_finite_amax_counts_as_overflow(algorithm, has_nan, amax):
    scaler = AutomaticLossScaler(algorithm, {"scale_max": 64.0})
    before = trace(scaler, [(False, 2.0)] * 3)[-1]
    [_, after] = trace(scaler, [(has_nan, amax)])
    assert after == {"Backoff": before / 2, "LogMax": 1.0}[algorithm]


def test_algorithm_names_and_defaults_match_page():
    assert AutomaticLossScaler.SUPPORTED_ALGOS == ["backoff", "logmax"]
    assert type(AutomaticLossScaler("BACKOFF").policy) is DynamicLossScale
    assert type(AutomaticLossScaler("logMax").policy) is LogMaxLossScale
    assert float(AutomaticLossScaler().loss_scale) == 2.0**14
    assert float(AutomaticLossScaler("LogMax").loss_scale) == 1.0


@pytest.mark.parametrize(
    "algorithm, params, error, message",
    [
        ("Backoff", {"step_windw": 3}, ValueError, "no parameter 'step_windw'.*'scale"),
        ("LogMax", {"step_window": 3}, ValueError, "LogMax has no parameter 'step_w"),
        ("Backoff", {"step_factor": 1.0}, ValueError, "step_factor=1.0"),
        ("Backoff", {"scale_min": 9.0, "scale_max": 8.0}, ValueError, "scale_min=9.0"),
        ("LogMax", {"beta2": 1.0}, ValueError, "beta2=1.0"),
        ("log_max", None, ValueError, "'backoff', 'logmax'.*algorithm="),
    ],
)
def test_error_names_invalid_params(algorithm, params, error, message):
    with pytest.raises(error, match=message):
        AutomaticLossScaler(algorithm, params)


def test_check_grads_distinguishes_nan_from_inf(sparse_or_none):
    w = keras.Variable(np.zeros((3, 1), "float32"))

    def check(*grads):
        grads = [g if g is None else ops.convert_to_tensor(g) for g in grads]
        pairs = [(g, w) for g in [*grads, *sparse_or_none]]
        has_nan, amax = AutomaticLossScaler.check_grads(pairs)
        return bool(has_nan), float(amax)

    assert check(np.float16([1.0, -3.0]), None, np.float32([2.0])) == (False, 3.0)
    assert check(np.float32([np.inf]), np.float32([2.0])) == (False, np.inf)
    assert check(np.float32([np.nan]), np.float32([2.0]))[0]
    assert check(np.float16([np.nan, np.inf]))[0]
    assert list(map(float, AutomaticLossScaler.check_grads([(None, w)]))) == [0, 0]


@pytest.fixture
def sparse_or_none(request):
    """A sparse gradient where the backend has one, and a None."""
    if keras.backend.backend() == "torch":
        return [None]
    make = request.getfixturevalue("sparse_gradient")
    return [None, make(np.float32([[1.5]]), [2], (3, 1))]
