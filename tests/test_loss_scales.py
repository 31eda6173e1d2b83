"""The loss-scale policies against models of them in plain Python and NumPy.

Every trajectory is compared step for step and exactly: both sides multiply in
float32.
"""

import json

import hypothesis
import keras
import numpy as np
import pytest
from hypothesis import strategies as st
from keras import ops

import keras_lso
from keras_lso import loss_scales
from keras_lso.loss_scales import (
    DynamicLossScale,
    FixedLossScale,
    LogMaxLossScale,
    LossScale,
    SearchingLossScale,
)

PATTERNS = st.lists(st.booleans(), min_size=1, max_size=24)


def model_of_dynamic(policy, pattern):
    """The dynamic loss scale, as its docstring has it; yields scale and counter."""
    scale, good_steps = np.float32(policy.initial_loss_scale), 0
    overflows_left = policy.hysteresis
    for finite in pattern:
        factor = 1.0
        good_steps = good_steps + 1 if finite else 0
        grows = good_steps == policy.increment_period
        if grows:
            factor, good_steps = policy.growth_factor, 0
        if grows or (finite and policy.consecutive_hysteresis):
            overflows_left = policy.hysteresis
        if not finite:
            overflows_left -= 1
            factor = policy.backoff_factor if overflows_left <= 0 else 1.0
        scale = scale * np.float32(factor)
        scale = np.clip(
            scale, np.float32(policy.min_scale), np.float32(policy.max_scale)
        )
        yield float(scale), good_steps


class MegatronGradScaler:
    """`DynamicGradScaler` of Megatron-LM."""

    def __init__(self, policy):
        self.scale = policy.initial_loss_scale
        self.min_scale = policy.min_scale
        self.growth_factor = policy.growth_factor
        self.backoff_factor = policy.backoff_factor
        self.growth_interval = policy.increment_period
        self.hysteresis = policy.hysteresis
        self._growth_tracker = 0
        self._hysteresis_tracker = self.hysteresis

    def update(self, found_inf):
        if found_inf:
            self._growth_tracker = 0
            self._hysteresis_tracker -= 1
            if self._hysteresis_tracker <= 0:
                self.scale = max(self.scale * self.backoff_factor, self.min_scale)
        else:
            self._growth_tracker += 1
            if self._growth_tracker == self.growth_interval:
                self._growth_tracker = 0
                self._hysteresis_tracker = self.hysteresis
                self.scale = self.scale * self.growth_factor


class DeepSpeedLossScaler:
    """`DynamicLossScaler` of DeepSpeed."""

    def __init__(self, policy):
        self.scale = policy.initial_loss_scale
        self.min_scale = policy.min_scale
        self.scale_factor = policy.growth_factor
        self.scale_window = policy.increment_period
        self.delayed_shift = policy.hysteresis
        self.consecutive_hysteresis = policy.consecutive_hysteresis
        self.cur_hysteresis = self.delayed_shift
        self.cur_iter = 0
        self.last_overflow_iter = -1

    def update(self, overflow):
        if overflow:
            if self.delayed_shift == 1 or self.cur_hysteresis == 1:
                self.scale = max(self.scale / self.scale_factor, self.min_scale)
            else:
                self.cur_hysteresis -= 1
            self.last_overflow_iter = self.cur_iter
        else:
            if self.consecutive_hysteresis:
                self.cur_hysteresis = self.delayed_shift
            if (self.cur_iter - self.last_overflow_iter) % self.scale_window == 0:
                if not self.consecutive_hysteresis:
                    self.cur_hysteresis = self.delayed_shift
                self.scale = self.scale * self.scale_factor
        self.cur_iter += 1


def built(policy):
    policy.build()
    return policy


def trajectory(policy, pattern, step=None):
    step = step or policy.step
    for finite in pattern:
        step(ops.convert_to_tensor(finite))
        yield float(policy()), int(ops.convert_to_numpy(policy.step_counter))


# --- The dynamic scale ------------------------------------------------------


