"""Arguments of schedules that are refused, and those that are converted."""

import keras
import numpy as np
import pytest

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
    linear_scaling,
    mlperf_bert,
    mlperf_resnet,
)


@pytest.mark.parametrize(
    ("argument", "make"),
    [
        ("schedule_or_rate", lambda x: LinearWarmup(x, 4)),
        ("schedule_or_rate", lambda x: PolynomialWarmup(x, 4)),
        ("initial_learning_rate", lambda x: LinearWarmup(0.5, 4, x)),
        (
            r"values\[1\]",
            lambda x: PiecewiseConstantDecayWithOffset(boundaries=[2], values=[1.0, x]),
        ),
        (
            "initial_learning_rate",
            lambda x: PolynomialDecayWithOffset(initial_learning_rate=x, decay_steps=4),
        ),
        (
            "end_learning_rate",
            lambda x: PolynomialDecayWithOffset(
                initial_learning_rate=1.0, decay_steps=4, end_learning_rate=x
            ),
        ),
        (
            "power",
            lambda x: PolynomialDecayWithOffset(
                initial_learning_rate=1.0, decay_steps=4, power=x
            ),
        ),
        (
            "initial_learning_rate",
            lambda x: ExponentialDecayWithOffset(
                initial_learning_rate=x, decay_steps=4, decay_rate=0.5
            ),
        ),
        (
            "initial_learning_rate",
            lambda x: CosineDecayWithOffset(initial_learning_rate=x, decay_steps=4),
        ),
        (
            "alpha",
            lambda x: CosineDecayWithOffset(
                initial_learning_rate=1.0, decay_steps=4, alpha=x
            ),
        ),
        (
            "warmup_target",
            lambda x: CosineDecayWithOffset(
                initial_learning_rate=1.0, decay_steps=4, warmup_target=x
            ),
        ),
        ("initial_learning_rate", lambda x: DirectPowerDecay(x)),
        ("initial_learning_rate", lambda x: PowerAndLinearDecay(x, 8)),
        ("initial_learning_rate", lambda x: PowerDecayWithOffset(x)),
        (
            "pre_offset_learning_rate",
            lambda x: PowerDecayWithOffset(1.0, pre_offset_learning_rate=x),
        ),
        (r"values\[0\]", lambda x: StepCosineDecayWithOffset([0], [x])),
        (r"schedules\[1\]", lambda x: JoinedSchedules([0.5, x], [4])),
        ("base_learning_rate", lambda x: linear_scaling(x, 256)),
        ("learning_rate", lambda x: WarmupStableDecay(x, 4, 4, 4)),
        ("learning_rate", lambda x: WarmupStableDecay(x, 4, 4, 4, "exponential", 0.1)),
        (
            "end_learning_rate",
            lambda x: WarmupStableDecay(1.0, 4, 4, 4, end_learning_rate=x),
        ),
        (
            "initial_learning_rate",
            lambda x: WarmupStableDecay(1.0, 4, 4, 4, initial_learning_rate=x),
        ),
        ("learning_rate", lambda x: WarmupCosine(x, 4, 4)),
        ("end_learning_rate", lambda x: WarmupCosine(1.0, 4, 4, x)),
        ("initial_learning_rate", lambda x: WarmupCosine(1.0, 4, 4, 0.0, x)),
        ("learning_rate", lambda x: InverseSquareRoot(x, 4)),
        ("max_learning_rate", lambda x: OneCycle(x, 4)),
        ("low", lambda x: Cyclical(x, 1.0, 4)),
        ("high", lambda x: Cyclical(0.0, x, 4)),
        ("schedule", lambda x: PerUpdate(x, 4)),
        ("schedule", lambda x: Scaled(x, 0.5)),
        ("factor", lambda x: Scaled(0.5, x)),
        ("learning_rate", lambda x: FixedLR(x)),
        ("learning_rate", lambda x: PiecewiseConstant(x, [4], [0.5])),
        (r"decay_rates\[1\]", lambda x: PiecewiseConstant(1.0, [4, 8], [0.5, x])),
        (r"boundaries\[0\]", lambda x: PiecewiseConstant(1.0, [x], [0.5], 10)),
        ("learning_rate", lambda x: ExpDecay(x, 4, 0.5, False)),
        ("min_lr", lambda x: PolyDecay(1.0, 4, min_lr=x)),
        ("learning_rate", lambda x: TransformerPolicy(x, 16, 4)),
        ("coefficient", lambda x: TransformerPolicy(1.0, 16, 4, coefficient=x)),
        ("max_lr", lambda x: TransformerPolicy(1.0, 16, 4, max_lr=x)),
    ],
)
def test_invalid_rate_is_rejected(argument, make):
    words = f"Argument `{argument}` must be"
    for value in (-0.1, float("nan"), float("inf"), 1e39, 10**400):
        with pytest.raises(ValueError, match=words):
            make(value)
    for value in (True, "0.1", [0.1]):
        with pytest.raises(TypeError, match=words):
            make(value)


