"""LARS, LAMB and NovoGrad warn of `weight_decay`, which means two things."""

import warnings

import keras
import numpy as np
import pytest
from keras import ops

from keras_lso import LAMB, LARS, NovoGrad
from testing.refusals import refused

each = pytest.mark.parametrize("cls", [LARS, LAMB, NovoGrad])


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


@each
@pytest.mark.filterwarnings("error")
def test_other_decays_do_not_warn(cls):
    cls(0.5)
    cls(0.5, weight_decay=None)
    cls(0.5, weight_decay=0.0)
    cls(0.5, weight_decay_rate=0.25)


@each
def test_weight_decay_set_afterwards_is_that_of_constructor(cls):
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
            variable = keras.Variable([3.0, 4.0])
            optimizer.apply([ops.array([0.0, 2.0])], [variable])
            weights.append(ops.convert_to_numpy(variable))
    np.testing.assert_array_equal(weights[0], weights[1])
    np.testing.assert_array_equal(weights[0], weights[2])


@each
def test_config_with_both_decays_is_rejected(cls):
    config = cls(0.5, weight_decay_rate=0.125).get_config() | {"weight_decay": 0.25}
    with refused(ValueError, "Give one of them", "weight_decay=0.25"):
        cls.from_config(config)
    with refused(TypeError, "`weight_decay` must be a number", "weight_decay='0.1'"):
        cls.from_config(config | {"weight_decay": "0.1"})
