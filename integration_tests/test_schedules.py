"""The schedules give the rates of the originals: Model Garden's and optax's.

`test_lr_policies.py` has those of OpenSeq2Seq.

Each is compared with its reference at every step, called alone and inside `fit`, where
the weights show the rate that SGD used. Tolerance: both do the same ten or fewer
float32 operations, each off by half a unit in the last place (6e-8), `pow` and `cos` by
a few. So 8 units of the rate, and 4 of the highest rate of the case, since a rate near
zero may be the difference of two large numbers.
"""

import types

import keras
import numpy as np
import pytest
from keras import ops

import keras_lso
from keras_lso import schedules
from keras_lso.compat import model_garden as lr_schedule

EPSILON = float(np.finfo("float32").eps)
STEPS = 40

POLYNOMIAL = {
    "initial_learning_rate": 0.8,
    "decay_steps": 20,
    "end_learning_rate": 0.01,
    "power": 2.0,
}
COSINE = {"initial_learning_rate": 0.8, "decay_steps": 17, "alpha": 0.05}
EXPONENTIAL = {"initial_learning_rate": 0.8, "decay_steps": 7, "decay_rate": 0.6}
PIECEWISE = {"boundaries": [3, 9, 20], "values": [0.8, 0.4, 0.1, 0.03]}

POWER = {"initial_learning_rate": 0.8, "power": -0.5}
RISING = {"initial_learning_rate": 0.02}

# Of each schedule, by the Model Garden's name of it, the arguments of each case.
ARGUMENTS = {
    "PiecewiseConstantDecayWithOffset": {
        "piecewise": PIECEWISE,
        "piecewise-later": {**PIECEWISE, "offset": 6},
        "piecewise-twice": {"boundaries": [5], "values": [0.8, 0.4], "offset": 2},
    },
    "PolynomialDecayWithOffset": {
        "polynomial": POLYNOMIAL,
        "polynomial-later": {**POLYNOMIAL, "offset": 11},
        "polynomial-earlier": {**POLYNOMIAL, "offset": -5},
        "polynomial-root": {**POLYNOMIAL, "power": 0.5, "offset": 4},
        "polynomial-cycle": {**POLYNOMIAL, "decay_steps": 9, "cycle": True},
    },
    "ExponentialDecayWithOffset": {
        "exponential": EXPONENTIAL,
        "exponential-later": {**EXPONENTIAL, "offset": 10},
        "exponential-stairs": {**EXPONENTIAL, "offset": 10, "staircase": True},
    },
    "CosineDecayWithOffset": {
        "cosine": COSINE,
        "cosine-later": {**COSINE, "offset": 12},
        "cosine-warmup": {
            **COSINE,
            "offset": 4,
            "warmup_target": 1.6,
            "warmup_steps": 6,
        },
    },
    "DirectPowerDecay": {"direct-power": POWER, "direct-power-up": RISING},
    "PowerAndLinearDecay": {
        "power-and-linear": {**POWER, "total_decay_steps": 30},
        "power-and-linear-later": {
            "initial_learning_rate": 0.8,
            "total_decay_steps": 23,
            "power": -0.3,
            "linear_decay_fraction": 0.4,
            "offset": 9,
        },
        "power-and-no-linear": {
            **RISING,
            "total_decay_steps": 23,
            "linear_decay_fraction": 0.0,
        },
    },
    "PowerDecayWithOffset": {
        "power": {**POWER, "offset": 9, "pre_offset_learning_rate": 0.5},
        "power-default": {"initial_learning_rate": 0.8},
    },
    "StepCosineDecayWithOffset": {
        "step-cosine": {
            "boundaries": [0, 10, 25, STEPS],
            "values": [0.8, 0.4, 0.3, 0.01],
        },
        "step-cosine-later": {
            "boundaries": [0, 12, STEPS],
            "values": [0.8, 0.2, 0.0],
            "offset": 8,
        },
        # The first cosine starts at 0 all the same.
        "step-cosine-first": {"boundaries": [5, 12, STEPS], "values": [0.8, 0.2, 0.1]},
    },
}
# Which schedule, with which arguments.
SINGLE = {
    case: (name, arguments)
    for name, cases in ARGUMENTS.items()
    for case, arguments in cases.items()
}