@pytest.mark.parametrize(
    "make",
    [
        lambda power: PolynomialWarmup(0.5, 4, power=power),
        lambda power: DirectPowerDecay(0.5, power=power),
        lambda power: PowerAndLinearDecay(0.5, 4, power=power),
        lambda power: PowerDecayWithOffset(0.5, power=power),
    ],
)
def test_power_may_be_negative_but_must_be_finite(make):
    assert make(-0.5).power == -0.5
    for power in (float("nan"), float("-inf")):
        with pytest.raises(ValueError, match="Argument `power` must be finite"):
            make(power)
    with pytest.raises(TypeError, match="Argument `power` must be a number"):
        make(None)


a_number_of_steps = pytest.mark.parametrize(
    ("argument", "make", "refused"),
    [
        ("warmup_steps", lambda x: LinearWarmup(0.5, x), [-1]),
        ("warmup_steps", lambda x: PolynomialWarmup(0.5, x), [-1]),
        (
            "warmup_steps",
            lambda x: CosineDecayWithOffset(
                initial_learning_rate=1.0, decay_steps=4, warmup_steps=x
            ),
            [-1],
        ),
        (
            "decay_steps",
            lambda x: PolynomialDecayWithOffset(
                initial_learning_rate=1.0, decay_steps=x
            ),
            [-1, 0],
        ),
        (
            "decay_steps",
            lambda x: ExponentialDecayWithOffset(
                initial_learning_rate=1.0, decay_steps=x, decay_rate=0.5
            ),
            [-1, 0],
        ),
        (
            "decay_steps",
            lambda x: CosineDecayWithOffset(initial_learning_rate=1.0, decay_steps=x),
            [-1, 0],
        ),
        ("total_decay_steps", lambda x: PowerAndLinearDecay(1.0, x), [-1, 0]),
        ("batch_size", lambda x: linear_scaling(0.1, x), [-1, 0]),
        ("base_batch_size", lambda x: linear_scaling(0.1, 256, x), [-1, 0]),
        ("batch_size", lambda x: mlperf_resnet(x, 157), [-1, 0]),
        ("offset", lambda x: PowerDecayWithOffset(1.0, offset=x), []),
        ("offset", lambda x: PowerAndLinearDecay(1.0, 8, offset=x), []),
        ("offset", lambda x: StepCosineDecayWithOffset([0], [1.0], offset=x), []),
        (
            "offset",
            lambda x: PolynomialDecayWithOffset(
                offset=x, initial_learning_rate=1.0, decay_steps=4
            ),
            [],
        ),
        (r"boundaries\[0\]", lambda x: JoinedSchedules([0.5, 0.1], [x]), [-1]),
        (r"boundaries\[0\]", lambda x: PiecewiseConstant(1.0, [x], [0.5]), [-1]),
        ("warmup_steps", lambda x: WarmupStableDecay(1.0, x, 4, 4), [-1, 2**31]),
        ("stable_steps", lambda x: WarmupStableDecay(1.0, 4, x, 4), [-1, 2**31]),
        ("decay_steps", lambda x: WarmupStableDecay(1.0, 4, 4, x), [-1, 0, 2**31]),
        ("warmup_steps", lambda x: WarmupCosine(1.0, x, 4), [-1]),
        ("decay_steps", lambda x: WarmupCosine(1.0, 4, x), [-1, 0]),
        ("warmup_steps", lambda x: InverseSquareRoot(1.0, x), [-1]),
        ("total_steps", lambda x: OneCycle(1.0, x), [-1, 0, 2**31]),
        ("half_cycle", lambda x: Cyclical(0.0, 1.0, x), [-1, 0]),
        ("micro_batches", lambda x: PerUpdate(0.5, x), [-1, 0]),
        ("decay_steps", lambda x: ExpDecay(1.0, x, 0.5, False), [-1, 0]),
        ("decay_steps", lambda x: PolyDecay(1.0, x), [-1, 0]),
        ("decay_steps", lambda x: InvPolyDecay(1.0, x, 0.1), [-1, 0]),
        ("decay_steps", lambda x: CosineDecayPolicy(1.0, x), [-1, 0]),
        (
            "begin_decay_at",
            lambda x: ExpDecay(1.0, 4, 0.5, False, begin_decay_at=x),
            [-1],
        ),
        ("begin_decay_at", lambda x: CosineDecayPolicy(1.0, 4, begin_decay_at=x), [-1]),
        ("warmup_steps", lambda x: PolyDecay(1.0, 4, warmup_steps=x), [-1]),
        ("warmup_steps", lambda x: InvPolyDecay(1.0, 4, 0.1, warmup_steps=x), [-1]),
        ("warmup_steps", lambda x: TransformerPolicy(1.0, 16, x), [-1, 0]),
        ("d_model", lambda x: TransformerPolicy(1.0, x, 4), [-1, 0]),
    ],
)