@hypothesis.given(
    pattern=PATTERNS,
    initial_loss_scale=st.sampled_from([1.0, 8.0, 1000.0, 2.0**15]),
    increment_period=st.integers(1, 4),
    multiplier=st.sampled_from([2.0, 1.5, 10.0]),
    growth_factor=st.sampled_from([None, 1.001, 4.0]),
    backoff_factor=st.sampled_from([None, 0.7, 0.25]),
    bounds=st.sampled_from([(2.0**-14, 2.0**24), (1.0, 2.0**15), (0.3, 8e37)]),
    hysteresis=st.integers(1, 3),
    consecutive_hysteresis=st.booleans(),
)
# It would grow beyond its highest, and fall below its lowest.
@hypothesis.example(
    pattern=[True, True, False, False, False],
    initial_loss_scale=2.0**15,
    increment_period=1,
    multiplier=2.0,
    growth_factor=4.0,
    backoff_factor=2.0**-9,
    bounds=(1.0, 2.0**15),
    hysteresis=1,
    consecutive_hysteresis=False,
)
def test_a_dynamic_scale_moves_as_its_docstring_says(pattern, bounds, **arguments):
    policy = built(
        DynamicLossScale(min_scale=bounds[0], max_scale=bounds[1], **arguments)
    )
    expected = list(model_of_dynamic(policy, pattern))
    assert list(trajectory(policy, pattern)) == expected


CONFIGURATIONS = {
    "default": {"increment_period": 3},
    "factors": {"increment_period": 2, "growth_factor": 1.3, "backoff_factor": 0.4},
    "bounds": {"increment_period": 1, "min_scale": 2.0**13, "max_scale": 40000.0},
    "hysteresis": {"increment_period": 2, "hysteresis": 2},
    "consecutive": {
        "increment_period": 3,
        "hysteresis": 2,
        "consecutive_hysteresis": True,
    },
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("arguments", CONFIGURATIONS.values(), ids=CONFIGURATIONS)
def test_a_dynamic_scale_moves_alike_when_compiled(arguments, compiled):
    policy = built(DynamicLossScale(**arguments))
    step = compiled(policy.step, policy.variables)

    @hypothesis.given(PATTERNS)
    def check(pattern):
        policy.reset()
        expected = list(model_of_dynamic(policy, pattern))
        assert list(trajectory(policy, pattern, step)) == expected

    check()


@hypothesis.given(
    pattern=PATTERNS,
    increment_period=st.integers(1, 3),
    hysteresis=st.integers(1, 4),
    consecutive_hysteresis=st.booleans(),
)
def test_hysteresis_is_that_of_deepspeed_and_megatron(pattern, **arguments):
    # Far from the upper bound, which neither of them has.
    policy = built(DynamicLossScale(2.0**4, max_scale=2.0**100, **arguments))
    deepspeed, megatron = DeepSpeedLossScaler(policy), MegatronGradScaler(policy)
    for finite in pattern:
        policy.step(ops.convert_to_tensor(finite))
        deepspeed.update(not finite)
        megatron.update(not finite)
        assert float(policy()) == deepspeed.scale
        if not policy.consecutive_hysteresis:  # which Megatron does not have
            assert float(policy()) == megatron.scale


def test_the_second_of_two_tolerated_overflows_drops_the_scale():
    policy = built(DynamicLossScale(1024, increment_period=3, hysteresis=2))
    pattern = [False, True, False, False, True, True, True, False, False]
    scales = [scale for scale, _ in trajectory(policy, pattern)]
    # A good step does not refill the budget; growth, at the seventh step, does.
    assert scales == [1024, 1024, 512, 256, 256, 256, 512, 512, 256]


def test_every_good_step_refills_a_consecutive_budget():
    policy = built(
        DynamicLossScale(
            1024, increment_period=9, hysteresis=2, consecutive_hysteresis=True
        )
    )
    pattern = [False, True, False, False, False, True, False]
    scales = [scale for scale, _ in trajectory(policy, pattern)]
    assert scales == [1024, 1024, 1024, 512, 256, 256, 256]


@pytest.fixture
def four_hundred(compiled_once):
    """`four_hundred(finite, **arguments)`: the scales of a policy along such steps."""

    def scales(finite, **arguments):
        policy = built(DynamicLossScale(**arguments))
        step = compiled_once(policy.step, policy.variables)
        return [scale for scale, _ in trajectory(policy, [finite] * 400, step)]

    return scales


@pytest.mark.parametrize(
    "arguments, lowest", [({"min_scale": 0.25}, 0.25), ({}, 2.0**-14)]
)
def test_four_hundred_overflows_end_at_the_lowest_scale(
    four_hundred, arguments, lowest
):
    scales = four_hundred(False, **arguments)
    assert min(scales) == scales[-1] == lowest


@pytest.mark.parametrize(
    "arguments, highest", [({}, 2.0**24), ({"max_scale": 2.0**126}, 2.0**126)]
)
def test_four_hundred_growths_end_at_the_highest_scale(
    four_hundred, arguments, highest
):
    scales = four_hundred(True, increment_period=1, **arguments)
    assert max(scales) == scales[-1] == highest


def test_a_period_longer_than_int32_never_ends():
    policy = built(DynamicLossScale(increment_period=2**40))
    assert list(trajectory(policy, [True, True, False, True])) == [
        (2.0**15, 1),
        (2.0**15, 2),
        (2.0**14, 0),
        (2.0**14, 1),
    ]


def test_the_default_float_type_of_keras_does_not_round_the_factors():
    before = keras.config.floatx()
    keras.config.set_floatx("float16")
    try:
        policy = built(DynamicLossScale(1024, increment_period=1, growth_factor=1.001))
        pattern = [True, True, False, True]
        expected = list(model_of_dynamic(policy, pattern))
        assert list(trajectory(policy, pattern)) == expected
        policy = built(SearchingLossScale(1000.0, search_factor=10.0))
        policy.step(finite=False)
        assert float(policy()) == np.float32(1000.0) * np.float32(0.1)
    finally:
        keras.config.set_floatx(before)


@pytest.mark.one_backend
def test_the_factors_default_to_the_multiplier_and_its_inverse():
    policy = DynamicLossScale(multiplier=4.0)
    assert (policy.growth_factor, policy.backoff_factor) == (4.0, 0.25)
    policy = DynamicLossScale(multiplier=4.0, backoff_factor=0.5)
    assert (policy.growth_factor, policy.backoff_factor) == (4.0, 0.5)


def test_the_defaults_are_those_of_keras(compiled_once):
    policy = built(DynamicLossScale())
    theirs = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1))
    assert float(policy()) == theirs.initial_scale == 2.0**15
    assert policy.increment_period == theirs.dynamic_growth_steps == 2000
    step = compiled_once(policy.step, policy.variables)
    pattern = [True] * 2001
    assert list(trajectory(policy, pattern, step))[-3:] == [
        (2.0**15, 1999),
        (2.0**16, 0),
        (2.0**16, 1),
    ]