@pytest.fixture
def reference(original, model_garden):
    """`reference(make, name=None)`: the rates of a schedule of the Model Garden's."""

    def get(make, name=None):
        return original(lambda: rates(make(model_garden("lr_schedule"))), name)

    return get


@pytest.fixture
def reference_case(reference):
    return lambda case: reference(CASES[case], case)


def single(case):
    name, arguments = SINGLE[case]
    return lambda module: getattr(module, name)(**arguments)


def warmup(case, name, *arguments, **options):
    return lambda module: getattr(module, name)(
        case if isinstance(case, float) else single(case)(module), *arguments, **options
    )


# Each makes a schedule from the module of either side.
CASES = {
    **{case: single(case) for case in SINGLE},
    "linear-warmup-constant": warmup(0.8, "LinearWarmup", 7, 0.1),
    "linear-warmup-none": warmup("cosine", "LinearWarmup", 1, 0.1),
    "linear-warmup-cosine": warmup("cosine", "LinearWarmup", 7, 0.0),
    "linear-warmup-later": warmup("polynomial-later", "LinearWarmup", 11, 0.0),
    "linear-warmup-step-cosine": warmup("step-cosine-later", "LinearWarmup", 8, 0.02),
    "linear-warmup-power": warmup("power-default", "LinearWarmup", 9, 0.0),
    "linear-warmup-by-name": lambda module: module.LinearWarmup(
        after_warmup_lr_sched=0.8, warmup_steps=5, warmup_learning_rate=0.2
    ),
    "polynomial-warmup-constant": warmup(0.8, "PolynomialWarmUp", 7),
    "polynomial-warmup-none": warmup("exponential", "PolynomialWarmUp", 0),
    "polynomial-warmup-root": warmup("cosine-later", "PolynomialWarmUp", 12, power=0.5),
    "polynomial-warmup-square": warmup("direct-power", "PolynomialWarmUp", 9, 2.0),
}


def rates(schedule, steps=range(STEPS)):
    return np.array([np.asarray(schedule(step), "float32") for step in steps])


def our_rates(schedule, kind, steps=range(STEPS)):
    return np.array([ops.convert_to_numpy(schedule(kind(step))) for step in steps])


def assert_same_rates(actual, expected):
    assert actual.dtype == expected.dtype == np.float32
    assert len(set(expected.tolist())) > 1
    assert np.isfinite(expected).all()
    # The default rate before a power decay, 1e6, is no yardstick for the others.
    highest = expected[expected < 100].max()
    np.testing.assert_allclose(
        actual, expected, rtol=8 * EPSILON, atol=4 * EPSILON * highest
    )


def of_variable(step):
    variable = keras.Variable(0, dtype="int", trainable=False)
    variable.assign(step)
    return variable


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", [int, ops.convert_to_tensor, of_variable])
@pytest.mark.parametrize("case", CASES)
def test_each_rate_matches_model_garden(case, kind, reference_case):
    assert_same_rates(our_rates(CASES[case](lr_schedule), kind), reference_case(case))


def test_rates_are_finite_where_model_garden_has_nan_or_inf(reference):
    def make_cosine(module):
        return module.StepCosineDecayWithOffset([0, 10], [0.8, 0.1], offset=3)

    def make_cycle(module):
        return module.PolynomialDecayWithOffset(**POLYNOMIAL, offset=5, cycle=True)

    expected = reference(make_cosine)
    actual = our_rates(make_cosine(lr_schedule), int)
    assert np.isfinite(expected).tolist() == [step < 13 for step in range(STEPS)]
    assert_same_rates(actual[:13], expected[:13])
    np.testing.assert_array_equal(actual[13:], np.float32(0.1))

    theirs = reference(make_cycle)
    assert np.isinf(theirs[:5]).all()
    np.testing.assert_array_equal(
        our_rates(make_cycle(lr_schedule), int, range(6)), np.float32(0.8)
    )
    assert_same_rates(
        our_rates(make_cycle(lr_schedule), int, range(5, STEPS)), theirs[5:]
    )


def test_warmup_of_zero_steps_matches_model_garden(reference):
    # Its own rate of step 0 is that of the schedule; it divides by zero on the way.
    make = warmup("cosine", "LinearWarmup", 0, 0.1)
    assert_same_rates(our_rates(make(lr_schedule), int), reference(make))


