"""Steps whose learning rate, or another coefficient, is not finite."""

import functools

import keras
import numpy as np
import pytest
from keras import ops

import keras_lso
from keras_lso.loss_scales import LogMaxLossScale
from testing.keras_versions import multi_optimizer
from testing.schedules import UntilStepTwo

K = keras.optimizers
SCALE = 8.0


MAKE = {
    "SGD": K.SGD,
    "Adam": K.Adam,
    "Adadelta": K.Adadelta,
    "LARS": keras_lso.LARS,
    "LARC": lambda rate: keras_lso.LARC(K.SGD(rate), mode="scale"),
    "averaged": lambda rate: K.SGD(rate, use_ema=True, ema_overwrite_frequency=1),
}
each = pytest.mark.parametrize("make", MAKE.values(), ids=MAKE)


class Run:
    """An optimizer of one variable, which keeps what a skipped step may not change."""

    def __init__(self, inner, compiled=lambda function, variables: function, **options):
        self.w = keras.Variable(np.float32([1.0, 2.0]))
        options = {"initial_scale": SCALE, "dynamic_growth_steps": 1, **options}
        self.optimizer = keras_lso.LossScaleOptimizer(inner, **options)
        self.optimizer.build([self.w])
        self.optimizer.scale_loss(1.0)
        self.kept = [self.w, *inner.variables, *self.optimizer._state.variables[2:]]
        variables = [self.w, *self.optimizer.variables]
        self._apply = compiled(self._take, variables)

    def _take(self, grad):
        self.optimizer.apply([grad], [self.w])

    def step(self, size=1.0):
        grad = np.float32([3.0, -4.0]) * np.float32(size)
        self._apply(ops.convert_to_tensor(grad * float(self.optimizer.loss_scale)))

    def bits(self):
        return [np.asarray(ops.convert_to_numpy(v)).tobytes() for v in self.kept]

    @property
    def skipped(self):
        return int(self.optimizer.skipped_steps)


@each
@pytest.mark.filterwarnings("ignore:The learning rate")
def test_schedule_that_turns_nan_skips_all_later_steps(make, compiled_once):
    run = Run(make(UntilStepTwo()), compiled_once)
    for _ in range(2):
        run.step()
    before = run.bits()
    for _ in range(3):
        run.step()
    assert run.skipped == 3 and int(run.optimizer.iterations) == 2
    assert not bool(run.optimizer.last_step_applied)
    # The scale and its count of good steps are among them.
    assert run.bits() == before
    assert np.isfinite(run.w.numpy()).all()


@pytest.mark.exhaustive
@each
@pytest.mark.parametrize("rate", [np.nan, np.inf])
@pytest.mark.filterwarnings("ignore:The learning rate")
def test_training_resumes_at_next_finite_learning_rate(make, rate, way):
    run, without = Run(make(0.5)), Run(make(0.5))
    for value in (0.5, rate, rate, 0.25):
        run.optimizer.learning_rate = without.optimizer.learning_rate = value
        run.step()
        if np.isfinite(value):
            without.step()
    assert run.bits() == without.bits()
    assert run.skipped == 2
    assert float(run.optimizer.loss_scale) == 4 * SCALE


@pytest.mark.parametrize("window", [None, 2])
@pytest.mark.parametrize("make", [K.SGD, K.Adam, K.Adagrad])
@pytest.mark.filterwarnings("ignore:The learning rate")
def test_rate_infinite_in_float16_skips_steps_of_float16_weights(
    make, window, compiled_once, snapshot
):
    """Keras casts it to the dtype of each weight, and makes inf and NaN of them."""
    w = keras.Variable(np.float32([1.0, 2.0]), dtype="float16")
    inner = make(1e5, gradient_accumulation_steps=window)
    optimizer = keras_lso.LossScaleOptimizer(
        inner, initial_scale=SCALE, master_weights=False
    )
    optimizer.build([w])

    def apply(grad):
        optimizer.apply([grad], [w], scaled=False)

    step = compiled_once(apply, [w, *optimizer.variables])
    grad = ops.convert_to_tensor(np.float16([1e-3, 0.0]))
    before = snapshot([w])
    for _ in range(3):
        step(grad)
    assert snapshot([w]) == before
    # The first micro-batch of a window multiplies by no rate.
    assert int(optimizer.skipped_steps) == (2 if window else 3)
    assert float(optimizer.loss_scale) == SCALE
    optimizer.learning_rate = 0.5
    step(grad)
    assert snapshot([w]) != before
    assert np.isfinite(ops.convert_to_numpy(w).astype("float32")).all()


