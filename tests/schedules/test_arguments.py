"""Arguments of schedules that are refused, and those that are converted."""

import re

import keras
import numpy as np
import pytest

from keras_lso.compat.model_garden import (
    PiecewiseConstantDecayWithOffset,
    StepCosineDecayWithOffset,
)
from keras_lso.compat.open_seq2seq import PiecewiseConstant
from keras_lso.schedules import (
    Cyclical,
    JoinedSchedules,
    OneCycle,
    WarmupStableDecay,
    linear_scaling,
    mlperf_bert,
    mlperf_resnet,
)
from testing.schedules import ALL

NAN, INF = float("nan"), float("inf")
NOT_REAL = [*((x, "be a number") for x in (True, "0.1", [0.1], None, {}, object()))]
NOT_FINITE = [(x, "be finite in float32") for x in (NAN, INF, -INF, 1e39, 10**400)]
NOT_WHOLE = [1.5, True, "4", None, NAN, INF, [4], np.array([1, 2])]
NOT_ONE_OF = ["cubic", "", 3, None, ["linear"], np.array(["linear", "cosine"])]
# By the type of an argument: the values that it refuses, and what it must be instead.
REFUSED = {
    "rate": [*NOT_REAL, *NOT_FINITE[:2], (-0.1, "be 0 or more"), NOT_FINITE[-1]],
    "real": [*NOT_REAL, *NOT_FINITE],
    "positive": [
        (x, "be a finite number above 0") for x in (0.0, -0.5, NAN, INF, "0.5", True)
    ],
    "power": [(0.0, "be a finite number above 0"), *NOT_REAL, *NOT_FINITE],
    "share": [
        (x, "be a number between 0 and 1") for x in (-0.1, 1.5, NAN, True, "0.1", None)
    ],
    "integer": [(x, "be an integer") for x in NOT_WHOLE],
    "count": [(x, "be an integer of at least 1") for x in (*NOT_WHOLE, 0, -1)],
    "step": [
        *((x, "be an integer of at least 0") for x in (*NOT_WHOLE, -1)),
        (2**31, "be an integer of at most 2147483647"),
    ],
    "length": [
        *((x, "be an integer of at least 1") for x in (*NOT_WHOLE, -1, 0)),
        (2**31, "be an integer of at most 2147483647"),
    ],
    "bool": [(x, "be True or False") for x in (1, 0.0, "no", None)],
    "choice": [(x, "be one of '") for x in NOT_ONE_OF],
    "name": [(x, "be a string") for x in (4, ["mine"])],
    "dtype": [(x, "be a dtype of floats") for x in ("int32", None, 3, "no such")],
    "list": [(x, "be a list") for x in ("24", 2, None, {2, 4}, np.array(2))],
    "member": [
        *NOT_FINITE,
        (-0.1, "be 0 or more"),
        (True, "or a number"),
        (None, "or a number"),
        (lambda step: 0.1, "subclass of `LearningRateSchedule`"),
        (keras.optimizers.schedules.CosineDecay, "Give an instance, not the class"),
        ({"class_name": "CosineDecay"}, "`from_config` first"),
    ],
}
# The types of the arguments of each class.
ARGUMENTS = {
    "LinearWarmup": "member step rate name",
    "PolynomialWarmup": "member step real name",
    "JoinedSchedules": "list:member list:step name",
    "PerUpdate": "member length name",
    "Scaled": "member rate name",
    "WarmupStableDecay": "rate step step length choice rate rate name",
    "WarmupCosine": "rate step length rate rate name",
    "InverseSquareRoot": "rate step optional:length name",
    "OneCycle": "rate length share positive positive choice name",
    "Cyclical": "rate rate length choice positive name",
    "PiecewiseConstantDecayWithOffset": "integer list:step list:rate name",
    "PolynomialDecayWithOffset": "integer rate count rate rate bool name",
    "ExponentialDecayWithOffset": "integer rate count positive bool name",
    "CosineDecayWithOffset": "integer rate count rate name optional:rate step",
    "DirectPowerDecay": "rate real name",
    "PowerAndLinearDecay": "rate count real share integer name",
    "PowerDecayWithOffset": "rate real integer rate name",
    "StepCosineDecayWithOffset": "list:step list:rate integer name",
    "FixedLR": "rate name",
    "PiecewiseConstant": "rate list:rate list:rate optional:count name",
    "ExpDecay": "rate length positive bool step rate name",
    "PolyDecay": "rate length power step rate step name",
    "InvPolyDecay": "rate length rate power step step name",
    "CosineDecayPolicy": "rate length power step rate step name",
    "TransformerPolicy": "rate count count optional:rate rate dtype name",
}
every_class = pytest.mark.parametrize("name", ALL)


def arguments_of(name):
    """Returns valid arguments of a class, and the types of them."""
    config = ALL[name]().get_config()
    arguments = {key: getattr(ALL[name](), key) for key in config}
    return arguments, dict(zip(config, ARGUMENTS[name].split(), strict=True))


