"""Every schedule, and expected rates that anybody can check by hand."""

import json

import keras
import numpy as np
import pytest
from keras import ops

from keras_lso.compat.model_garden import (
    CosineDecayWithOffset,
    DirectPowerDecay,
    ExponentialDecayWithOffset,
    PiecewiseConstantDecayWithOffset,
    PolynomialDecayWithOffset,
    PowerAndLinearDecay,
    PowerDecayWithOffset,
    StepCosineDecayWithOffset,
)
from keras_lso.compat.open_seq2seq import (
    CosineDecayPolicy,
    ExpDecay,
    FixedLR,
    InvPolyDecay,
    PiecewiseConstant,
    PolyDecay,
    TransformerPolicy,
)
from keras_lso.schedules import (
    Cyclical,
    InverseSquareRoot,
    JoinedSchedules,
    LinearWarmup,
    OneCycle,
    PerUpdate,
    PolynomialWarmup,
    Scaled,
    WarmupCosine,
    WarmupStableDecay,
)

# A rate is the result of at most ten float32 operations. Each is off by half a unit in
# the last place, `pow` and `cos` by a few units.
EPSILON = float(np.finfo("float32").eps)
TOLERANCE = {"rtol": 8 * EPSILON, "atol": 8 * EPSILON}


# Every class, with no argument at its default.
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
    "WarmupStableDecay": lambda: WarmupStableDecay(
        1.0, 3, 2, 4, "exponential", 0.1, 0.2, name="mine"
    ),
    "WarmupCosine": lambda: WarmupCosine(1.0, 3, 4, 0.1, 0.2, name="mine"),
    "InverseSquareRoot": lambda: InverseSquareRoot(1.0, 3, timescale=5, name="mine"),
    "OneCycle": lambda: OneCycle(1.0, 11, 0.45, 4.0, 10.0, "linear", name="mine"),
    "Cyclical": lambda: Cyclical(0.1, 1.0, 3, "exponential", 0.9, name="mine"),
    "PerUpdate": lambda: PerUpdate(LinearWarmup(0.5, 4), 3, name="mine"),
    "Scaled": lambda: Scaled(LinearWarmup(0.5, 4), 0.5, name="mine"),
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
