"""`load_optimizer_state`, with tf.keras as the judge of what was saved and goes on."""

import json
import logging
import os
import warnings
import zipfile

import keras
import numpy as np
import pytest

import keras_lso
from keras_lso import adapters
from keras_lso.mixed_precision import load_optimizer_state

tf = pytest.importorskip("tensorflow")
tf_keras = pytest.importorskip("tf_keras")
pytest.importorskip("h5py")

STEPS = 10
WIDTH = 4
# Each step rounds the slots and the weights to float32 a few times, at 6e-8 of the
# largest magnitude in the tensor. After ten steps the two differ by a multiple of
# that: what was measured is at most a third of this.
SHARE = 1e-6


# --- Models that are alike, layers that are alike ---------------------------


def sequential(k):
    """Two layers of the same shapes: a swap shows in no shape."""
    return k.Sequential(
        [k.Input((WIDTH,)), k.layers.Dense(WIDTH), k.layers.Dense(WIDTH)]
    )


def functional(k):
    """Two branches, whose layers were created in another order than they run."""
    inputs = k.Input((WIDTH,))
    last, right, left = (k.layers.Dense(WIDTH) for _ in range(3))
    normalized = k.layers.BatchNormalization()(right(inputs))
    total = k.layers.Add()([left(inputs), normalized])
    return k.Model(inputs, last(total))


def nested(k):
    """A model between two layers: their variables are not the first in a checkpoint."""
    inputs = k.Input((WIDTH,))
    inner = k.Sequential(
        [k.Input((WIDTH,)), k.layers.Dense(WIDTH, name="inner"), k.layers.Dense(WIDTH)]
    )
    x = inner(k.layers.Dense(WIDTH)(inputs))
    return k.Model(inputs, k.layers.Dense(WIDTH)(x))


def subclassed(k):
    class Network(k.Model):
        def __init__(self):
            super().__init__()
            self.second = k.layers.Dense(WIDTH)
            self.first = k.layers.Dense(WIDTH)
            self.blocks = [k.layers.Dense(WIDTH), k.layers.Dense(WIDTH)]

        def call(self, inputs):
            x = self.second(self.first(inputs))
            for block in self.blocks:
                x = block(x)
            return x

    model = Network()
    model(np.zeros((1, WIDTH), "float32"))
    return model


def of_many_layers(k):
    """Layers of many kinds, some with other names in Keras 3, each of them twice."""
    inputs = k.Input((WIDTH,))
    x = k.layers.Reshape((2, 2))(inputs)
    for _ in range(2):
        lstm = k.layers.LSTM(2, return_sequences=True, unit_forget_bias=False)
        x = k.layers.Bidirectional(lstm)(x)
        x = k.layers.MultiHeadAttention(2, 2)(x, x)
        x = k.layers.LayerNormalization()(x)
        x = k.layers.GRU(4, return_sequences=True)(x)
        x = k.layers.SeparableConv1D(4, 1)(x)
        x = k.layers.Reshape((2, 2, 2))(x)
        x = k.layers.DepthwiseConv2D(1)(x)
        x = k.layers.Conv2DTranspose(2, 1)(x)
        x = k.layers.Reshape((2, 4))(x)
        x = k.layers.TimeDistributed(k.layers.Dense(4))(x)
        x = k.layers.PReLU()(x)
    return k.Model(inputs, k.layers.Flatten()(x))


def make_pair(make):
    """Returns a tf.keras model and a Keras 3 model with its weights."""
    theirs, ours = make(tf_keras), make(keras)
    random = np.random.default_rng(1)
    for their, our in zip(
        theirs.trainable_variables, ours.trainable_variables, strict=True
    ):
        value = random.normal(size=their.shape).astype("float32")
        their.assign(value)
        our.assign(value)
    # The order of the variables is that of the layers: else they would differ.
    x = random.normal(size=(2, WIDTH)).astype("float32")
    np.testing.assert_allclose(
        to_numpy(ours(x, training=False)), theirs(x, training=False), 1e-4, 1e-5
    )
    return theirs, ours


def gradients(model, step):
    random = np.random.default_rng(100 + step)
    return [
        random.normal(size=v.shape).astype("float32") for v in model.trainable_variables
    ]


def train_theirs(model, optimizer, steps):
    for step in steps:
        grads = [tf.constant(g) for g in gradients(model, step)]
        optimizer.apply_gradients(zip(grads, model.trainable_variables, strict=True))


def train_ours(model, optimizer, steps):
    # The gradients are those of an unscaled loss.
    options = {}
    if isinstance(optimizer, keras_lso.LossScaleOptimizer):
        options["scaled"] = False
    for step in steps:
        grads = [keras.ops.convert_to_tensor(g) for g in gradients(model, step)]
        pairs = list(zip(grads, model.trainable_variables, strict=True))
        optimizer.apply_gradients(pairs, **options)


@pytest.fixture(autouse=True)
def quiet():
    """tf.keras asks whether the loss was scaled, and not to write `.h5` files."""
    logger = logging.getLogger("tensorflow")
    level = logger.level
    logger.setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message="You are saving your model as an HDF5"
        )
        yield
    logger.setLevel(level)


# --- Files ------------------------------------------------------------------


def save_h5(model, optimizer, folder):
    path = os.path.join(folder, "model.h5")
    model.save(path)
    return path


def save_keras(model, optimizer, folder):
    path = os.path.join(folder, "model.keras")
    model.save(path)
    return path


