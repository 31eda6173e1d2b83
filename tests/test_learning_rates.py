"""Which learning rates an optimizer accepts, and how a program reads them.

`tests/schedules/` tests the rates of schedules.
"""

import functools

import keras
import numpy as np
import pytest
from keras import ops

import keras_lso
from keras_lso import schedules
from keras_lso.compat import open_seq2seq

KERAS = keras.optimizers.schedules


class CosineDecay:
    """Like the class of tf_keras: no schedule of Keras 3, called with the step."""

    def __init__(self, initial_learning_rate, decay_steps):
        pass

    def __call__(self, step):
        return 0.1


def setter(make, name):
    def assign(rate):
        optimizer = make(0.5)
        try:
            setattr(optimizer, name, rate)
        finally:
            # A refused rate changes nothing.
            assert float(optimizer.learning_rate) == 0.5

    return assign


def wrapped(rate):
    return keras_lso.LossScaleOptimizer(keras.optimizers.SGD(rate))


OWN = [keras_lso.LARS, keras_lso.LAMB, keras_lso.NovoGrad]
RATE = "learning_rate"
# Everything that takes a learning rate, and the name of the argument.
TAKERS = {
    **{make.__name__: (make, "learning_rate") for make in OWN},
    **{
        f"{make.__name__}, {RATE}=": (setter(make, RATE), RATE)
        for make in [*OWN, wrapped]
    },
    "LARS(lr)": (lambda rate: keras_lso.LARS(lr=rate), "lr"),
    "LARS, lr=": (setter(keras_lso.LARS, "lr"), "learning_rate"),
    "LARC, wrapped": (
        lambda rate: keras_lso.LossScaleOptimizer(
            keras_lso.LARC(keras.optimizers.SGD(rate), mode="scale")
        ),
        "learning_rate",
    ),
}


def of_the_step(step, last=100):
    return 0.1 * step / last


# Values that a step cannot call for its rate, and the advice of the error.
NO_RATES = {
    "schedule of tf_keras": (
        CosineDecay(0.1, 4),
        r"Write `keras.optimizers.schedules.CosineDecay\(...\)`, the class of Keras 3",
    ),
    "class of tf_keras": (CosineDecay, "Give an instance, not the class"),
    "class of Keras": (KERAS.CosineDecay, "Give an instance, not the class"),
    "function of the step": (of_the_step, "subclass of `LearningRateSchedule`"),
    "partial function": (
        functools.partial(of_the_step, last=9),
        "subclass of `LearningRateSchedule`",
    ),
    "method": (KERAS.CosineDecay(0.1, 4).__call__, "`LearningRateSchedule`"),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("given", NO_RATES)
@pytest.mark.parametrize("taker", TAKERS)
def test_callable_with_required_arguments_is_rejected_as_learning_rate(taker, given):
    take, argument = TAKERS[taker]
    value, words = NO_RATES[given]
    with pytest.raises(TypeError, match=f"Argument `{argument}` must be .*{words}"):
        take(value)


def test_learning_rate_accepts_number_callable_and_schedule():
    assert (
        float(keras_lso.LARS(functools.partial(of_the_step, 50)).learning_rate) == 0.05
    )
    optimizer = keras_lso.LARS(0.5)
    # A number, a tensor, a callable, a schedule.
    for rate, expected in [
        (0.25, 0.25),
        (np.float32(0.125), 0.125),
        (lambda: 0.0625, 0.0625),
        (int, 0.0),  # It has no signature in Python 3.11.
        (open_seq2seq.FixedLR(0.5), 0.5),
    ]:
        optimizer.learning_rate = rate
        assert float(optimizer.learning_rate) == expected


SCHEDULES = {
    "Keras's": lambda: KERAS.PolynomialDecay(0.5, 8, 0.0),
    "warm-up of Keras's": lambda: schedules.LinearWarmup(
        KERAS.PolynomialDecay(0.5, 8, 0.0), 2
    ),
    "Keras's, joined": lambda: schedules.JoinedSchedules(
        [0.125, KERAS.PolynomialDecay(0.5, 8, 0.0)], [2]
    ),
}


@pytest.mark.parametrize("make", SCHEDULES.values(), ids=SCHEDULES)
def test_schedule_called_with_iterations_returns_learning_rate(make):
    """`schedule(optimizer.iterations)`, a variable, as loops that print the rate do."""
    schedule = make()
    optimizer = keras_lso.LossScaleOptimizer(keras_lso.LARS(schedule))
    variable = keras.Variable([1.0, 2.0])
    optimizer.build([variable])
    for step in range(5):
        read = schedule(optimizer.iterations)
        assert float(read) == float(optimizer.learning_rate) == float(schedule(step))
        if step == 2:
            # A window's count is a tensor.
            assert float(schedule(optimizer.iterations + 0)) == float(read)
        optimizer.apply([ops.ones(2)], [variable])
