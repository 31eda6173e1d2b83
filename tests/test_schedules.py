"""The learning-rate schedules: worked examples, traces, configs and refusals.

The examples are numbers that anybody can check by hand. Comparisons with the Model
Garden, optax and training runs are in `integration_tests/test_schedules.py`, the
rates of OpenSeq2Seq's policies in `test_policies.py`.
"""

import copy
import inspect
import json
import pickle

import keras
import numpy as np
import pytest
from keras import ops

import keras_lso
from keras_lso import schedules
from keras_lso.schedules import (
    CosineDecayPolicy,
    CosineDecayWithOffset,
    DirectPowerDecay,
    ExpDecay,
    ExponentialDecayWithOffset,
    FixedLR,
    InvPolyDecay,
    JoinedSchedules,
    LinearWarmup,
    PiecewiseConstant,
    PiecewiseConstantDecayWithOffset,
    PolyDecay,
    PolynomialDecayWithOffset,
    PolynomialWarmUp,
    PolynomialWarmup,
    PowerAndLinearDecay,
    PowerDecayWithOffset,
    StepCosineDecayWithOffset,
    TransformerPolicy,
    linear_scaling,
    mlperf_bert,
    mlperf_resnet,
)

pytestmark = pytest.mark.in_turn

# A rate is the result of at most ten float32 operations, each of which is off by half
# a unit in the last place, and `pow` and `cos` by a few.
EPSILON = float(np.finfo("float32").eps)
TOLERANCE = {"rtol": 8 * EPSILON, "atol": 8 * EPSILON}

# Every class, every argument off its default.
ALL = {
    "LinearWarmup": lambda: LinearWarmup(0.5, 4, 0.1, name="mine"),
    "PolynomialWarmup": lambda: PolynomialWarmup(0.5, 4, power=2.0, name="mine"),
    "PiecewiseConstantDecayWithOffset": lambda: PiecewiseConstantDecayWithOffset(
        offset=3, boundaries=[2, 5], values=[1.0, 0.5, 0.1], name="mine"
    ),
    "PolynomialDecayWithOffset": lambda: PolynomialDecayWithOffset(
        offset=3,
        initial_learning_rate=1.0,
        decay_steps=4,
        end_learning_rate=0.1,
        power=2.0,
        cycle=True,
        name="mine",
    ),
    "ExponentialDecayWithOffset": lambda: ExponentialDecayWithOffset(
        offset=3,
        initial_learning_rate=1.0,
        decay_steps=2,
        decay_rate=0.5,
        staircase=True,
        name="mine",
    ),
    "CosineDecayWithOffset": lambda: CosineDecayWithOffset(
        offset=3,
        initial_learning_rate=0.2,
        decay_steps=4,
        alpha=0.1,
        warmup_target=1.0,
        warmup_steps=2,
        name="mine",
    ),
    "DirectPowerDecay": lambda: DirectPowerDecay(1.0, power=-0.5, name="mine"),
    "PowerAndLinearDecay": lambda: PowerAndLinearDecay(
        1.0, 8, power=-0.5, linear_decay_fraction=0.5, offset=3, name="mine"
    ),
    "PowerDecayWithOffset": lambda: PowerDecayWithOffset(
        1.0, power=-0.5, offset=3, pre_offset_learning_rate=0.9, name="mine"
    ),
    "StepCosineDecayWithOffset": lambda: StepCosineDecayWithOffset(
        [0, 4, 6], [1.0, 0.5, 0.1], offset=3, name="mine"
    ),
    "JoinedSchedules": lambda: JoinedSchedules(
        [LinearWarmup(0.5, 2), PolynomialWarmup(0.4, 3), 0.1], [3, 6], name="mine"
    ),
    "FixedLR": lambda: FixedLR(0.5, name="mine"),
    "PiecewiseConstant": lambda: PiecewiseConstant(
        1.0, [1, 2.5], [0.5, 0.1], steps_per_epoch=2, name="mine"
    ),
    "ExpDecay": lambda: ExpDecay(
        1.0, 2, 0.5, True, begin_decay_at=3, min_lr=0.1, name="mine"
    ),
    "PolyDecay": lambda: PolyDecay(1.0, 4, 2.0, 5, 0.1, warmup_steps=3, name="mine"),
    "InvPolyDecay": lambda: InvPolyDecay(
        1.0, 4, 0.1, 2.0, 5, warmup_steps=3, name="mine"
    ),
    "CosineDecayPolicy": lambda: CosineDecayPolicy(
        1.0, 4, 2.0, 5, 0.1, warmup_steps=3, name="mine"
    ),
    "TransformerPolicy": lambda: TransformerPolicy(
        2.0, 16, 4, max_lr=0.2, coefficient=0.9, name="mine"
    ),
}
STEPS = range(13)

every_schedule = pytest.mark.parametrize("make", ALL.values(), ids=ALL.keys())


def rates(schedule, steps=STEPS):
    return np.array([ops.convert_to_numpy(schedule(step)) for step in steps])


def assert_rates(schedule, expected):
    """Compares with a dict of steps to rates."""
    np.testing.assert_allclose(
        rates(schedule, expected.keys()), list(expected.values()), **TOLERANCE
    )