def test_warning_says_that_rate_is_infinite_in_float16():
    w = keras.Variable(np.float32([1.0, 2.0]), dtype="float16")
    optimizer = keras_lso.LossScaleOptimizer(K.SGD(1e5), master_weights=False)
    with pytest.warns(UserWarning, match="100000.0 at step 0, and inf in float16"):
        optimizer.apply([ops.ones(2, "float16")], [w], scaled=False)
    assert ops.convert_to_numpy(w).tolist() == [1.0, 2.0]


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
    moved = ops.convert_to_numpy(w)
    assert moved[0] != 1.0 and np.isfinite(moved).all()


@pytest.mark.filterwarnings("ignore:The learning rate")
def test_gradient_overflow_under_nan_rate_lowers_scale(way):
    run = Run(K.Adam(np.nan))
    run.step(np.inf)
    assert float(run.optimizer.loss_scale) == SCALE / 2
    run.step()
    assert float(run.optimizer.loss_scale) == SCALE / 2
    assert run.skipped == 2


@pytest.mark.filterwarnings("ignore:The learning rate")
def test_step_with_nan_rate_leaves_log_max_policy_unchanged(way):
    run = Run(K.SGD(0.5), loss_scale=LogMaxLossScale(), **dict.fromkeys(UNSET))
    run.step()
    before = run.bits()
    run.optimizer.learning_rate = np.nan
    run.step(64.0)
    run.optimizer.learning_rate = 0.0
    assert run.bits()[1:] != before[1:]  # The rate itself is among them.
    run.optimizer.learning_rate = 0.5
    assert run.bits() == before


UNSET = ("initial_scale", "dynamic_growth_steps")


@pytest.mark.filterwarnings("ignore:The learning rate")
@pytest.mark.parametrize("make", [K.SGD, K.Adadelta, keras_lso.LARS])
def test_non_finite_rate_skips_only_last_micro_batch_of_window(make, way):
    run = Run(make(0.5, gradient_accumulation_steps=2))
    run.optimizer.learning_rate = np.nan
    run.step()
    assert run.skipped == 0
    before = run.bits()
    for _ in range(2):
        run.step()
    assert run.skipped == 2 and run.bits() == before
    run.optimizer.learning_rate = 0.5
    run.step()
    twin = Run(make(0.5, gradient_accumulation_steps=2))
    for _ in range(2):
        twin.step()
    np.testing.assert_array_equal(run.w.numpy(), twin.w.numpy())


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
    run = Run(make(0.5), compiled_once)
    before = run.bits()
    setattr(run.optimizer, name, value)
    with pytest.warns(UserWarning, match=f"`{name}` of the inner optimizer is {value}"):
        run.step()
    run.step()
    assert run.bits() == before and run.skipped == 2


class MySGD(K.SGD):
    """With a limit of its own, which limits nothing unless it is set."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.limit, self.factor = np.inf, 1.0


def test_attribute_of_user_optimizer_that_becomes_infinite_skips_step():
    run = Run(MySGD(0.5))
    run.step()
    assert run.skipped == 0
    run.optimizer.inner_optimizer.factor = np.inf
    with pytest.warns(UserWarning, match="`factor` of the inner optimizer is inf"):
        run.step()
    assert run.skipped == 1


@pytest.mark.filterwarnings("error::UserWarning")
def test_infinite_clipvalue_clips_nothing():
    run, twin = Run(K.SGD(0.5, clipvalue=np.inf)), Run(K.SGD(0.5))
    for each_run in (run, twin):
        each_run.step()
    np.testing.assert_array_equal(run.w.numpy(), twin.w.numpy())
    # No other infinite number may be in a config.
    config = run.optimizer.get_config()
    assert keras_lso.LossScaleOptimizer.from_config(config).clipvalue == np.inf


def test_single_warning_names_rate_step_and_schedule():
    run = Run(K.SGD(UntilStepTwo()))
    with pytest.warns(UserWarning, match="rate is nan at step 2, as `Unt") as seen:
        for _ in range(5):
            run.step()
    [found] = [w for w in seen if "rate" in str(w.message)]
    assert found.filename == __file__


def test_check_stalled_names_non_finite_rate():
    run = Run(K.SGD(np.inf))
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
        run = Run(K.Adam(Remote(), **options))
        run.step()
        before, Remote.is_down = run.bits(), True
        with pytest.raises(ConnectionError):
            run.step()
        assert run.bits() == before and run.skipped == 0
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
    """As from `np.logspace`. NumPy's float64 would set the dtype of a product."""
    trained = []
    for number in (float, np.float64):
        run = Run(make(number), compiled)
        run.step()
        trained.append(ops.convert_to_numpy(run.w))
    np.testing.assert_array_equal(*trained)


def test_schedule_may_return_an_array_of_one_rate(compiled):
    class OneRate(K.schedules.LearningRateSchedule):
        def __call__(self, step):
            return ops.array([0.5])

    run = Run(K.SGD(OneRate(), momentum=0.5), compiled)
    run.step()
    assert ops.convert_to_numpy(run.w).tolist() == [-0.5, 4.0]


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
    assert (ops.convert_to_numpy(w) < 1).all()