# --- The fixed scale --------------------------------------------------------


@pytest.mark.one_backend
def test_a_fixed_scale_never_moves(compiled):
    policy = built(FixedLossScale(300.0))
    step = compiled(policy.step, policy.variables)
    for finite in [True, False, False, True]:
        step(ops.convert_to_tensor(finite))
        assert float(policy()) == 300.0


@pytest.mark.parametrize("scale", [2.0**-100, 2.0**100])
def test_a_fixed_scale_may_lie_beyond_the_bounds_of_a_dynamic_one(scale):
    policy = built(FixedLossScale(scale))
    policy.restore()
    assert float(policy()) == scale


# --- The life of any policy -------------------------------------------------


@keras.saving.register_keras_serializable("keras_lso_tests")
class CountingOverflows(LossScale):
    """Aims the largest gradient at a target, and counts the overflows."""

    needs_amax = True

    def __init__(self, target=64.0, **arguments):
        super().__init__(initial_loss_scale=8.0, **arguments)
        self.target = target

    def build(self, add_variable=None):
        if not self.built:
            super().build(add_variable)
            self.overflows = self.add_variable("overflows", 0, dtype="int")

    def step(self, finite, amax=None):
        self.assign_scale(ops.where(finite, self.target / amax, self.value / 2))
        overflow = ops.cast(ops.logical_not(finite), self.overflows.dtype)
        self.overflows.assign_add(overflow)

    def get_config(self):
        config = super().get_config()
        del config["initial_loss_scale"]
        return {**config, "target": self.target}


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


@pytest.mark.one_backend
def test_a_config_makes_the_same_policy_again(policy):
    twin = type(policy).from_config(policy.get_config())
    assert type(twin) is type(policy)
    assert plain_attributes(twin) == plain_attributes(policy)


