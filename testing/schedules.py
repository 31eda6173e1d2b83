"""Every schedule, with comparisons of its rates."""

import json
from functools import partial

import keras
import numpy as np
import pytest
from keras import ops

from keras_lso import schedules
from keras_lso.compat import model_garden, open_seq2seq

# A rate is the result of at most ten float32 operations. Each is off by half a unit in
# the last place, `pow` and `cos` by a few units.
EPSILON = float(np.finfo("float32").eps)
TOLERANCE = {"rtol": 8 * EPSILON, "atol": 8 * EPSILON}


# Every class, with no argument at its default.
_MAKERS = [
    partial(schedules.LinearWarmup, 0.5, 4, 0.1),
    partial(schedules.PolynomialWarmup, 0.5, 4, power=2.0),
    partial(
        model_garden.PiecewiseConstantDecayWithOffset,
        3,
        boundaries=[2, 5],
        values=[1.0, 0.5, 0.1],
    ),
    partial(
        model_garden.PolynomialDecayWithOffset,
        3,
        initial_learning_rate=1.0,
        decay_steps=4,
        end_learning_rate=0.1,
        power=2.0,
        cycle=True,
    ),
    partial(
        model_garden.ExponentialDecayWithOffset,
        3,
        initial_learning_rate=1.0,
        decay_steps=2,
        decay_rate=0.5,
        staircase=True,
    ),
    partial(
        model_garden.CosineDecayWithOffset,
        3,
        initial_learning_rate=0.2,
        decay_steps=4,
        alpha=0.1,
        warmup_target=1.0,
        warmup_steps=2,
    ),
    partial(model_garden.DirectPowerDecay, 1.0, power=-0.5),
    partial(model_garden.PowerAndLinearDecay, 1.0, 8, -0.5, 0.5, offset=3),
    partial(
        model_garden.PowerDecayWithOffset, 1.0, -0.5, 3, pre_offset_learning_rate=0.9
    ),
    partial(
        model_garden.StepCosineDecayWithOffset, [0, 4, 6], [1.0, 0.5, 0.1], offset=3
    ),
    partial(
        schedules.JoinedSchedules,
        [schedules.LinearWarmup(0.5, 2), schedules.PolynomialWarmup(0.4, 3), 0.1],
        [3, 6],
    ),
    partial(schedules.WarmupStableDecay, 1.0, 3, 2, 4, "exponential", 0.1, 0.2),
    partial(schedules.WarmupCosine, 1.0, 3, 4, 0.1, 0.2),
    partial(schedules.InverseSquareRoot, 1.0, 3, timescale=5),
    partial(schedules.OneCycle, 1.0, 11, 0.45, 4.0, 10.0, "linear"),
    partial(schedules.Cyclical, 0.1, 1.0, 3, "exponential", 0.9),
    partial(schedules.PerUpdate, schedules.LinearWarmup(0.5, 4), 3),
    partial(schedules.Scaled, schedules.LinearWarmup(0.5, 4), 0.5),
    partial(open_seq2seq.FixedLR, 0.5),
    partial(
        open_seq2seq.PiecewiseConstant, 1.0, [1, 2.5], [0.5, 0.1], steps_per_epoch=2
    ),
    partial(open_seq2seq.ExpDecay, 1.0, 2, 0.5, True, begin_decay_at=3, min_lr=0.1),
    partial(open_seq2seq.PolyDecay, 1.0, 4, 2.0, 5, 0.1, warmup_steps=3),
    partial(open_seq2seq.InvPolyDecay, 1.0, 4, 0.1, 2.0, 5, warmup_steps=3),
    partial(open_seq2seq.CosineDecayPolicy, 1.0, 4, 2.0, 5, 0.1, warmup_steps=3),
    partial(open_seq2seq.TransformerPolicy, 2.0, 16, 4, max_lr=0.2, coefficient=0.9),
]
ALL = {make.func.__qualname__: partial(make, name="mine") for make in _MAKERS}


STEPS = range(13)

every_schedule = pytest.mark.parametrize("make", ALL.values(), ids=ALL)


class Half(keras.optimizers.schedules.LearningRateSchedule):
    """Found by `custom_objects` only."""

    def __call__(self, step):
        return 0.5

    def get_config(self):
        return {}


@keras.saving.register_keras_serializable("keras_lso_tests")
class UntilStepTwo(keras.optimizers.schedules.LearningRateSchedule):
    """A rate that a division by zero ends, as a decay of no power does under XLA."""

    def __call__(self, step):
        left = 2.0 - ops.cast(step, "float32")
        return 0.5 * (left / left)

    def get_config(self):
        return {}


def rates(schedule, steps=STEPS):
    return np.array([ops.convert_to_numpy(schedule(step)) for step in steps])


def assert_rates(schedule, expected):
    """Compares the rates of a schedule with a dict of steps to rates."""
    np.testing.assert_allclose(
        rates(schedule, expected.keys()), list(expected.values()), **TOLERANCE
    )


def through_json(schedule):
    config = keras.optimizers.schedules.serialize(schedule)
    return keras.optimizers.schedules.deserialize(json.loads(json.dumps(config)))