@pytest.mark.one_backend
def test_no_public_schedule_is_missing_in_this_file():
    classes = {
        name
        for name, item in vars(schedules).items()
        if inspect.isclass(item)
        and issubclass(item, keras.optimizers.schedules.LearningRateSchedule)
    }
    assert classes == {*ALL, "PolynomialWarmUp"}
    assert classes < set(schedules.__all__)


# Worked examples


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (LinearWarmup(0.5, 4, 0.1), {0: 0.1, 1: 0.2, 3: 0.4, 4: 0.5, 5: 0.5, 99: 0.5}),
        (LinearWarmup(0.0, 2, 0.4), {0: 0.4, 1: 0.2, 2: 0.0, 3: 0.0}),
        (LinearWarmup(0.5, 0), {0: 0.5, 1: 0.5}),
        (LinearWarmup(0.5, 0, 0.1), {-1: 0.1 - 0.4, 0: 0.5}),
        (LinearWarmup(0.5, 1), {0: 0.0, 1: 0.5}),
        (PolynomialWarmup(1.6, 4), {0: 0.4, 1: 0.4, 2: 0.8, 3: 1.2, 4: 1.6, 5: 1.6}),
        (PolynomialWarmup(1.6, 4, power=0.5), {0: 0.8, 1: 0.8, 4: 1.6}),
        (PolynomialWarmup(1.6, 0), {0: 1.6, 1: 1.6}),
        (
            CosineDecayWithOffset(
                offset=3,
                initial_learning_rate=0.2,
                decay_steps=4,
                alpha=0.5,
                warmup_target=1.0,
                warmup_steps=2,
            ),
            {3: 0.2, 4: 0.6, 5: 1.0, 7: 0.75, 9: 0.5, 10: 0.5},
        ),
        (
            CosineDecayWithOffset(
                initial_learning_rate=0.2,
                decay_steps=4,
                warmup_target=1.0,
                warmup_steps=0,
            ),
            {-1: 0.2 - 0.8, 0: 1.0, 2: 0.5, 4: 0.0},
        ),
        (
            PolynomialDecayWithOffset(
                initial_learning_rate=1.0,
                decay_steps=4,
                end_learning_rate=0.0,
                offset=-2,
            ),
            {0: 0.5, 1: 0.25, 2: 0.0, 3: 0.0},
        ),
        (DirectPowerDecay(2.0), {-1: 2.0, 0: 2.0, 1: 2.0, 2: 4.0, 3: 6.0}),
        (
            PowerAndLinearDecay(2.0, 4, power=1.0, linear_decay_fraction=0.5, offset=1),
            {0: 2.0, 1: 2.0, 2: 2.0, 3: 4.0, 4: 3.0, 5: 0.0, 6: 0.0},
        ),
        (
            PowerAndLinearDecay(2.0, 4, power=1.0, linear_decay_fraction=0.0),
            {0: 2.0, 4: 8.0, 5: 10.0},
        ),
        (
            PowerDecayWithOffset(2.0, offset=1, pre_offset_learning_rate=5.0),
            {0: 5.0, 1: 5.0, 2: 2.0, 3: 4.0, 4: 5.0, 5: 5.0},
        ),
        (PowerDecayWithOffset(2.0), {0: 1e6, 1: 2.0}),
        (JoinedSchedules([0.25], []), {0: 0.25, 1: 0.25}),
        (JoinedSchedules([0.5, 0.25], [0]), {-1: 0.5, 0: 0.25}),
    ],
)
def test_rates_are_what_the_formula_says(schedule, expected):
    assert_rates(schedule, expected)


@pytest.mark.in_turn("tensorflow")
def test_a_warmup_ends_where_the_schedule_is_and_does_not_shift_its_clock():
    decay = PolynomialDecayWithOffset(
        initial_learning_rate=1.0, decay_steps=10, end_learning_rate=0.0
    )
    assert_rates(
        LinearWarmup(decay, 4), {0: 0.0, 1: 0.15, 2: 0.3, 4: 0.6, 5: 0.5, 10: 0.0}
    )
    later = PolynomialDecayWithOffset(
        offset=4, initial_learning_rate=1.0, decay_steps=10, end_learning_rate=0.0
    )
    assert_rates(LinearWarmup(later, 4), {1: 0.25, 4: 1.0, 5: 0.9, 9: 0.5, 14: 0.0})


@pytest.mark.in_turn("torch")
def test_a_sequential_member_sees_the_steps_since_its_boundary():
    joined = JoinedSchedules([0.5, LinearWarmup(0.4, 4), DirectPowerDecay(0.1)], [2, 5])
    assert_rates(
        joined,
        {0: 0.5, 1: 0.5, 2: 0.0, 3: 0.1, 4: 0.2, 5: 0.1, 6: 0.1, 7: 0.2, 8: 0.3},
    )


@pytest.mark.in_turn("jax")
def test_a_stepwise_cosine_stays_at_the_last_value():
    schedule = StepCosineDecayWithOffset([0, 4, 6], [1.0, 0.5, 0.1], offset=3)
    assert_rates(schedule, {3: 1.0, 5: 0.75, 7: 0.5, 8: 0.3, 9: 0.1, 10: 0.1, 99: 0.1})
    assert_rates(StepCosineDecayWithOffset([0], [0.5]), {-1: 0.5, 0: 0.5, 1: 0.5})