def save_saved_model(model, optimizer, folder):
    path = os.path.join(folder, "saved_model")
    model.save(path, save_format="tf")
    return path


def save_weights(model, optimizer, folder):
    path = os.path.join(folder, "weights")
    model.save_weights(path, save_format="tf")
    return path


def save_checkpoint(model, optimizer, folder):
    checkpoint = tf.train.Checkpoint(model=model, optimizer=optimizer)
    return checkpoint.save(os.path.join(folder, "checkpoint"))


def save_checkpoint_folder(model, optimizer, folder):
    return os.path.dirname(save_checkpoint(model, optimizer, folder))


SAVERS = {
    f.__name__.removeprefix("save_"): f
    for f in (
        save_h5,
        save_keras,
        save_saved_model,
        save_weights,
        save_checkpoint,
        save_checkpoint_folder,
    )
}
WITH_SCALE = {"saved_model", "weights", "checkpoint", "checkpoint_folder"}


def save_after_training(model, optimizer, save, folder, steps=5):
    model.compile(optimizer, "mse")
    train_theirs(model, optimizer, range(steps))
    return SAVERS[save](model, optimizer, str(folder))


# --- Optimizers -------------------------------------------------------------

# Name of the class and its arguments. The values differ from all defaults.
OPTIMIZERS = {
    "sgd": ("SGD", {"learning_rate": 0.05}),
    "momentum": ("SGD", {"learning_rate": 0.05, "momentum": 0.8}),
    "nesterov": ("SGD", {"learning_rate": 0.05, "momentum": 0.8, "nesterov": True}),
    "adam": ("Adam", {"learning_rate": 0.02, "beta_1": 0.8, "beta_2": 0.99}),
    "amsgrad": ("Adam", {"learning_rate": 0.02, "beta_2": 0.9, "amsgrad": True}),
    "adamw": ("AdamW", {"learning_rate": 0.02, "weight_decay": 0.1}),
    "rmsprop": ("RMSprop", {"learning_rate": 0.02, "rho": 0.8}),
    "rmsprop_momentum": ("RMSprop", {"learning_rate": 0.02, "momentum": 0.8}),
    "rmsprop_centered": (
        "RMSprop",
        {"learning_rate": 0.02, "momentum": 0.8, "centered": True},
    ),
    "adagrad": ("Adagrad", {"learning_rate": 0.02}),
    "adadelta": ("Adadelta", {"learning_rate": 0.5, "rho": 0.8}),
    "adamax": ("Adamax", {"learning_rate": 0.02, "beta_2": 0.9}),
    "nadam": ("Nadam", {"learning_rate": 0.02, "beta_1": 0.8}),
    "ftrl": ("Ftrl", {"learning_rate": 0.05, "l1_regularization_strength": 0.01}),
    "lion": ("Lion", {"learning_rate": 0.02, "beta_2": 0.8}),
    "ema": ("Adam", {"learning_rate": 0.02, "use_ema": True, "ema_momentum": 0.8}),
}
NOT_LEGACY = {"adamw", "lion", "ema"}


def make_theirs(name, legacy=False):
    cls, arguments = OPTIMIZERS[name]
    module = tf_keras.optimizers.legacy if legacy else tf_keras.optimizers
    return getattr(module, cls)(**arguments)


def make_ours(name, **arguments):
    cls, defaults = OPTIMIZERS[name]
    return getattr(keras.optimizers, cls)(**{**defaults, **arguments})


def built(optimizer, model):
    optimizer.build(model.trainable_variables)
    return optimizer


def their_slots(model, optimizer):
    """Returns the slots of each trainable variable, by the names of `adapters`."""
    if isinstance(optimizer, tf_keras.optimizers.legacy.Optimizer):
        return {
            slot: [optimizer.get_slot(v, slot) for v in model.trainable_variables]
            for slot in optimizer.get_slot_names()
        }
    words = {
        "_momentums": "m",
        "_velocities": "v",
        "_velocity_hats": "vhat",
        "_accumulators": "accumulator",
        "_linears": "linear",
        "_accumulated_grads": "accum_grad",
        "_accumulated_delta_vars": "accum_var",
        "_m": "m",
        "_u": "v",
        "_model_variables_moving_average": "average",
    }
    if isinstance(optimizer, tf_keras.optimizers.RMSprop):
        words = {"_velocities": "rms", "_momentums": "momentum"}
        words["_average_gradients"] = "mg"
    if isinstance(optimizer, tf_keras.optimizers.SGD):
        words = {"momentums": "momentum"} if optimizer.momentum else {}
    if isinstance(optimizer, tf_keras.optimizers.Lion):
        words = {"momentums": "m"}
    return {
        slot: list(getattr(optimizer, name))
        for name, slot in words.items()
        if getattr(optimizer, name, None)
    }


def our_slots(optimizer):
    innermost = adapters.chain(optimizer)[-1]
    slots = adapters.slots(innermost)
    if innermost.use_ema:
        slots["average"] = innermost._model_variables_moving_average
    return slots


def assert_same_slots(ours, theirs, model):
    """The loaded slots are the saved ones, bit for bit."""
    expected = their_slots(model, theirs)
    actual = our_slots(ours)
    assert actual.keys() == expected.keys()
    for slot, values in expected.items():
        for i, (a, e) in enumerate(zip(actual[slot], values, strict=True)):
            np.testing.assert_array_equal(to_numpy(a), e.numpy(), f"{slot} {i}")