# Which schedules, those of optax out of its module, and where they are joined.
JOINED = {
    "two": (
        [0.3, keras.optimizers.schedules.ExponentialDecay(0.8, 7, 0.6)],
        lambda optax: [
            optax.constant_schedule(0.3),
            optax.exponential_decay(0.8, 7, 0.6),
        ],
        [9],
    ),
    "three": (
        [
            schedules.LinearWarmup(0.8, 6),
            lr_schedule.PolynomialDecayWithOffset(**POLYNOMIAL),
            0.02,
        ],
        lambda optax: [
            optax.linear_schedule(0.0, 0.8, 6),
            optax.polynomial_schedule(0.8, 0.01, 2.0, 20),
            optax.constant_schedule(0.02),
        ],
        [6, 30],
    ),
    # The second is never seen to its end, the third starts with step 0 of its own.
    "cut-short": (
        [
            schedules.LinearWarmup(0.8, 6, 0.2),
            keras.optimizers.schedules.CosineDecay(0.8, 30),
            keras.optimizers.schedules.CosineDecay(0.6, 10, alpha=0.1),
            0.0,
        ],
        lambda optax: [
            optax.linear_schedule(0.2, 0.8, 6),
            optax.cosine_decay_schedule(0.8, 30),
            optax.cosine_decay_schedule(0.6, 10, alpha=0.1),
            optax.constant_schedule(0.0),
        ],
        [4, 13, 35],
    ),
}


@pytest.fixture(params=JOINED)
def joined(request, original):
    ours, make_theirs, boundaries = JOINED[request.param]

    def run():
        import optax

        return rates(optax.join_schedules(make_theirs(optax), boundaries))

    return types.SimpleNamespace(
        ours=schedules.JoinedSchedules(ours, boundaries),
        rates=original(run, f"joined {request.param}"),
    )


@pytest.mark.parametrize("kind", [int, ops.convert_to_tensor, of_variable])
def test_joined_schedules_match_optax(joined, kind):
    assert_same_rates(our_rates(joined.ours, kind), joined.rates)


# In training


@pytest.fixture
def make_meter():
    """A model that measures learning rates: one weight for each step.

    The gradient of weight i is 1 at step i and 0 at all others, so that after training
    it is minus the rate of that step, not rounded once more.
    """

    def make(optimizer, **options):
        model = keras.Sequential(
            [
                keras.Input((STEPS,)),
                keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros"),
            ]
        )
        # Of the absolute error of a prediction that is always too high.
        model.compile(optimizer, loss="mean_absolute_error", **options)
        return model

    return make


@pytest.fixture
def used_rates(fit):
    """Trains a meter; returns the rates that its optimizer used from `start` on."""

    def run(model, start=0, stop=STEPS):
        x = np.eye(STEPS, dtype="float32")[start:stop]
        y = np.full((stop - start, 1), -1e9, "float32")
        fit(model, x, y, batch_size=1)
        return -model.get_weights()[0][start:stop, 0]

    return run


# A lookup, a formula, and one around another.
IN_TRAINING = ["piecewise-later", "cosine-warmup", "polynomial-warmup-root"]


@pytest.mark.parametrize("case", IN_TRAINING)
def test_sgd_trains_with_rates_of_model_garden(
    case, reference_case, make_meter, used_rates
):
    model = make_meter(keras.optimizers.SGD(CASES[case](lr_schedule)))
    assert_same_rates(used_rates(model), reference_case(case))


@pytest.mark.parametrize("wrap", [keras_lso.LossScaleOptimizer, lambda inner: inner])
def test_model_saved_within_window_resumes_at_rate_of_its_update(
    wrap, make_meter, used_rates, tmp_path
):
    by_update = schedules.WarmupStableDecay(0.8, 6, 20, 10, "1-sqrt", 0.01, 0.1)
    schedule = schedules.PerUpdate(by_update, 4)
    inner = keras.optimizers.SGD(schedule, gradient_accumulation_steps=4)
    model = make_meter(wrap(inner))
    used_rates(model, stop=18)
    model.save(tmp_path / "model.keras")
    loaded = keras_lso.load_model(tmp_path / "model.keras")
    used_rates(loaded, start=18)
    # The mean of four gradients, of which three are 0.
    used = -4 * loaded.get_weights()[0][:, 0]
    updates = np.arange(STEPS) // 4
    assert_same_rates(used, our_rates(by_update, int, updates.tolist()))
