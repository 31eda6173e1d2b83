"""Arguments of LARS, LAMB, NovoGrad and LARC that depend on each other.

`tests/test_arguments.py` has those that are refused by themselves, and
`tests/public_names.txt` the signatures.
"""

import warnings

import numpy as np
import pytest

from keras_lso import LAMB, LARC, LARS, NovoGrad
from testing.layer_wise import assert_close, make_variables, values_of
from testing.refusals import refused

OURS = [LARS, LAMB, NovoGrad]


# By the class: arguments that contradict each other, or do not exist.
CONTRADICTORY = [
    (
        LARS,
        {"trust_ratio": "paper", "classic_momentum": False},
        ValueError,
        ["classic_momentum=True", "trust_ratio='model_garden'"],
    ),
    (
        LAMB,
        {"min_trust_ratio": 2.0, "max_trust_ratio": 1.0},
        ValueError,
        ["must not be above", "min_trust_ratio=2.0", "max_trust_ratio=1.0"],
    ),
    (NovoGrad, {"lr": 0.5}, ValueError, ["lr"]),
    *((cls, {"wheight_decay": 0.1}, ValueError, ["wheight_decay"]) for cls in OURS),
    *(
        (
            cls,
            {"learning_rate": rate, "lr": 0.25},
            TypeError,
            ["Give one of them", f"learning_rate={rate}, lr=0.25"],
        )
        for cls in (LARS, LAMB)
        for rate in (0.5, cls().learning_rate.numpy().item())
    ),
    *(
        (
            cls,
            {"weight_decay_rate": 0.25, "weight_decay": 0.5},
            ValueError,
            ["Give one of them", "weight_decay=0.5", f"{cls.__name__} as published"],
        )
        for cls in OURS
    ),
]


@pytest.mark.parametrize("cls, settings, error, words", CONTRADICTORY, ids=str)
def test_contradictory_arguments_are_rejected(cls, settings, error, words):
    with refused(error, *words):
        cls(**settings)


def test_config_without_inner_optimizer_is_rejected():
    with refused(ValueError, "inner_optimizer=None"):
        LARC.from_config({})


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