@pytest.mark.in_turn("jax")
def test_no_tail_ends_in_nan():
    # A power that is infinite in float32, and a tail that is zero in it.
    steep = PowerAndLinearDecay(1.0, 10, power=200.0)
    short = PowerAndLinearDecay(1.0, 10, power=0.0, linear_decay_fraction=1e-300)
    assert_rates(steep, {10: 0.0, 11: 0.0})
    assert_rates(short, {9: 1.0, 10: 0.0, 11: 0.0})


@pytest.mark.in_turn("tensorflow")
def test_a_cycling_decay_has_its_initial_rate_before_the_offset():
    schedule = PolynomialDecayWithOffset(
        offset=5,
        initial_learning_rate=1.0,
        decay_steps=4,
        end_learning_rate=0.0,
        cycle=True,
    )
    # The second cycle is a decay over twice the steps.
    assert_rates(schedule, {0: 1.0, 4: 1.0, 5: 1.0, 7: 0.5, 9: 0.0, 10: 0.375, 13: 0.0})


@pytest.mark.exhaustive
@pytest.mark.parametrize("floatx", ["bfloat16", "float16", "float64"])
@every_schedule
def test_rates_are_float32_whatever_floatx_is(make, floatx):
    steps = [*STEPS, 70_000]
    expected = rates(make(), steps)
    default = keras.config.floatx()
    keras.config.set_floatx(floatx)
    try:
        result = make()(3)
        actual = rates(make(), steps)
    finally:
        keras.config.set_floatx(default)
    assert keras.backend.standardize_dtype(result.dtype) == "float32"
    np.testing.assert_array_equal(actual, expected)


# Steps and traces


@every_schedule
def test_a_step_is_an_integer_of_any_kind(make):
    schedule = make()
    variable = keras.Variable(0, dtype="int", trainable=False)

    def of_variable(step):
        variable.assign(step)
        return schedule(variable)

    expected = rates(schedule)
    assert len(set(expected)) > 1 or isinstance(schedule, FixedLR)
    assert expected.dtype == np.float32
    assert expected.shape == (len(STEPS),)
    for kind in (
        np.int64,
        np.int32,
        lambda step: ops.convert_to_tensor(step, dtype="int32"),
        lambda step: ops.convert_to_tensor(step, dtype="int"),
        lambda step: ops.convert_to_tensor(step, dtype="float32"),
    ):
        np.testing.assert_array_equal(
            rates(lambda step, kind=kind: schedule(kind(step))), expected
        )
    np.testing.assert_array_equal(rates(of_variable), expected)


# Each backend has its own ways to compile.
@pytest.mark.in_turn("tensorflow", "jax", "torch")
@pytest.mark.exhaustive
@every_schedule
def test_one_trace_serves_every_step(make, compiled):
    schedule = make()
    variable = keras.Variable(0, dtype="int32", trainable=False)
    traces = []

    def rate():
        traces.append(1)
        return schedule(variable)

    compiled_rate = compiled(rate, [variable])

    def at(step):
        variable.assign(step)
        return compiled_rate()

    # XLA may fuse a product and a sum, which saves one rounding.
    np.testing.assert_allclose(rates(at), rates(schedule), **TOLERANCE)
    # An eager function runs again at each step, a traced one only while it is traced.
    is_eager = compiled_rate is rate
    assert len(traces) in ([len(STEPS)] if is_eager else [1, 2])


@pytest.mark.skipif(
    keras.backend.backend() != "torch",
    reason="a traced function cannot read a value on TensorFlow and JAX",
)
@pytest.mark.default_backend("torch")
@every_schedule
def test_no_value_is_read_back_from_the_device(make):
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    class NoReads(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if function is torch.ops.aten._local_scalar_dense.default:
                raise AssertionError("a value was read back")
            return function(*args, **(kwargs or {}))

    step = torch.tensor(3)
    with pytest.raises(AssertionError, match="read back"), NoReads():
        bool(step)
    with NoReads():
        make()(step)


@pytest.mark.in_turn("torch")
def test_a_large_step_is_subtracted_before_it_is_rounded():
    # 2**25 + 1 is not a float32.
    schedule = PiecewiseConstantDecayWithOffset(
        offset=2**25, boundaries=[0], values=[1.0, 0.5]
    )
    assert_rates(schedule, {2**25: 1.0, 2**25 + 1: 0.5})
    joined = JoinedSchedules([1.0, LinearWarmup(1.0, 2)], [2**25])
    assert_rates(joined, {2**25 - 1: 1.0, 2**25: 0.0, 2**25 + 1: 0.5})


# Configs


def nested_twice():
    inner = PolynomialDecayWithOffset(
        offset=6, initial_learning_rate=1.0, decay_steps=4, name="inner"
    )
    keras_own = keras.optimizers.schedules.InverseTimeDecay(0.5, 2, 0.5)
    return JoinedSchedules(
        [LinearWarmup(inner, 3, name="outer"), PolynomialWarmup(keras_own, 2), 0.25],
        [5, 9],
    )


ALL_AND_NESTED = {**ALL, "nested": nested_twice}
every_schedule_and_nested = pytest.mark.parametrize(
    "make", ALL_AND_NESTED.values(), ids=ALL_AND_NESTED.keys()
)


def through_from_config(schedule):
    return type(schedule).from_config(schedule.get_config())


def through_json(schedule):
    config = keras.optimizers.schedules.serialize(schedule)
    return keras.optimizers.schedules.deserialize(json.loads(json.dumps(config)))


def through_saving(schedule):
    return keras.saving.deserialize_keras_object(
        keras.saving.serialize_keras_object(schedule)
    )


def through_sgd(schedule):
    config = json.loads(json.dumps(keras.optimizers.SGD(schedule).get_config()))
    return keras.optimizers.SGD.from_config(config)._learning_rate


def through_pickle(schedule):
    return pickle.loads(pickle.dumps(schedule))


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "through",
    [
        through_from_config,
        through_json,
        through_saving,
        through_sgd,
        through_pickle,
        copy.deepcopy,
    ],
)
@every_schedule_and_nested
def test_a_copy_is_the_same_schedule(make, through):
    schedule = make()
    before = json.dumps(schedule.get_config())
    restored = through(schedule)
    assert type(restored) is type(schedule)
    assert restored is not schedule
    assert json.dumps(restored.get_config()) == before
    assert json.dumps(schedule.get_config()) == before
    np.testing.assert_array_equal(rates(restored), rates(schedule))


