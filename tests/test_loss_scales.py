"""The life of any loss-scale policy: config, state and bounds; `get`; a fixed scale.

`test_dynamic_loss_scale.py` and its like have the moves of each policy.
"""

import json

import keras
import numpy as np
import pytest
from keras import ops

import keras_lso
from keras_lso import loss_scales
from keras_lso.loss_scales import (
    DynamicLossScale,
    FixedLossScale,
    LogMaxLossScale,
    LossScale,
)
from keras_lso.loss_scales.searching import SearchingLossScale
from testing.loss_scales import CountingOverflows, built


def test_fixed_scale_never_changes(compiled):
    policy = built(FixedLossScale(300.0))
    step = compiled(policy.step, policy.variables)
    for finite in [True, False, False, True]:
        step(ops.convert_to_tensor(finite))
        assert float(policy()) == 300.0


@pytest.mark.parametrize("scale", [2.0**-100, 2.0**100])
def test_fixed_scale_may_exceed_bounds_of_dynamic_scale(scale):
    policy = built(FixedLossScale(scale))
    policy.restore()
    assert float(policy()) == scale


POLICIES = {
    "fixed": lambda: FixedLossScale(128),
    "dynamic": lambda: DynamicLossScale(),
    "dynamic in full": lambda: DynamicLossScale(
        initial_loss_scale=1024.0,
        increment_period=7,
        multiplier=3.0,
        growth_factor=1.5,
        backoff_factor=0.1,
        min_scale=0.5,
        max_scale=4096.0,
        hysteresis=3,
        consecutive_hysteresis=True,
    ),
    "searching": lambda: SearchingLossScale(increment_period=3, search_period=2),
    "log max": lambda: LogMaxLossScale(),
    "log max in full": lambda: LogMaxLossScale(
        scale_min=0.5,
        scale_max=4096.0,
        log_max=15.0,
        beta1=0.9,
        beta2=0.95,
        overflow_std_dev=2.0,
        original_overflow=True,
    ),
    "custom": lambda: CountingOverflows(target=5.0, max_scale=99.0),
}


@pytest.fixture(params=POLICIES.values(), ids=POLICIES)
def policy(request):
    return request.param()


def plain_attributes(policy):
    return {k: v for k, v in vars(policy).items() if not k.startswith("_")}


def test_policy_round_trips_in_each_way(policy):
    config = loss_scales.serialize(policy)
    assert config == keras.saving.serialize_keras_object(policy)
    names = {**vars(loss_scales), type(policy).__name__: type(policy)}
    for twin in (
        type(policy).from_config(policy.get_config()),
        keras.saving.deserialize_keras_object(config),
        loss_scales.deserialize(json.loads(json.dumps(config))),
        loss_scales.get(config),
        eval(repr(policy), names),
    ):
        assert type(twin) is type(policy)
        assert plain_attributes(twin) == plain_attributes(policy)
    assert loss_scales.get(policy) is policy


def test_serialize_and_deserialize_reject_other_values():
    with pytest.raises(TypeError, match="`policy` must be.*policy=128 of type int"):
        loss_scales.serialize(128)
    for config in (128, "dynamic", None):
        with pytest.raises(TypeError, match="`config` must be a dict"):
            loss_scales.deserialize(config)
    with pytest.raises(ValueError, match="as its 'class_name'"):
        loss_scales.deserialize({})
    schedule = keras.optimizers.schedules.ExponentialDecay(0.5, 10, 0.5)
    with pytest.raises(ValueError, match="must describe a `LossScale`, not a Ex"):
        loss_scales.deserialize(keras.saving.serialize_keras_object(schedule))


def test_config_omits_default_values():
    assert DynamicLossScale().get_config() == {
        "initial_loss_scale": 2.0**15,
        "increment_period": 2000,
        "multiplier": 2.0,
    }
    assert FixedLossScale(8).get_config() == {"loss_scale_value": 8.0}