def assert_close_weights(ours, theirs):
    for a, e in zip(ours.trainable_variables, theirs.trainable_variables, strict=True):
        e = e.numpy()
        atol = SHARE * np.abs(e).max()
        np.testing.assert_allclose(to_numpy(a), e, 0, atol, err_msg=a.path)


def to_numpy(value):
    return np.array(keras.ops.convert_to_numpy(value))


def copy_weights(theirs, ours):
    for e, a in zip(theirs.trainable_variables, ours.trainable_variables, strict=True):
        a.assign(e.numpy())


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


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "name, legacy, save",
    [
        *cases(["h5", "keras", "checkpoint"]),
        *cases(["saved_model"], ["momentum", "amsgrad", "nadam"]),
        *cases(["weights", "checkpoint_folder"], ["adam"]),
    ],
)
def test_the_next_ten_steps_are_those_of_tf_keras(name, legacy, save, tmp_path):
    make = {"h5": functional, "keras": sequential}.get(save, nested)
    their_model, our_model = make_pair(make)
    theirs = make_theirs(name, legacy)
    path = save_after_training(their_model, theirs, save, tmp_path)
    copy_weights(their_model, our_model)
    # Another rate than that of the file, which the file's has to replace.
    ours = built(make_ours(name, learning_rate=0.9), our_model)

    load_optimizer_state(ours, path)

    assert int(ours.iterations) == 5
    assert float(ours.learning_rate) == float(theirs.learning_rate)
    assert_same_slots(ours, theirs, their_model)
    train_theirs(their_model, theirs, range(5, 5 + STEPS))
    train_ours(our_model, ours, range(5, 5 + STEPS))
    assert int(ours.iterations) == 5 + STEPS
    if (name, legacy) not in FORMULAS_DIFFER:
        assert_close_weights(our_model, their_model)
    if name == "ema":
        for optimizer, model in ((ours, our_model), (theirs, their_model)):
            optimizer.finalize_variable_values(model.trainable_variables)
        assert_close_weights(our_model, their_model)


def deviation(name, scale, legacy, tmp_path, monkeypatch, **arguments):
    """Returns how far Keras 3 is from tf.keras after ten steps, in shares."""
    monkeypatch.setitem(
        OPTIMIZERS, name, (OPTIMIZERS[name][0], {**OPTIMIZERS[name][1], **arguments})
    )
    unscaled = gradients
    monkeypatch.setitem(
        globals(),
        "gradients",
        lambda *args: [g * np.float32(scale) for g in unscaled(*args)],
    )
    their_model, our_model = make_pair(sequential)
    theirs = make_theirs(name, legacy)
    path = save_after_training(their_model, theirs, "h5", tmp_path)
    copy_weights(their_model, our_model)
    ours = built(make_ours(name), our_model)
    load_optimizer_state(ours, path)
    assert_same_slots(ours, theirs, their_model)
    train_theirs(their_model, theirs, range(5, 5 + STEPS))
    train_ours(our_model, ours, range(5, 5 + STEPS))
    return max(
        np.abs(to_numpy(a) - e.numpy()).max() / np.abs(e.numpy()).max()
        for a, e in zip(
            our_model.trainable_variables, their_model.trainable_variables, strict=True
        )
    )


@pytest.mark.parametrize(
    "name, scale, arguments",
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
    name, scale, arguments, tmp_path, monkeypatch
):
    """The state is right all the same, but the run goes on a little differently."""
    new, old = tmp_path / "new", tmp_path / "old"
    new.mkdir()
    old.mkdir()
    assert deviation(name, scale, False, new, monkeypatch, **arguments) < SHARE
    measured = deviation(name, scale, True, old, monkeypatch, **arguments)
    assert 1e-4 < measured < 0.5


def test_the_momentum_cache_of_nadam_is_loaded_or_computed(tmp_path):
    """Of TF 2.11 and newer only a checkpoint holds it.

    Elsewhere it is multiplied up as Keras does.
    """
    their_model, our_model = make_pair(sequential)
    theirs = make_theirs("nadam")
    checkpoint = save_after_training(their_model, theirs, "checkpoint", tmp_path)
    h5 = SAVERS["h5"](their_model, theirs, str(tmp_path))
    theirs._u_product.assign(0.25)
    edited = SAVERS["weights"](their_model, theirs, str(tmp_path))
    caches = []
    for path in (checkpoint, h5, edited):
        ours = built(make_ours("nadam"), our_model)
        load_optimizer_state(ours, path)
        caches.append(float(to_numpy(ours._u_product)))
    # Five products in float32, in the one order and in the other.
    assert caches[1] == pytest.approx(caches[0], rel=5e-7)
    assert caches[2] == 0.25


def test_legacy_nadam_gives_its_momentum_cache(tmp_path):
    their_model, our_model = make_pair(sequential)
    theirs = make_theirs("nadam", legacy=True)
    path = save_after_training(their_model, theirs, "checkpoint", tmp_path)
    h5 = SAVERS["h5"](their_model, theirs, str(tmp_path))
    for file in (path, h5):
        ours = built(make_ours("nadam"), our_model)
        load_optimizer_state(ours, file)
        assert to_numpy(ours._u_product) == theirs._m_cache.numpy()
        assert 0 < float(theirs._m_cache) < 0.1


