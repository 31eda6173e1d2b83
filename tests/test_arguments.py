"""Each argument of a public constructor refuses what it cannot be, by its name.

The types of the arguments say what they refuse. A new class or argument is tested
without an entry here, unless its type has a new check, which `REFUSED` must have.
"""

import inspect
from functools import partial
from typing import Annotated, get_args, get_origin

import keras
import numpy as np
import pytest

import keras_lso
from keras_lso import (
    LAMB,
    LARC,
    LARS,
    GuardedOptimizer,
    LossScaleOptimizer,
    callbacks,
    loss_scales,
    schedules,
)
from keras_lso._backend.tensors import shown
from keras_lso._core import fields
from keras_lso.compat import model_garden, open_seq2seq
from keras_lso.compat.v1 import mixed_precision as v1
from keras_lso.loss_scales import DynamicLossScale, FixedLossScale
from keras_lso.loss_scales.searching import SearchingLossScale
from keras_lso.mixed_precision import experimental
from keras_lso.schedules import linear_scaling, mlperf_bert, mlperf_resnet
from testing.refusals import refused, sgd
from testing.schedules import ALL as SCHEDULES

# Some casts of NumPy's numbers warn.
pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning")


class Stricter(keras_lso.SpikeGuard):
    """A guard with a rule of its own, which no step would call."""


PUBLIC = [keras_lso, callbacks, loss_scales, schedules, model_garden, open_seq2seq]
PUBLIC += [v1, experimental]
# Once each, although some have several paths. `initial_scale="auto"` makes the last.
CLASSES = [
    *dict.fromkeys(
        cls
        for module in PUBLIC
        for cls in map(vars(module).get, module.__all__)
        if inspect.isclass(cls)
    ),
    SearchingLossScale,
]
every_class = pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__qualname__)
# Values of the arguments without a default.
REQUIRED = {
    "inner_optimizer": sgd,
    "optimizer": sgd,
    "opt": sgd,
    "loss_scale": lambda: DynamicLossScale(8.0),
    "loss_scale_value": lambda: 8.0,
    "initial_loss_scale": lambda: 8.0,
}

# What every argument refuses.
ODD = [np.array([1.0, 2.0]), np.array(["a", "b"]), [1, 2], {"a": 1}, object()]
NOT_NUMBERS = [*ODD, np.array(1.5), None, "0.5", True, np.True_, 1j]
NOT_FINITE = [np.nan, np.inf, -np.inf, 1e39, 10**400]
NOT_FINITE += [np.float16("nan"), np.longdouble("1e400")]
NOT_WHOLE = [*ODD, np.array(1.5), None, "4", True, np.True_, 1.5, np.nan, np.inf]
NOT_WHOLE += [np.float32(2.5)]


def of_real(at_least=-np.inf):
    yield TypeError, "be a number", NOT_NUMBERS
    yield ValueError, "be finite in float32", NOT_FINITE
    if at_least > -np.inf:
        yield ValueError, f"be {at_least} or more", [at_least - 0.1, at_least - 1e-30]


def of_int(at_least=-np.inf, at_most=np.inf):
    limit = f" of at least {at_least}" if at_least > -np.inf else ""
    yield ValueError, f"be an integer{limit}", NOT_WHOLE
    if limit:
        below = [at_least - 1, at_least - 1.0, at_least - 7]
        yield ValueError, f"be an integer{limit}", below
    if at_most < np.inf:
        yield ValueError, f"be an integer of at most {at_most}", [at_most + 1, 10**400]


def of_factor(above, below=np.inf):
    limits = [above, above - 1.5, above + 1e-50]
    limits += [below, below + 1.5, below - 1e-9] if below < np.inf else []
    span = f"above {above}" + (f" and below {below}" if below < np.inf else "")
    values = [*NOT_NUMBERS, *NOT_FINITE, *limits]
    yield ValueError, f"be a finite number {span} in float32", values


def of_choice(choices):
    known = ", ".join(map(repr, choices))
    values = [*ODD, None, "no such", "", str(choices[0]).upper(), 7, ["auto"]]
    yield ValueError, f"be one of {known}", values