@pytest.mark.one_backend
def test_a_nested_copy_keeps_offsets_and_names():
    restored = through_json(nested_twice())
    assert restored.schedules[0].name == "outer"
    assert restored.schedules[0].schedule_or_rate.name == "inner"
    assert restored.schedules[0].schedule_or_rate.offset == 6
    assert isinstance(
        restored.schedules[1].schedule_or_rate,
        keras.optimizers.schedules.InverseTimeDecay,
    )


@pytest.mark.in_turn("torch")
def test_a_nested_schedule_of_the_user_is_found_in_custom_objects():
    class Half(keras.optimizers.schedules.LearningRateSchedule):
        def __call__(self, step):
            return 0.5

        def get_config(self):
            return {}

    config = keras.optimizers.schedules.serialize(LinearWarmup(Half(), 2))
    restored = keras.optimizers.schedules.deserialize(config, {"Half": Half})
    assert isinstance(restored.schedule_or_rate, Half)
    assert_rates(restored, {0: 0.0, 1: 0.25, 2: 0.5})


@pytest.mark.one_backend
@every_schedule
def test_each_argument_is_an_attribute_and_in_the_config(make):
    schedule = make()
    arguments = inspect.signature(type(schedule)).parameters
    config = schedule.get_config()
    assert set(config) == set(arguments)
    assert config["name"] == "mine"
    for name, argument in arguments.items():
        assert hasattr(schedule, name)
        # The list above would not show that a copy loses an argument otherwise. All
        # there return float32: for a `dtype` see `test_policies.py`.
        assert getattr(schedule, name) != argument.default or name == "dtype"


@pytest.mark.one_backend
def test_attributes_are_plain_python_values():
    schedule = PiecewiseConstantDecayWithOffset(
        offset=np.int32(1), boundaries=np.array([2, 5]), values=(np.float32(1), 0.5, 0)
    )
    assert schedule.get_config() == {
        "offset": 1,
        "boundaries": [2, 5],
        "values": [1.0, 0.5, 0.0],
        "name": "PiecewiseConstantDecayWithOffset",
    }
    assert all(type(boundary) is int for boundary in schedule.boundaries)
    assert all(type(value) is float for value in schedule.values)


@pytest.mark.one_backend
def test_the_decays_with_an_offset_are_those_of_keras():
    for name in ("PiecewiseConstant", "Polynomial", "Exponential", "Cosine"):
        base = getattr(keras.optimizers.schedules, f"{name}Decay")
        assert isinstance(ALL[f"{name}DecayWithOffset"](), base)


# What the Model Garden wrote


@pytest.mark.one_backend
def test_the_model_gardens_names_for_arguments_work():
    assert PolynomialWarmUp is PolynomialWarmup
    warmup = LinearWarmup(
        after_warmup_lr_sched=0.5, warmup_steps=4, warmup_learning_rate=0.1
    )
    assert warmup.get_config() == LinearWarmup(0.5, 4, 0.1).get_config()
    warmup = PolynomialWarmUp(after_warmup_lr_sched=0.5, warmup_steps=4, power=2.0)
    assert warmup.get_config() == PolynomialWarmup(0.5, 4, 2.0).get_config()


@pytest.mark.one_backend
@pytest.mark.parametrize(
    "arguments",
    [
        {"schedule_or_rate": 0.5, "after_warmup_lr_sched": 0.5},
        {
            "schedule_or_rate": 0.5,
            "initial_learning_rate": 0.1,
            "warmup_learning_rate": 0.1,
        },
    ],
)
def test_an_argument_under_both_names_is_refused(arguments):
    with pytest.raises(TypeError, match="Model Garden's name for"):
        LinearWarmup(warmup_steps=4, **arguments)


@pytest.mark.one_backend
def test_an_argument_by_position_and_under_its_old_name_is_refused():
    with pytest.raises(TypeError, match="multiple values"):
        LinearWarmup(0.5, 4, after_warmup_lr_sched=0.5)
    with pytest.raises(TypeError, match="unexpected keyword"):
        PolynomialWarmup(0.5, 4, warmup_learning_rate=0.1)


@pytest.mark.one_backend
def test_an_old_config_of_a_constant_rate_loads():
    old = {
        "after_warmup_lr_sched": 0.5,
        "warmup_steps": 4,
        "warmup_learning_rate": 0.1,
        "name": None,
    }
    assert (
        LinearWarmup.from_config(old).get_config()
        == LinearWarmup(0.5, 4, 0.1).get_config()
    )
    assert old["after_warmup_lr_sched"] == 0.5