# --- Which slot belongs to which variable -----------------------------------


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
def test_no_slot_is_swapped(make, save, legacy, numbered, tmp_path):
    if legacy and save == "keras":
        pytest.skip("tf.keras writes no state of legacy optimizers there")
    for k in (keras, tf_keras):
        k.backend.clear_session()
    if numbered == "anew":
        # The names of the one are still those of other layers in the other.
        keras.layers.Dense(1)
    their_model, our_model = make_pair(make)
    theirs = make_theirs("adam", legacy)
    path = save_after_training(their_model, theirs, save, tmp_path)
    ours = built(make_ours("adam"), our_model)
    load_optimizer_state(ours, path)
    assert_same_slots(ours, theirs, their_model)


@pytest.mark.parametrize(
    "save, legacy",
    [("h5", True), ("keras", False), ("checkpoint", True), ("checkpoint", False)],
)
def test_no_slot_is_swapped_among_many_layers(save, legacy, tmp_path):
    # The numbers in the names agree in part at most.
    keras.layers.GRU(1), keras.layers.LSTM(1), tf_keras.layers.PReLU()
    their_model, our_model = make_pair(of_many_layers)
    theirs = make_theirs("momentum", legacy)
    path = save_after_training(their_model, theirs, save, tmp_path, steps=1)
    ours = built(make_ours("momentum"), our_model)
    load_optimizer_state(ours, path)
    assert_same_slots(ours, theirs, their_model)


@pytest.mark.exhaustive
@pytest.mark.parametrize("save", ["h5", "keras", "saved_model"])
@pytest.mark.parametrize("legacy", [False, True], ids=["new", "legacy"])
def test_a_model_that_was_fitted(legacy, save, tmp_path):
    """`fit` creates the slots in a graph, and a strategy in containers of its own."""
    if legacy and save == "keras":
        pytest.skip("tf.keras writes no state of legacy optimizers there")
    with tf.distribute.OneDeviceStrategy("/cpu:0").scope():
        their_model, inner = sequential(tf_keras), make_theirs("adam", legacy)
        theirs = tf_keras.mixed_precision.LossScaleOptimizer(inner)
        their_model.compile(theirs, "mse")
    x = np.random.default_rng(0).normal(size=(16, WIDTH)).astype("float32")
    their_model.fit(x, x, batch_size=4, verbose=0)
    path = SAVERS[save](their_model, theirs, str(tmp_path))
    ours = keras_lso.LossScaleOptimizer(make_ours("adam"))
    built(ours, sequential(keras))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        load_optimizer_state(ours, path)
    assert int(ours.iterations) == 4
    assert_same_slots(ours, theirs.inner_optimizer, their_model)


@pytest.mark.parametrize("save", ["h5", "checkpoint"])
@pytest.mark.parametrize("legacy", [False, True], ids=["new", "legacy"])
def test_names_count_more_than_the_order(save, legacy, tmp_path):
    def named(k):
        names = ["first", "second"]
        return k.Sequential(
            [k.Input((WIDTH,)), *(k.layers.Dense(WIDTH, name=n) for n in names)]
        )

    their_model, our_model = make_pair(named)
    theirs = make_theirs("adam", legacy)
    path = save_after_training(their_model, theirs, save, tmp_path)
    ours = make_ours("adam")
    order = [2, 1, 3, 0]
    ours.build([our_model.trainable_variables[i] for i in order])
    load_optimizer_state(ours, path)
    for slot, values in their_slots(their_model, theirs).items():
        for a, i in zip(adapters.slots(ours)[slot], order, strict=True):
            np.testing.assert_array_equal(to_numpy(a), values[i].numpy())


def test_renamed_layers_go_by_their_order(tmp_path):
    def make(k, names):
        layers = [k.layers.Dense(WIDTH, name=n) for n in names]
        return k.Sequential([k.Input((WIDTH,)), *layers])

    theirs = make_theirs("adam")
    their_model = make(tf_keras, ["body", "head"])
    path = save_after_training(their_model, theirs, "h5", tmp_path)
    our_model = make(keras, ["encoder", "output"])
    ours = built(make_ours("adam"), our_model)
    load_optimizer_state(ours, path)
    assert_same_slots(ours, theirs, their_model)

    crossed = make(keras, ["head", "output"])
    with pytest.raises(ValueError, match="'body/kernel'.*might be taken for"):
        load_optimizer_state(built(make_ours("adam"), crossed), path)


# --- The loss scale ---------------------------------------------------------


def their_wrapper(legacy=False, scale=2.0**10, good_steps=3, **arguments):
    inner = make_theirs("adam", legacy)
    wrapper = tf_keras.mixed_precision.LossScaleOptimizer(inner, **arguments)
    if wrapper.dynamic:
        wrapper._loss_scale._current_loss_scale.assign(scale)
        wrapper._loss_scale._counter.assign(good_steps)
    return wrapper


def save_wrapped(save, tmp_path, legacy=False, steps=5, **arguments):
    """Returns both models and the path of the one that was saved."""
    their_model, our_model = make_pair(sequential)
    theirs = their_wrapper(legacy, **arguments)
    path = save_after_training(their_model, theirs, save, tmp_path, steps)
    copy_weights(their_model, our_model)
    return their_model, theirs, our_model, path


