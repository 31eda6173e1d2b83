"""The arguments of `LARS`: those of the Model Garden, `lr`, and what is refused."""

import inspect
import json

import keras
import numpy as np
import pytest

from keras_lso import LARS
from testing.lars import MODEL_GARDEN_ARGUMENTS, OWN_ARGUMENTS, variable
from testing.optimizer_steps import apply, in_loss_scale_optimizer

# --- Arguments ----------------------------------------------------------------


def test_lars_signature_has_model_garden_arguments_and_four_keywords():
    parameters = inspect.signature(LARS).parameters.values()
    positional = [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    keywords = [p for p in parameters if p.kind is p.KEYWORD_ONLY]
    # As lists: the order counts as well.
    assert [(p.name, p.default) for p in positional] == list(
        MODEL_GARDEN_ARGUMENTS.items()
    )
    assert [(p.name, p.default) for p in keywords] == list(OWN_ARGUMENTS.items())


def test_positional_arguments_follow_model_garden_order():
    optimizer = LARS(0.5, 0.8, 0.1, 0.02, True, False, ["bn"], ["bias"], "mine")
    config = optimizer.get_config()
    assert {key: config[key] for key in MODEL_GARDEN_ARGUMENTS} == {
        "learning_rate": 0.5,
        "momentum": 0.8,
        "weight_decay_rate": 0.1,
        "eeta": 0.02,
        "nesterov": True,
        "classic_momentum": False,
        "exclude_from_weight_decay": ["bn"],
        "exclude_from_layer_adaptation": ["bias"],
        "name": "mine",
    }


def test_arguments_are_readable_as_attributes():
    optimizer = LARS(
        0.5,
        momentum=0.75,
        weight_decay_rate=0.125,
        eeta=0.25,
        nesterov=True,
        exclude_from_layer_adaptation=["bias"],
        name="mine",
        trust_ratio="paper",
        epsilon=0.5,
        trust_clip=True,
        exclude_1d=True,
        decay=2.0,
        clipnorm=3.0,
    )
    assert float(optimizer.learning_rate) == 0.5
    assert optimizer.momentum == 0.75
    assert optimizer.weight_decay_rate == 0.125
    assert optimizer.eeta == 0.25
    assert optimizer.nesterov is True
    assert optimizer.classic_momentum is True
    assert list(optimizer.exclude_from_layer_adaptation) == ["bias"]
    assert optimizer.name == "mine"
    assert optimizer.trust_ratio == "paper"
    assert optimizer.epsilon == 0.5
    assert optimizer.trust_clip is True
    assert optimizer.exclude_1d is True
    assert optimizer.decay == 2.0
    assert optimizer.clipnorm == 3.0
    # Keras's method has the name of the other list.
    assert callable(optimizer.exclude_from_weight_decay)


def test_numpy_numbers_and_integers_are_accepted_and_stored_as_floats():
    optimizer = LARS(
        np.float32(0.5),
        momentum=np.float64(0.75),
        weight_decay_rate=1,
        eeta=np.int64(2),
        nesterov=np.bool_(True),
        decay=3,
    )
    config = optimizer.get_config()
    values = [
        config[key]
        for key in ("learning_rate", "momentum", "weight_decay_rate", "eeta", "decay")
    ]
    assert values == [0.5, 0.75, 1.0, 2.0, 3.0]
    assert {type(value) for value in values} == {float}
    assert config["nesterov"] is True
    json.dumps(config)


@pytest.mark.parametrize("momentum", [0, 1, 0.0, 1.0])
def test_momentum_of_0_or_1_is_accepted(momentum):
    assert LARS(momentum=momentum).momentum == momentum


# --- lr -----------------------------------------------------------------------


def test_lr_is_alias_of_learning_rate():
    optimizer = LARS(lr=0.25)
    assert float(optimizer.learning_rate) == 0.25
    assert float(optimizer.lr) == 0.25
    optimizer.lr = 0.5
    assert float(optimizer.learning_rate) == 0.5
    optimizer.learning_rate = 0.125
    assert float(optimizer.lr) == 0.125
    assert optimizer.get_config()["learning_rate"] == 0.125
    assert "lr" not in optimizer.get_config()


def test_loss_scale_optimizer_reads_and_writes_lr_of_inner_lars():
    optimizer = in_loss_scale_optimizer(LARS(lr=0.25))
    assert float(optimizer.lr) == 0.25
    optimizer.lr = 0.5
    assert float(optimizer.inner_optimizer.learning_rate) == 0.5


def test_lr_accepts_schedule():
    schedule = keras.optimizers.schedules.ExponentialDecay(0.5, 1, 0.5)
    optimizer = LARS(lr=schedule)
    w = variable("w", [3.0, 4.0])
    apply(optimizer, [np.zeros(2)], [w])
    assert float(optimizer.lr) == 0.25


def test_lr_and_learning_rate_together_raise_type_error():
    with pytest.raises(TypeError, match="learning_rate=0.5, lr=0.25") as error:
        LARS(0.5, lr=0.25)
    assert "Give one of them" in str(error.value)


# --- Refusals -----------------------------------------------------------------

RATES = ["learning_rate", "lr", "weight_decay_rate", "eeta", "epsilon", "decay"]
BOOLS = ["nesterov", "classic_momentum", "trust_clip", "exclude_1d"]
LISTS = ["exclude_from_weight_decay", "exclude_from_layer_adaptation"]


def assert_refused(error_type, parts, **settings):
    with pytest.raises(error_type) as error:
        LARS(**settings)
    for part in parts:
        assert part in str(error.value), (part, str(error.value))


@pytest.mark.parametrize("argument", RATES)
def test_rate_arguments_reject_negative_and_nonfinite_numbers(argument):
    for value in (-0.5, -1e-30):
        parts = [f"`{argument}`", f"{argument}={value!r}", "zero or more"]
        assert_refused(ValueError, parts, **{argument: value})
    for value in (np.nan, np.inf, -np.inf, 1e39, 10**400):
        parts = [f"`{argument}`", f"{argument}={value!r}", "finite"]
        assert_refused(ValueError, parts, **{argument: value})


@pytest.mark.parametrize("argument", RATES)
def test_rate_arguments_reject_values_other_than_numbers(argument):
    for value in ("0.5", True, None, [0.5], np.bool_(False), 1j):
        parts = [f"`{argument}`", f"{argument}={value!r}", "must be a number"]
        assert_refused(TypeError, parts, **{argument: value})


def test_learning_rate_rejects_functions_of_keras():
    # A config can name any of them, and each step would call it.
    parts = ["`learning_rate`", "your own function"]
    for function in (keras.ops.shape, keras.config.floatx):
        assert_refused(TypeError, parts, learning_rate=function)


def test_momentum_rejects_values_outside_0_to_1():
    for value in (-0.1, 1.1, np.nan, np.inf, "0.9", True, None, [0.9]):
        parts = ["`momentum`", f"momentum={value!r}", "between 0 and 1"]
        assert_refused(ValueError, parts, momentum=value)


@pytest.mark.parametrize("argument", BOOLS)
def test_bool_arguments_reject_other_types(argument):
    for value in (0, 1, 0.5, "True", None, np.int64(1)):
        parts = [f"`{argument}`", f"{argument}={value!r}", "must be True or False"]
        assert_refused(TypeError, parts, **{argument: value})


@pytest.mark.parametrize("argument", LISTS)
def test_exclusion_list_rejects_bare_string(argument):
    parts = [f"`{argument}`", f"{argument}='bias'", "a list of regular expressions"]
    assert_refused(TypeError, parts, **{argument: "bias"})


@pytest.mark.parametrize("argument", LISTS)
def test_exclusion_list_rejects_other_types(argument):
    for value in (3, {"bias"}, {"bias": 1}, b"bias"):
        assert_refused(TypeError, [f"`{argument}`", repr(value)], **{argument: value})


@pytest.mark.parametrize("argument", LISTS)
def test_exclusion_list_rejects_patterns_other_than_strings(argument):
    for item in (3, None, b"bias", ["bias"]):
        parts = [f"`{argument}`", repr(["bn", item]), "must hold strings"]
        assert_refused(TypeError, parts, **{argument: ["bn", item]})


@pytest.mark.parametrize("argument", LISTS)
def test_exclusion_list_rejects_invalid_regular_expression(argument):
    parts = [f"`{argument}`", "'bn['", r"bn\\[", "must hold regular expressions"]
    assert_refused(ValueError, parts, **{argument: ["bias", "bn["]})


def test_unknown_trust_ratio_is_rejected():
    for value in ("papers", "PAPER", None, 1, True):
        parts = ["`trust_ratio`", f"trust_ratio={value!r}", "'model_garden', 'paper'"]
        assert_refused(ValueError, parts, trust_ratio=value)


def test_paper_trust_ratio_requires_classic_momentum():
    parts = ["trust_ratio='paper'", "classic_momentum=False", "classic_momentum=True"]
    parts.append("trust_ratio='model_garden'")
    settings = dict(trust_ratio="paper", classic_momentum=False)
    assert_refused(ValueError, parts, **settings)


def test_weight_decay_and_weight_decay_rate_together_are_rejected():
    parts = ["weight_decay_rate=0.125", "weight_decay=0.25", "Give one of them"]
    assert_refused(ValueError, parts, weight_decay_rate=0.125, weight_decay=0.25)
    # A decay of 0 is none.
    LARS(weight_decay_rate=0.0, weight_decay=0.25)
    LARS(weight_decay_rate=0.25, weight_decay=0.0)


def test_unknown_keyword_is_rejected():
    assert_refused(ValueError, ["not recognized", "wheight_decay"], wheight_decay=0.1)


def test_too_many_positional_arguments_raise_type_error():
    # What follows the name in the Model Garden are keywords, and so it is here.
    with pytest.raises(TypeError, match="positional"):
        LARS(0.5, 0.9, 0.0, 0.001, False, True, None, None, "LARS", "paper")