@pytest.mark.one_backend
def test_keras_serializes_and_deserializes_a_policy(policy):
    config = keras.saving.serialize_keras_object(policy)
    twin = keras.saving.deserialize_keras_object(config)
    assert type(twin) is type(policy)
    assert plain_attributes(twin) == plain_attributes(policy)


@pytest.mark.one_backend
def test_get_reads_the_config_dict_of_a_policy(policy):
    twin = loss_scales.get(keras.saving.serialize_keras_object(policy))
    assert type(twin) is type(policy)
    assert plain_attributes(twin) == plain_attributes(policy)


@pytest.mark.one_backend
def test_deserialize_reads_what_serialize_returns(policy):
    config = loss_scales.serialize(policy)
    assert config == keras.saving.serialize_keras_object(policy)
    twin = loss_scales.deserialize(json.loads(json.dumps(config)))
    assert type(twin) is type(policy)
    assert plain_attributes(twin) == plain_attributes(policy)


@pytest.mark.one_backend
def test_what_is_no_policy_or_config_of_one_is_refused():
    with pytest.raises(TypeError, match="`policy` must be.*policy=128 of type int"):
        loss_scales.serialize(128)
    for config in (128, "dynamic", None):
        with pytest.raises(TypeError, match="`config` must be a dict"):
            loss_scales.deserialize(config)
    with pytest.raises(ValueError, match="has the keys 'class_name' and 'config'"):
        loss_scales.deserialize({})
    schedule = keras.optimizers.schedules.ExponentialDecay(0.5, 10, 0.5)
    with pytest.raises(ValueError, match="must describe a .*LossScale"):
        loss_scales.deserialize(keras.saving.serialize_keras_object(schedule))


@pytest.mark.one_backend
def test_the_representation_of_a_policy_is_code_that_makes_it(policy):
    classes = (
        FixedLossScale,
        DynamicLossScale,
        LogMaxLossScale,
        SearchingLossScale,
        CountingOverflows,
    )
    names = {cls.__name__: cls for cls in classes}
    twin = eval(repr(policy), names)
    assert type(twin) is type(policy)
    assert plain_attributes(twin) == plain_attributes(policy)


@pytest.mark.one_backend
def test_a_config_leaves_out_the_defaults():
    assert DynamicLossScale().get_config() == {
        "initial_loss_scale": 2.0**15,
        "increment_period": 2000,
        "multiplier": 2.0,
    }
    assert FixedLossScale(8).get_config() == {"loss_scale_value": 8.0}


def test_before_it_is_built_a_policy_has_its_initial_scale_and_no_state(policy):
    assert policy.variables == []
    assert float(policy()) == float(policy.value) == policy.initial_loss_scale


def test_the_scale_is_a_float32_scalar(policy):
    for _ in range(2):
        assert keras.backend.standardize_dtype(policy().dtype) == "float32"
        assert tuple(policy().shape) == ()
        policy.build()


def test_building_twice_keeps_the_state(policy):
    policy.build()
    variables = policy.variables
    policy.step(False, ops.convert_to_tensor(np.inf))
    scale = float(policy())
    policy.build()
    assert [id(v) for v in policy.variables] == [id(v) for v in variables]
    assert float(policy()) == scale


@pytest.mark.one_backend
def test_the_state_starts_with_the_counter_and_the_scale(policy):
    policy.build()
    assert policy.variables[0] is policy.step_counter
    assert policy.variables[1] is policy.scale
    assert [v.name for v in policy.variables[:2]] == ["step_counter", "dynamic_scale"]


def test_replicas_share_the_state_of_a_policy(policy):
    policy.build()
    assert {v.aggregation for v in policy.variables} == {"only_first_replica"}


def test_reset_goes_back_to_the_first_step(policy, snapshot):
    policy.build()
    first = snapshot(policy.variables)
    for finite in [False, False, True]:
        policy.step(finite, ops.convert_to_tensor(2.0))
    policy.reset()
    assert snapshot(policy.variables) == first


def test_a_scale_that_was_read_stays_what_it_was():
    policy = built(DynamicLossScale(1024))
    read = policy()
    policy.step(False)
    assert float(read) == 1024.0
    assert float(policy()) == 512.0


