"""The constructor refuses bad arguments, and leaves everything as it was.

Each message names the argument, what came, and what to write instead.
"""

import keras
import numpy as np
import pytest

from keras_lso import LossScaleOptimizer, loss_scales
from keras_lso.loss_scales import DynamicLossScale, FixedLossScale
from testing.refusals import refused, sgd

InverseTime = keras.optimizers.schedules.InverseTimeDecay
NOT_OPTIMIZERS = {
    "None": (None, "keras.optimizers.Adam()", "None"),
    "name": ("sgd", 'keras.optimizers.get("sgd")', "'sgd'"),
    "class": (keras.optimizers.Nadam, "such as `Nadam(...)`", "Nadam"),
    "dict": ({"class_name": "SGD"}, "keras.optimizers.Adam()", "{'class_name': 'SGD'}"),
    "policy": (FixedLossScale(8), "is the argument `loss_scale`", "FixedLossScale("),
    "schedule": (
        InverseTime(0.5, 9, 1),
        "such as `keras.optimizers.Adam(schedule)`",
        "",
    ),
    "rate": (0.5, "such as `keras.optimizers.Adam(0.5)`", "0.5"),
}


@pytest.mark.parametrize(
    "inner, instead, received", NOT_OPTIMIZERS.values(), ids=NOT_OPTIMIZERS
)
def test_inner_optimizer_of_other_type_is_rejected(inner, instead, received):
    with refused(TypeError, "`inner_optimizer`", "Received", received, instead):
        LossScaleOptimizer(inner)


@pytest.mark.parametrize(
    "wrapper", [LossScaleOptimizer, keras.optimizers.LossScaleOptimizer]
)
def test_nested_loss_scale_optimizer_is_rejected(wrapper):
    inner = wrapper(sgd(), initial_scale=16.0)
    words = "must not be a LossScaleOptimizer", "Pass its `inner_optimizer` instead"
    with refused(TypeError, "`inner_optimizer`", *words, "Received"):
        LossScaleOptimizer(inner)
    assert float(inner.scale_loss(1.0)) == 16.0


FIXED = {"dynamic": False, "initial_scale": 2.0}
CONTRADICTORY = [
    ({"dynamic": False}, ["`dynamic=False`", "`initial_scale`", "initial_scale=1024"]),
    ({**FIXED, "dynamic_growth_steps": 7}, ["leave out", "dynamic_growth_steps=7"]),
    ({**FIXED, "min_scale": 2.0}, ["leave out", "min_scale=2.0"]),
    ({**FIXED, "max_scale": 2.0}, ["leave out", "max_scale=2.0"]),
    # Bounds that are given at their defaults.
    ({**FIXED, "min_scale": 2.0**-14}, ["leave out", "min_scale=6.1"]),
    ({"loss_scale": DynamicLossScale(16.0), "max_scale": 2.0**24}, ["max_scale=1677"]),
    (
        {"min_scale": 64.0, "max_scale": 32.0},
        ["min_scale=64.0", "max_scale=32.0", "above"],
    ),
    (
        {"initial_scale": 4.0, "min_scale": 8.0, "max_scale": 512.0},
        ["initial_scale=4.0", "min_scale=8.0", "max_scale=512.0", "widen the bounds"],
    ),
    (
        {"initial_scale": 1024.0, "min_scale": 8.0, "max_scale": 512.0},
        ["initial_scale=1024.0", "max_scale=512.0", "widen the bounds"],
    ),
    ({"max_scale": 1024.0}, ["initial_scale=32768.0", "Choose another scale"]),
    ({"x": 1.0, "steps": 2}, ["does not support arguments", "`x`", "`steps`"]),
    ({"init_scale": 8.0}, ["`init_scale`. Did you mean `initial_scale`?"]),
    ({"growth_interval": 9}, ["Did you mean `dynamic_growth_steps`?"]),
    ({"masters": "float32"}, ["`masters`. Did you mean `master_weights`?"]),
    ({"learning_rate": 0.5}, ["set `learning_rate` on the `inner_optimizer`"]),
    *(
        ({"loss_scale": DynamicLossScale(16.0), **more}, ["`loss_scale`", *more])
        for more in (
            {"dynamic": False},
            {"initial_scale": 8.0},
            {"dynamic_growth_steps": 7},
            {"min_scale": 1.0, "max_scale": 2.0**20},
        )
    ),
]


