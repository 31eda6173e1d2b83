"""The state of a loss-scale policy survives every way of saving, at any time."""

import copy

import keras
import numpy as np
import pytest
from keras import ops

import keras_lso
from keras_lso import LossScaleOptimizer
from keras_lso.loss_scales import (
    DynamicLossScale,
    FixedLossScale,
    LogMaxLossScale,
    LossScale,
)
from keras_lso.loss_scales.searching import SearchingLossScale
from testing.harness import bits
from testing.trained_optimizers import saved

BACKEND = keras.backend.backend()


def dtype_of_flags():
    try:
        keras.initializers.Constant(True)((), dtype="bool")
    except Exception:  # Older versions of Keras on TensorFlow multiply it by 1.
        return "uint8"
    return "bool"


FLAG = dtype_of_flags()


@keras.saving.register_keras_serializable("tests")
class Signed(LossScale):
    """Counts good steps upwards and skipped ones downwards, and begins below zero."""

    def build(self, add_variable=None):
        if self.built:
            return
        super().build(add_variable)
        self.balance = self.add_variable("balance", -100, dtype="int")
        self.narrow = self.add_variable("narrow", -128, dtype="int8")
        self.was_finite = self.add_variable("was_finite", True, dtype=FLAG)
        self.drift = self.add_variable("drift", -1.5)

    def step(self, finite, amax=None):
        move = ops.where(finite, 1, -1)
        for count in (self.step_counter, self.balance):
            count.assign(count.value + ops.cast(move, count.dtype))
        self.was_finite.assign(ops.cast(finite, FLAG))
        self.drift.assign(ops.where(finite, self.drift.value, -np.inf))


POLICIES = {
    "auto": lambda: "auto",
    "searching": lambda: SearchingLossScale(64.0, 3, search_period=2),
    "dynamic": lambda: DynamicLossScale(64.0, 3),
    "hysteresis": lambda: DynamicLossScale(64.0, 3, hysteresis=3),
    "fixed": lambda: FixedLossScale(64.0),
    "log max": lambda: LogMaxLossScale(),
    "of a user": lambda: Signed(64.0),
}
# By whether each step so far was finite.
WHEN = {
    "new": [],
    "after an overflow": [False],
    "after two overflows": [False, False],
    "after the first finite step": [True],
    "in the search": [False, True],
    "at any time": [False, True, True, True, True, False],
}


def new_model(policy):
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    scale = POLICIES[policy]()
    option = {"initial_scale": scale} if scale == "auto" else {"loss_scale": scale}
    inner = keras.optimizers.SGD(0.1, momentum=0.9)
    model.compile(LossScaleOptimizer(inner, **option), loss="mean_squared_error")
    model.optimizer.build(model.trainable_variables)
    return model


def trained(policy, pattern):
    model = new_model(policy)
    for finite in pattern:
        grads = [ops.full((1, 1), 0.5 if finite else np.inf), ops.ones(1)]
        model.optimizer.apply(grads, model.trainable_variables, scaled=False)
    return model


def state_of(model):
    """The state that files hold, bit for bit."""
    store = saved(model.optimizer).items()
    return {key: (value.dtype, value.tobytes()) for key, value in store}


def by_file(load):
    def way(model, policy, folder):
        model.save(folder / "model.keras")
        return load(folder / "model.keras")

    return way


def by_weights_file(model, policy, folder):
    model.save_weights(folder / "model.weights.h5")
    new = new_model(policy)
    new.load_weights(folder / "model.weights.h5")
    return new


def by_store(model, policy, folder):
    new = new_model(policy)
    new.optimizer.load_own_variables(saved(model.optimizer))
    return new


def by_list(model, policy, folder):
    new = new_model(policy)
    values = [ops.convert_to_numpy(v) for v in model.optimizer.variables]
    new.optimizer.set_weights(values)
    return new


def by_checkpoint(model, policy, folder):
    import tensorflow as tf

    path = tf.train.Checkpoint(model=model).save(str(folder / "checkpoint"))
    new = new_model(policy)
    tf.train.Checkpoint(model=new).restore(path).assert_consumed()
    return new


