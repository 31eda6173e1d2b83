"""Steps with a learning rate, or another coefficient, that is not finite."""

import functools
import itertools

import keras
import numpy as np
import pytest
from keras import ops

import keras_lso
from keras_lso.loss_scales import LogMaxLossScale
from testing.harness import Harness, array, bits
from testing.keras_versions import multi_optimizer
from testing.schedules import UntilStepTwo

K = keras.optimizers
SCALE = 8.0
GRADS = [np.float32([3.0, -4.0])]

MAKE = {
    "SGD": K.SGD,
    "Adam": K.Adam,
    "Adadelta": K.Adadelta,
    "LARS": keras_lso.LARS,
    "LARC": lambda rate: keras_lso.LARC(K.SGD(rate), mode="scale"),
    "averaged": lambda rate: K.SGD(rate, use_ema=True, ema_overwrite_frequency=1),
}
each = pytest.mark.parametrize("make", MAKE.values(), ids=MAKE)


def run_of(inner, compiled=None, dtype="float32", **options):
    options = {"initial_scale": SCALE, "dynamic_growth_steps": 1, **options}
    optimizer = keras_lso.LossScaleOptimizer(inner, **options)
    weight = keras.Variable(np.float32([1.0, 2.0]), dtype=dtype)
    return Harness(optimizer, [weight], compiled=compiled)


def unmoved(run):
    """Returns what such a step leaves unchanged, the scale and its counts included."""
    return [*run.state, *run.optimizer.loss_scale_policy.variables]


@each
@pytest.mark.filterwarnings("ignore:The learning rate")
def test_schedule_that_turns_nan_skips_all_later_steps(make, compiled_once):
    run = run_of(make(UntilStepTwo()), compiled_once).steps(2)
    with run.unchanged(*unmoved(run)):
        run.steps(3)
    assert run.skipped == 3 and int(run.optimizer.iterations) == 2
    assert np.isfinite(run.values()).all()


def test_rate_may_be_computed_by_a_callable_without_attributes():
    rates = 0.5, itertools.repeat(0.5).__next__
    runs = [run_of(K.SGD(rate)).steps(2) for rate in rates]
    np.testing.assert_array_equal(*(run.values()[0] for run in runs))


@pytest.mark.exhaustive
@each
@pytest.mark.parametrize("rate", [np.nan, np.inf])
@pytest.mark.filterwarnings("ignore:The learning rate")
def test_training_resumes_at_next_finite_learning_rate(make, rate, way):
    run, without = run_of(make(0.5)), run_of(make(0.5))
    for value in (0.5, rate, rate, 0.25):
        run.optimizer.learning_rate = without.optimizer.learning_rate = value
        run.step(GRADS)
        if np.isfinite(value):
            without.step(GRADS)
    assert bits(unmoved(run)) == bits(unmoved(without))
    assert run.skipped == 2
    assert run.scale == 4 * SCALE


@pytest.mark.parametrize("count", [None, 2])
@pytest.mark.parametrize("make", [K.SGD, K.Adam, K.Adagrad])
@pytest.mark.filterwarnings("ignore:The learning rate")
def test_rate_infinite_in_float16_skips_steps_of_float16_weights(
    make, count, compiled_once
):
    """Keras casts it to the dtype of each weight, and makes inf and NaN of them."""
    run = run_of(
        make(1e5, gradient_accumulation_steps=count),
        compiled_once,
        "float16",
        dynamic_growth_steps=2000,
        master_weights=False,
    )
    grads, before = [np.float32([1e-3, 0.0])], bits(run.weights)
    for _ in range(3):
        run.step(grads)
    assert bits(run.weights) == before
    # The first of two micro-batches is not multiplied by the rate.
    assert run.skipped == (2 if count else 3)
    assert run.scale == SCALE
    run.optimizer.learning_rate = 0.5
    run.step(grads)
    assert bits(run.weights) != before
    assert np.isfinite(run.values()).all()


def test_warning_says_that_rate_is_infinite_in_float16():
    w = keras.Variable(np.float32([1.0, 2.0]), dtype="float16")
    optimizer = keras_lso.LossScaleOptimizer(K.SGD(1e5), master_weights=False)
    with pytest.warns(UserWarning, match="100000.0 at step 0, and inf in float16"):
        optimizer.apply([ops.ones(2, "float16")], [w], scaled=False)
    assert array(w).tolist() == [1.0, 2.0]


@pytest.mark.parametrize(
    "make, options",
    [(K.SGD, {}), (keras_lso.LARS, {"master_weights": False})],
    ids=["a master", "LARS"],
)
@pytest.mark.filterwarnings("error::UserWarning")
def test_rate_beyond_float16_is_applied_if_multiplied_in_float32(make, options):
    w = keras.Variable(np.float32([1.0, 2.0]), dtype="float16")
    optimizer = keras_lso.LossScaleOptimizer(make(1e5), **options)
    optimizer.apply([np.float32([1e-5, 0.0])], [w], scaled=False)
    moved = array(w)
    assert moved[0] != 1.0 and np.isfinite(moved).all()