COUNT, RATE = [*of_int(at_least=1)], [*of_real(at_least=0)]
SCALE = (
    "be positive and finite in float32, and so must be its inverse: a number between "
    "2.0**-126 and 2.0**126, such as 2.0**15"
)
SCHEDULE = "be a `keras.optimizers.schedules.LearningRateSchedule` or a number"
FUNCTION = (
    "be a number, an instance of a `keras.optimizers.schedules.LearningRateSchedule` "
    "or your own function without arguments"
)
MASTERS = (
    "be one of 'auto', True, False, 'float32', 'remainder', 'remainder8', "
    "'stochastic'. R"
)
# By the name of a check: its errors, their words after "must", and the values that
# lead to them.
REFUSED = {
    "real": of_real,
    "int": of_int,
    "factor": of_factor,
    "choice": of_choice,
    "share": [
        (
            ValueError,
            "be a number between 0 and 1",
            [*NOT_NUMBERS, *NOT_FINITE, -0.1, 1.1],
        )
    ],
    # In float32 the last is 1 as well, and the bias correction a division by 0.
    "beta": [*RATE, (ValueError, "be below 1 in float32", [1.0, 2, 1 - 1e-8])],
    "power": [*of_real(), (ValueError, "be a finite number above 0", [0.0, -0.5])],
    "scale": [
        (TypeError, SCALE, NOT_NUMBERS),
        (ValueError, SCALE, [*NOT_FINITE, 0, -8.0, 1e-50, 2.0**-127, 2.0**127]),
    ],
    "bool": [
        (TypeError, "be True or False", [*ODD, None, 0, 1, 0.5, "True", np.int64(1)])
    ],
    "name": [(TypeError, "be a string", [*ODD, 4, True])],
    "path": [(TypeError, "be a path", [*ODD, 4, True])],
    "float_dtype": [
        (
            ValueError,
            "be a dtype of floats such as 'float32'",
            [None, "int32", 3, "no such", *ODD[2:]],
        )
    ],
    "list": [(TypeError, "be a list", ["24", 2, None, {2, 4}, {"a": 1}, np.array(2)])],
    "patterns": [
        (
            TypeError,
            "be a list of regular expressions, such as ['bias', 'gamma']",
            ["bias", 3, {"bias"}, {"bias": 1}, b"bias", *ODD[:2]],
        ),
        (
            TypeError,
            "hold strings",
            [["bn", item] for item in (3, None, b"bias", ["bias"])],
        ),
        (ValueError, "hold regular expressions. 'bn[' is not", [["bias", "bn["]]),
    ],
    "schedule_or_rate": [
        *RATE[1:],
        (TypeError, SCHEDULE, NOT_NUMBERS),
        (TypeError, f"{SCHEDULE}. Write a function of the step", [lambda step: 0.1]),
        (TypeError, f"{SCHEDULE}. Give an instance, not the class", [schedules.Scaled]),
        (TypeError, f"{SCHEDULE}. Make a schedule from its config", [{"a": 1}]),
    ],
    # A config can name any function of Keras, and each step would call it.
    "learning_rate": [
        *RATE,
        (
            TypeError,
            FUNCTION,
            [keras.ops.shape, keras.config.floatx, FixedLossScale(8)],
        ),
    ],
}
ANY = [((TypeError, ValueError), "", [*ODD, "no such"])]
# The arguments whose types hold no check.
UNDECLARED = {
    **dict.fromkeys(("dynamic", "swap_on_epoch", "use_locking"), REFUSED["bool"]),
    **dict.fromkeys(("initial_scale", "min_scale", "max_scale"), REFUSED["scale"]),
    **dict.fromkeys(("log_dir", "path", "save_bad_batch"), REFUSED["path"]),
    **dict.fromkeys(("patience", "keep_every", "keep", "every"), COUNT),
    "dynamic_growth_steps": COUNT,
    "retries": [*of_int(at_least=0)],
    "learning_rate_factor": [*of_factor(above=0.0)],
    "on_stall": [*of_choice(("warn", "stop", "raise", "restore"))],
    "master_weights": [(ValueError, MASTERS, [*ODD, None, 0, 1, "yes", ["auto"]])],
    "spike_guard": [
        (
            TypeError,
            "be a `keras_lso.SpikeGuard` itself, such as `keras_lso.SpikeGuard(",
            [*ODD[:3], ODD[4], 6.0, keras_lso.SpikeGuard, Stricter()],
        )
    ],
    "slot_dtype": [
        (
            ValueError,
            "be one of None, 'bfloat16', 'int8'",
            [*ODD, "float16", "uint8", True, 8],
        )
    ],
    "shard_state": REFUSED["bool"],
    "name": [((TypeError, ValueError), "", ODD)],  # Keras's own check.
}


