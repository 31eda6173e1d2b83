"""`load_optimizer_state`, with tf.keras as the reference of what was saved and goes on.

The files are those that tf.keras wrote, in `tf_keras_files.py`.
"""

import warnings

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
    places,
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
    subclassed,
)
from keras_lso._keras_internals.slots import slots_of
from keras_lso.mixed_precision import load_optimizer_state

# Keras's own, where it writes one.
pytestmark = pytest.mark.filterwarnings("ignore:You are saving your model as an HDF5")


# --- The run goes on ----------------------------------------------------------

FORMULAS_DIFFER = {("nadam", True)}


def cases(saves, names=OPTIMIZERS):
    for save in saves:
        for name in names:
            for word in ("new", "legacy"):
                # tf.keras writes no state of legacy optimizers into `.keras` files.
                if word == "new" or (save != "keras" and name not in NOT_LEGACY):
                    case = f"{name}-{word}-{save}"
                    yield pytest.param(name, word == "legacy", save, id=case)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "name, legacy, save",
    [
        *cases(["h5", "keras", "checkpoint"]),
        *cases(["saved_model"], ["momentum", "amsgrad", "nadam"]),
        *cases(["weights", "checkpoint_folder"], ["adam"]),
    ],
)
def test_next_ten_steps_after_load_match_tf_keras(name, legacy, save, theirs):
    make = {"h5": functional, "keras": sequential}.get(save, nested)
    saved = theirs("trained", make, name, save, legacy=legacy, later=STEPS)
    model = twin(make, saved)
    copy_weights(saved.weights, model)
    # Another rate than that of the file, which the file's has to replace.
    ours = built(make_ours(name, learning_rate=0.9), model)

    load_optimizer_state(ours, saved.path)

    assert int(ours.iterations) == 5
    assert float(ours.learning_rate) == saved.learning_rate
    assert_same_slots(ours, saved)
    train(model, ours, range(5, 5 + STEPS))
    assert int(ours.iterations) == 5 + STEPS
    if (name, legacy) not in FORMULAS_DIFFER:
        assert_close_weights(model, saved.later)
    if name == "ema":
        ours.finalize_variable_values(model.trainable_variables)
        assert_close_weights(model, saved.averages)


@pytest.mark.parametrize("legacy", [False, True], ids=["new", "legacy"])
@pytest.mark.parametrize(
    "name, size, arguments",
    [
        # Its momentum follows another schedule.
        ("nadam", 1.0, {}),
        # Those add epsilon outside of the root: it shows where gradients are small.
        ("rmsprop", 1e-3, {}),
        ("rmsprop", 1e-3, {"centered": True}),
        ("adagrad", 1e-3, {"initial_accumulator_value": 0.0}),
    ],
)
def test_steps_deviate_only_for_legacy_formulas_absent_from_keras_3(
    name, size, arguments, legacy, theirs
):
    """The state is right all the same, but the run goes on a little differently."""

    def make_theirs(k):
        cls, defaults = OPTIMIZERS[name]
        module = k.optimizers.legacy if legacy else k.optimizers
        return getattr(module, cls)(**{**defaults, **arguments})

    saved = theirs("trained", sequential, make_theirs, "h5", size=size, later=STEPS)
    model = twin(sequential, saved)
    copy_weights(saved.weights, model)
    ours = built(make_ours(name, **arguments), model)
    load_optimizer_state(ours, saved.path)
    assert_same_slots(ours, saved)
    train(model, ours, range(5, 5 + STEPS), size)
    deviation = max(
        np.abs(to_numpy(a) - e).max() / np.abs(e).max()
        for a, e in zip(model.trainable_variables, saved.later, strict=True)
    )
    if legacy:
        assert 1e-4 < deviation < 0.5
    else:
        assert deviation < SHARE


def test_momentum_cache_of_nadam_is_loaded_or_computed(theirs):
    """Of TF 2.11 and newer only a checkpoint holds it.

    Elsewhere it is multiplied up as Keras does.
    """
    saved = theirs("caches_of_nadam")
    model = twin(sequential, saved)
    caches = []
    for path in saved.paths:
        ours = built(make_ours("nadam"), model)
        load_optimizer_state(ours, path)
        caches.append(float(to_numpy(ours._u_product)))
    # Five products in float32, in the one order and in the other.
    assert caches[1] == pytest.approx(caches[0], rel=5e-7)
    assert caches[2] == 0.25