@pytest.mark.exhaustive
@pytest.mark.parametrize("legacy", [False, True], ids=["new", "legacy"])
@pytest.mark.parametrize("save", sorted(WITH_SCALE))
def test_the_scale_and_the_good_steps_are_loaded(save, legacy, tmp_path):
    their_model, theirs, our_model, path = save_wrapped(save, tmp_path, legacy)
    ours = built(keras_lso.LossScaleOptimizer(make_ours("adam")), our_model)
    # What the file says comes after what this run has seen.
    train_ours(our_model, ours, range(2))
    copy_weights(their_model, our_model)

    load_optimizer_state(ours, path)

    assert float(ours.loss_scale) == 2.0**10
    # Five good steps after the three.
    assert int(ours.dynamic_counter) == 8
    assert int(ours.iterations) == 5 and int(ours.skipped_steps) == 0
    assert_same_slots(ours, theirs.inner_optimizer, their_model)
    train_theirs(their_model, theirs, range(5, 5 + STEPS))
    train_ours(our_model, ours, range(5, 5 + STEPS))
    assert_close_weights(our_model, their_model)
    assert int(ours.dynamic_counter) == int(theirs.dynamic_counter)


@pytest.mark.parametrize(
    "save, legacy", [("h5", True), ("h5", False), ("keras", False)]
)
def test_a_file_without_scale_starts_afresh_with_a_warning(save, legacy, tmp_path):
    their_model, theirs, our_model, path = save_wrapped(save, tmp_path, legacy)
    inner = make_ours("adam")
    ours = keras_lso.LossScaleOptimizer(inner, initial_scale=2.0**7)
    built(ours, our_model)
    ours.dynamic_scale.assign(2.0**3)
    ours.step_counter.assign(5)
    with pytest.warns(UserWarning, match="no loss scale.*initial_scale=128") as record:
        load_optimizer_state(ours, path)
    assert places(record) == [__file__]
    assert float(ours.loss_scale) == 2.0**7 and int(ours.dynamic_counter) == 0
    assert int(ours.skipped_steps) == 0
    assert_same_slots(ours, theirs.inner_optimizer, their_model)


@pytest.mark.parametrize("save", ["h5", "checkpoint"])
def test_an_optimizer_without_scale_needs_none(save, tmp_path):
    their_model, theirs, our_model, path = save_wrapped(save, tmp_path)
    ours = built(make_ours("adam"), our_model)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        load_optimizer_state(ours, path)
    assert_same_slots(ours, theirs.inner_optimizer, their_model)


def test_a_checkpoint_of_a_bare_optimizer_holds_no_scale(tmp_path):
    their_model, our_model = make_pair(sequential)
    theirs = make_theirs("adam")
    path = save_after_training(their_model, theirs, "checkpoint", tmp_path)
    ours = built(keras_lso.LossScaleOptimizer(make_ours("adam")), our_model)
    with pytest.warns(UserWarning, match="no loss scale.*initial_scale=32768"):
        load_optimizer_state(ours, path)


def test_a_fixed_scale_stays_as_it_is(tmp_path):
    *_, our_model, path = save_wrapped("checkpoint", tmp_path)
    ours = keras_lso.LossScaleOptimizer(make_ours("adam"), False, initial_scale=64)
    built(ours, our_model)
    with pytest.warns(UserWarning, match="1024.0 is ignored.*FixedLossScale") as record:
        load_optimizer_state(ours, path)
    assert places(record) == [__file__]
    assert float(ours.loss_scale) == 64 and int(ours.iterations) == 5
    # A file without a scale has nothing to ignore.
    path = SAVERS["h5"](*save_wrapped("h5", tmp_path)[:2], str(tmp_path))
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        load_optimizer_state(ours, path)


@pytest.mark.parametrize(
    "saved, good_steps, loaded, counter",
    [
        (2.0**40, 3, 2.0**24, 3),
        (0.0, 3, 2.0**-14, 3),
        (np.nan, 3, 2.0**15, 3),
        (2.0**10, 10**12, 2.0**10, 1999),
    ],
)
def test_a_scale_out_of_bounds_is_mended(saved, good_steps, loaded, counter, tmp_path):
    their_model, our_model = make_pair(sequential)
    theirs = their_wrapper()
    their_model.compile(theirs, "mse")
    theirs.build(their_model.trainable_variables)
    theirs._loss_scale._current_loss_scale.assign(saved)
    theirs._loss_scale._counter.assign(good_steps)
    path = SAVERS["checkpoint"](their_model, theirs, str(tmp_path))
    ours = built(keras_lso.LossScaleOptimizer(make_ours("adam")), our_model)
    load_optimizer_state(ours, path)
    assert float(ours.loss_scale) == loaded
    assert int(ours.dynamic_counter) == counter