WAYS = {
    "keras.saving.load_model": by_file(keras.saving.load_model),
    "keras_lso.load_model": by_file(keras_lso.load_model),
    "load_weights": by_weights_file,
    "load_own_variables": by_store,
    "set_weights": by_list,
    "copy.deepcopy": lambda model, policy, folder: copy.deepcopy(model),
}
if BACKEND == "tensorflow":
    WAYS["tf.train.Checkpoint"] = by_checkpoint


@pytest.mark.exhaustive
@pytest.mark.parametrize("when", WHEN)
@pytest.mark.parametrize("policy", POLICIES)
def test_policy_state_round_trips_through_every_way_of_saving(policy, when, tmp_path):
    model = trained(policy, WHEN[when])
    for name, way in WAYS.items():
        loaded = way(model, policy, tmp_path)
        assert state_of(loaded) == state_of(model), name


@pytest.mark.skipif(BACKEND != "tensorflow", reason="TensorFlow's checkpoints")
@pytest.mark.parametrize("policy", POLICIES)
def test_checkpoint_restores_policy_built_before_optimizer(policy, tmp_path):
    import tensorflow as tf

    def make():
        made = POLICIES[policy]()
        made = SearchingLossScale() if made == "auto" else made
        made.build()
        optimizer = LossScaleOptimizer(keras.optimizers.SGD(0.1), loss_scale=made)
        optimizer.build([keras.Variable([1.0])])
        return optimizer

    optimizer, other = make(), make()
    optimizer.apply([ops.full((1,), np.inf)], scaled=False)
    path = tf.train.Checkpoint(optimizer=optimizer).save(str(tmp_path / "checkpoint"))
    tf.train.Checkpoint(optimizer=other).restore(path)
    assert bits(other.variables) == bits(optimizer.variables)


@pytest.mark.full
@pytest.mark.skipif(
    not hasattr(keras.callbacks, "OrbaxCheckpoint"), reason="Keras 3.14 has it"
)
@pytest.mark.parametrize("policy", ["auto", "of a user"])
@pytest.mark.filterwarnings("ignore:Sharding info not provided")
def test_orbax_restores_state_saved_before_first_finite_step(policy, tmp_path):
    pytest.importorskip("orbax.checkpoint")
    model = trained(policy, [False])
    callback = keras.callbacks.OrbaxCheckpoint(str(tmp_path), save_freq="epoch")
    x = np.full((1, 1), np.inf, "float32")
    model.fit(x, x, callbacks=[callback], verbose=0)
    new = new_model(policy)
    new.load_weights(str(tmp_path))
    loaded = keras_lso.load_model(str(tmp_path))
    assert state_of(loaded) == state_of(new) == state_of(model)


@pytest.mark.parametrize("count", [-1, -5, -(2**31)])
@pytest.mark.parametrize("of", ["the optimizer", "its inner optimizer"])
def test_negative_step_count_in_state_is_rejected(of, count):
    model = trained("auto", [True])
    optimizer = model.optimizer
    inner = optimizer.inner_optimizer
    damaged = optimizer if of == "the optimizer" else inner
    path = damaged._iterations.path
    store = saved(optimizer)
    index = [v.path for v in optimizer.variables].index(path)
    store[str(index)] = np.array(count, store[str(index)].dtype)
    before = state_of(model)
    for load, state in (
        (optimizer.load_own_variables, store),
        (optimizer.set_weights, list(store.values())),
    ):
        with pytest.raises(ValueError, match=f"'{path}' takes whole numbers from 0 "):
            load(state)
        assert state_of(model) == before


def test_damaged_search_state_is_repaired_on_load():
    model = trained("searching", [False, True])
    optimizer = model.optimizer
    position = [v.name for v in optimizer.variables].index("search_state")
    for damaged, mended in ((-77, -2), (100, 3), (-1, -1)):
        store = saved(optimizer)
        store[str(position)] = np.array(damaged, store[str(position)].dtype)
        optimizer.load_own_variables(store)
        assert int(ops.convert_to_numpy(optimizer.variables[position])) == mended
