"""The inner optimizer's hyperparameters read and write through its wrapper."""

import warnings

import keras
import numpy as np
import pytest
from keras import ops

from keras_lso import LARC, LARS, GuardedOptimizer, LossScaleOptimizer
from keras_lso._backend import backend
from keras_lso.compat.v1.mixed_precision import MixedPrecisionLossScaleOptimizer
from testing.refusals import refused


@pytest.fixture
def inner():
    return keras.optimizers.Adam(
        0.5,
        beta_1=0.8,
        weight_decay=0.125,
        clipnorm=3.0,
        use_ema=True,
        ema_momentum=0.75,
        ema_overwrite_frequency=7,
        gradient_accumulation_steps=4,
    )


@pytest.fixture
def optimizer(inner):
    return LossScaleOptimizer(inner)


def weight_and_gradient():
    return keras.Variable([1.0, 2.0]), ops.ones(2)


PROPERTIES = {
    "weight_decay": (0.125, 0.25),
    "clipnorm": (3.0, 4.0),
    "clipvalue": (None, 5.0),
    "global_clipnorm": (None, 6.0),
    "use_ema": (True, False),
    "ema_momentum": (0.75, 0.5),
    "ema_overwrite_frequency": (7, 8),
    "gradient_accumulation_steps": (4, 2),
    "beta_1": (0.8, 0.7),
    "beta_2": (0.999, 0.99),
    "epsilon": (1e-7, 1e-3),
    "amsgrad": (False, True),
}


@pytest.mark.parametrize(
    "name, before, after", [(k, *v) for k, v in PROPERTIES.items()], ids=PROPERTIES
)
def test_hyperparameter_reads_and_writes_through_to_inner_optimizer(
    optimizer, inner, name, before, after
):
    assert getattr(optimizer, name) == getattr(inner, name) == before
    setattr(optimizer, name, after)
    assert getattr(optimizer, name) == getattr(inner, name) == after
    setattr(inner, name, before)
    assert getattr(optimizer, name) == before
    assert name not in vars(optimizer)


@pytest.mark.parametrize("name", ["learning_rate", "lr"])
def test_learning_rate_reads_and_writes_through_to_inner_optimizer(
    optimizer, inner, name
):
    assert float(getattr(optimizer, name)) == 0.5
    setattr(optimizer, name, 0.25)
    assert float(inner.learning_rate) == float(optimizer.learning_rate) == 0.25
    assert float(optimizer.lr) == 0.25


def test_learning_rate_schedule_can_be_set_through_wrapper(optimizer, inner):
    optimizer.learning_rate = keras.optimizers.schedules.PiecewiseConstantDecay(
        [3], [0.5, 0.25]
    )
    assert float(optimizer.learning_rate) == 0.5
    inner._iterations.assign(4)  # `iterations` counts whole windows
    assert float(optimizer.lr) == 0.25


def test_attributes_and_methods_of_user_optimizer_read_and_write_through():
    class Mine(keras.optimizers.SGD):
        sharpness = 3

        def sharpen(self, by):
            self.sharpness += by
            return self.sharpness

    inner = Mine(0.5)
    inner.note = "mine"
    optimizer = LossScaleOptimizer(inner)
    assert optimizer.sharpness == 3
    assert optimizer.sharpen(by=2) == 5
    assert inner.sharpness == 5
    optimizer.sharpness = 9
    assert inner.sharpness == 9
    assert optimizer.note == "mine"


def test_new_attribute_is_set_on_wrapper_only(optimizer, inner):
    optimizer.note = "mine"
    assert optimizer.note == "mine"
    assert not hasattr(inner, "note")
    # It stays the wrapper's when the inner optimizer gets one of that name.
    inner.note = "inner"
    assert optimizer.note == "mine"
    optimizer.note = "still mine"
    assert inner.note == "inner"


def test_private_attributes_do_not_read_or_write_through(optimizer, inner):
    inner._secret = 3
    assert not hasattr(optimizer, "_secret")
    optimizer._secret = 4
    assert inner._secret == 3
    assert optimizer._iterations is not inner._iterations


def test_missing_attribute_raises_attribute_error(optimizer):
    assert not hasattr(optimizer, "momentum_of_inertia")
    with pytest.raises(AttributeError, match="momentum_of_inertia"):
        _ = optimizer.momentum_of_inertia
    with pytest.raises(AttributeError, match="LossScaleOptimizer.*'_missing'"):
        _ = optimizer._missing


# Names of `torch.amp.GradScaler` and jmp, and what is written for them here.
ELSEWHERE = {
    "scale": "scale_loss(loss)",
    "get_scale": "float(optimizer.loss_scale)",
    "unscale_": "get_unscaled_gradients(gradients)",
    "step": "apply(gradients, variables)",
    "state_dict": "optimizer.variables",
}


@pytest.mark.parametrize("name", ELSEWHERE)
@pytest.mark.parametrize("cls", [LossScaleOptimizer, GuardedOptimizer])
def test_missing_attribute_of_other_library_says_what_to_write(cls, name):
    optimizer = cls(keras.optimizers.SGD(0.5))
    words = f"'{cls.__name__}' object has no attribute '{name}'", ELSEWHERE[name]
    with refused(AttributeError, *words):
        getattr(optimizer, name)


def test_error_inside_property_of_inner_optimizer_stays_its_own():
    class Broken(keras.optimizers.SGD):
        @property
        def sharpness(self):
            return None.value

    with pytest.raises(AttributeError, match="'NoneType' object has no.*'value'"):
        _ = LossScaleOptimizer(Broken(0.5)).sharpness


