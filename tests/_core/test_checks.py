"""NumPy numbers as arguments are accepted or rejected, without a warning."""

import math

import numpy as np
import pytest

import keras_lso
from keras_lso import loss_scales
from keras_lso._core import checks
from keras_lso.compat import open_seq2seq

pytestmark = [pytest.mark.filterwarnings("error::RuntimeWarning")]

DTYPES = [np.float16, np.float32, np.float64, np.longdouble, np.int8, np.uint64]
FLOATS = DTYPES[:4]


@pytest.mark.parametrize("dtype", FLOATS, ids=lambda dtype: dtype.__name__)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_checks_reject_non_finite_numpy_numbers(bad, dtype):
    value = dtype(bad)
    for call in (
        lambda: checks.check_factor("given", value, above=0.0),
        lambda: checks.check_real("given", value),
        lambda: checks.check_scale("given", value),
        lambda: checks.check_share("given", value),
    ):
        with pytest.raises(ValueError, match="`given`.*Received: given="):
            call()


@pytest.mark.parametrize("value", [10**400, -(10**400), np.longdouble("1e400")])
def test_checks_reject_numbers_too_large_for_float(value):
    for call in (
        lambda: checks.check_factor("given", value, above=0.0),
        lambda: checks.check_real("given", value),
        lambda: checks.check_share("given", value),
    ):
        with pytest.raises(ValueError, match="`given`.*Received: given="):
            call()


@pytest.mark.parametrize("dtype", FLOATS, ids=lambda dtype: dtype.__name__)
def test_constructors_accept_numpy_numbers(dtype):
    number, share = dtype(3), dtype(0.5)
    assert keras_lso.SpikeGuard(max_norm=number).max_norm == 3.0
    policy = loss_scales.DynamicLossScale(multiplier=dtype(2), backoff_factor=share)
    assert policy.backoff_factor == 0.5
    assert loss_scales.LogMaxLossScale(beta1=share).beta1 == 0.5
    inner = keras_lso.LAMB(share, beta_1=share, epsilon=share, weight_decay_rate=share)
    bounds = {"min_scale": dtype(1), "max_scale": dtype(64)}
    optimizer = keras_lso.LossScaleOptimizer(inner, initial_scale=dtype(8), **bounds)
    assert optimizer.initial_scale == 8.0
    keras_lso.LossScaleOptimizer(keras_lso.LARS(share), initial_scale="auto", **bounds)
    open_seq2seq.CosineDecayPolicy(share, 100)