def name_of(check):
    """Returns the name of a check of `checks` or `fields`, limits excluded."""
    return getattr(check, "func", check).__name__.lstrip("_").removeprefix("check_")


def refusals_of(check, argument, value):
    """Yields the values that an argument refuses, their errors and words of these."""
    if name_of(check) == "optional":
        refusals = refusals_of(check.args[0], argument, value)
        yield from (r for r in refusals if r[0] is not None)
    elif name_of(check) == "items":
        yield from refusals_by(REFUSED["list"], argument)
        *first, _ = value
        of_item = refusals_of(check.args[0], f"{argument}[{len(first)}]", None)
        yield from (([*first, item], *others) for item, *others in of_item)
    else:
        groups, limits = REFUSED[name_of(check)], getattr(check, "keywords", {})
        yield from refusals_by(
            groups(**limits) if callable(groups) else groups, argument
        )


def refusals_by(groups, argument):
    """Yields the same, given the errors of a check as in `REFUSED`."""
    for error, requirement, values in groups:
        for value in values:
            words = [f"`{argument}` must {requirement}", f"{argument}={shown(value)}"]
            yield value, error, words if requirement else [argument]


def arguments_of(cls):
    """Returns valid arguments of a class."""
    if cls.__qualname__ in SCHEDULES:
        schedule = SCHEDULES[cls.__qualname__]()
        return {name: getattr(schedule, name) for name in schedule.get_config()}
    parameters = inspect.signature(cls).parameters.values()
    required = [p.name for p in parameters if p.default is p.empty]
    return {name: REQUIRED[name]() for name in required if name != "kwargs"}


@every_class
def test_argument_refuses_what_it_cannot_be(cls):
    arguments, declared = arguments_of(cls), getattr(cls, "_checks", {})
    parameters = inspect.signature(cls).parameters
    for name in parameters.keys() - {"kwargs"}:
        if name in declared:
            refusals = refusals_of(declared[name], name, arguments.get(name))
        else:
            refusals = refusals_by(UNDECLARED.get(name, ANY), name)
        for value, error, words in refusals:
            if value is None and parameters[name].default is None:
                continue
            with refused(error, *words):
                cls(**arguments | {name: value})
    # What was refused has wrapped no optimizer, and claimed no policy.
    cls(**arguments)


def described(check):
    """Returns the type of an argument in words, with the names of `fields`."""
    names = {
        get_args(hint)[1]: name
        for name, hint in vars(fields).items()
        if get_origin(hint) is Annotated
    }
    limits = getattr(check, "keywords", {})
    if name_of(check) in ("optional", "items"):
        return f"{name_of(check)}:{described(check.args[0])}"
    if check in names or name_of(check) == "choice":
        return names.get(check, "choice")
    return ",".join([name_of(check), *(f"{k}={v}" for k, v in limits.items())])