def refused_values(argument, kind, value):
    """Yields the values that an argument refuses, and the beginning of the error."""
    if kind.startswith("list:"):
        for items, words in REFUSED["list"]:
            yield items, f"`{argument}` must {words}"
        *first, _ = value
        for item, words in REFUSED[kind.removeprefix("list:")]:
            yield [*first, item], f"`{argument}[{len(first)}]` must .*{words}"
        return
    for refused, words in REFUSED[kind.removeprefix("optional:")]:
        if refused is not None or not kind.startswith("optional:"):
            yield refused, f"`{argument}` must .*{words}"


@every_class
def test_argument_outside_its_type_is_refused(name):
    arguments, kinds = arguments_of(name)
    cls = type(ALL[name]())
    assert cls(**arguments).get_config() == ALL[name]().get_config()
    for argument, kind in kinds.items():
        for value, words in refused_values(argument, kind, arguments[argument]):
            words = words.replace("[", r"\[").replace("]", r"\]")
            with pytest.raises((TypeError, ValueError)) as caught:
                cls(**{**arguments, argument: value})
            assert re.search(words, str(caught.value)), (argument, value)


@every_class
def test_whole_numbers_and_numbers_of_numpy_become_python_values(name):
    arguments, kinds = arguments_of(name)
    cls = type(ALL[name]())
    given = {"integer": 40.0, "count": 40.0, "step": 40.0, "length": 40.0}
    given |= {"rate": np.float32(0.5), "real": 2, "power": np.float64(2)}
    for argument, kind in kinds.items():
        kind = kind.removeprefix("optional:")
        # `low` must not be above `high`.
        if kind in given and argument != "high":
            value = given[kind] if argument != "low" else np.float32(0)
            kept = getattr(cls(**{**arguments, argument: value}), argument)
            assert kept == value
            assert type(kept) is (float if kind in ("rate", "real", "power") else int)


def test_lists_of_numpy_become_lists_of_python_values():
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
def test_invalid_boundaries_are_rejected(make):
    assert make([2, 4]).boundaries == [2, 4]
    for boundaries in ([4, 2], [2, 2]):
        with pytest.raises(ValueError, match="must be strictly increasing"):
            make(boundaries)
    for boundaries in ([], [2], [2, 4, 6]):
        with pytest.raises(ValueError, match="`boundaries` must have 2 entries"):
            make(boundaries)


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: JoinedSchedules([], []), "`schedules` must have at least 1 entry"),
        (lambda: StepCosineDecayWithOffset([], []), "`values` must have at least 1"),
        (
            lambda: PiecewiseConstantDecayWithOffset(boundaries=[], values=[1.0]),
            "`values` must have at least 2 entries",
        ),
        (
            lambda: WarmupStableDecay(1.0, 4, 4, 4, decay="exponential"),
            "`end_learning_rate` must be above zero if the decay is exponential",
        ),
        (
            lambda: WarmupStableDecay(0.0, 4, 4, 4, "exponential", 0.1),
            "Argument `learning_rate` must be above zero if the decay is",
        ),
        (
            lambda: OneCycle(1e20, 4, div_factor=1e-20),
            "`max_learning_rate / div_factor` must be finite in float32",
        ),
        (
            lambda: OneCycle(1e20, 4, final_div_factor=1e-20),
            "`max_learning_rate / div_factor / final_div_factor` must be finite",
        ),
        (lambda: Cyclical(0.2, 0.1, 4), "`low` must not be above `high`. Received: lo"),
        (
            lambda: Cyclical(0.1, 0.2, 4, "triangular2", gamma=0.9),
            '`gamma` must be 1 unless `mode="exponential"`',
        ),
        (
            lambda: Cyclical(0.1, 0.2, 4, "exponential", 1.1),
            "`gamma` must be at most 1. Received: gamma=1.1",
        ),
        (
            lambda: PiecewiseConstant(1.0, [], []),
            "`decay_rates` must have at least 1 entry",
        ),
        (
            lambda: PiecewiseConstant(1.0, [30, 20], [0.5, 0.1], 10),
            r"increasing.*\[300, 200\].*, with 10 steps per epoch",
        ),
        (
            lambda: PiecewiseConstant(1e20, [1], [1e20]),
            r"`learning_rate \* decay_rates\[0\]` must be finite",
        ),
        (lambda: mlperf_resnet(1024, 157), "must be one of 4096, 8192, 32768"),
        (lambda: mlperf_resnet("4096", 157), "`batch_size` must be an integer of at"),
        (lambda: mlperf_resnet(4096, 0), "`steps_per_epoch` must be"),
        (lambda: mlperf_bert(1024), "must be one of 256, 448, .*16384"),
        (lambda: linear_scaling(-0.1, 256), "`base_learning_rate` must be 0 or"),
        (lambda: linear_scaling(0.1, 0), "`batch_size` must be an integer of at"),
        (lambda: linear_scaling(0.1, 256, 1.5), "`base_batch_size` must be an int"),
    ],
)
def test_arguments_that_do_not_fit_together_are_rejected(make, message):
    with pytest.raises((TypeError, ValueError), match=message):
        make()