@pytest.mark.parametrize("save", ["h5", "checkpoint"])
def test_a_float16_model_trains_on(save, tmp_path):
    """tf.keras keeps float32 variables under `mixed_float16`; so does Keras 3."""

    def mixed(k):
        layers = [k.layers.Dense(WIDTH, dtype="mixed_float16") for _ in range(2)]
        return k.Sequential([k.Input((WIDTH,)), *layers])

    theirs, their_model = their_wrapper(), mixed(tf_keras)
    our_model = mixed(keras)
    path = save_after_training(their_model, theirs, save, tmp_path)
    copy_weights(their_model, our_model)
    ours = built(keras_lso.LossScaleOptimizer(make_ours("adam")), our_model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        load_optimizer_state(ours, path)
    assert_same_slots(ours, theirs.inner_optimizer, their_model)
    train_theirs(their_model, theirs, range(5, 5 + STEPS))
    train_ours(our_model, ours, range(5, 5 + STEPS))
    assert_close_weights(our_model, their_model)


def test_float32_masters_take_the_slots_of_a_float32_model(tmp_path):
    """Float16 variables have float32 masters, which carry their paths."""
    their_model, _ = make_pair(sequential)
    theirs = make_theirs("adam")
    path = save_after_training(their_model, theirs, "checkpoint", tmp_path)
    layers = [keras.layers.Dense(WIDTH, dtype="float16") for _ in range(2)]
    our_model = keras.Sequential([keras.Input((WIDTH,)), *layers])
    ours = built(keras_lso.LossScaleOptimizer(make_ours("adam")), our_model)
    with pytest.warns(UserWarning, match="no loss scale"):
        load_optimizer_state(ours, path)
    assert_same_slots(ours, theirs, their_model)


@pytest.mark.parametrize("save", ["h5", "checkpoint"])
def test_keras_own_wrapper_is_loaded_as_well(save, tmp_path):
    their_model, theirs, our_model, path = save_wrapped(save, tmp_path)
    ours = keras.optimizers.LossScaleOptimizer(make_ours("adam"), initial_scale=64.0)
    built(ours, our_model)
    ours.dynamic_scale.assign(8.0)
    with warnings.catch_warnings(record=True) as record:
        warnings.simplefilter("always")
        load_optimizer_state(ours, path)
    messages = [str(r.message) for r in record]
    assert any("no loss scale" in m for m in messages) == (save == "h5")
    assert float(ours.dynamic_scale) == (64.0 if save == "h5" else 2.0**10)
    assert int(ours.step_counter) == (0 if save == "h5" else 8)
    assert_same_slots(ours, theirs.inner_optimizer, their_model)


def test_a_wrapper_of_tf_2_2_tracks_the_optimizer_as_its_child(tmp_path):
    """It has no slots of its own: TensorFlow lets no two objects own one."""
    their_model, our_model = make_pair(nested)
    theirs = make_theirs("adam", legacy=True)
    train_theirs(their_model, theirs, range(5))
    state = their_wrapper(scale=2.0**9, good_steps=7)._loss_scale
    wrapper = tf.train.Checkpoint(base_optimizer=theirs, loss_scale=state)
    checkpoint = tf.train.Checkpoint(model=their_model, optimizer=wrapper)
    path = checkpoint.save(str(tmp_path / "checkpoint"))
    ours = built(keras_lso.LossScaleOptimizer(make_ours("adam")), our_model)
    load_optimizer_state(ours, path)
    assert_same_slots(ours, theirs, their_model)
    assert float(ours.loss_scale) == 2.0**9 and int(ours.dynamic_counter) == 7


# --- Learning rate and hyperparameters --------------------------------------


@pytest.mark.parametrize("save", ["h5", "keras", "checkpoint"])
def test_schedules_stay_on_either_side(save, tmp_path):
    their_model, our_model = make_pair(sequential)
    schedule = tf_keras.optimizers.schedules.ExponentialDecay(0.5, 3, 0.5)
    theirs = tf_keras.optimizers.Adam(schedule)
    path = save_after_training(their_model, theirs, save, tmp_path)
    ours = built(keras.optimizers.Adam(0.125), our_model)
    load_optimizer_state(ours, path)
    assert float(ours.learning_rate) == 0.125

    theirs = tf_keras.optimizers.Adam(0.5)
    path = save_after_training(their_model, theirs, save, tmp_path)
    schedule = keras.optimizers.schedules.ExponentialDecay(0.25, 5, 0.5)
    ours = built(keras.optimizers.Adam(schedule), our_model)
    load_optimizer_state(ours, path)
    # After as many steps as the schedule takes to halve.
    assert float(ours.learning_rate) == 0.125


@pytest.mark.parametrize("save", ["h5", "checkpoint"])
def test_a_decaying_rate_is_pointed_out(save, tmp_path):
    their_model, our_model = make_pair(sequential)
    theirs = tf_keras.optimizers.legacy.SGD(0.5, decay=0.25)
    path = save_after_training(their_model, theirs, save, tmp_path)
    ours = built(keras.optimizers.SGD(0.1), our_model)
    with pytest.warns(UserWarning, match=r"InverseTimeDecay\(.*0\.25") as record:
        load_optimizer_state(ours, path)
    assert places(record) == [__file__]
    assert float(ours.learning_rate) == 0.5

    schedule = keras.optimizers.schedules.InverseTimeDecay(0.5, 1, 0.25)
    ours = built(keras.optimizers.SGD(schedule), our_model)
    copy_weights(their_model, our_model)
    load_optimizer_state(ours, path)
    train_theirs(their_model, theirs, range(5, 5 + STEPS))
    train_ours(our_model, ours, range(5, 5 + STEPS))
    assert_close_weights(our_model, their_model)


@pytest.mark.parametrize("save", ["h5", "keras", "checkpoint"])
def test_momentum_of_an_optimizer_without_is_refused(save, tmp_path):
    their_model, our_model = make_pair(sequential)
    legacy = save != "keras"
    theirs = make_theirs("momentum", legacy)
    path = save_after_training(their_model, theirs, save, tmp_path)
    ours = built(make_ours("sgd"), our_model)
    with pytest.raises(ValueError, match=r"Only in the file: \['momentum'\]"):
        load_optimizer_state(ours, path)
    assert int(ours.iterations) == 0


def test_accumulated_steps_count_as_in_keras_3(tmp_path):
    their_model, our_model = make_pair(sequential)
    theirs = make_theirs("momentum")
    path = save_after_training(their_model, theirs, "h5", tmp_path)
    ours = built(make_ours("momentum", gradient_accumulation_steps=2), our_model)
    train_ours(our_model, ours, [0])
    load_optimizer_state(ours, path)
    copy_weights(their_model, our_model)
    assert int(ours.iterations) == 5
    train_theirs(their_model, theirs, range(5, 8))
    # The mean of twice the same gradient is that gradient.
    train_ours(our_model, ours, [5, 5, 6, 6, 7, 7])
    assert int(ours.iterations) == 8
    assert_close_weights(our_model, their_model)


# --- What cannot be loaded --------------------------------------------------


def assert_refused(ours, path, match, error=ValueError):
    before = [to_numpy(v).tobytes() for v in ours.variables]
    with pytest.raises(error, match=match):
        load_optimizer_state(ours, path)
    assert [to_numpy(v).tobytes() for v in ours.variables] == before


@pytest.fixture
def trained():
    """An optimizer with a state of its own."""
    model = sequential(keras)
    optimizer = built(keras_lso.LossScaleOptimizer(make_ours("adam")), model)
    train_ours(model, optimizer, range(3))
    return optimizer


@pytest.mark.parametrize("save", SAVERS)
def test_a_model_without_optimizer_is_refused(save, trained, tmp_path):
    model = sequential(tf_keras)
    if save.startswith("checkpoint"):
        path = tf.train.Checkpoint(model=model).save(str(tmp_path / "checkpoint"))
        path = path if save == "checkpoint" else str(tmp_path)
    else:
        path = SAVERS[save](model, None, str(tmp_path))
    assert_refused(trained, path, "holds no optimizer state")


@pytest.mark.parametrize("save", ["h5", "saved_model"])
def test_a_model_saved_without_its_optimizer_is_refused(save, trained, tmp_path):
    model = sequential(tf_keras)
    path = str(tmp_path / "model")
    path += ".h5" if save == "h5" else ""
    optimizer = make_theirs("adam")
    model.compile(optimizer, "mse")
    train_theirs(model, optimizer, range(2))
    model.save(path, include_optimizer=False)
    assert_refused(trained, path, "holds no optimizer state")


def test_legacy_optimizers_leave_no_state_in_a_keras_file(trained, tmp_path):
    for optimizer in (make_theirs("adam", legacy=True), their_wrapper(legacy=True)):
        model = sequential(tf_keras)
        path = save_after_training(model, optimizer, "keras", tmp_path)
        assert_refused(trained, path, "never writes that of .*legacy")


@pytest.mark.parametrize("save", ["h5", "checkpoint"])
def test_an_optimizer_that_has_not_trained_is_refused(save, trained, tmp_path):
    model = sequential(tf_keras)
    optimizer = make_theirs("adam", legacy=True)
    path = save_after_training(model, optimizer, save, tmp_path, steps=0)
    assert_refused(trained, path, "no optimizer state")


def test_several_optimizers_are_named(trained, tmp_path):
    models = [sequential(tf_keras) for _ in range(2)]
    optimizers = [make_theirs("adam"), make_theirs("adam", legacy=True)]
    for model, optimizer in zip(models, optimizers, strict=True):
        train_theirs(model, optimizer, range(2))
    path = tf.train.Checkpoint(
        model=models, generator=optimizers[0], critic=optimizers[1]
    ).save(str(tmp_path / "checkpoint"))
    assert_refused(trained, path, "2 optimizers: .*'critic', 'generator'")


def test_one_optimizer_under_two_names_is_one(tmp_path):
    their_model, our_model = make_pair(sequential)
    theirs = make_theirs("adam")
    their_model.compile(theirs, "mse")
    train_theirs(their_model, theirs, range(5))
    root = tf.train.Checkpoint(a=theirs, model=their_model, b=theirs)
    ours = built(make_ours("adam"), our_model)
    load_optimizer_state(ours, root.save(str(tmp_path / "checkpoint")))
    assert_same_slots(ours, theirs, their_model)


@pytest.mark.parametrize("ending", [".keras", ".h5", ".weights.h5"])
def test_a_file_of_keras_3_is_refused(ending, trained, tmp_path):
    model = sequential(keras)
    model.compile(make_ours("adam"), "mse")
    model.optimizer.build(model.trainable_variables)
    path = str(tmp_path / f"model{ending}")
    save = model.save_weights if ending == ".weights.h5" else model.save
    save(path)
    assert_refused(trained, path, r"Keras 3.*keras_lso\.load_model")


@pytest.mark.skipif(
    keras.backend.backend() != "tensorflow", reason="a checkpoint of TensorFlow"
)
def test_a_checkpoint_of_keras_3_is_refused(trained, tmp_path):
    model = sequential(keras)
    optimizer = built(keras.optimizers.Adam(), model)
    path = tf.train.Checkpoint(model=model, optimizer=optimizer).save(
        str(tmp_path / "checkpoint")
    )
    assert_refused(trained, path, "written by Keras 3")


def test_weights_in_the_format_of_keras_3_hold_the_state_as_well(tmp_path):
    """tf.keras 2.12+ writes `.weights.h5` as Keras 3 does."""
    their_model, our_model = make_pair(sequential)
    theirs = make_theirs("adam")
    save_after_training(their_model, theirs, "h5", tmp_path)
    path = str(tmp_path / "model.weights.h5")
    their_model.save_weights(path)
    ours = built(make_ours("adam"), our_model)
    load_optimizer_state(ours, path)
    assert_same_slots(ours, theirs, their_model)


def test_other_counts_shapes_classes_and_slots_are_refused(trained, tmp_path):
    def small(width, layers=2):
        stack = [tf_keras.layers.Dense(width) for _ in range(layers)]
        return tf_keras.Sequential([tf_keras.Input((width,)), *stack])

    adam = OPTIMIZERS["adam"]
    for make, cls, arguments, match in (
        (lambda: small(WIDTH, 3), *adam, r"variables|\d+ slot"),
        (lambda: small(3), *adam, "has shape"),
        (lambda: small(WIDTH), "Adam", {"amsgrad": True}, "vhat"),
        (lambda: small(WIDTH), "Adam", {"use_ema": True}, "average"),
        (lambda: small(WIDTH), "Adagrad", {}, "Adagrad|accumulator"),
        (lambda: small(WIDTH), "Lion", {}, "Lion|'v'"),
    ):
        for save in ("h5", "keras", "checkpoint"):
            optimizer = getattr(tf_keras.optimizers, cls)(**arguments)
            folder = tmp_path / f"{cls}{save}{len(list(tmp_path.iterdir()))}"
            folder.mkdir()
            path = save_after_training(make(), optimizer, save, folder)
            assert_refused(trained, path, match)


@pytest.mark.parametrize("save", ["h5", "keras", "checkpoint", "saved_model"])
@pytest.mark.parametrize("share", [0.0, 0.5, 0.98])
def test_a_truncated_file_is_refused(save, share, trained, tmp_path):
    model = sequential(tf_keras)
    path = save_after_training(model, make_theirs("adam"), save, tmp_path)
    if save in ("checkpoint", "saved_model"):
        [data] = tmp_path.glob("**/*.data-00000-of-00001")
    else:
        data = path
    with open(data, "r+b") as file:
        file.truncate(int(share * os.path.getsize(data)))
    assert_refused(trained, path, "damaged|neither an HDF5")


def test_a_folder_without_checkpoint_is_refused(trained, tmp_path):
    assert_refused(trained, tmp_path, "neither a SavedModel nor a checkpoint")


def test_a_checkpoint_of_names_is_refused(trained, tmp_path):
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        tf.compat.v1.get_variable("x", initializer=1.0)
        session.run(tf.compat.v1.global_variables_initializer())
        saver = tf.compat.v1.train.Saver()
        path = saver.save(session, str(tmp_path / "model"))
    assert_refused(trained, path, "tf.train.Checkpoint")


def test_nothing_is_changed_in_a_wrapper_either(trained, tmp_path):
    """The scale of a file with a foreign optimizer is not taken."""
    model = sequential(tf_keras)
    inner = tf_keras.optimizers.Adagrad()
    optimizer = tf_keras.mixed_precision.LossScaleOptimizer(inner)
    path = save_after_training(model, optimizer, "checkpoint", tmp_path)
    assert_refused(trained, path, r"Only in the file: \['accumulator'\]")


@pytest.mark.parametrize("save", ["h5", "keras", "checkpoint"])
def test_nan_in_a_slot_is_refused(save, trained, tmp_path):
    """The next step would make weights NaN, though the gradients are finite."""
    their_model, _ = make_pair(sequential)
    theirs = make_theirs("adam")
    theirs.build(their_model.trainable_variables)
    theirs._momentums[0].assign(np.full((WIDTH, WIDTH), np.nan, "float32"))
    path = save_after_training(their_model, theirs, save, tmp_path, steps=0)
    assert_refused(trained, path, "momentum.*must not be NaN")


def test_inf_in_a_slot_is_loaded_as_it_is(tmp_path):
    """The square of a finite gradient may be inf; that of a weight is then still."""
    their_model, our_model = make_pair(sequential)
    theirs = make_theirs("adam")
    theirs.build(their_model.trainable_variables)
    theirs._velocities[0].assign(np.full((WIDTH, WIDTH), np.inf, "float32"))
    path = save_after_training(their_model, theirs, "checkpoint", tmp_path, steps=0)
    ours = built(make_ours("adam"), our_model)
    load_optimizer_state(ours, path)
    assert_same_slots(ours, theirs, their_model)


def test_a_file_of_before_the_wrapper_was_renamed(tmp_path):
    """TF 2.3 called the wrapped optimizer's config `optimizer`."""
    import h5py

    their_model, theirs, our_model, path = save_wrapped("h5", tmp_path, legacy=True)
    with h5py.File(path, "r+") as file:
        config = json.loads(file.attrs["training_config"])
        wrapper = config["optimizer_config"]["config"]
        wrapper["optimizer"] = wrapper.pop("inner_optimizer")
        wrapper["optimizer"]["config"]["learning_rate"] = 0.25
        file.attrs["training_config"] = json.dumps(config).encode()
    ours = built(make_ours("adam"), our_model)
    load_optimizer_state(ours, path)
    assert float(ours.learning_rate) == 0.25


def test_a_keras_file_without_its_weights_is_refused(trained, tmp_path):
    path = tmp_path / "model.keras"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("config.json", "{}")
    assert_refused(trained, path, "holds no optimizer state")