# The values above follow a changed type; these do not.
TYPES = """
LAMB optional:learning_rate beta beta Rate Rate patterns patterns name bool\
 optional:Rate optional:Rate bool
LARC Rate choice Rate Rate patterns name
LARS optional:learning_rate Share Rate Rate bool bool patterns patterns name choice\
 Rate bool bool
NovoGrad learning_rate Share Share Rate Rate bool patterns name
SpikeGuard Positive int,at_least=2,at_most=1048576 int,at_least=2 optional:Positive
DynamicLossScale Scale Count AboveOne optional:AboveOne optional:Fraction Scale Scale\
 Length bool
FixedLossScale Scale
LogMaxLossScale Scale Scale Real Fraction Fraction Rate bool
LossScale Scale Scale Scale
SearchingLossScale Scale Count AboveOne AboveOne Count Scale Scale
Cyclical Rate Rate Length choice Positive name
InverseSquareRoot Rate Step optional:Length name
JoinedSchedules items:schedule_or_rate items:Step name
LinearWarmup schedule_or_rate Step Rate name
OneCycle Rate Length Share Positive Positive choice name
PerUpdate schedule_or_rate Length name
PolynomialWarmup schedule_or_rate Step Real name
Scaled schedule_or_rate Rate name
WarmupCosine Rate Step Length Rate Rate name
WarmupStableDecay Rate Step Step Length choice Rate Rate name
CosineDecayWithOffset int Rate Count Rate name optional:Rate Step
DirectPowerDecay Rate Real name
ExponentialDecayWithOffset int Rate Count Positive bool name
PiecewiseConstantDecayWithOffset int items:Step items:Rate name
PolynomialDecayWithOffset int Rate Count Rate Rate bool name
PowerAndLinearDecay Rate Count Real Share int name
PowerDecayWithOffset Rate Real int Rate name
StepCosineDecayWithOffset items:Step items:Rate int name
CosineDecayPolicy Rate Length power Step Rate Step optional:name
ExpDecay Rate Length Positive bool Step Rate name
FixedLR Rate name
InvPolyDecay Rate Length Rate power Step Step name
PiecewiseConstant Rate list items:Rate optional:Count name
PolyDecay Rate Length power Step Rate Step optional:name
TransformerPolicy Rate Count Count optional:Rate Rate float_dtype name
"""


def test_arguments_have_these_types():
    classes = {cls.__qualname__: cls for cls in CLASSES}
    for line in TYPES.replace("\\\n", "").strip().splitlines():
        name, *types = line.split()
        assert [described(c) for c in classes[name]._checks.values()] == types, name


# By the type of an argument: the types of an equal value.
EQUAL = {int: [float, np.int32, np.float32], float: [int, np.float64], bool: [np.bool_]}


@every_class
def test_numbers_of_numpy_and_whole_floats_become_python_values(cls):
    arguments, parameters = arguments_of(cls), inspect.signature(cls).parameters
    for name in getattr(cls, "_checks", {}):
        value = arguments.get(name, parameters[name].default)
        for convert in EQUAL.get(type(value), []):
            if convert(value) == value:
                instance = cls(**arguments | {name: convert(value)})
                written = instance.get_config().get(name, getattr(instance, name))
                assert type(written) is type(value), (name, convert)
                # Some hold the float32 of a learning rate.
                assert np.float32(written) == np.float32(value)


def model():
    return keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])


MODEL = [(TypeError, "be a keras.Model", [*ODD, None, "model.keras", keras.Model])]
X = np.ones((2, 1), "float32")
report = partial(keras_lso.float16_report, x=X)
# Calls that lack an argument, its name, and what it refuses.
CALLS = [
    (lambda **a: report(model(), **a), "batches", COUNT),
    (lambda **a: report(model(), **a), "loss_scale", REFUSED["scale"]),
    (lambda **a: report(model(), **a), "training", REFUSED["bool"]),
    (report, "model", MODEL),
    (partial(keras_lso.recommend, x=X), "model", MODEL),
    (partial(keras_lso.keep_in_float32, layers=[]), "model", MODEL),
    (lambda **a: LossScaleOptimizer(sgd()).check_stalled(**a), "patience", COUNT),
    *((cls, name, RATE) for cls in (LARS, LAMB) for name in ("lr", "decay")),
    (partial(linear_scaling, batch_size=256), "base_learning_rate", RATE),
    (partial(linear_scaling, 0.1), "batch_size", COUNT),
    (partial(linear_scaling, 0.1, 256), "base_batch_size", COUNT),
    (partial(mlperf_resnet, steps_per_epoch=157), "batch_size", COUNT),
    (partial(mlperf_resnet, 4096), "steps_per_epoch", [*of_factor(above=0.0)]),
    (mlperf_bert, "batch_size", COUNT),
]


