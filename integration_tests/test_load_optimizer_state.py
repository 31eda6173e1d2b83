"""`load_optimizer_state`, with tf.keras as the reference of what was saved and goes on.

The files are those that tf.keras wrote, in `tf_keras_files.py`.
"""

import json
import os
import types
import warnings
import zipfile

import keras
import numpy as np
import pytest

import keras_lso
from integration_tests.twin_models import (
    NOT_LEGACY,
    OPTIMIZERS,
    WIDTH,
    dense,
    functional,
    gradients,
    nested,
    of_many_layers,
    sequential,
    start,
    subclassed,
)
from keras_lso._keras_internals.optimizers import chain_of
from keras_lso._keras_internals.slots import slots_of
from keras_lso.mixed_precision import load_optimizer_state

pytest.importorskip("h5py")

# Keras's own, where it writes one.
pytestmark = pytest.mark.filterwarnings("ignore:You are saving your model as an HDF5")

STEPS = 10
# Each step rounds the slots and the weights to float32 a few times, at 6e-8 of the
# largest magnitude in the tensor. After ten steps the two differ by a multiple of
# that: what was measured is at most a third of this.
SHARE = 1e-6


# --- What tf.keras has saved ------------------------------------------------


@pytest.fixture
def theirs(original, tmp_path):
    """`theirs(name, ...)`: what a function of `tf_keras_files.py` returns.

    Its files are in a folder of the test, and `path` is where they are there.
    """

    def get(*arguments, record=None, **options):
        def run():
            from integration_tests import tf_keras_files

            return tf_keras_files.run(*arguments, **options)

        saved = types.SimpleNamespace(**original(run, record))
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        for path, content in saved.files.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(content)
        if hasattr(saved, "path"):
            saved.path = str(folder / saved.path)
        if hasattr(saved, "paths"):
            saved.paths = [str(folder / path) for path in saved.paths]
        return saved

    return get


SAVES = ["h5", "keras", "saved_model", "weights", "checkpoint", "checkpoint_folder"]
WITH_SCALE = {"saved_model", "weights", "checkpoint", "checkpoint_folder"}


# --- Ours -------------------------------------------------------------------


def twin(make, saved):
    """Returns a Keras 3 model that started as the one of tf.keras."""
    model = make(keras)
    x = start(model)
    # The order of the variables is that of the layers: else they would differ.
    np.testing.assert_allclose(
        to_numpy(model(x, training=False)), saved.output, 1e-4, 1e-5
    )
    return model


def make_ours(name, **arguments):
    cls, defaults = OPTIMIZERS[name]
    return getattr(keras.optimizers, cls)(**{**defaults, **arguments})


def built(optimizer, model):
    optimizer.build(model.trainable_variables)
    return optimizer


def train(model, optimizer, steps, size=1.0):
    # The gradients are those of an unscaled loss.
    options = {}
    if isinstance(optimizer, keras_lso.LossScaleOptimizer):
        options["scaled"] = False
    for step in steps:
        grads = [keras.ops.convert_to_tensor(g) for g in gradients(model, step, size)]
        pairs = list(zip(grads, model.trainable_variables, strict=True))
        optimizer.apply_gradients(pairs, **options)


def our_slots(optimizer):
    innermost = chain_of(optimizer)[-1]
    slots = slots_of(innermost)
    if innermost.use_ema:
        slots["average"] = innermost._model_variables_moving_average
    return slots


def assert_same_slots(ours, saved):
    """The loaded slots are the saved ones, bit for bit."""
    actual = our_slots(ours)
    assert actual.keys() == saved.slots.keys()
    for slot, values in saved.slots.items():
        for i, (a, e) in enumerate(zip(actual[slot], values, strict=True)):
            np.testing.assert_array_equal(to_numpy(a), e, f"{slot} {i}")


def assert_close_weights(model, weights):
    for a, e in zip(model.trainable_variables, weights, strict=True):
        atol = SHARE * np.abs(e).max()
        np.testing.assert_allclose(to_numpy(a), e, 0, atol, err_msg=a.path)