def test_assigned_scales_are_kept_within_the_bounds():
    policy = built(LossScale(1.0, min_scale=0.5, max_scale=2.0))
    for value, expected in [(3.0, 2.0), (0.1, 0.5), (1.5, 1.5)]:
        policy.assign_scale(value)
        assert float(policy()) == expected


@pytest.mark.one_backend
@pytest.mark.parametrize(
    "loaded, restored",
    [
        (np.nan, 8.0),  # the initial one
        (np.inf, 64.0),
        (-np.inf, 0.5),
        (0.0, 0.5),
        (-3.0, 0.5),
        (1e30, 64.0),
        (64.0, 64.0),
        (5.0, 5.0),
    ],
)
def test_a_loaded_scale_is_mended(loaded, restored):
    policy = built(DynamicLossScale(8.0, min_scale=0.5, max_scale=64.0))
    policy.scale.assign(loaded)
    policy.restore()
    assert float(policy()) == restored


@pytest.mark.one_backend
@pytest.mark.parametrize(
    "loaded, restored", [((-1, -1), (0, 0)), ((9, 9), (3, 2)), ((2, 1), (2, 1))]
)
def test_loaded_counters_are_mended(loaded, restored):
    policy = built(DynamicLossScale(increment_period=4, hysteresis=2))
    policy.step_counter.assign(loaded[0])
    policy.overflows_left.assign(loaded[1])
    policy.restore()
    counters = [policy.step_counter, policy.overflows_left]
    assert tuple(int(c.numpy()) for c in counters) == restored


@pytest.mark.one_backend
def test_the_base_class_says_what_to_override():
    with pytest.raises(NotImplementedError, match="LossScale must override `step`"):
        built(LossScale(1.0)).step(True)


# --- get --------------------------------------------------------------------


@pytest.mark.one_backend
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
        (
            {
                "class_name": "DynamicLossScale",
                "config": {
                    "initial_loss_scale": 4.0,
                    "increment_period": 5,
                    "multiplier": 3.0,
                },
            },
            DynamicLossScale(4.0, 5, 3.0),
        ),
    ],
)
def test_get_makes_the_policy_that_an_identifier_stands_for(identifier, expected):
    policy = loss_scales.get(identifier)
    assert type(policy) is type(expected)
    assert plain_attributes(policy) == plain_attributes(expected)


@pytest.mark.one_backend
def test_get_returns_a_policy_as_it_is(policy):
    assert loss_scales.get(policy) is policy


@pytest.mark.one_backend
def test_get_makes_a_new_policy_each_time():
    assert loss_scales.get("dynamic") is not loss_scales.get("dynamic")


# --- A policy of the user's own, in the optimizer ----------------------------


@pytest.fixture
def with_custom_policy():
    optimizer = keras_lso.LossScaleOptimizer(
        keras.optimizers.SGD(1.0), loss_scale=CountingOverflows()
    )
    variables = [keras.Variable([0.0, 0.0]), keras.Variable(0.0)]
    optimizer.build(variables)
    return optimizer, variables


@pytest.mark.parametrize("scaled", [True, False])
def test_a_custom_policy_is_told_the_largest_unscaled_gradient(
    with_custom_policy, compiled, scaled
):
    optimizer, variables = with_custom_policy

    def apply(*grads):
        optimizer.apply(list(grads), variables, scaled=scaled)

    step = compiled(apply, variables + optimizer.variables)
    factor = 8.0 if scaled else 1.0  # the initial scale is 8
    step(*[ops.convert_to_tensor(factor * np.float32(g)) for g in ([1.0, -4.0], 2.0)])
    np.testing.assert_array_equal(variables[0].numpy(), [-1.0, 4.0])
    assert float(optimizer.loss_scale) == 64.0 / 4.0

    step(*[ops.convert_to_tensor(np.float32(g)) for g in ([1.0, np.nan], 2.0)])
    assert float(optimizer.loss_scale) == 8.0
    assert int(optimizer.loss_scale_policy.overflows.numpy()) == 1
    np.testing.assert_array_equal(variables[0].numpy(), [-1.0, 4.0])