@pytest.mark.parametrize("call, name, groups", CALLS)
def test_argument_of_function_refuses_what_it_cannot_be(call, name, groups):
    for value, error, words in refusals_by(groups, name):
        if name != "loss_scale" or value is not None:
            with refused(error, *words):
                call(**{name: value})


InverseTime = keras.optimizers.schedules.InverseTimeDecay
NOT_OPTIMIZERS = {
    "None": (None, "keras.optimizers.Adam()", "None"),
    "name": ("sgd", 'keras.optimizers.get("sgd")', "'sgd'"),
    "class": (keras.optimizers.Nadam, "such as `Nadam(...)`", "Nadam"),
    "dict": ({"class_name": "SGD"}, "write `.from_config(config)`", "{'class_name'"),
    "policy": (FixedLossScale(8), "is the argument `loss_scale`", "FixedLossScale("),
    "schedule": (InverseTime(0.5, 9, 1), "such as `keras.optimizers.Adam(sche", ""),
    "rate": (0.5, "such as `keras.optimizers.Adam(0.5)`", "0.5"),
}


@pytest.mark.parametrize("wrap", [LossScaleOptimizer, LARC])
@pytest.mark.parametrize(
    "inner, instead, received", NOT_OPTIMIZERS.values(), ids=NOT_OPTIMIZERS
)
def test_inner_optimizer_of_other_type_is_rejected(inner, instead, received, wrap):
    with refused(TypeError, "`inner_optimizer`", "Received", received, instead):
        wrap(inner)


@pytest.mark.parametrize("outer", [LossScaleOptimizer, GuardedOptimizer])
@pytest.mark.parametrize(
    "wrapper", [LossScaleOptimizer, keras.optimizers.LossScaleOptimizer]
)
def test_nested_loss_scale_optimizer_is_rejected(wrapper, outer):
    inner = wrapper(sgd(), initial_scale=16.0)
    words = "must not be a LossScaleOptimizer", "Pass its `inner_optimizer` instead"
    with refused(TypeError, "`inner_optimizer`", *words, "Received"):
        outer(inner)
    assert float(inner.scale_loss(1.0)) == 16.0


def test_schedule_of_weight_decay_is_rejected():
    schedule = InverseTime(0.5, 9, 1)
    words = ("`weight_decay`", "be a number or None", "follows a schedule", "Received")
    with refused(TypeError, *words):
        LossScaleOptimizer(keras.optimizers.AdamW(weight_decay=schedule))
    optimizer = LossScaleOptimizer(keras.optimizers.AdamW())
    with refused(TypeError, *words):
        optimizer.weight_decay = schedule
    assert optimizer.inner_optimizer.weight_decay == 0.004


@pytest.mark.parametrize(
    "second, advice",
    [("dynamic", "dynamic without it: leave it out"), (128, "`initial_scale=...`")],
)
def test_loss_scale_as_second_argument_says_what_to_write(second, advice):
    with refused(TypeError, "`dynamic`", advice, f"Received: dynamic={second!r}"):
        LossScaleOptimizer(sgd(), second)


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