@pytest.mark.parametrize("arguments, words", CONTRADICTORY, ids=str)
def test_contradictory_arguments_are_rejected(arguments, words):
    if "loss_scale" in arguments:
        words = [*words, "Set the other arguments", "=DynamicLossScale("]
    with refused(ValueError, *words):
        LossScaleOptimizer(sgd(), **arguments)


def test_contradictory_bounds_of_policy_are_rejected():
    words = "`min_scale`", "`max_scale`", "min_scale=64.0", "max_scale=32.0", "above"
    with refused(ValueError, *words):
        DynamicLossScale(48.0, min_scale=64.0, max_scale=32.0)
    with refused(ValueError, "initial_loss_scale=4.0", "widen the bounds"):
        DynamicLossScale(4.0, min_scale=8.0, max_scale=512.0)


BAD_SCALES = {
    "zero": (0.0, ValueError),
    "negative": (-8.0, ValueError),
    "nan": (float("nan"), ValueError),
    "inf": (float("inf"), ValueError),
    "too large for float32": (1e39, ValueError),
    "too large for float64": (10**400, ValueError),
    "too small for float32": (1e-50, ValueError),
    "true": (True, TypeError),
    "numpy bool": (np.True_, TypeError),
    "text": ("1024", TypeError),
    "list": ([8.0], TypeError),
    "array": (np.array([8.0, 16.0]), TypeError),
    "complex": (8j, TypeError),
}
bad_scales = pytest.mark.parametrize(
    "value, exception", BAD_SCALES.values(), ids=BAD_SCALES
)


@bad_scales
@pytest.mark.parametrize(
    "make",
    [
        lambda value: LossScaleOptimizer(sgd(), initial_scale=value),
        lambda value: LossScaleOptimizer(sgd(), dynamic=False, initial_scale=value),
    ],
    ids=["dynamic", "fixed"],
)
def test_invalid_initial_scale_is_rejected(make, value, exception):
    received = f"initial_scale={value!r}"
    with refused(
        exception, "`initial_scale`", received, "positive", "finite", "2.0**15"
    ):
        make(value)


@bad_scales
@pytest.mark.parametrize("bound", ["min_scale", "max_scale"])
def test_invalid_scale_bound_is_rejected(bound, value, exception):
    received = f"{bound}={value!r}"
    with refused(exception, f"`{bound}`", received, "positive", "finite", "2.0**15"):
        LossScaleOptimizer(sgd(), **{bound: value})
    with refused(exception, f"`{bound}`", received, "positive", "finite", "2.0**15"):
        DynamicLossScale(**{bound: value})


@bad_scales
def test_invalid_scale_of_policy_is_rejected(value, exception):
    words = (repr(value), "positive", "finite", "2.0**15")
    with refused(exception, "`loss_scale_value`", *words):
        FixedLossScale(value)
    with refused(exception, "`initial_loss_scale`", *words):
        DynamicLossScale(value)


WHOLE = [7, 7.0, np.int32(7), np.uint8(7), np.float32(7), np.float16(7)]


@pytest.mark.parametrize("value", WHOLE, ids=repr)
def test_counts_accept_whole_floats_as_in_tf_keras(value):
    optimizer = LossScaleOptimizer(sgd(), dynamic_growth_steps=value)
    policy = DynamicLossScale(increment_period=value, hysteresis=value)
    counts = [optimizer.dynamic_growth_steps, policy.increment_period]
    counts += [policy.hysteresis, optimizer.get_config()["dynamic_growth_steps"]]
    counts += [policy.get_config()[name] for name in ("increment_period", "hysteresis")]
    assert [(type(count), count) for count in counts] == [(int, 7)] * 6
    assert DynamicLossScale.from_config(policy.get_config()).hysteresis == 7
    optimizer.build([keras.Variable([1.0])])
    optimizer.check_stalled(patience=value)


BAD_COUNTS = [0, -3, 0.0, -2.0, 2.5, True, np.True_, "7", None, [7]]
BAD_COUNTS += [float("nan"), float("inf"), np.float32(2.5), np.float64("nan")]


@pytest.mark.parametrize("value", BAD_COUNTS, ids=repr)
def test_counts_reject_values_that_are_not_positive_integers(value):
    words = (repr(value), "an integer of at least 1")
    if value is not None:  # the default
        with refused(ValueError, "`dynamic_growth_steps`", *words):
            LossScaleOptimizer(sgd(), dynamic_growth_steps=value)
    with refused(ValueError, "`increment_period`", *words):
        DynamicLossScale(increment_period=value)
    with refused(ValueError, "`hysteresis`", repr(value), "integer of at least 1"):
        DynamicLossScale(hysteresis=value)
    with refused(ValueError, "`patience`", *words):
        LossScaleOptimizer(sgd()).check_stalled(patience=value)