def test_momentum_cache_of_legacy_nadam_is_loaded(theirs):
    saved = theirs("caches_of_legacy_nadam")
    model = twin(sequential, saved)
    for path in saved.paths:
        ours = built(make_ours("nadam"), model)
        load_optimizer_state(ours, path)
        assert to_numpy(ours._u_product) == saved.cache
        assert 0 < saved.cache < 0.1


def test_checkpoint_with_optimizer_under_two_names_loads(theirs):
    saved = theirs("under_two_names")
    ours = built(make_ours("adam"), twin(sequential, saved))
    load_optimizer_state(ours, saved.path)
    assert_same_slots(ours, saved)


def test_tf_keras_weights_in_keras_3_format_load_slots(theirs):
    """tf.keras 2.12+ writes `.weights.h5` as Keras 3 does."""
    saved = theirs("trained", sequential, "adam", "keras_3_weights")
    ours = built(make_ours("adam"), twin(sequential, saved))
    load_optimizer_state(ours, saved.path)
    assert_same_slots(ours, saved)


def test_inf_in_slot_is_loaded_unchanged(theirs):
    """The square of a finite gradient may be inf; that of a weight is then still."""
    saved = theirs("with_slots_of", "_velocities", np.inf, "checkpoint")
    ours = built(make_ours("adam"), twin(sequential, saved))
    load_optimizer_state(ours, saved.path)
    assert_same_slots(ours, saved)


# --- Which slot belongs to which variable -------------------------------------