@pytest.mark.filterwarnings("ignore:The learning rate")
def test_gradient_overflow_under_nan_rate_lowers_scale(way):
    run = run_of(K.Adam(np.nan))
    run.overflow()
    assert run.scale == SCALE / 2
    run.step()
    assert run.scale == SCALE / 2
    assert run.skipped == 2


@pytest.mark.filterwarnings("ignore:The learning rate")
def test_step_with_nan_rate_leaves_log_max_policy_unchanged(way):
    run = run_of(K.SGD(0.5), loss_scale=LogMaxLossScale(), **dict.fromkeys(UNSET))
    run.step()
    with run.unchanged(*unmoved(run)):
        run.optimizer.learning_rate = np.nan
        run.step(size=64.0)
        run.optimizer.learning_rate = 0.5


UNSET = ("initial_scale", "dynamic_growth_steps")


def larc_without_rate(rate, **options):
    return keras_lso.LARC(K.SGD(rate, **options), mode="scale")


@pytest.mark.filterwarnings("ignore:The learning rate")
@pytest.mark.parametrize("make", [K.SGD, K.Adadelta, keras_lso.LARS, larc_without_rate])
def test_non_finite_rate_skips_only_last_micro_batch(make, way):
    run, twin = (run_of(make(0.5, gradient_accumulation_steps=2)) for _ in "ab")
    run.optimizer.learning_rate = np.nan
    run.step(GRADS)
    assert run.skipped == 0
    with run.unchanged(*unmoved(run)):
        run.steps(2)
    assert run.skipped == 2
    run.optimizer.learning_rate = 0.5
    run.step(GRADS)
    for _ in range(2):
        twin.step(GRADS)
    np.testing.assert_array_equal(run.values(), twin.values())


WITH_LARC = {
    "inside": lambda inner: keras_lso.GuardedOptimizer(keras_lso.LARC(inner, 0.01)),
    "outside": lambda inner: keras_lso.LARC(keras_lso.GuardedOptimizer(inner), 0.01),
}


def run_with_larc(wrap, compiled=None, **options):
    inner = K.SGD(0.5, **options)
    run = Harness(wrap(inner), [(2,)], compiled=compiled)
    run.inner = inner
    return run


@pytest.mark.filterwarnings("ignore:The learning rate")
@pytest.mark.parametrize("rate", [np.nan, np.inf])
@pytest.mark.parametrize("wrap", WITH_LARC.values(), ids=WITH_LARC)
def test_micro_batch_that_larc_divides_by_non_finite_rate_is_skipped(
    wrap, rate, compiled, way
):
    run, twin = (
        run_with_larc(wrap, compiled, gradient_accumulation_steps=2) for _ in "ab"
    )
    run.optimizer.learning_rate = rate
    with run.unchanged():
        assert not run.step(GRADS)
    run.optimizer.learning_rate = 0.5
    for _ in range(2):
        run.step(GRADS)
        twin.step(GRADS)
    assert run.skipped == 1
    assert bits(run.state) == bits(twin.state)


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("wrap", WITH_LARC.values(), ids=WITH_LARC)
def test_non_finite_number_of_larc_skips_step_and_is_named_in_warning(wrap, value):
    run = run_with_larc(wrap)
    run.optimizer.eta = value
    with run.unchanged(), pytest.warns(UserWarning, match=f"`eta` of LARC is {value}"):
        assert not run.step(GRADS)


@pytest.mark.filterwarnings("ignore:The learning rate")
def test_non_finite_rate_of_multi_optimizer_member_skips_step():
    members = {"a": K.SGD(0.5), "b": K.Adam(np.nan)}
    inner = multi_optimizer(lambda variable: members[variable.name])
    a, b = (keras.Variable(1.0, name=name) for name in "ab")
    optimizer = keras_lso.LossScaleOptimizer(inner)
    optimizer.apply([ops.ones(()), ops.ones(())], [a, b], scaled=False)
    assert float(a) == float(b) == 1.0
    assert int(optimizer.skipped_steps) == 1


HYPERPARAMETERS = {
    "momentum": (functools.partial(K.SGD, momentum=0.5), np.nan),
    "weight_decay": (K.AdamW, np.inf),
    "beta_1": (K.Adam, np.nan),
    "epsilon": (K.RMSprop, np.nan),
    "rho": (K.Adadelta, np.nan),
    "ema_momentum": (functools.partial(K.SGD, use_ema=True), np.nan),
    "clipnorm": (functools.partial(K.SGD, clipnorm=1.0), np.inf),
    "global_clipnorm": (functools.partial(K.SGD, global_clipnorm=1.0), np.inf),
    "clipvalue": (functools.partial(K.SGD, clipvalue=1.0), np.nan),
    "eeta": (keras_lso.LARS, np.nan),
    "l1_regularization_strength": (K.Ftrl, np.nan),
    "clip_threshold": (K.Adafactor, np.nan),
    "momentum of NumPy": (functools.partial(K.SGD, momentum=0.5), np.float32(np.nan)),
}