@pytest.mark.parametrize("cls", [LinearWarmup, PolynomialWarmup])
def test_an_old_config_that_lost_the_class_of_its_schedule_is_refused(cls):
    decay = keras.optimizers.schedules.PolynomialDecay(1.0, 10)
    old = {"after_warmup_lr_sched": decay.get_config(), "warmup_steps": 4}
    with pytest.raises(ValueError, match=r"schedules\.serialize\(schedule\)"):
        cls.from_config(old)
    old["after_warmup_lr_sched"] = {
        "class_name": "PolynomialDecay",
        "config": decay.get_config(),
    }
    assert_rates(cls.from_config(old), {4: float(decay(4)), 5: float(decay(5))})


@pytest.mark.one_backend
@every_schedule
def test_a_name_of_none_is_the_default_one(make):
    schedule = make()
    config = {**schedule.get_config(), "name": None}
    assert type(schedule).from_config(config).name == type(schedule).__name__


# Recipes


@pytest.mark.one_backend
def test_linear_scaling_is_proportional_to_the_batch_size():
    assert linear_scaling(0.1, 256) == 0.1
    assert linear_scaling(0.1, 8192) == 3.2
    assert linear_scaling(0.5, 64, base_batch_size=128) == 0.25
    assert type(linear_scaling(np.float32(1), np.int64(512))) is float


def mlperf_rate(step, base, warmup_steps, decay_steps):
    """The rate of MLPerf's reference implementation, in float64."""
    if step <= warmup_steps:
        return base * step / warmup_steps
    left = 1 - min(step - warmup_steps, decay_steps) / decay_steps
    return (base - 1e-4) * left**2 + 1e-4


@pytest.mark.parametrize(
    ("batch_size", "steps_per_epoch", "base", "warmup_steps", "decay_steps"),
    [
        # At ImageNet's own number of steps the decay is the published one.
        (4096, 1281167 / 4096, 10.0, 1564, 13137),
        (8192, 1281167 / 8192, 17.0, 782, 6095),
        (32768, 1281167 / 32768, 21.2, 626, 2267),
        # Data of a tenth of the size: a tenth of the steps, as many epochs.
        (4096, 128116.7 / 4096, 10.0, 156, 1314),
        # 6095 * 157 / 156.39
        (8192, 157, 17.0, 785, 6119),
        (32768, 40, 21.2, 640, 2319),
    ],
)
def test_the_mlperf_schedule_is_that_of_the_reference(
    batch_size, steps_per_epoch, base, warmup_steps, decay_steps
):
    schedule = mlperf_resnet(batch_size, steps_per_epoch).learning_rate
    end = warmup_steps + decay_steps
    steps = [0, 1, 2, warmup_steps - 1, warmup_steps, warmup_steps + 1]
    steps += [end - 1, end, end + 1, *range(0, end + 500, 211)]
    expected = [mlperf_rate(s, base, warmup_steps, decay_steps) for s in steps]
    # Near its end the rate is a small difference of two numbers as large as `base`.
    np.testing.assert_allclose(
        rates(schedule, steps), expected, rtol=8 * EPSILON, atol=EPSILON * 1e-2 * base
    )
    assert rates(schedule, [0]) == 0.0
    assert schedule.warmup_steps == warmup_steps
    assert schedule.schedule_or_rate.decay_steps == decay_steps
    restored = through_json(schedule)
    np.testing.assert_array_equal(rates(restored, steps), rates(schedule, steps))


@pytest.mark.one_backend
@pytest.mark.parametrize(
    ("batch_size", "momentum", "weight_decay_rate"),
    [(4096, 0.9, 2e-4), (8192, 0.9, 2e-4), (32768, 0.94, 2.5e-5)],
)
def test_the_mlperf_settings_are_the_published_ones(
    batch_size, momentum, weight_decay_rate
):
    schedule, settings = mlperf_resnet(batch_size, 100)
    assert isinstance(schedule, keras.optimizers.schedules.LearningRateSchedule)
    assert settings == {
        "momentum": momentum,
        "weight_decay_rate": weight_decay_rate,
        "eeta": 0.001,
        "trust_ratio": "paper",
        "epsilon": 0.0,
        "exclude_1d": True,
    }
    # A caller may change his own dict.
    settings["momentum"] = 0.0
    assert mlperf_resnet(batch_size, 100).lars["momentum"] == momentum


# Base rate, steps, warm-up, its start: rcps_bert.json of MLPerf training 5.1.
MLPERF_BERT = {
    256: (0.00035, 13700, 0, 0),
    448: (0.000425, 6700, 0, 0),
    1536: (0.002, 2254, 0, 0),
    3072: (0.002, 1141, 100, 0),
    4096: (0.0024, 855, 0, 0),
    4608: (0.0035, 700, 0, 0),
    6144: (0.0029293, 700, 0, -700),
    6912: (0.0029293, 700, 0, -700),
    8192: (0.00288293, 600, 287, -76),
    8704: (0.002971656225, 600, 287, -76),
    12288: (0.0031, 500, 300, -100),
    13056: (0.00319540686, 500, 300, -100),
    16384: (0.0033, 600, 290, -100),
}