@pytest.mark.exhaustive
@pytest.mark.parametrize("numbered", ["alike", "anew"])
@pytest.mark.parametrize("legacy", [False, True], ids=["new", "legacy"])
@pytest.mark.parametrize(
    "make, save",
    [
        *[
            (make, save)
            for make in (sequential, functional, nested)
            for save in ("h5", "keras", "checkpoint")
        ],
        # It holds a checkpoint, and takes a second to write.
        (functional, "saved_model"),
        # tf.keras saves a subclassed model in its own format only.
        (subclassed, "weights"),
        (subclassed, "saved_model"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_slots_are_assigned_to_their_variables_in_small_models(
    make, save, legacy, numbered, theirs
):
    if legacy and save == "keras":
        pytest.skip("tf.keras writes no state of legacy optimizers there")
    name = f"adam {make.__name__} {save} {'legacy' if legacy else 'new'}"
    saved = theirs("trained", make, "adam", save, legacy=legacy, record=name)
    keras.utils.clear_session(free_memory=False)
    if numbered == "anew":
        # The names of the one are still those of other layers in the other.
        keras.layers.Dense(1)
    ours = built(make_ours("adam"), twin(make, saved))
    load_optimizer_state(ours, saved.path)
    assert_same_slots(ours, saved)


@pytest.mark.parametrize(
    "save, legacy",
    [
        ("h5", True),
        pytest.param("keras", False, marks=pytest.mark.full),
        pytest.param("checkpoint", True, marks=pytest.mark.full),
        ("checkpoint", False),
    ],
)
def test_slots_are_assigned_to_their_variables_among_many_layers(save, legacy, theirs):
    options = dict(legacy=legacy, steps=1)
    saved = theirs("numbered_otherwise", of_many_layers, "momentum", save, **options)
    # The numbers in the names agree in part at most.
    keras.layers.GRU(1), keras.layers.LSTM(1)
    ours = built(make_ours("momentum"), twin(of_many_layers, saved))
    load_optimizer_state(ours, saved.path)
    assert_same_slots(ours, saved)


# In `.keras` files tf.keras writes no state of legacy optimizers.
FITTED = {"new": ("h5", "keras", "saved_model"), "legacy": ("h5", "saved_model")}


@pytest.mark.parametrize(
    ("legacy", "save"),
    [
        pytest.param(kind == "legacy", save, id=f"{kind}-{save}")
        for kind, saves in FITTED.items()
        for save in saves
    ],
)
def test_state_of_fitted_tf_keras_model_loads(legacy, save, theirs):
    saved = theirs("fitted", save, legacy)
    ours = keras_lso.LossScaleOptimizer(make_ours("adam"))
    built(ours, sequential(keras))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        load_optimizer_state(ours, saved.path)
    assert int(ours.iterations) == 4
    assert_same_slots(ours, saved)


@pytest.mark.parametrize("save", ["h5", "checkpoint"])
@pytest.mark.parametrize("legacy", [False, True], ids=["new", "legacy"])
def test_slots_are_assigned_by_name_rather_than_order(save, legacy, theirs):
    named = dense("first", "second")
    saved = theirs("trained", named, "adam", save, legacy=legacy)
    model = twin(named, saved)
    ours = make_ours("adam")
    order = [2, 1, 3, 0]
    ours.build([model.trainable_variables[i] for i in order])
    load_optimizer_state(ours, saved.path)
    for slot, values in saved.slots.items():
        for a, i in zip(slots_of(ours)[slot], order, strict=True):
            np.testing.assert_array_equal(to_numpy(a), values[i])


def test_slots_of_renamed_layers_are_assigned_by_order(theirs):
    saved = theirs("trained", dense("body", "head"), "adam", "h5")
    ours = built(make_ours("adam"), dense("encoder", "output")(keras))
    load_optimizer_state(ours, saved.path)
    assert_same_slots(ours, saved)

    crossed = dense("head", "output")(keras)
    with pytest.raises(ValueError, match="'body/kernel'.*might be taken for"):
        load_optimizer_state(built(make_ours("adam"), crossed), saved.path)


# --- Learning rate and hyperparameters ----------------------------------------


@pytest.mark.parametrize("save", ["h5", "keras", "checkpoint"])
def test_own_learning_rate_is_kept_if_file_or_optimizer_has_schedule(save, theirs):
    def with_schedule(k):
        schedule = k.optimizers.schedules.ExponentialDecay(0.5, 3, 0.5)
        return k.optimizers.Adam(schedule)

    saved = theirs("trained", sequential, with_schedule, save)
    model = twin(sequential, saved)
    ours = built(keras.optimizers.Adam(0.125), model)
    load_optimizer_state(ours, saved.path)
    assert float(ours.learning_rate) == 0.125

    saved = theirs("trained", sequential, lambda k: k.optimizers.Adam(0.5), save)
    schedule = keras.optimizers.schedules.ExponentialDecay(0.25, 5, 0.5)
    ours = built(keras.optimizers.Adam(schedule), model)
    load_optimizer_state(ours, saved.path)
    # After as many steps as the schedule takes to halve.
    assert float(ours.learning_rate) == 0.125


@pytest.mark.parametrize("save", ["h5", "checkpoint"])
def test_decaying_rate_in_file_warns_and_names_matching_schedule(save, theirs):
    def decaying(k):
        return k.optimizers.legacy.SGD(0.5, decay=0.25)

    saved = theirs("trained", sequential, decaying, save, later=STEPS)
    model = twin(sequential, saved)
    ours = built(keras.optimizers.SGD(0.1), model)
    with pytest.warns(UserWarning, match=r"InverseTimeDecay\(.*0\.25") as record:
        load_optimizer_state(ours, saved.path)
    assert places(record) == [__file__]
    assert float(ours.learning_rate) == 0.5

    schedule = keras.optimizers.schedules.InverseTimeDecay(0.5, 1, 0.25)
    ours = built(keras.optimizers.SGD(schedule), model)
    copy_weights(saved.weights, model)
    load_optimizer_state(ours, saved.path)
    train(model, ours, range(5, 5 + STEPS))
    assert_close_weights(model, saved.later)


def test_loaded_iterations_count_accumulated_updates_as_in_keras_3(theirs):
    saved = theirs("trained", sequential, "momentum", "h5", later=3)
    model = twin(sequential, saved)
    ours = built(make_ours("momentum", gradient_accumulation_steps=2), model)
    train(model, ours, [0])
    load_optimizer_state(ours, saved.path)
    copy_weights(saved.weights, model)
    assert int(ours.iterations) == 5
    # The mean of twice the same gradient is that gradient.
    train(model, ours, [5, 5, 6, 6, 7, 7])
    assert int(ours.iterations) == 8
    assert_close_weights(model, saved.later)