FIXED = {"dynamic": False, "initial_scale": 2.0}
HIGH = {"min_scale": 64.0, "max_scale": 32.0}
NARROW = {"min_scale": 8.0, "max_scale": 512.0}
WHOLE_POLICY = "Set the other arguments", "`loss_scale`", "=DynamicLossScale("
NO_SCALE = "For a loss scale write `LossScaleOptimizer`"
# Arguments of a LossScaleOptimizer that contradict each other, or do not exist.
CONTRADICTORY = [
    ({"dynamic": False}, ["`dynamic=False`", "`initial_scale`", "initial_scale=1024"]),
    ({**FIXED, "dynamic_growth_steps": 7}, ["leave out", "dynamic_growth_steps=7"]),
    ({**FIXED, "min_scale": 2.0}, ["leave out", "min_scale=2.0"]),
    ({**FIXED, "max_scale": 2.0}, ["leave out", "max_scale=2.0"]),
    # Bounds that are given at their defaults.
    ({**FIXED, "min_scale": 2.0**-14}, ["leave out", "min_scale=6.1"]),
    (HIGH, ["min_scale=64.0", "max_scale=32.0", "above"]),
    (
        {"initial_scale": 4.0, **NARROW},
        ["initial_scale=4.0", "min_scale=8.0", "max_scale=512.0", "widen the bounds"],
    ),
    ({"initial_scale": 1024.0, **NARROW}, ["initial_scale=1024.0", "widen the bounds"]),
    ({"max_scale": 1024.0}, ["initial_scale=32768.0", "Choose another scale"]),
    ({"x": 1.0, "steps": 2}, ["does not support arguments", "`x`", "`steps`"]),
    ({"init_scale": 8.0}, ["`init_scale`. Did you mean `initial_scale`?"]),
    ({"growth_interval": 9}, ["Did you mean `dynamic_growth_steps`?"]),
    ({"min_loss_scale": 1.0}, ["Did you mean `min_scale`?"]),
    ({"hysteresis": 2}, ["Write `loss_scale=keras_lso.DynamicLossScale(hysteresis"]),
    ({"masters": "float32"}, ["`masters`. Did you mean `master_weights`?"]),
    ({"learning_rate": 0.5}, ["set `learning_rate` on the `inner_optimizer`"]),
    *(
        ({keyword: value}, [f"does not support `{keyword}`"])
        for keyword in ("weight_decay", "clipnorm", "use_ema")
        for value in (ODD[0], True, 0.5)
    ),
    *(
        ({"loss_scale": DynamicLossScale(16.0), **more}, [*WHOLE_POLICY, *more])
        for more in (
            {"dynamic": False},
            {"initial_scale": 8.0},
            {"dynamic_growth_steps": 7},
            {"min_scale": 1.0, "max_scale": 2.0**24},
        )
    ),
]


@pytest.mark.parametrize("arguments, words", CONTRADICTORY, ids=str)
def test_contradictory_arguments_are_rejected(arguments, words):
    inner = keras.optimizers.SGD(1.0, loss_scale_factor=8.0)
    with refused(ValueError, *words):
        LossScaleOptimizer(inner, **arguments)
    # Nothing is half-changed: neither has an owner.
    assert inner.loss_scale_factor == 8.0
    if "loss_scale" in arguments:
        LossScaleOptimizer(sgd(), loss_scale=arguments["loss_scale"])


def test_class_of_loss_scale_is_refused_with_its_call():
    with refused(TypeError, "not a class: write `DynamicLossScale(...)`"):
        LossScaleOptimizer(sgd(), loss_scale=DynamicLossScale)


def test_callback_is_found_by_its_module():
    with refused(AttributeError, "Write `keras_lso.callbacks.LossScaleMonitor`"):
        _ = keras_lso.LossScaleMonitor
    assert not hasattr(keras_lso, "no_such_name")


@pytest.mark.parametrize(
    "name", ["master_weights", "spike_guard", "slot_dtype", "shard_state"]
)
def test_refused_argument_leaves_policy_without_owner(name):
    policy = DynamicLossScale(16.0)
    with pytest.raises((TypeError, ValueError), match=f"`{name}` must"):
        LossScaleOptimizer(sgd(), loss_scale=policy, **{name: 1})
    LossScaleOptimizer(sgd(), loss_scale=policy)


@pytest.mark.parametrize("value", [7.0, np.uint8(7), np.float16(7)], ids=repr)
def test_counts_accept_whole_numbers_as_in_tf_keras(value):
    optimizer = LossScaleOptimizer(sgd(), dynamic_growth_steps=value)
    count = optimizer.get_config()["dynamic_growth_steps"]
    assert (type(count), count) == (int, 7)
    optimizer.build([keras.Variable([1.0])])
    optimizer.check_stalled(patience=value)


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
