"""The values of a state file are all valid, or none is loaded."""

import keras
import numpy as np
import pytest

from keras_lso import LAMB, LARC, LARS, LossScaleOptimizer, NovoGrad, SpikeGuard
from testing.harness import bits
from testing.trained_optimizers import saved

OPTIMIZERS = {
    "LossScaleOptimizer": lambda: LossScaleOptimizer(
        keras.optimizers.SGD(0.5, momentum=0.5)
    ),
    "LARS": lambda: LARS(0.5),
    "LAMB": lambda: LAMB(0.5),
    "NovoGrad": lambda: NovoGrad(0.5),
    "LARC": lambda: LARC(keras.optimizers.SGD(0.5, momentum=0.5)),
    "LARC of LARS": lambda: LARC(LARS(0.5)),
    "LossScaleOptimizer of LARC": lambda: LossScaleOptimizer(LARC(NovoGrad(0.5))),
}


@pytest.fixture(params=OPTIMIZERS)
def optimizer(request):
    optimizer = OPTIMIZERS[request.param]()
    optimizer.build([keras.Variable([1.0, 2.0], name="w")])
    return optimizer


def state_of(optimizer):
    return {key: np.array(value) for key, value in saved(optimizer).items()}


def assert_refused(optimizer, store, match):
    before = bits(optimizer.variables)
    with pytest.raises((ValueError, TypeError), match=match):
        optimizer.load_own_variables(store)
    assert bits(optimizer.variables) == before


def changed(store):
    """Returns a copy with other values, so that a part that is loaded shows."""
    return {key: value + 1 for key, value in store.items()}


def last_slot(optimizer, store):
    """Returns the key of the last slot of all."""
    return max((k for k, v in store.items() if v.shape == (2,)), key=int)


def test_valid_state_is_loaded(optimizer):
    store = changed(state_of(optimizer))
    optimizer.load_own_variables(store)
    loaded = state_of(optimizer)
    assert loaded.keys() == store.keys()
    key = last_slot(optimizer, store)
    np.testing.assert_array_equal(loaded[key], store[key])


@pytest.mark.parametrize(
    "value, match",
    [
        (np.ones((3,), "float32"), r"shape \(2,\).*shape \(3,\)"),
        (np.float32(1), "shape"),
        (np.array([b"a", b"b"]), "array of numbers"),
        (np.ones((2,), "complex64"), "array of numbers"),
        (np.array([1.0, np.nan], "float32"), "must not be NaN.*compile=False"),
        (np.array([1.0, -np.inf], "float32"), "must be finite in float32.*-inf"),
        (np.array([1.0, 1e300]), "must be finite in float32.*1e[+]300"),
    ],
)
def test_invalid_slot_is_rejected_and_nothing_is_assigned(optimizer, value, match):
    store = changed(state_of(optimizer))
    assert_refused(optimizer, {**store, last_slot(optimizer, store): value}, match)


def test_slot_under_wrong_key_is_rejected(optimizer):
    store = changed(state_of(optimizer))
    key = last_slot(optimizer, store)
    store[f"{key}0"] = store.pop(key)
    assert_refused(optimizer, store, rf"Missing: \['{key}'\]")


@pytest.mark.parametrize("rate", [np.nan, np.inf, -np.inf, 1e39])
def test_learning_rate_not_finite_in_float32_is_rejected(optimizer, rate):
    # The wrapper has a rate as well, which it does not use.
    index = [i for i, v in enumerate(optimizer.variables) if v.name == "learning_rate"][
        -1
    ]
    store = {**changed(state_of(optimizer)), str(index): np.float64(rate)}
    assert_refused(optimizer, store, "learning_rate.*must")


def test_state_with_other_variable_count_is_skipped_with_warning(optimizer):
    store = changed(state_of(optimizer))
    store["100"] = np.float32(1)
    before = state_of(optimizer)
    with pytest.warns(UserWarning, match=rf"saved optimizer has {len(store)} "):
        optimizer.load_own_variables(store)
    for key, value in state_of(optimizer).items():
        np.testing.assert_array_equal(value, before[key])


@pytest.mark.parametrize("dtype", ["float16", ">f4", "longdouble", "float64", "int64"])
def test_slots_of_other_numeric_dtypes_are_converted(optimizer, dtype):
    store = changed(state_of(optimizer))
    key = last_slot(optimizer, store)
    optimizer.load_own_variables({**store, key: store[key].astype(dtype)})
    np.testing.assert_array_equal(state_of(optimizer)[key], store[key])


def test_infinite_slot_is_loaded_unchanged(optimizer):
    """The square of a finite gradient may be inf."""
    store = changed(state_of(optimizer))
    key = last_slot(optimizer, store)
    store[key] = np.array([1.0, np.inf], "float32")
    optimizer.load_own_variables(store)
    np.testing.assert_array_equal(state_of(optimizer)[key], store[key])


# Optimizers of a weight that may be -inf, and the slots that hold its values.
WEIGHTS = {
    "averages": (lambda: LARS(0.5, use_ema=True), "average"),
    "averages of an inner optimizer": (
        lambda: LossScaleOptimizer(keras.optimizers.Adam(use_ema=True)),
        "average",
    ),
}
if hasattr(keras.optimizers, "ScheduleFreeAdamW"):  # Since Keras 3.14.
    free = keras.optimizers.ScheduleFreeAdamW
    WEIGHTS["schedule-free"] = lambda: LossScaleOptimizer(free()), "momentum"


@pytest.mark.parametrize("of", WEIGHTS)
def test_negative_infinity_is_loaded_only_into_numbers_of_weights(of):
    make, name = WEIGHTS[of]
    optimizer = make()
    optimizer.build([keras.Variable([1.0, 2.0], name="w")])
    store = state_of(optimizer)
    infinite = np.array([-np.inf, 1.0], "float32")
    for key, variable in zip(store, list(optimizer.variables), strict=False):
        if variable.name == f"w_{name}":
            optimizer.load_own_variables({**store, key: infinite})
            np.testing.assert_array_equal(state_of(optimizer)[key], infinite)
        elif variable.shape == (2,):
            assert_refused(optimizer, {**store, key: infinite}, "must be finite.*-inf")


def test_negative_infinity_is_loaded_into_master():
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(0.5))
    optimizer.build([keras.Variable([-np.inf, 1.0], dtype="bfloat16")])
    store = state_of(optimizer)
    assert store["6"][0] == -np.inf
    optimizer.load_own_variables(store)
    np.testing.assert_array_equal(state_of(optimizer)["6"], store["6"])


def test_negative_infinity_among_norms_of_spike_guard_is_rejected():
    inner = keras.optimizers.SGD(0.5)
    guard = SpikeGuard(window=16, warmup=8)
    optimizer = LossScaleOptimizer(inner, spike_guard=guard)
    optimizer.build([keras.Variable([1.0, 2.0])])
    store = state_of(optimizer)
    key = next(k for k, v in store.items() if v.shape == (16,))
    store[key] = np.full(16, -np.inf, "float32")
    assert_refused(optimizer, store, "spike_norms.*must be finite")