def test_a_custom_policy_is_told_the_largest_of_several_losses(
    with_custom_policy, compiled
):
    optimizer, [weight, _] = with_custom_policy

    def apply(grads, update_scale):
        optimizer.apply([grads], [weight], scaled=False, update_scale=update_scale)

    first = compiled(lambda g: apply(g, False), [weight, *optimizer.variables])
    last = compiled(lambda g: apply(g, True), [weight, *optimizer.variables])
    for step, gradient, scale in [
        (first, 16.0, 8.0),
        (first, 2.0, 8.0),
        (last, 4.0, 64.0 / 16.0),
        # What came before an update is forgotten.
        (last, 4.0, 64.0 / 4.0),
        (first, np.nan, 64.0 / 4.0),
        (last, 4.0, 64.0 / 8.0),
        (last, 4.0, 64.0 / 4.0),
    ]:
        step(ops.convert_to_tensor(np.float32([gradient, 1.0])))
        assert float(optimizer.loss_scale) == scale


def test_a_custom_policy_hears_nothing_of_float8_scales(with_custom_policy):
    optimizer, [weight, scale] = with_custom_policy
    scale.overwrite_with_gradient = True
    grads = [np.float32([16.0, 8.0]), np.float32(2.0**20)]
    optimizer.apply([ops.convert_to_tensor(g) for g in grads], [weight, scale])
    # Of 16, unscaled by 8: the other "gradient" is a new value.
    assert float(optimizer.loss_scale) == 64.0 / 2.0


@pytest.mark.one_backend
def test_the_state_of_a_custom_policy_follows_that_of_the_inner_optimizer(
    with_custom_policy,
):
    optimizer, _ = with_custom_policy
    policy, inner = optimizer.loss_scale_policy, optimizer.inner_optimizer
    # The last two are not saved.
    assert [id(v) for v in optimizer.variables[2:-2]] == [
        id(v)
        for v in [policy.step_counter, policy.scale, *inner.variables, policy.overflows]
    ]


def test_an_optimizer_with_a_custom_policy_round_trips(with_custom_policy):
    optimizer, variables = with_custom_policy
    optimizer.apply(
        [ops.convert_to_tensor([np.inf, 0.0]), ops.convert_to_tensor(0.0)], variables
    )
    config = keras.saving.serialize_keras_object(optimizer)
    twin = keras_lso.deserialize(config)
    assert type(twin.loss_scale_policy) is CountingOverflows
    assert twin.loss_scale_policy is not optimizer.loss_scale_policy
    assert twin.get_config() == optimizer.get_config()

    store = {}
    optimizer.save_own_variables(store)
    twin.build([keras.Variable([0.0, 0.0]), keras.Variable(0.0)])
    twin.load_own_variables(store)
    assert float(twin.loss_scale) == 4.0
    assert int(twin.loss_scale_policy.overflows.numpy()) == 1


@pytest.mark.one_backend
def test_a_custom_policy_is_found_among_custom_objects():
    class Unregistered(FixedLossScale):
        pass

    optimizer = keras_lso.LossScaleOptimizer(
        keras.optimizers.SGD(1.0), loss_scale=Unregistered(16.0)
    )
    twin = keras_lso.LossScaleOptimizer.from_config(
        optimizer.get_config(), custom_objects={"Unregistered": Unregistered}
    )
    assert type(twin.loss_scale_policy) is Unregistered
    assert float(twin.loss_scale) == 16.0


def test_a_policy_of_the_user_may_be_called_as_one_of_ours():
    own = type("FixedLossScale", (FixedLossScale,), {})
    config = keras.saving.serialize_keras_object(own(16.0))
    policy = loss_scales.get(config, custom_objects={"FixedLossScale": own})
    assert type(policy) is own


@pytest.mark.one_backend
def test_a_policy_belongs_to_one_optimizer(policy):
    first = keras_lso.LossScaleOptimizer(keras.optimizers.SGD(0.1), loss_scale=policy)
    with pytest.raises(ValueError, match="already belongs to 'loss_scale_optimizer'"):
        keras_lso.LossScaleOptimizer(keras.optimizers.SGD(0.1), loss_scale=policy)
    policy.claim(first)  # its own may claim it again
    copy = type(policy).from_config(policy.get_config())
    second = keras_lso.LossScaleOptimizer(keras.optimizers.SGD(0.1), loss_scale=copy)
    assert second.loss_scale_policy is copy
