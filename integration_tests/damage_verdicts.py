"""What may come of a damaged config or file: a clear error, or a sound optimizer."""

import contextlib
import warnings

import numpy as np
from keras import ops

from keras_lso._keras_internals.optimizers import variables_of

# What our loaders may raise, and what comes out of Keras's `load_weights` besides:
# what h5py says to a file that it cannot find its way in.
REFUSALS = (ValueError, TypeError, OSError)
REFUSALS_OF_KERAS = (*REFUSALS, RuntimeError, LookupError)
# A finite number as large as this is legal, but no step is finite with it.
HUGE = 1e18
_SANE: set = set()
# What Python says where nobody has looked.
_CARELESS = ("unhashable", "not iterable", "not subscriptable", "'NoneType' object")


def bits(variables):
    """The bytes of variables: -0.0 differs from 0.0, and NaN equals NaN."""
    return [np.array(ops.convert_to_numpy(v)).tobytes() for v in variables]


def number(variable):
    return float(ops.convert_to_numpy(variable))


@contextlib.contextmanager
def quietly():
    """Keras and we warn of what is skipped; that is no error."""
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        yield


def attempt(load, label, names=(), allowed=REFUSALS):
    """Returns what `load` returns; None if it refuses as it should."""
    with quietly():
        try:
            return load()
        except Exception as error:
            assert_clear(error, label, names, allowed)
            return None


def assert_clear(error, label, names=(), allowed=REFUSALS):
    """The error is of an allowed type, and says something; one of `names`, if any."""
    assert isinstance(error, allowed), f"{label}: {type(error).__name__}: {error}"
    message = str(error)
    assert len(message) > 25, f"{label}: {message!r}"
    for words in _CARELESS:
        assert words not in message or "damaged" in message, f"{label}: {message}"
    assert not names or any(n in message for n in names), f"{label}: {message}"


def assert_sane(optimizer, label):
    """The built optimizer is as sound as one that nobody has damaged."""
    _assert_scale_is_sane(optimizer, label)
    assert number(optimizer.iterations) >= 0, label
    assert number(optimizer.skipped_steps) >= 0, label
    values = [np.asarray(ops.convert_to_numpy(v)) for v in optimizer.variables]
    assert not any(np.isnan(v).any() for v in values), label
    # Damage that changed nothing, or the same as other damage, takes no steps again.
    known = repr({**optimizer.get_config(), "name": None}), *bits(optimizer.variables)
    if known in _SANE:
        return
    _SANE.add(known)
    is_huge = any((np.abs(v.astype("float64")) > HUGE).any() for v in values)

    steps = number(optimizer.iterations)
    variables = variables_of(optimizer)
    for variable in variables:
        variable.assign(np.ones(variable.shape))
    # An overflow, which must not reach a weight, and a step that is applied.
    for gradient in (np.inf, 0.5):
        grads = [np.full(v.shape, gradient, "float32") for v in variables]
        grads = [ops.convert_to_tensor(g) * optimizer.loss_scale for g in grads]
        optimizer.apply(grads, variables, scaled=True)
        _assert_scale_is_sane(optimizer, label)
        for variable in variables:
            is_finite = np.isfinite(ops.convert_to_numpy(variable)).all()
            assert is_finite or (is_huge and gradient == 0.5), label
    if steps < 2**31 - 2:
        assert number(optimizer.iterations) == steps + 1, label


def _assert_scale_is_sane(optimizer, label):
    policy = optimizer.loss_scale_policy
    scale = number(optimizer.loss_scale)
    assert np.isfinite(scale), label
    assert policy.min_scale <= scale <= policy.max_scale, label
    period = getattr(policy, "increment_period", None)
    if period is not None:
        assert 0 <= number(optimizer.dynamic_counter) < period, label
