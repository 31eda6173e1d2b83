"""The arguments of LARS, LAMB, NovoGrad and LARC that are accepted, and refused.

`tests/test_constructor_arguments.py` has values of other types, and
`tests/public_names.txt` the signatures.
"""

import warnings

import keras
import numpy as np
import pytest

from keras_lso import LAMB, LARC, LARS, NovoGrad
from testing.layer_wise import assert_close, make_variables, values_of
from testing.refusals import refused, sgd

ADAPTIVE = [LARS, LAMB]
OURS = [*ADAPTIVE, NovoGrad]


def larc(**arguments):
    return LARC(sgd(), **arguments)


def test_numpy_numbers_and_integers_are_stored_as_python_numbers():
    optimizer = LARS(
        np.float32(0.5),
        momentum=np.float64(0.75),
        weight_decay_rate=1,
        eeta=np.int64(2),
        nesterov=np.bool_(True),
        decay=3,
    )
    config = optimizer.get_config()
    names = "learning_rate", "momentum", "weight_decay_rate", "eeta", "decay"
    values = [config[key] for key in names]
    assert values == [0.5, 0.75, 1.0, 2.0, 3.0]
    assert {type(value) for value in values} == {float}
    assert config["nesterov"] is True


@pytest.mark.parametrize("momentum", [0, 1, 0.0, 1.0])
def test_momentum_of_0_or_1_is_accepted(momentum):
    assert LARS(momentum=momentum).momentum == momentum


RATES = {
    LARS: ["learning_rate", "lr", "weight_decay_rate", "eeta", "epsilon", "decay"],
    LAMB: ["learning_rate", "lr", "weight_decay_rate", "epsilon", "decay"],
    NovoGrad: ["learning_rate", "weight_decay_rate", "epsilon"],
    larc: ["eta", "min_update", "epsilon"],
}
BOOLS = {
    LARS: ["nesterov", "classic_momentum", "trust_clip", "exclude_1d"],
    LAMB: ["bias_correction", "exclude_1d"],
    NovoGrad: ["grad_averaging"],
}
LISTS = {
    LARS: ["exclude_from_weight_decay", "exclude_from_layer_adaptation"],
    LAMB: ["exclude_from_weight_decay", "exclude_from_layer_adaptation"],
    NovoGrad: ["exclude_from_weight_decay"],
    larc: ["exclude"],
}


def of_each(names):
    pairs = [(make, name) for make in names for name in names[make]]
    ids = [f"{make.__name__}({name})" for make, name in pairs]
    return pytest.mark.parametrize("make, name", pairs, ids=ids)


@of_each(RATES)
def test_rate_rejects_negative_and_nonfinite_numbers_and_other_types(make, name):
    for value in (-0.5, -1e-30):
        with refused(ValueError, f"`{name}`", f"{name}={value!r}", "0 or more"):
            make(**{name: value})
    for value in (np.nan, np.inf, -np.inf, 1e39, 10**400):
        with refused(ValueError, f"`{name}`", f"{name}={value!r}", "finite"):
            make(**{name: value})
    for value in ("0.5", True, [0.5], np.bool_(False), 1j):
        with refused(TypeError, f"`{name}`", f"{name}={value!r}", "must be a number"):
            make(**{name: value})


@of_each(BOOLS)
def test_bool_rejects_other_types(make, name):
    for value in (0, 1, 0.5, "True", None, np.int64(1)):
        words = f"`{name}`", f"{name}={value!r}", "must be True or False"
        with refused(TypeError, *words):
            make(**{name: value})


@of_each(LISTS)
def test_list_of_patterns_rejects_what_is_none(make, name):
    with refused(TypeError, f"`{name}`", f"{name}='bias'", "a list of regular expre"):
        make(**{name: "bias"})
    for value in (3, {"bias"}, {"bias": 1}, b"bias"):
        with refused(TypeError, f"`{name}`", repr(value)):
            make(**{name: value})
    for item in (3, None, b"bias", ["bias"]):
        with refused(TypeError, f"`{name}`", repr(["bn", item]), "must hold strings"):
            make(**{name: ["bn", item]})
    words = f"`{name}`", "'bn['", "must hold regular expressions"
    with refused(ValueError, *words):
        make(**{name: ["bias", "bn["]})