def test_policy_is_built_once_and_reset_to_its_initial_state(policy, snapshot):
    assert policy.variables == []
    assert float(policy()) == float(policy.value) == policy.initial_loss_scale
    policy.build()
    assert keras.backend.standardize_dtype(policy().dtype) == "float32"
    assert tuple(policy().shape) == ()
    variables = policy.variables
    assert variables[0] is policy.step_counter and variables[1] is policy.scale
    assert [v.name for v in variables[:2]] == ["step_counter", "dynamic_scale"]
    assert {v.aggregation for v in variables} == {"only_first_replica"}
    first = snapshot(variables)
    for finite in [False, False, True]:
        policy.step(finite, ops.convert_to_tensor(2.0))
    scale = float(policy())
    policy.build()
    assert [id(v) for v in policy.variables] == [id(v) for v in variables]
    assert float(policy()) == scale
    policy.reset()
    assert snapshot(policy.variables) == first


def test_scale_read_before_step_keeps_its_value():
    policy = built(DynamicLossScale(1024))
    read = policy()
    policy.step(False)
    assert float(read) == 1024.0
    assert float(policy()) == 512.0


def test_assign_scale_clips_to_bounds():
    policy = LossScale(1.0, min_scale=0.5, max_scale=2.0)
    policy.build(keras.optimizers.SGD().add_variable)
    for value, expected in [(3.0, 2.0), (0.1, 0.5), (1.5, 1.5)]:
        policy.assign_scale(value)
        assert float(policy()) == expected


def test_step_error_names_what_is_missing():
    with pytest.raises(NotImplementedError, match="LossScale must override `step`"):
        built(LossScale(1.0)).step(True)
    with pytest.raises(ValueError, match="needs the largest magnitude .* `amax`"):
        built(LogMaxLossScale()).step(True)


@pytest.mark.parametrize(
    "cls, arguments, words",
    [
        (
            DynamicLossScale,
            {"initial_loss_scale": 48.0, "min_scale": 64.0, "max_scale": 32.0},
            "`min_scale` must not be above `max_scale`.*min_scale=64.0, max_scale=32.0",
        ),
        (
            DynamicLossScale,
            {"initial_loss_scale": 4.0, "min_scale": 8.0, "max_scale": 512.0},
            "initial_loss_scale=4.0, .*widen the bounds",
        ),
        (
            LogMaxLossScale,
            {"scale_min": 8.0, "scale_max": 4.0},
            "`scale_min` must not be above `scale_max`",
        ),
        (
            LogMaxLossScale,
            {"original_overflow": True, "log_max": 64.0},
            "below 64 if .*log_max=64.0",
        ),
        (
            SearchingLossScale,
            {"search_factor": 1.5},
            "`search_factor` must be at least `multiplier`, 2.0",
        ),
    ],
)
def test_contradictory_arguments_are_rejected(cls, arguments, words):
    with pytest.raises(ValueError, match=words):
        cls(**arguments)


def test_policy_cannot_be_shared_by_two_optimizers(policy):
    first = keras_lso.LossScaleOptimizer(keras.optimizers.SGD(0.1), loss_scale=policy)
    inner = keras.optimizers.SGD(0.1, loss_scale_factor=8.0)
    with pytest.raises(ValueError, match="already belongs to 'loss_scale_optimizer'"):
        keras_lso.LossScaleOptimizer(inner, loss_scale=policy)
    assert inner.loss_scale_factor == 8.0
    policy.claim(first)  # Its owner may claim it again.
    copy = type(policy).from_config(policy.get_config())
    second = keras_lso.LossScaleOptimizer(keras.optimizers.SGD(0.1), loss_scale=copy)
    assert second.loss_scale_policy is copy


@pytest.mark.parametrize(
    "identifier, expected",
    [
        (128, FixedLossScale(128)),
        (0.5, FixedLossScale(0.5)),
        (np.float32(8), FixedLossScale(8)),
        (np.int64(8), FixedLossScale(8)),
        ("dynamic", DynamicLossScale()),
        (
            {"class_name": "FixedLossScale", "config": {"loss_scale_value": 4}},
            FixedLossScale(4),
        ),
    ],
)
def test_get_returns_policy_for_each_kind_of_identifier(identifier, expected):
    policy = loss_scales.get(identifier)
    assert type(policy) is type(expected)
    assert plain_attributes(policy) == plain_attributes(expected)


def test_get_creates_new_policy_on_each_call():
    assert loss_scales.get("dynamic") is not loss_scales.get("dynamic")