@pytest.mark.parametrize("name", HYPERPARAMETERS)
def test_non_finite_hyperparameter_skips_step_and_is_named_in_warning(
    name, compiled_once
):
    make, value = HYPERPARAMETERS[name]
    name = name.partition(" ")[0]
    run = run_of(make(0.5), compiled_once)
    with run.unchanged(*unmoved(run)):
        setattr(run.optimizer, name, value)
        message = f"`{name}` of {type(run.inner).__name__} is {value}"
        with pytest.warns(UserWarning, match=message):
            run.steps(2)
    assert run.skipped == 2


class MySGD(K.SGD):
    """An optimizer with a limit of inf, which limits nothing until it is set."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.limit, self.factor = np.inf, 1.0


def test_attribute_of_user_optimizer_that_becomes_infinite_skips_step():
    run = run_of(MySGD(0.5))
    run.step()
    assert run.skipped == 0
    run.optimizer.inner_optimizer.factor = np.inf
    with pytest.warns(UserWarning, match="`factor` of MySGD is inf"):
        run.step()
    assert run.skipped == 1


@pytest.mark.filterwarnings("error::UserWarning")
def test_infinite_clipvalue_clips_nothing():
    run, twin = run_of(K.SGD(0.5, clipvalue=np.inf)), run_of(K.SGD(0.5))
    for each_run in (run, twin):
        each_run.step()
    np.testing.assert_array_equal(run.values(), twin.values())
    # No other infinite number may be in a config.
    config = run.optimizer.get_config()
    assert keras_lso.LossScaleOptimizer.from_config(config).clipvalue == np.inf


def test_single_warning_names_rate_step_and_schedule():
    run = run_of(K.SGD(UntilStepTwo()))
    with pytest.warns(UserWarning, match="rate is nan at step 2, as `Unt") as seen:
        for _ in range(5):
            run.optimizer.apply(run.scaled(GRADS), run.weights, scaled=True)
    [warning] = [w for w in seen if "rate" in str(w.message)]
    assert warning.filename == __file__


def test_check_stalled_names_non_finite_rate():
    run = run_of(K.SGD(np.inf))
    with pytest.warns(UserWarning, match="rate is inf at step 0"):
        for _ in range(3):
            run.step()
    with pytest.raises(FloatingPointError, match="3 steps .* learning rate is inf"):
        run.optimizer.check_stalled(patience=3)
    run.optimizer.check_stalled(patience=4)
    run.optimizer.learning_rate = 0.5
    run.optimizer.check_stalled(patience=3)


def test_schedule_that_raises_leaves_state_unchanged():
    class Remote(K.schedules.LearningRateSchedule):
        is_down = False

        def __call__(self, step):
            if Remote.is_down:
                raise ConnectionError
            return ops.convert_to_tensor(np.float32(0.5))

    for options in ({}, {"gradient_accumulation_steps": 2, "use_ema": True}):
        run = run_of(K.Adam(Remote(), **options))
        run.step()
        Remote.is_down = True
        with run.unchanged(*unmoved(run)), pytest.raises(ConnectionError):
            run.step()
        assert run.skipped == 0
        Remote.is_down = False
        run.step()


NUMPY = {
    "AdamW": lambda number: K.AdamW(0.1, weight_decay=number(0.5)),
    "clipped": lambda number: K.Adam(0.1, clipnorm=number(0.5)),
    "momentum": lambda number: K.SGD(0.1, momentum=number(0.5)),
    "RMSprop": lambda number: K.RMSprop(0.1, rho=number(0.5)),
    "Lamb": lambda number: K.Lamb(0.1, beta_1=number(0.5)),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("make", NUMPY.values(), ids=NUMPY)
def test_hyperparameters_may_be_numbers_of_numpy(make, compiled):
    """As of `np.logspace`: a float64 of NumPy would set the dtype of a product."""
    trained = []
    for number in (float, np.float64):
        run = run_of(make(number), compiled).steps(1)
        trained.append(run.values())
    np.testing.assert_array_equal(*trained)


def test_schedule_may_return_an_array_of_one_rate(compiled):
    class OneRate(K.schedules.LearningRateSchedule):
        def __call__(self, step):
            return ops.array([0.5])

    run = run_of(K.SGD(OneRate(), momentum=0.5), compiled)
    run.step(GRADS)
    assert run.values()[0].tolist() == [-0.5, 4.0]


@pytest.mark.parametrize("make", [K.Adam, K.Adagrad, keras_lso.LAMB])
def test_variable_without_elements_trains_beside_another(make, compiled):
    """Keras adds shapes (0, 3) and (0, 3) by a kernel for biases on TensorFlow."""
    empty, w = keras.Variable(np.zeros((0, 3))), keras.Variable(np.ones(2))
    optimizer = keras_lso.GuardedOptimizer(make(0.1))
    optimizer.build([empty, w])
    step = compiled(
        lambda g, h: optimizer.apply([g, h], [empty, w]),
        [empty, w, *optimizer.variables],
    )
    step(ops.zeros((0, 3)), ops.ones(2))
    assert (array(w) < 1).all()