@a_number_of_steps
def test_invalid_integer_argument_is_rejected(argument, make, refused):
    for value in [*refused, 1.5, True, "4", None, float("nan"), float("inf")]:
        with pytest.raises(ValueError, match=f"Argument `{argument}` must be a"):
            make(value)


@a_number_of_steps
def test_whole_float_is_accepted_as_integer_argument(argument, make, refused):
    # The originals make a float of it anyway. 4096 is also a batch size of MLPerf's.
    expected = described(make(4096))
    for value in (4096.0, np.float32(4096)):
        assert repr(described(make(value))) == repr(expected)


def described(result):
    """The config of a schedule; the rate that comes in its place, or with it."""
    if isinstance(result, tuple):
        return [described(each) for each in result]
    return getattr(result, "get_config", lambda: result)()


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
    for boundaries in ("24", 2, None, {2, 4}):
        with pytest.raises(TypeError, match="`boundaries` must be a list"):
            make(boundaries)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: JoinedSchedules([], []), "`schedules` must have at least 1 entry"),
        (lambda: StepCosineDecayWithOffset([], []), "`values` must have at least 1"),
        (
            lambda: PiecewiseConstantDecayWithOffset(boundaries=[], values=[1.0]),
            "`values` must have at least 2 entries",
        ),
        *[
            (
                lambda x=x: PowerAndLinearDecay(1.0, 8, linear_decay_fraction=x),
                "`linear_decay_fraction` must be a number between 0 and 1",
            )
            for x in (-0.1, 1.5, float("nan"), True, "0.1")
        ],
        (
            lambda: WarmupStableDecay(1.0, 4, 4, 4, decay="sqrt"),
            "`decay` must be one of '1-sqrt', 'linear', 'cosine', 'exponential'. Rec",
        ),
        (
            lambda: WarmupStableDecay(1.0, 4, 4, 4, decay="exponential"),
            "`end_learning_rate` must be above zero if the decay is exponential",
        ),
        (
            lambda: WarmupStableDecay(0.0, 4, 4, 4, "exponential", 0.1),
            "Argument `learning_rate` must be above zero if the decay is",
        ),
        *[
            (
                lambda x=x: InverseSquareRoot(1.0, 4, timescale=x),
                "`timescale` must be an integer of at least 1",
            )
            for x in (0, -1, 1.5, "4", True)
        ],
        *[
            (
                lambda x=x: OneCycle(1.0, 4, warmup_share=x),
                "`warmup_share` must be a number between 0 and 1",
            )
            for x in (-0.1, 1.5, float("nan"), None)
        ],
        *[
            (
                lambda name=name, x=x: OneCycle(1.0, 4, **{name: x}),
                f"`{name}` must be a finite number above 0",
            )
            for name in ("div_factor", "final_div_factor")
            for x in (0.0, -1.0, float("inf"), "25")
        ],
        (
            lambda: OneCycle(1e20, 4, div_factor=1e-20),
            "`max_learning_rate / div_factor` must be finite in float32",
        ),
        (
            lambda: OneCycle(1e20, 4, final_div_factor=1e-20),
            "`max_learning_rate / div_factor / final_div_factor` must be finite",
        ),
        (
            lambda: OneCycle(1.0, 4, anneal="cos"),
            "`anneal` must be one of 'cosine', 'linear'. Received: anneal='cos'",
        ),
        (lambda: Cyclical(0.2, 0.1, 4), "`low` must not be above `high`. Received: lo"),
        (
            lambda: Cyclical(0.1, 0.2, 4, mode="exp_range"),
            "`mode` must be one of 'triangular', 'triangular2', 'exponential'",
        ),
        (
            lambda: Cyclical(0.1, 0.2, 4, "triangular2", gamma=0.9),
            '`gamma` is only for `mode="exponential"`',
        ),
        *[
            (
                lambda x=x: Cyclical(0.1, 0.2, 4, "exponential", x),
                "`gamma` must be (a finite number above 0|at most 1)",
            )
            for x in (0.0, -0.5, 1.1, float("nan"), "0.5")
        ],
        (lambda: mlperf_resnet(1024, 157), "4096, 8192, 32768.*linear_scaling"),
        (lambda: mlperf_bert(1024), "256, 448, .*16384.*arXiv:1904.00962"),
        (lambda: mlperf_resnet(4096, 0), "`steps_per_epoch` must be"),
        (lambda: mlperf_resnet(4096, float("nan")), "`steps_per_epoch` must be"),
        (lambda: mlperf_resnet(4096, "157"), "`steps_per_epoch` must be"),
        (
            lambda: ExponentialDecayWithOffset(
                initial_learning_rate=1.0, decay_steps=4, decay_rate=0.0
            ),
            "`decay_rate` must be a finite number above 0",
        ),
        *[
            (
                lambda x=x: ExpDecay(1.0, 4, x, False),
                "`decay_rate` must be a finite number above 0",
            )
            for x in (0.0, -0.5, float("nan"), "0.5")
        ],
        *[
            (
                lambda cls=cls, rest=rest, x=x: cls(1.0, 4, power=x, **rest),
                "`power` must be (a finite number above 0|finite)",
            )
            for cls, rest in (
                (PolyDecay, {}),
                (CosineDecayPolicy, {}),
                (InvPolyDecay, {"min_lr": 0.1}),
            )
            for x in (0.0, -1.0, float("nan"), float("inf"))
        ],
        (
            lambda: PolyDecay(1.0, 4, begin_decay_at=2**31),
            "`begin_decay_at` must be an integer of at most 2147483647",
        ),
        (
            lambda: PiecewiseConstant(1.0, [], []),
            "`decay_rates` must have at least 1 entry",
        ),
        (
            lambda: PiecewiseConstant(1.0, [30, 20], [0.5, 0.1], 10),
            r"increasing.*\[300, 200\], in steps of boundaries=\[30, 20\] epochs",
        ),
        (
            lambda: PiecewiseConstant(1.0, [1], [0.5], steps_per_epoch=2.5),
            "`steps_per_epoch` must be a positive integer",
        ),
        (
            lambda: PiecewiseConstant(1e20, [1], [1e20]),
            r"`learning_rate \* decay_rates\[0\]` must be finite",
        ),
    ],
)
def test_argument_out_of_range_is_rejected(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (lambda step: 0.1, "subclass of `LearningRateSchedule`"),
        (keras.optimizers.schedules.CosineDecay, "Give an instance, not the class"),
        ({"class_name": "CosineDecay"}, "from_config"),
        (None, "or a number"),
    ],
)
def test_schedule_of_wrong_type_is_rejected(schedule, message):
    for make in (
        lambda: LinearWarmup(schedule, 4),
        lambda: PolynomialWarmup(schedule, 4),
        lambda: JoinedSchedules([schedule], []),
        lambda: PerUpdate(schedule, 4),
        lambda: Scaled(schedule, 0.5),
    ):
        with pytest.raises(TypeError, match=message):
            make()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LinearWarmup(0.5, 4, name=4), "`name` must be a string"),
        (
            lambda: PolynomialDecayWithOffset(
                initial_learning_rate=1.0, decay_steps=4, cycle=1
            ),
            "`cycle` must be True or False",
        ),
        (
            lambda: ExponentialDecayWithOffset(
                initial_learning_rate=1.0,
                decay_steps=4,
                decay_rate=0.5,
                staircase="no",
            ),
            "`staircase` must be True or False",
        ),
        (
            lambda: StepCosineDecayWithOffset([0], 0.5),
            "`values` must be a list",
        ),
        (lambda: JoinedSchedules(0.5, []), "`schedules` must be a list"),
    ],
)
def test_argument_of_wrong_type_is_rejected(make, message):
    with pytest.raises(TypeError, match=message):
        make()