def to_numpy(value):
    return np.array(keras.ops.convert_to_numpy(value))


def copy_weights(weights, model):
    for e, a in zip(weights, model.trainable_variables, strict=True):
        a.assign(e)


def places(record):
    """Returns the files that our own warnings point at."""
    # Keras's own, on NumPy's arrays, are of other categories.
    return [r.filename for r in record if r.category is UserWarning]


# --- The run goes on --------------------------------------------------------

FORMULAS_DIFFER = {("nadam", True)}


def cases(saves, names=OPTIMIZERS):
    for save in saves:
        for name in names:
            for word in ("new", "legacy"):
                # tf.keras writes no state of legacy optimizers into `.keras` files.
                if word == "new" or (save != "keras" and name not in NOT_LEGACY):
                    case = f"{name}-{word}-{save}"
                    yield pytest.param(name, word == "legacy", save, id=case)


@pytest.mark.in_turn
@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "name, legacy, save",
    [
        *cases(["h5", "keras", "checkpoint"]),
        *cases(["saved_model"], ["momentum", "amsgrad", "nadam"]),
        *cases(["weights", "checkpoint_folder"], ["adam"]),
    ],
)
def test_the_next_ten_steps_are_those_of_tf_keras(name, legacy, save, theirs):
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


@pytest.mark.in_turn
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
def test_legacy_formulas_that_keras_3_does_not_have(
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


def test_the_momentum_cache_of_nadam_is_loaded_or_computed(theirs):
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


def test_legacy_nadam_gives_its_momentum_cache(theirs):
    saved = theirs("caches_of_legacy_nadam")
    model = twin(sequential, saved)
    for path in saved.paths:
        ours = built(make_ours("nadam"), model)
        load_optimizer_state(ours, path)
        assert to_numpy(ours._u_product) == saved.cache
        assert 0 < saved.cache < 0.1


# --- Which slot belongs to which variable -----------------------------------


@pytest.mark.in_turn
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
def test_no_slot_is_swapped(make, save, legacy, numbered, theirs):
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


@pytest.mark.in_turn
@pytest.mark.parametrize(
    "save, legacy",
    [
        ("h5", True),
        pytest.param("keras", False, marks=pytest.mark.full),
        pytest.param("checkpoint", True, marks=pytest.mark.full),
        ("checkpoint", False),
    ],
)
def test_no_slot_is_swapped_among_many_layers(save, legacy, theirs):
    options = dict(legacy=legacy, steps=1)
    saved = theirs("numbered_otherwise", of_many_layers, "momentum", save, **options)
    # The numbers in the names agree in part at most.
    keras.layers.GRU(1), keras.layers.LSTM(1)
    ours = built(make_ours("momentum"), twin(of_many_layers, saved))
    load_optimizer_state(ours, saved.path)
    assert_same_slots(ours, saved)


@pytest.mark.in_turn
@pytest.mark.exhaustive
@pytest.mark.parametrize("save", ["h5", "keras", "saved_model"])
@pytest.mark.parametrize("legacy", [False, True], ids=["new", "legacy"])
def test_a_model_that_was_fitted(legacy, save, theirs):
    if legacy and save == "keras":
        pytest.skip("tf.keras writes no state of legacy optimizers there")
    saved = theirs("fitted", save, legacy)
    ours = keras_lso.LossScaleOptimizer(make_ours("adam"))
    built(ours, sequential(keras))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        load_optimizer_state(ours, saved.path)
    assert int(ours.iterations) == 4
    assert_same_slots(ours, saved)


@pytest.mark.in_turn
@pytest.mark.parametrize("save", ["h5", "checkpoint"])
@pytest.mark.parametrize("legacy", [False, True], ids=["new", "legacy"])
def test_names_count_more_than_the_order(save, legacy, theirs):
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


def test_renamed_layers_go_by_their_order(theirs):
    saved = theirs("trained", dense("body", "head"), "adam", "h5")
    ours = built(make_ours("adam"), dense("encoder", "output")(keras))
    load_optimizer_state(ours, saved.path)
    assert_same_slots(ours, saved)

    crossed = dense("head", "output")(keras)
    with pytest.raises(ValueError, match="'body/kernel'.*might be taken for"):
        load_optimizer_state(built(make_ours("adam"), crossed), saved.path)


# --- The loss scale ---------------------------------------------------------


@pytest.fixture
def wrapped(theirs):
    """An Adam that was saved in its wrapper, and a model with its weights."""

    def get(save, legacy=False, **options):
        options = {"wrapper": {}, **options}
        saved = theirs("trained", sequential, "adam", save, legacy=legacy, **options)
        model = twin(sequential, saved)
        copy_weights(saved.weights, model)
        return saved, model

    return get


@pytest.mark.in_turn
@pytest.mark.exhaustive
@pytest.mark.parametrize("legacy", [False, True], ids=["new", "legacy"])
@pytest.mark.parametrize("save", sorted(WITH_SCALE))
def test_the_scale_and_the_good_steps_are_loaded(save, legacy, wrapped):
    saved, model = wrapped(save, legacy, later=STEPS)
    ours = built(keras_lso.LossScaleOptimizer(make_ours("adam")), model)
    # What the file says comes after what this run has seen.
    train(model, ours, range(2))
    copy_weights(saved.weights, model)

    load_optimizer_state(ours, saved.path)

    assert float(ours.loss_scale) == 2.0**10
    # Five good steps after the three.
    assert int(ours.dynamic_counter) == 8
    assert int(ours.iterations) == 5 and int(ours.skipped_steps) == 0
    assert_same_slots(ours, saved)
    train(model, ours, range(5, 5 + STEPS))
    assert_close_weights(model, saved.later)
    assert int(ours.dynamic_counter) == saved.counter


@pytest.mark.parametrize(
    "save, legacy", [("h5", True), ("h5", False), ("keras", False)]
)
def test_a_file_without_scale_starts_afresh_with_a_warning(save, legacy, wrapped):
    saved, model = wrapped(save, legacy)
    inner = make_ours("adam")
    ours = keras_lso.LossScaleOptimizer(inner, initial_scale=2.0**7)
    built(ours, model)
    ours.dynamic_scale.assign(2.0**3)
    ours.step_counter.assign(5)
    with pytest.warns(UserWarning, match="no loss scale.*initial_scale=128") as record:
        load_optimizer_state(ours, saved.path)
    assert places(record) == [__file__]
    assert float(ours.loss_scale) == 2.0**7 and int(ours.dynamic_counter) == 0
    assert int(ours.skipped_steps) == 0
    assert_same_slots(ours, saved)


@pytest.mark.parametrize("save", ["h5", "checkpoint"])
def test_an_optimizer_without_scale_needs_none(save, wrapped):
    saved, model = wrapped(save)
    ours = built(make_ours("adam"), model)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        load_optimizer_state(ours, saved.path)
    assert_same_slots(ours, saved)


def test_a_checkpoint_of_a_bare_optimizer_holds_no_scale(theirs):
    saved = theirs("trained", sequential, "adam", "checkpoint")
    model = twin(sequential, saved)
    ours = built(keras_lso.LossScaleOptimizer(make_ours("adam")), model)
    with pytest.warns(UserWarning, match="no loss scale.*initial_scale=32768"):
        load_optimizer_state(ours, saved.path)


def test_a_fixed_scale_stays_as_it_is(wrapped):
    saved, model = wrapped("checkpoint")
    ours = keras_lso.LossScaleOptimizer(make_ours("adam"), False, initial_scale=64)
    built(ours, model)
    with pytest.warns(UserWarning, match="1024.0 is ignored.*FixedLossScale") as record:
        load_optimizer_state(ours, saved.path)
    assert places(record) == [__file__]
    assert float(ours.loss_scale) == 64 and int(ours.iterations) == 5
    # A file without a scale has nothing to ignore.
    saved, _ = wrapped("h5")
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        load_optimizer_state(ours, saved.path)


@pytest.mark.parametrize(
    "scale, good_steps, loaded, counter",
    [
        (2.0**40, 3, 2.0**24, 3),
        (0.0, 3, 2.0**-14, 3),
        (np.nan, 3, 2.0**15, 3),
        (2.0**10, 10**12, 2.0**10, 1999),
    ],
)
def test_a_scale_out_of_bounds_is_mended(scale, good_steps, loaded, counter, theirs):
    saved = theirs("with_a_scale_of", scale, good_steps)
    model = twin(sequential, saved)
    ours = built(keras_lso.LossScaleOptimizer(make_ours("adam")), model)
    load_optimizer_state(ours, saved.path)
    assert float(ours.loss_scale) == loaded
    assert int(ours.dynamic_counter) == counter


@pytest.mark.parametrize("save", ["h5", "checkpoint"])
def test_a_float16_model_trains_on(save, theirs):
    """tf.keras keeps float32 variables under `mixed_float16`; so does Keras 3."""
    mixed = dense(None, None, dtype="mixed_float16")
    saved = theirs("trained", mixed, "adam", save, wrapper={}, later=STEPS)
    model = mixed(keras)
    copy_weights(saved.weights, model)
    ours = built(keras_lso.LossScaleOptimizer(make_ours("adam")), model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        load_optimizer_state(ours, saved.path)
    assert_same_slots(ours, saved)
    train(model, ours, range(5, 5 + STEPS))
    assert_close_weights(model, saved.later)


def test_float32_masters_take_the_slots_of_a_float32_model(theirs):
    """Float16 variables have float32 masters, which carry their paths."""
    saved = theirs("trained", sequential, "adam", "checkpoint")
    model = dense(None, None, dtype="float16")(keras)
    ours = built(keras_lso.LossScaleOptimizer(make_ours("adam")), model)
    with pytest.warns(UserWarning, match="no loss scale"):
        load_optimizer_state(ours, saved.path)
    assert_same_slots(ours, saved)


@pytest.mark.parametrize("save", ["h5", "checkpoint"])
def test_keras_own_wrapper_is_loaded_as_well(save, wrapped):
    saved, model = wrapped(save)
    ours = keras.optimizers.LossScaleOptimizer(make_ours("adam"), initial_scale=64.0)
    built(ours, model)
    ours.dynamic_scale.assign(8.0)
    with warnings.catch_warnings(record=True) as record:
        warnings.simplefilter("always")
        load_optimizer_state(ours, saved.path)
    messages = [str(r.message) for r in record]
    assert any("no loss scale" in m for m in messages) == (save == "h5")
    assert float(ours.dynamic_scale) == (64.0 if save == "h5" else 2.0**10)
    assert int(ours.step_counter) == (0 if save == "h5" else 8)
    assert_same_slots(ours, saved)


def test_a_wrapper_of_tf_2_2_tracks_the_optimizer_as_its_child(theirs):
    saved = theirs("wrapped_as_in_2_2", nested)
    model = twin(nested, saved)
    ours = built(keras_lso.LossScaleOptimizer(make_ours("adam")), model)
    load_optimizer_state(ours, saved.path)
    assert_same_slots(ours, saved)
    assert float(ours.loss_scale) == 2.0**9 and int(ours.dynamic_counter) == 7


# --- Learning rate and hyperparameters --------------------------------------


@pytest.mark.parametrize("save", ["h5", "keras", "checkpoint"])
def test_schedules_stay_on_either_side(save, theirs):
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
def test_a_decaying_rate_is_pointed_out(save, theirs):
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


@pytest.mark.parametrize("save", ["h5", "keras", "checkpoint"])
def test_momentum_of_an_optimizer_without_is_refused(save, theirs):
    legacy = save != "keras"
    saved = theirs("trained", sequential, "momentum", save, legacy=legacy)
    ours = built(make_ours("sgd"), twin(sequential, saved))
    with pytest.raises(ValueError, match=r"Only in the file: \['momentum'\]"):
        load_optimizer_state(ours, saved.path)
    assert int(ours.iterations) == 0


def test_accumulated_steps_count_as_in_keras_3(theirs):
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


# --- What cannot be loaded --------------------------------------------------


def assert_refused(ours, path, match, error=ValueError):
    before = [to_numpy(v).tobytes() for v in ours.variables]
    with pytest.raises(error, match=match):
        load_optimizer_state(ours, path)
    assert [to_numpy(v).tobytes() for v in ours.variables] == before


@pytest.fixture
def with_state():
    """An optimizer with a state of its own."""
    model = sequential(keras)
    optimizer = built(keras_lso.LossScaleOptimizer(make_ours("adam")), model)
    train(model, optimizer, range(3))
    return optimizer


@pytest.mark.parametrize("save", SAVES)
def test_a_model_without_optimizer_is_refused(save, with_state, theirs):
    saved = theirs("without_optimizer", save)
    assert_refused(with_state, saved.path, "holds no optimizer state")


@pytest.mark.parametrize("save", ["h5", "saved_model"])
def test_a_model_saved_without_its_optimizer_is_refused(save, with_state, theirs):
    saved = theirs("without_its_optimizer", save)
    assert_refused(with_state, saved.path, "holds no optimizer state")


def test_legacy_optimizers_leave_no_state_in_a_keras_file(with_state, theirs):
    for wrapper in (None, {}):
        options = dict(legacy=True, wrapper=wrapper)
        saved = theirs("trained", sequential, "adam", "keras", **options)
        assert_refused(with_state, saved.path, "never writes that of .*legacy")


@pytest.mark.parametrize("save", ["h5", "checkpoint"])
def test_an_optimizer_that_has_not_trained_is_refused(save, with_state, theirs):
    saved = theirs("untrained", save)
    assert_refused(with_state, saved.path, "no optimizer state")


def test_several_optimizers_are_named(with_state, theirs):
    saved = theirs("with_two_optimizers")
    assert_refused(with_state, saved.path, "2 optimizers: .*'critic', 'generator'")


def test_one_optimizer_under_two_names_is_one(theirs):
    saved = theirs("under_two_names")
    ours = built(make_ours("adam"), twin(sequential, saved))
    load_optimizer_state(ours, saved.path)
    assert_same_slots(ours, saved)


@pytest.mark.parametrize("ending", [".keras", ".h5", ".weights.h5"])
def test_a_file_of_keras_3_is_refused(ending, with_state, tmp_path):
    model = sequential(keras)
    model.compile(make_ours("adam"), "mse")
    model.optimizer.build(model.trainable_variables)
    path = str(tmp_path / f"model{ending}")
    save = model.save_weights if ending == ".weights.h5" else model.save
    save(path)
    assert_refused(with_state, path, r"Keras 3.*keras_lso\.load_model")


@pytest.mark.skipif(
    keras.backend.backend() != "tensorflow", reason="a checkpoint of TensorFlow"
)
@pytest.mark.default_backend("tensorflow")
def test_a_checkpoint_of_keras_3_is_refused(with_state, tmp_path):
    import tensorflow as tf

    model = sequential(keras)
    optimizer = built(keras.optimizers.Adam(), model)
    path = tf.train.Checkpoint(model=model, optimizer=optimizer).save(
        str(tmp_path / "checkpoint")
    )
    assert_refused(with_state, path, "written by Keras 3")


def test_weights_in_the_format_of_keras_3_hold_the_state_as_well(theirs):
    """tf.keras 2.12+ writes `.weights.h5` as Keras 3 does."""
    saved = theirs("trained", sequential, "adam", "keras_3_weights")
    ours = built(make_ours("adam"), twin(sequential, saved))
    load_optimizer_state(ours, saved.path)
    assert_same_slots(ours, saved)


@pytest.mark.parametrize("save", ["h5", "keras", "checkpoint"])
@pytest.mark.parametrize(
    "layers, width, name, arguments, match",
    [
        (3, WIDTH, *OPTIMIZERS["adam"], r"variables|\d+ slot"),
        (2, 3, *OPTIMIZERS["adam"], "has shape"),
        (2, WIDTH, "Adam", {"amsgrad": True}, "vhat"),
        (2, WIDTH, "Adam", {"use_ema": True}, "average"),
        (2, WIDTH, "Adagrad", {}, "of Adagrad|accumulator|4 slot variables"),
        (2, WIDTH, "Lion", {}, "of Lion|'v'"),
    ],
    ids=["count", "shape", "vhat", "average", "Adagrad", "Lion"],
)
def test_other_counts_shapes_classes_and_slots_are_refused(
    layers, width, name, arguments, match, save, with_state, theirs
):
    make = dense(*layers * [None], width=width)
    optimizer = lambda k: getattr(k.optimizers, name)(**arguments)  # noqa: E731
    saved = theirs("trained", make, optimizer, save)
    assert_refused(with_state, saved.path, match)


@pytest.mark.in_turn
@pytest.mark.parametrize("save", ["h5", "keras", "checkpoint", "saved_model"])
@pytest.mark.parametrize("share", [0.0, 0.5, 0.98])
def test_a_truncated_file_is_refused(save, share, with_state, theirs):
    saved = theirs("trained", sequential, "adam", save, record=f"whole {save}")
    path = saved.path
    if save == "checkpoint":
        path += ".data-00000-of-00001"
    if save == "saved_model":
        path += "/variables/variables.data-00000-of-00001"
    with open(path, "r+b") as file:
        file.truncate(int(share * os.path.getsize(path)))
    assert_refused(with_state, saved.path, "damaged|neither an HDF5")


def test_a_folder_without_checkpoint_is_refused(with_state, tmp_path):
    assert_refused(with_state, tmp_path, "neither a SavedModel nor a checkpoint")


def test_a_checkpoint_of_names_is_refused(with_state, theirs):
    assert_refused(with_state, theirs("of_a_session").path, "tf.train.Checkpoint")


def test_nothing_is_changed_in_a_wrapper_either(with_state, theirs):
    """The scale of a file with a foreign optimizer is not taken."""
    adagrad = lambda k: k.optimizers.Adagrad()  # noqa: E731
    saved = theirs("trained", sequential, adagrad, "checkpoint", wrapper={})
    assert_refused(with_state, saved.path, r"Only in the file: \['accumulator'\]")


@pytest.mark.parametrize("save", ["h5", "keras", "checkpoint"])
def test_nan_in_a_slot_is_refused(save, with_state, theirs):
    """The next step would make weights NaN, though the gradients are finite."""
    saved = theirs("with_slots_of", "_momentums", np.nan, save)
    assert_refused(with_state, saved.path, "momentum.*must not be NaN")


def test_inf_in_a_slot_is_loaded_as_it_is(theirs):
    """The square of a finite gradient may be inf; that of a weight is then still."""
    saved = theirs("with_slots_of", "_velocities", np.inf, "checkpoint")
    ours = built(make_ours("adam"), twin(sequential, saved))
    load_optimizer_state(ours, saved.path)
    assert_same_slots(ours, saved)


def test_a_file_of_before_the_wrapper_was_renamed(wrapped):
    """TF 2.3 called the wrapped optimizer's config `optimizer`."""
    import h5py

    saved, model = wrapped("h5", legacy=True)
    with h5py.File(saved.path, "r+") as file:
        config = json.loads(file.attrs["training_config"])
        wrapper = config["optimizer_config"]["config"]
        wrapper["optimizer"] = wrapper.pop("inner_optimizer")
        wrapper["optimizer"]["config"]["learning_rate"] = 0.25
        file.attrs["training_config"] = json.dumps(config).encode()
    ours = built(make_ours("adam"), model)
    load_optimizer_state(ours, saved.path)
    assert float(ours.learning_rate) == 0.25


def test_a_keras_file_without_its_weights_is_refused(with_state, tmp_path):
    path = tmp_path / "model.keras"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("config.json", "{}")
    assert_refused(with_state, path, "holds no optimizer state")