def mlperf_bert_rate(step, base, steps, warmup, start):
    """The rate of `create_optimizer` in MLPerf's reference, in float64."""
    rate = base * (1 - min(step, steps) / steps)
    if warmup and step - start < warmup:
        rate = base * (step - start) / warmup
    return rate


@pytest.mark.parametrize("batch_size", MLPERF_BERT)
def test_the_schedule_of_mlperfs_bert_is_that_of_the_reference(batch_size):
    point = MLPERF_BERT[batch_size]
    schedule = mlperf_bert(batch_size).learning_rate
    end = max(0, sum(point[2:]))
    steps = [0, 1, 2, end - 1, end, end + 1, *range(0, point[1] + 100, 61)]
    steps = [step for step in steps if step >= 0]
    expected = [mlperf_bert_rate(step, *point) for step in steps]
    np.testing.assert_allclose(
        rates(schedule, steps), expected, rtol=8 * EPSILON, atol=4 * EPSILON * point[0]
    )
    restored = through_json(schedule)
    np.testing.assert_array_equal(rates(restored, steps), rates(schedule, steps))


@pytest.mark.one_backend
def test_the_settings_of_mlperfs_bert_are_the_published_ones():
    schedule, settings = mlperf_bert(6912)
    assert settings == {
        "beta_1": 0.7206,
        "beta_2": 0.78921,
        "epsilon": 1e-6,
        "weight_decay_rate": 0.001,
        "exclude_from_weight_decay": ["(?i)layer_?norm", "bias"],
        "exclude_1d": True,
        "global_clipnorm": 1.0,
    }
    # A caller may change his own dict.
    settings["beta_1"] = 0.0
    assert mlperf_bert(6912).lamb["beta_1"] == 0.7206
    optimizer = keras_lso.LAMB(schedule, **mlperf_bert(6912).lamb)
    config = optimizer.get_config()
    assert {key: config[key] for key in mlperf_bert(6912).lamb} == mlperf_bert(
        6912
    ).lamb


@pytest.mark.in_turn("tensorflow")
def test_a_recipe_for_hardly_any_steps_is_finite():
    schedule = mlperf_resnet(4096, 1e-6).learning_rate
    assert_rates(schedule, {0: 10.0, 1: 1e-4})


# Refusals


@pytest.mark.one_backend
@pytest.mark.parametrize(
    ("argument", "make"),
    [
        ("schedule_or_rate", lambda x: LinearWarmup(x, 4)),
        ("schedule_or_rate", lambda x: PolynomialWarmup(x, 4)),
        ("initial_learning_rate", lambda x: LinearWarmup(0.5, 4, x)),
        (
            r"values\[1\]",
            lambda x: PiecewiseConstantDecayWithOffset(boundaries=[2], values=[1.0, x]),
        ),
        (
            "initial_learning_rate",
            lambda x: PolynomialDecayWithOffset(initial_learning_rate=x, decay_steps=4),
        ),
        (
            "end_learning_rate",
            lambda x: PolynomialDecayWithOffset(
                initial_learning_rate=1.0, decay_steps=4, end_learning_rate=x
            ),
        ),
        (
            "power",
            lambda x: PolynomialDecayWithOffset(
                initial_learning_rate=1.0, decay_steps=4, power=x
            ),
        ),
        (
            "initial_learning_rate",
            lambda x: ExponentialDecayWithOffset(
                initial_learning_rate=x, decay_steps=4, decay_rate=0.5
            ),
        ),
        (
            "initial_learning_rate",
            lambda x: CosineDecayWithOffset(initial_learning_rate=x, decay_steps=4),
        ),
        (
            "alpha",
            lambda x: CosineDecayWithOffset(
                initial_learning_rate=1.0, decay_steps=4, alpha=x
            ),
        ),
        (
            "warmup_target",
            lambda x: CosineDecayWithOffset(
                initial_learning_rate=1.0, decay_steps=4, warmup_target=x
            ),
        ),
        ("initial_learning_rate", lambda x: DirectPowerDecay(x)),
        ("initial_learning_rate", lambda x: PowerAndLinearDecay(x, 8)),
        ("initial_learning_rate", lambda x: PowerDecayWithOffset(x)),
        (
            "pre_offset_learning_rate",
            lambda x: PowerDecayWithOffset(1.0, pre_offset_learning_rate=x),
        ),
        (r"values\[0\]", lambda x: StepCosineDecayWithOffset([0], [x])),
        (r"schedules\[1\]", lambda x: JoinedSchedules([0.5, x], [4])),
        ("base_learning_rate", lambda x: linear_scaling(x, 256)),
        ("learning_rate", lambda x: FixedLR(x)),
        ("learning_rate", lambda x: PiecewiseConstant(x, [4], [0.5])),
        (r"decay_rates\[1\]", lambda x: PiecewiseConstant(1.0, [4, 8], [0.5, x])),
        (r"boundaries\[0\]", lambda x: PiecewiseConstant(1.0, [x], [0.5], 10)),
        ("learning_rate", lambda x: ExpDecay(x, 4, 0.5, False)),
        ("min_lr", lambda x: PolyDecay(1.0, 4, min_lr=x)),
        ("learning_rate", lambda x: TransformerPolicy(x, 16, 4)),
        ("coefficient", lambda x: TransformerPolicy(1.0, 16, 4, coefficient=x)),
        ("max_lr", lambda x: TransformerPolicy(1.0, 16, 4, max_lr=x)),
    ],
)
def test_a_rate_that_is_none_is_refused(argument, make):
    words = f"Argument `{argument}` must be"
    for value in (-0.1, float("nan"), float("inf"), 1e39, 10**400):
        with pytest.raises(ValueError, match=words):
            make(value)
    for value in (True, "0.1", [0.1]):
        with pytest.raises(TypeError, match=words):
            make(value)


