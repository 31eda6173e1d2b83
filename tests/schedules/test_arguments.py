"""Arguments of schedules that are lists, and those that do not fit together.

`tests/test_arguments.py` has those that are refused by themselves.
"""

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
    mlperf_bert,
    mlperf_resnet,
)


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
        (lambda: mlperf_bert(1024), "must be one of 256, 448, .*16384"),
    ],
)
def test_arguments_that_do_not_fit_together_are_rejected(make, message):
    with pytest.raises(ValueError, match=message):
        make()