def test_setting_loss_scale_says_what_to_write():
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(1.0))
    words = "`loss_scale`", "no setter", "`optimizer.dynamic_scale.assign(128.0)`"
    with refused(AttributeError, *words):
        optimizer.loss_scale = 128.0
    optimizer.dynamic_scale.assign(128.0)
    weight, _ = weight_and_gradient()
    before = weight.numpy()
    optimizer.apply([keras.ops.full((2,), 128.0)], [weight], scaled=True)
    np.testing.assert_array_equal(weight.numpy(), before - 1)
    new = "make a new `LossScaleOptimizer(inner_optimizer, loss_scale=...)`"
    with refused(AttributeError, "`loss_scale` of a GuardedOptimizer", new):
        GuardedOptimizer(keras.optimizers.SGD(1.0)).loss_scale = 128.0


def test_bounds_of_loss_scale_are_those_of_its_policy():
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(1.0), min_scale=1.0)
    assert (optimizer.min_scale, optimizer.max_scale) == (1.0, 2.0**24)


def test_wrapper_attributes_take_precedence_over_inner_attributes(optimizer, inner):
    inner.loss_scale = 3.0
    assert float(optimizer.loss_scale) == 2.0**15
    assert optimizer.name != inner.name
    assert optimizer.inner_optimizer is inner


@pytest.mark.parametrize(
    "name",
    [
        *("iterations", "loss_scale", "dynamic", "skipped_steps", "variables"),
        *("min_scale", "max_scale"),
    ],
)
def test_read_only_properties_cannot_be_set(optimizer, inner, name):
    with pytest.raises(AttributeError, match=f"{name}.*has no setter"):
        setattr(optimizer, name, 1)
    assert name not in vars(inner)


def test_loss_scale_factor_is_none(optimizer, inner):
    # Otherwise a trainer would scale the loss again.
    assert optimizer.loss_scale_factor is None
    assert inner.loss_scale_factor is None


def test_wrapper_creates_no_slots_for_options_of_inner_optimizer(optimizer, inner):
    # The inner optimizer averages and accumulates; the wrapper has no variables
    # for that: its own four, the inner ones, and the count of skips.
    weight, _ = weight_and_gradient()
    optimizer.build([weight])
    assert len(optimizer.variables) == 4 + len(inner.variables) + 1
    twin = keras.optimizers.Adam.from_config(inner.get_config())
    twin.build([keras.Variable([1.0, 2.0])])
    assert len(inner.variables) == len(twin.variables)


def test_arguments_of_wrapper_stay_out_of_inner_optimizer_with_such_attributes():
    inner = keras.optimizers.SGD(0.5)
    inner.spike_guard = inner.master_weights = "mine"
    optimizer = LossScaleOptimizer(inner, master_weights=False)
    assert (optimizer.master_weights, optimizer.spike_guard) == (False, None)
    assert (inner.master_weights, inner.spike_guard) == ("mine", "mine")
    inner = keras.optimizers.SGD(0.5)
    inner.use_locking = "mine"
    optimizer = MixedPrecisionLossScaleOptimizer(inner, 8, use_locking=True)
    assert (optimizer.use_locking, inner.use_locking) == (True, "mine")


def test_repr_shows_inner_optimizer_scale_and_skipped_steps(monkeypatch):
    optimizer = LossScaleOptimizer(LARC(keras.optimizers.SGD(0.5)), initial_scale=8.0)
    weight, grad = weight_and_gradient()
    optimizer.apply([grad * np.inf], [weight], scaled=True)
    numbers = "loss_scale=4.0, skipped_steps=1"
    assert repr(optimizer) == f"LossScaleOptimizer(LARC(SGD), {numbers})"
    # It leaves out numbers that are not on the host.
    monkeypatch.setattr(type(backend), "value_if_on_host", lambda *_: None)
    assert repr(optimizer) == "LossScaleOptimizer(LARC(SGD))"
    assert repr(GuardedOptimizer(keras.optimizers.SGD(0.5))) == "GuardedOptimizer(SGD)"


@pytest.mark.each_backend
def test_repr_reads_nothing_in_compiled_step(compiled):
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(0.5), initial_scale=8.0)
    weight, grad = weight_and_gradient()
    optimizer.build([weight])
    seen = []

    def step(grad):
        optimizer.apply([grad], [weight], scaled=True)
        seen.append(repr(optimizer))

    compiled(step, [weight, *optimizer.variables])(grad)
    eager = "LossScaleOptimizer(SGD, loss_scale=8.0, skipped_steps=0)"
    assert seen[0] in (eager, "LossScaleOptimizer(SGD)")
    assert repr(optimizer) == eager


@pytest.mark.parametrize(
    "make",
    [LossScaleOptimizer, GuardedOptimizer, LARC, lambda _: LARS()],
    ids=["LossScaleOptimizer", "GuardedOptimizer", "LARC", "LARS"],
)
@pytest.mark.parametrize("is_built", [True, False])
def test_pairs_given_to_apply_are_rejected_before_other_warnings(make, is_built):
    optimizer = make(keras.optimizers.SGD(0.5))
    weight, grad = weight_and_gradient()
    if is_built:
        optimizer.build([weight])
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        with pytest.raises(
            TypeError, match=r"pairs.*`optimizer.apply_gradients\(pairs"
        ):
            optimizer.apply(zip([grad], [weight], strict=True))
    assert not [w for w in seen if "divides gradients" in str(w.message)]