@pytest.mark.one_backend
@pytest.mark.parametrize(
    "make",
    [
        lambda power: PolynomialWarmup(0.5, 4, power=power),
        lambda power: DirectPowerDecay(0.5, power=power),
        lambda power: PowerAndLinearDecay(0.5, 4, power=power),
        lambda power: PowerDecayWithOffset(0.5, power=power),
    ],
)
def test_a_power_may_be_negative_but_must_be_finite(make):
    assert make(-0.5).power == -0.5
    for power in (float("nan"), float("-inf")):
        with pytest.raises(ValueError, match="Argument `power` must be finite"):
            make(power)
    with pytest.raises(TypeError, match="Argument `power` must be a number"):
        make(None)


a_number_of_steps = pytest.mark.parametrize(
    ("argument", "make", "refused"),
    [
        ("warmup_steps", lambda x: LinearWarmup(0.5, x), [-1]),
        ("warmup_steps", lambda x: PolynomialWarmup(0.5, x), [-1]),
        (
            "warmup_steps",
            lambda x: CosineDecayWithOffset(
                initial_learning_rate=1.0, decay_steps=4, warmup_steps=x
            ),
            [-1],
        ),
        (
            "decay_steps",
            lambda x: PolynomialDecayWithOffset(
                initial_learning_rate=1.0, decay_steps=x
            ),
            [-1, 0],
        ),
        (
            "decay_steps",
            lambda x: ExponentialDecayWithOffset(
                initial_learning_rate=1.0, decay_steps=x, decay_rate=0.5
            ),
            [-1, 0],
        ),
        (
            "decay_steps",
            lambda x: CosineDecayWithOffset(initial_learning_rate=1.0, decay_steps=x),
            [-1, 0],
        ),
        ("total_decay_steps", lambda x: PowerAndLinearDecay(1.0, x), [-1, 0]),
        ("batch_size", lambda x: linear_scaling(0.1, x), [-1, 0]),
        ("base_batch_size", lambda x: linear_scaling(0.1, 256, x), [-1, 0]),
        ("batch_size", lambda x: mlperf_resnet(x, 157), [-1, 0]),
        ("offset", lambda x: PowerDecayWithOffset(1.0, offset=x), []),
        ("offset", lambda x: PowerAndLinearDecay(1.0, 8, offset=x), []),
        ("offset", lambda x: StepCosineDecayWithOffset([0], [1.0], offset=x), []),
        (
            "offset",
            lambda x: PolynomialDecayWithOffset(
                offset=x, initial_learning_rate=1.0, decay_steps=4
            ),
            [],
        ),
        (r"boundaries\[0\]", lambda x: JoinedSchedules([0.5, 0.1], [x]), [-1]),
        (r"boundaries\[0\]", lambda x: PiecewiseConstant(1.0, [x], [0.5]), [-1]),
        ("decay_steps", lambda x: ExpDecay(1.0, x, 0.5, False), [-1, 0]),
        ("decay_steps", lambda x: PolyDecay(1.0, x), [-1, 0]),
        ("decay_steps", lambda x: InvPolyDecay(1.0, x, 0.1), [-1, 0]),
        ("decay_steps", lambda x: CosineDecayPolicy(1.0, x), [-1, 0]),
        (
            "begin_decay_at",
            lambda x: ExpDecay(1.0, 4, 0.5, False, begin_decay_at=x),
            [-1],
        ),
        ("begin_decay_at", lambda x: CosineDecayPolicy(1.0, 4, begin_decay_at=x), [-1]),
        ("warmup_steps", lambda x: PolyDecay(1.0, 4, warmup_steps=x), [-1]),
        ("warmup_steps", lambda x: InvPolyDecay(1.0, 4, 0.1, warmup_steps=x), [-1]),
        ("warmup_steps", lambda x: TransformerPolicy(1.0, 16, x), [-1, 0]),
        ("d_model", lambda x: TransformerPolicy(1.0, x, 4), [-1, 0]),
    ],
)


@pytest.mark.one_backend
@a_number_of_steps
def test_a_number_of_steps_that_is_none_is_refused(argument, make, refused):
    for value in [*refused, 1.5, True, "4", None, float("nan"), float("inf")]:
        with pytest.raises(ValueError, match=f"Argument `{argument}` must be a"):
            make(value)


@pytest.mark.one_backend
@a_number_of_steps
def test_a_number_of_steps_may_be_a_whole_float(argument, make, refused):
    # The originals make a float of it anyway. 4096 is also a batch size of MLPerf's.
    expected = described(make(4096))
    for value in (4096.0, np.float32(4096)):
        assert repr(described(make(value))) == repr(expected)


def described(result):
    """The config of a schedule; the rate that comes in its place, or with it."""
    if isinstance(result, tuple):
        return [described(each) for each in result]
    return getattr(result, "get_config", lambda: result)()


