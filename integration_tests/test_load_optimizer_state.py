"""`load_optimizer_state` with files that tf.keras wrote, and its next steps.

`tf_keras_files.py` writes the files.
"""

import keras
import numpy as np
import pytest

import keras_lso
from integration_tests.loaded_states import (
    SHARE,
    STEPS,
    assert_close_weights,
    assert_same_slots,
    built,
    copy_weights,
    make_ours,
    to_numpy,
    train,
    twin,
)
from integration_tests.twin_models import (
    NOT_LEGACY,
    OPTIMIZERS,
    dense,
    functional,
    nested,
    of_many_layers,
    sequential,
)
from keras_lso.mixed_precision import load_optimizer_state

# Keras 3 warns where it writes such a file.
pytestmark = pytest.mark.filterwarnings("ignore:You are saving your model as an HDF5")

# tf.keras writes no state of legacy optimizers into `.keras` files.
FILES = {"new h5": ("h5", False), "legacy h5": ("h5", True), "keras": ("keras", False)}
files = pytest.mark.parametrize("save, legacy", FILES.values(), ids=FILES)


RUNS = {
    f"{name} {file}": (name, *FILES[file])
    for name in OPTIMIZERS
    for file in FILES
    if not (name in NOT_LEGACY and file == "legacy h5")
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("name, save, legacy", RUNS.values(), ids=RUNS)
def test_next_ten_steps_after_load_match_tf_keras(name, save, legacy, theirs):
    make = functional if save == "h5" else sequential
    saved = theirs("trained", make, name, save, legacy=legacy, later=STEPS)
    model = twin(make, saved)
    copy_weights(saved.weights, model)
    # The rate in the file has to replace this one.
    ours = built(make_ours(name, learning_rate=0.9), model)

    load_optimizer_state(ours, saved.path)

    assert int(ours.iterations) == 5
    assert float(ours.learning_rate) == saved.learning_rate
    assert_same_slots(ours, saved)
    train(model, ours, range(5, 5 + STEPS))
    assert int(ours.iterations) == 5 + STEPS
    # The momentum of the legacy Nadam follows another schedule.
    if (name, legacy) != ("nadam", True):
        assert_close_weights(model, saved.later)
    if name == "ema":
        ours.finalize_variable_values(model.trainable_variables)
        assert_close_weights(model, saved.averages)


@pytest.mark.parametrize("legacy", [False, True], ids=["new", "legacy"])
@pytest.mark.parametrize(
    "name, size, arguments",
    [
        ("nadam", 1.0, {}),
        # Legacy classes add epsilon outside the root: small gradients show it.
        ("rmsprop", 1e-3, {}),
        ("adagrad", 1e-3, {"initial_accumulator_value": 0.0}),
    ],
)
def test_steps_deviate_only_for_legacy_formulas_absent_from_keras_3(
    name, size, arguments, legacy, theirs
):
    """The state is the same, and the next steps are slightly different."""

    def make_theirs(k):
        cls, defaults = OPTIMIZERS[name]
        module = k.optimizers.legacy if legacy else k.optimizers
        return getattr(module, cls)(**{**defaults, **arguments})

    saved = theirs("trained", sequential, make_theirs, "h5", size=size, later=STEPS)
    model = twin(sequential, saved)
    copy_weights(saved.weights, model)
    ours = built(make_ours(name, **arguments), model)
    load_optimizer_state(ours, saved.path)
    train(model, ours, range(5, 5 + STEPS), size)
    deviation = max(
        np.abs(to_numpy(a) - e).max() / np.abs(e).max()
        for a, e in zip(model.trainable_variables, saved.later, strict=True)
    )
    assert 1e-4 < deviation < 0.5 if legacy else deviation < SHARE


def test_tf_keras_weights_in_keras_3_format_load_slots(theirs):
    """tf.keras 2.12+ writes `.weights.h5` as Keras 3 does."""
    saved = theirs("trained", sequential, "adam", "keras_3_weights")
    for slot_dtype in (None, "bfloat16"):
        ours = keras_lso.GuardedOptimizer(make_ours("adam"), slot_dtype=slot_dtype)
        built(ours, twin(sequential, saved))
        load_optimizer_state(ours, saved.path)
        assert_same_slots(ours, saved)


@pytest.mark.parametrize("make", [functional, nested])
@files
def test_slots_are_assigned_to_their_variables_in_small_models(
    make, save, legacy, theirs
):
    saved = theirs("trained", make, "adam", save, legacy=legacy)
    keras.utils.clear_session(free_memory=False)
    # The numbers in the layers' names differ from those in the file by one.
    keras.layers.Dense(1)
    ours = built(make_ours("adam"), twin(make, saved))
    load_optimizer_state(ours, saved.path)
    assert_same_slots(ours, saved)


@files
def test_slots_are_assigned_to_their_variables_among_many_layers(save, legacy, theirs):
    options = dict(legacy=legacy, steps=1)
    saved = theirs("numbered_otherwise", of_many_layers, "momentum", save, **options)
    # Some of the numbers in the names differ from those in the file.
    keras.layers.GRU(1), keras.layers.LSTM(1)
    ours = built(make_ours("momentum"), twin(of_many_layers, saved))
    load_optimizer_state(ours, saved.path)
    assert_same_slots(ours, saved)


@files
def test_state_of_fitted_tf_keras_model_loads_and_starts_a_new_scale(
    save, legacy, theirs
):
    saved = theirs("fitted", save, legacy)
    ours = keras_lso.LossScaleOptimizer(make_ours("adam"), initial_scale=2.0**7)
    built(ours, sequential(keras))
    ours.dynamic_scale.assign(2.0**3)
    ours.step_counter.assign(5)
    with pytest.warns(UserWarning, match="no loss scale.*initial_scale=128") as record:
        load_optimizer_state(ours, saved.path)
    assert __file__ in [r.filename for r in record if r.category is UserWarning]
    assert float(ours.loss_scale) == 2.0**7 and int(ours.dynamic_counter) == 0
    assert int(ours.iterations) == 4 and int(ours.skipped_steps) == 0
    assert_same_slots(ours, saved)


def test_decaying_rate_in_file_warns_and_names_matching_schedule(theirs):
    def decaying(k):
        return k.optimizers.legacy.SGD(0.5, decay=0.25)

    saved = theirs("trained", sequential, decaying, "h5", later=STEPS)
    model = twin(sequential, saved)
    ours = built(keras.optimizers.SGD(0.1), model)
    with pytest.warns(UserWarning, match=r"InverseTimeDecay\(.*0\.25"):
        load_optimizer_state(ours, saved.path)
    assert float(ours.learning_rate) == 0.5

    schedule = keras.optimizers.schedules.InverseTimeDecay(0.5, 1, 0.25)
    ours = built(keras.optimizers.SGD(schedule), model)
    copy_weights(saved.weights, model)
    load_optimizer_state(ours, saved.path)
    train(model, ours, range(5, 5 + STEPS))
    assert_close_weights(model, saved.later)


def test_float32_masters_take_slots_of_float32_model(theirs):
    """The masters of float16 variables have the variables' paths."""
    saved = theirs("trained", sequential, "adam", "h5")
    model = dense(None, None, dtype="float16")(keras)
    ours = built(keras_lso.LossScaleOptimizer(make_ours("adam")), model)
    with pytest.warns(UserWarning, match="no loss scale"):
        load_optimizer_state(ours, saved.path)
    assert_same_slots(ours, saved)


def assert_refused(ours, path, match):
    before = [to_numpy(v).tobytes() for v in ours.variables]
    with pytest.raises(ValueError, match=match):
        load_optimizer_state(ours, path)
    assert [to_numpy(v).tobytes() for v in ours.variables] == before


@pytest.fixture
def with_state():
    """An optimizer with a state of its own."""
    model = sequential(keras)
    optimizer = built(keras_lso.LossScaleOptimizer(make_ours("adam")), model)
    train(model, optimizer, range(3))
    return optimizer


@pytest.mark.parametrize("ending", [".keras", ".h5", ".weights.h5"])
def test_file_of_keras_3_is_rejected(ending, with_state, tmp_path):
    model = sequential(keras)
    model.compile(make_ours("adam"), "mse")
    model.optimizer.build(model.trainable_variables)
    path = str(tmp_path / f"model{ending}")
    save = model.save_weights if ending == ".weights.h5" else model.save
    save(path)
    assert_refused(with_state, path, r"Keras 3.*keras_lso\.load_model")


def test_state_loads_into_keras_loss_scale_optimizer(theirs):
    saved = theirs("trained", sequential, "adam", "h5", scaled=True)
    ours = keras.optimizers.LossScaleOptimizer(make_ours("adam"), initial_scale=64.0)
    built(ours, twin(sequential, saved))
    ours.dynamic_scale.assign(8.0)
    ours.step_counter.assign(5)
    with pytest.warns(UserWarning, match="no loss scale"):
        load_optimizer_state(ours, saved.path)
    assert float(ours.dynamic_scale) == 64.0 and int(ours.step_counter) == 0
    assert_same_slots(ours, saved)


def test_files_without_optimizer_state_are_rejected(with_state, theirs):
    for save in ("h5", "keras"):
        saved = theirs("without_optimizer", save)
        assert_refused(with_state, saved.path, "holds no optimizer state")
    saved = theirs("untrained", "h5")
    assert_refused(with_state, saved.path, "no optimizer state")
    saved = theirs("trained", sequential, "adam", "keras", legacy=True)
    assert_refused(with_state, saved.path, "never writes that of .*legacy")