@pytest.mark.parametrize(
    "make, settings, error, words",
    [
        # A config can name any function of Keras, and each step would call it.
        (LARS, {"learning_rate": keras.ops.shape}, TypeError, ["your own function"]),
        (LARS, {"learning_rate": keras.config.floatx}, TypeError, ["`learning_rate`"]),
        *(
            (LARS, {"momentum": value}, ValueError, ["`momentum`", "between 0 and 1"])
            for value in (-0.1, 1.1, np.nan, np.inf, "0.9", True, None, [0.9])
        ),
        *(
            (LARS, {"trust_ratio": value}, ValueError, ["'model_garden', 'paper'"])
            for value in ("papers", "PAPER", None, 1, True)
        ),
        (
            LARS,
            {"trust_ratio": "paper", "classic_momentum": False},
            ValueError,
            ["classic_momentum=True", "trust_ratio='model_garden'"],
        ),
        (LAMB, {"beta_1": 1.0}, ValueError, ["`beta_1`", "below 1", "1.0"]),
        (LAMB, {"beta_2": -0.5}, ValueError, ["`beta_2`", "-0.5"]),
        # In float32 it is 1, and the bias correction a division by 0.
        (LAMB, {"beta_2": 1 - 1e-8}, ValueError, ["below 1 in float32", "0.99999999"]),
        (LAMB, {"min_trust_ratio": -1.0}, ValueError, ["`min_trust_ratio`", "0 or"]),
        (LAMB, {"max_trust_ratio": "10"}, TypeError, ["`max_trust_ratio`", "'10'"]),
        (
            LAMB,
            {"min_trust_ratio": 2.0, "max_trust_ratio": 1.0},
            ValueError,
            ["must not be above", "min_trust_ratio=2.0", "max_trust_ratio=1.0"],
        ),
        (NovoGrad, {"beta_1": 1.5}, ValueError, ["`beta_1`", "between 0 and 1", "1.5"]),
        (NovoGrad, {"lr": 0.5}, ValueError, ["lr"]),
        *((cls, {"wheight_decay": 0.1}, ValueError, ["wheight_decay"]) for cls in OURS),
        *(
            (
                cls,
                {"learning_rate": rate, "lr": 0.25},
                TypeError,
                ["Give one of them", f"learning_rate={rate}, lr=0.25"],
            )
            for cls in ADAPTIVE
            for rate in (0.5, cls().learning_rate.numpy().item())
        ),
        *(
            (
                cls,
                {"weight_decay_rate": 0.25, "weight_decay": 0.5},
                ValueError,
                [
                    "Give one of them",
                    "weight_decay=0.5",
                    f"{cls.__name__} as published",
                ],
            )
            for cls in OURS
        ),
        (larc, {"mode": "clamp"}, ValueError, ["`mode`", "'clip', 'scale'", "'clamp'"]),
        (lambda: LARC("sgd"), {}, TypeError, ["`inner_optimizer`", "'sgd'"]),
        (lambda: LARC.from_config({}), {}, ValueError, ["inner_optimizer=None"]),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, dict) else "",
)
def test_invalid_argument_is_named_in_error(make, settings, error, words):
    with refused(error, *words):
        make(**settings)


each = pytest.mark.parametrize("cls", OURS)


@each
def test_weight_decay_warns_and_names_argument_of_paper(cls):
    with pytest.warns(UserWarning) as caught:
        cls(0.5, weight_decay=0.25)
    [message] = [str(w.message) for w in caught]
    for words in (
        f"`weight_decay` of {cls.__name__} is Keras's",
        "papers, optax and PyTorch",
        f"`{cls.__name__}(..., weight_decay_rate=0.25)`",
        "`optimizer.weight_decay = 0.25`",
    ):
        assert words in message
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for decay in ({}, {"weight_decay": None}, {"weight_decay": 0.0}):
            cls(0.5, weight_decay_rate=0.25, **decay)


@each
def test_weight_decay_set_afterwards_is_that_of_constructor_and_config(cls):
    with pytest.warns(UserWarning, match="is Keras's"):
        given = cls(0.5, weight_decay=0.25)
    assigned = cls(0.5)
    assigned.weight_decay = 0.25
    weights = []
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        # A config is unambiguous.
        again = cls.from_config(given.get_config())
        assert again.get_config() == assigned.get_config() | {"name": again.name}
        for optimizer in (given, assigned, again):
            trained = make_variables([[3.0, 4.0]])
            optimizer.apply([np.array([0.0, 2.0], "float32")], trained)
            weights += values_of(trained)
    assert_close(weights, [weights[0]] * 3, 0)


@each
def test_config_with_both_decays_is_rejected(cls):
    config = cls(0.5, weight_decay_rate=0.125).get_config() | {"weight_decay": 0.25}
    with refused(ValueError, "Give one of them", "weight_decay=0.25"):
        cls.from_config(config)
    with refused(TypeError, "`weight_decay` must be a number", "weight_decay='0.1'"):
        cls.from_config(config | {"weight_decay": "0.1"})