@pytest.mark.one_backend
@pytest.mark.parametrize(
    "make",
    [
        lambda x: PiecewiseConstantDecayWithOffset(
            boundaries=x, values=[1.0, 0.5, 0.1]
        ),
        lambda x: StepCosineDecayWithOffset(x, [1.0, 0.5]),
        lambda x: JoinedSchedules([1.0, 0.5, 0.1], x),
        lambda x: PiecewiseConstant(1.0, x, [0.5, 0.1]),
        lambda x: PiecewiseConstant(1.0, x, [0.5, 0.1], steps_per_epoch=3),
    ],
)
def test_boundaries_that_are_none_are_refused(make):
    assert make([2, 4]).boundaries == [2, 4]
    for boundaries in ([4, 2], [2, 2]):
        with pytest.raises(ValueError, match="must be strictly increasing"):
            make(boundaries)
    for boundaries in ([], [2], [2, 4, 6]):
        with pytest.raises(ValueError, match="`boundaries` must have 2 entries"):
            make(boundaries)
    for boundaries in ("24", 2, None, {2, 4}):
        with pytest.raises(TypeError, match="`boundaries` must be a list"):
            make(boundaries)


@pytest.mark.one_backend
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: JoinedSchedules([], []), "`schedules` must have at least 1 entry"),
        (lambda: StepCosineDecayWithOffset([], []), "`values` must have at least 1"),
        (
            lambda: PiecewiseConstantDecayWithOffset(boundaries=[], values=[1.0]),
            "`values` must have at least 2 entries",
        ),
        *[
            (
                lambda x=x: PowerAndLinearDecay(1.0, 8, linear_decay_fraction=x),
                "`linear_decay_fraction` must be a number between 0 and 1",
            )
            for x in (-0.1, 1.5, float("nan"), True, "0.1")
        ],
        (lambda: mlperf_resnet(1024, 157), "4096, 8192, 32768.*linear_scaling"),
        (lambda: mlperf_bert(1024), "256, 448, .*16384.*arXiv:1904.00962"),
        (lambda: mlperf_resnet(4096, 0), "`steps_per_epoch` must be"),
        (lambda: mlperf_resnet(4096, float("nan")), "`steps_per_epoch` must be"),
        (lambda: mlperf_resnet(4096, "157"), "`steps_per_epoch` must be"),
        (
            lambda: ExponentialDecayWithOffset(
                initial_learning_rate=1.0, decay_steps=4, decay_rate=0.0
            ),
            "`decay_rate` must be a finite number above 0",
        ),
        *[
            (
                lambda x=x: ExpDecay(1.0, 4, x, False),
                "`decay_rate` must be a finite number above 0",
            )
            for x in (0.0, -0.5, float("nan"), "0.5")
        ],
        *[
            (
                lambda cls=cls, rest=rest, x=x: cls(1.0, 4, power=x, **rest),
                "`power` must be (a finite number above 0|finite)",
            )
            for cls, rest in (
                (PolyDecay, {}),
                (CosineDecayPolicy, {}),
                (InvPolyDecay, {"min_lr": 0.1}),
            )
            for x in (0.0, -1.0, float("nan"), float("inf"))
        ],
        (
            lambda: PolyDecay(1.0, 4, begin_decay_at=2**31),
            "`begin_decay_at` must be an integer of at most 2147483647",
        ),
        (
            lambda: PiecewiseConstant(1.0, [], []),
            "`decay_rates` must have at least 1 entry",
        ),
        (
            lambda: PiecewiseConstant(1.0, [30, 20], [0.5, 0.1], 10),
            r"increasing.*\[300, 200\], in steps of boundaries=\[30, 20\] epochs",
        ),
        (
            lambda: PiecewiseConstant(1.0, [1], [0.5], steps_per_epoch=2.5),
            "`steps_per_epoch` must be a positive integer",
        ),
        (
            lambda: PiecewiseConstant(1e20, [1], [1e20]),
            r"`learning_rate \* decay_rates\[0\]` must be finite",
        ),
    ],
)
def test_an_argument_out_of_range_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.one_backend
@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (lambda step: 0.1, "subclass of `LearningRateSchedule`"),
        (keras.optimizers.schedules.CosineDecay, "Give an instance, not the class"),
        ({"class_name": "CosineDecay"}, "from_config"),
        (None, "or a number"),
    ],
)
def test_a_schedule_that_is_none_is_refused(schedule, message):
    for make in (
        lambda: LinearWarmup(schedule, 4),
        lambda: PolynomialWarmup(schedule, 4),
        lambda: JoinedSchedules([schedule], []),
    ):
        with pytest.raises(TypeError, match=message):
            make()


@pytest.mark.one_backend
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LinearWarmup(0.5, 4, name=4), "`name` must be a string"),
        (
            lambda: PolynomialDecayWithOffset(
                initial_learning_rate=1.0, decay_steps=4, cycle=1
            ),
            "`cycle` must be True or False",
        ),
        (
            lambda: ExponentialDecayWithOffset(
                initial_learning_rate=1.0,
                decay_steps=4,
                decay_rate=0.5,
                staircase="no",
            ),
            "`staircase` must be True or False",
        ),
        (
            lambda: StepCosineDecayWithOffset([0], 0.5),
            "`values` must be a list",
        ),
        (lambda: JoinedSchedules(0.5, []), "`schedules` must be a list"),
    ],
)
def test_an_argument_of_the_wrong_type_is_refused(make, message):
    with pytest.raises(TypeError, match=message):
        make()