@pytest.mark.parametrize("value", [1.0, 0.5, -2, float("inf"), float("nan"), "2", True])
@pytest.mark.parametrize("factor", ["multiplier", "growth_factor"])
def test_invalid_growth_factor_is_rejected(factor, value):
    with refused(ValueError, f"`{factor}`", f"{factor}={value!r}", "above 1.0"):
        DynamicLossScale(**{factor: value})


@pytest.mark.parametrize("value", [1.0, 0.0, 2, -0.5, float("nan"), "0.5", True])
def test_invalid_backoff_factor_is_rejected(value):
    words = (f"backoff_factor={value!r}", "above 0.0 and below 1.0")
    with refused(ValueError, "`backoff_factor`", *words):
        DynamicLossScale(backoff_factor=value)


@pytest.mark.parametrize("value", [1, 0, None, "yes", ["auto"]], ids=repr)
def test_master_weights_rejects_unknown_values(value):
    words = (f"master_weights={value!r}", "'auto'", "True", "False")
    with refused(ValueError, "`master_weights`", *words):
        LossScaleOptimizer(sgd(), master_weights=value)


NOT_POLICIES = {
    "text": ("fixed", ValueError, ("'dynamic'", "'fixed'")),
    "search": ("auto", ValueError, ("write `initial_scale='auto'`", "'dynamic'")),
    "true": (True, TypeError, ("number", "'dynamic'", "True")),
    "list": ([8.0], TypeError, ("number", "'dynamic'", "[8.0]")),
    "class": (DynamicLossScale, TypeError, ("number", "LossScale", "DynamicLossScale")),
    "zero": (0, ValueError, ("positive", "2.0**15", "0")),
    "empty config": ({}, ValueError, ("'class_name'", "class_name=None")),
    "another class": (
        {"module": "keras.optimizers", "class_name": "SGD", "config": {}},
        ValueError,
        ("LossScale", "SGD"),
    ),
}


@pytest.mark.parametrize(
    "value, exception, words", NOT_POLICIES.values(), ids=NOT_POLICIES
)
def test_invalid_loss_scale_is_rejected(value, exception, words):
    with refused(exception, *words):
        LossScaleOptimizer(sgd(), loss_scale=value)
    with refused(exception, *words):
        loss_scales.get(value)


def test_unknown_config_keys_are_rejected():
    config = {**LossScaleOptimizer(sgd()).get_config(), "increment": 2}
    with refused(ValueError, "does not support arguments", "`increment`"):
        LossScaleOptimizer.from_config(config)
    with refused(TypeError, "increment"):
        loss_scales.get({"class_name": "DynamicLossScale", "config": {"increment": 2}})


@pytest.mark.parametrize("inner", [None, "sgd", 3])
def test_config_without_inner_optimizer_config_is_rejected(inner):
    config = {**LossScaleOptimizer(sgd()).get_config(), "inner_optimizer": inner}
    words = ("'inner_optimizer'", f"inner_optimizer={inner!r}", "config dict")
    with refused(ValueError, *words):
        LossScaleOptimizer.from_config(config)


def test_rejected_constructor_leaves_arguments_unchanged():
    inner = keras.optimizers.SGD(1.0, loss_scale_factor=8.0)
    policy = DynamicLossScale(16.0)
    for name, value in (
        ("clipnorm", 1.0),
        ("scale", 1.0),
        ("dynamic", 1),
        ("initial_scale", 8.0),
        ("master_weights", 1),
    ):
        with pytest.raises((TypeError, ValueError), match=name):
            LossScaleOptimizer(inner, loss_scale=policy, **{name: value})
    with pytest.raises(TypeError, match="`inner_optimizer`"):
        LossScaleOptimizer("sgd", loss_scale=policy)
    assert inner.loss_scale_factor == 8.0
    assert not policy.built
    owner = LossScaleOptimizer(sgd(), loss_scale=policy)

    with refused(ValueError, "belongs to one optimizer", "from_config", owner.name):
        LossScaleOptimizer(inner, loss_scale=policy)
    assert inner.loss_scale_factor == 8.0
    policy.claim(owner)  # is still the owner
    inner.loss_scale_factor = None
    LossScaleOptimizer(inner)  # is still nobody's
