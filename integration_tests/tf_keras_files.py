"""Models of tf.keras 2 in training, and the files that it writes of them.

Each function writes into a folder, and returns a tree to record. Tests import this
module where they run the originals.
"""

import contextlib
import io
import logging
import os
import pathlib
import re
import tempfile
import warnings
import zipfile

import numpy as np
import tensorflow as tf
import tf_keras

from integration_tests.twin_models import (
    OPTIMIZERS,
    WIDTH,
    gradients,
    sequential,
    start,
)


def run(name, *arguments, **options):
    """Returns what the function of this name returns, and the files it has written."""
    # The numbers in the names of layers depend on nothing that ran before.
    tf_keras.backend.clear_session()
    with tempfile.TemporaryDirectory() as folder, quiet():
        tree = globals()[name](folder, *arguments, **options)
        return {**tree, "files": files_in(pathlib.Path(folder))}


@contextlib.contextmanager
def quiet():
    """Lets it not ask whether the loss was scaled, and advise not to write `.h5`."""
    logger = logging.getLogger("tensorflow")
    level = logger.level
    logger.setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message="You are saving your model as an HDF5"
        )
        yield
    logger.setLevel(level)


def files_in(folder, pattern="*"):
    """Returns the bytes of the files, by their paths; at any time the same bytes."""
    return {
        str(path.relative_to(folder)): timeless_bytes(path)
        for path in sorted(folder.rglob(pattern))
        if path.is_file()
    }


def timeless_bytes(path):
    if path.name in ("saved_model.pb", "fingerprint.pb"):
        # Graphs, in another order each time: it is enough that they are there.
        return b""
    if path.suffix != ".keras":
        return path.read_bytes()
    stream = io.BytesIO()
    with zipfile.ZipFile(path) as file, zipfile.ZipFile(stream, "w") as copy:
        for name in file.namelist():
            content = file.read(name)
            if name.endswith(".json"):
                content = timeless_json(content)
            copy.writestr(zipfile.ZipInfo(name), content)
    return stream.getvalue()


def timeless_json(content):
    """Returns it without a date, and with small numbers in place of addresses."""
    numbers = {}
    content = re.sub(rb'("date_saved": )"[^"]*"', rb'\1""', content)
    return re.sub(
        rb'(?<="shared_object_id": )\d+',
        lambda match: b"%d" % numbers.setdefault(match[0], len(numbers)),
        content,
    )


# --- Models and optimizers ----------------------------------------------------------


def make_optimizer(optimizer, legacy=False):
    """Returns that of a name in `OPTIMIZERS`, or what a function makes of tf_keras."""
    if callable(optimizer):
        return optimizer(tf_keras)
    cls, arguments = OPTIMIZERS[optimizer]
    module = tf_keras.optimizers.legacy if legacy else tf_keras.optimizers
    return getattr(module, cls)(**arguments)


def wrap(inner, scale=2.0**10, good_steps=3, **arguments):
    wrapper = tf_keras.mixed_precision.LossScaleOptimizer(inner, **arguments)
    if wrapper.dynamic:
        wrapper._loss_scale._current_loss_scale.assign(scale)
        wrapper._loss_scale._counter.assign(good_steps)
    return wrapper


def make_model(make):
    """Returns a model, and what it makes of the inputs of `twin_models.start`."""
    model = make(tf_keras)
    return model, np.array(model(start(model), training=False))


def train(model, optimizer, steps, size=1.0):
    for step in steps:
        grads = [tf.constant(g) for g in gradients(model, step, size)]
        optimizer.apply_gradients(zip(grads, model.trainable_variables, strict=True))


def weights_of(model):
    return [np.array(v) for v in model.trainable_variables]


def slots_of(model, optimizer):
    """Returns the slots of each trainable variable, by tf.keras's names."""
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)
    if isinstance(optimizer, tf_keras.optimizers.legacy.Optimizer):
        slots = {
            slot: [optimizer.get_slot(v, slot) for v in model.trainable_variables]
            for slot in optimizer.get_slot_names()
        }
    else:
        slots = {
            slot: getattr(optimizer, name)
            for name, slot in words_of(optimizer).items()
            if getattr(optimizer, name, None)
        }
    return {slot: [np.array(v) for v in values] for slot, values in slots.items()}


def words_of(optimizer):
    if isinstance(optimizer, tf_keras.optimizers.RMSprop):
        words = {"_velocities": "rms", "_momentums": "momentum"}
        return {**words, "_average_gradients": "mg"}
    if isinstance(optimizer, tf_keras.optimizers.SGD):
        return {"momentums": "momentum"} if optimizer.momentum else {}
    if isinstance(optimizer, tf_keras.optimizers.Lion):
        return {"momentums": "m"}
    return {
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


# --- Files --------------------------------------------------------------------------


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


def save_keras_3_weights(model, optimizer, folder):
    path = os.path.join(folder, "model.weights.h5")
    model.save_weights(path)
    return path


def write(model, optimizer, save, folder):
    """Returns the path, from the folder on."""
    path = globals()[f"save_{save}"](model, optimizer, folder)
    return os.path.relpath(path, folder)


def state(model, optimizer):
    return {"weights": weights_of(model), "slots": slots_of(model, optimizer)}


# --- What tests load ----------------------------------------------------------------


def trained(
    folder,
    make,
    optimizer,
    save,
    *,
    legacy=False,
    wrapper=None,
    steps=5,
    later=0,
    size=1.0,
):
    """Trains and saves.

    Args:
        folder: String.
        make: What makes the model of tf_keras.
        optimizer: As in `make_optimizer`.
        save: String, the end of a name of a `save_` function.
        legacy: Bool. Whether the optimizer is one of tf.keras 2.0 to 2.10.
        wrapper: Dict of arguments of `wrap`. Defaults to `None`: not wrapped.
        steps: Int. Number of steps before it is saved.
        later: Int. Number of steps after it is saved.
        size: Float. Factor of the gradients.
    """
    model, output = make_model(make)
    optimizer = make_optimizer(optimizer, legacy)
    if wrapper is not None:
        optimizer = wrap(optimizer, **wrapper)
    model.compile(optimizer, "mse")
    train(model, optimizer, range(steps), size)
    path = write(model, optimizer, save, folder)
    tree = {"path": path, "output": output, **state(model, optimizer)}
    if later:
        tree["learning_rate"] = float(optimizer.learning_rate)
        train(model, optimizer, range(steps, steps + later), size)
        tree["later"] = weights_of(model)
    if wrapper is not None:
        counter = optimizer.dynamic_counter
        tree["counter"] = None if counter is None else int(counter)
    if getattr(optimizer, "use_ema", False):
        optimizer.finalize_variable_values(model.trainable_variables)
        tree["averages"] = weights_of(model)
    return tree


def fitted(folder, save, legacy):
    """`fit` creates the slots in a graph, and a strategy in containers of its own."""
    with tf.distribute.OneDeviceStrategy("/cpu:0").scope():
        model = sequential(tf_keras)
        start(model)
        optimizer = wrap(make_optimizer("adam", legacy))
        model.compile(optimizer, "mse")
    x = np.random.default_rng(0).normal(size=(16, WIDTH)).astype("float32")
    model.fit(x, x, batch_size=4, shuffle=False, verbose=0)
    return {"path": write(model, optimizer, save, folder), **state(model, optimizer)}


def numbered_otherwise(folder, *arguments, **options):
    """As `trained`, with another number in the name of a layer."""
    tf_keras.layers.PReLU()
    return trained(folder, *arguments, **options)


def with_slots_of(folder, attribute, value, save):
    """A new Adam, one of whose slots is all this number."""
    model, output = make_model(sequential)
    optimizer = make_optimizer("adam")
    model.compile(optimizer, "mse")
    optimizer.build(model.trainable_variables)
    getattr(optimizer, attribute)[0].assign(np.full((WIDTH, WIDTH), value, "float32"))
    path = write(model, optimizer, save, folder)
    return {"path": path, "output": output, **state(model, optimizer)}


def caches_of_nadam(folder):
    """Three files of Nadam; in the last one its cache is another."""
    model, output = make_model(sequential)
    optimizer = make_optimizer("nadam")
    model.compile(optimizer, "mse")
    train(model, optimizer, range(5))
    paths = [write(model, optimizer, save, folder) for save in ("checkpoint", "h5")]
    optimizer._u_product.assign(0.25)
    paths.append(write(model, optimizer, "weights", folder))
    return {"paths": paths, "output": output}


def caches_of_legacy_nadam(folder):
    model, output = make_model(sequential)
    optimizer = make_optimizer("nadam", legacy=True)
    model.compile(optimizer, "mse")
    train(model, optimizer, range(5))
    paths = [write(model, optimizer, save, folder) for save in ("checkpoint", "h5")]
    return {"paths": paths, "output": output, "cache": optimizer._m_cache.numpy()}


def with_a_scale_of(folder, scale, good_steps):
    model, output = make_model(sequential)
    optimizer = wrap(make_optimizer("adam"))
    model.compile(optimizer, "mse")
    optimizer.build(model.trainable_variables)
    optimizer._loss_scale._current_loss_scale.assign(scale)
    optimizer._loss_scale._counter.assign(good_steps)
    return {"path": write(model, optimizer, "checkpoint", folder), "output": output}


def wrapped_as_in_2_2(folder, make):
    """Its wrapper has the optimizer as a child, and no slots of its own.

    TensorFlow lets no two objects own one.
    """
    model, output = make_model(make)
    optimizer = make_optimizer("adam", legacy=True)
    train(model, optimizer, range(5))
    scale = wrap(make_optimizer("adam"), scale=2.0**9, good_steps=7)._loss_scale
    wrapper = tf.train.Checkpoint(base_optimizer=optimizer, loss_scale=scale)
    path = write(model, wrapper, "checkpoint", folder)
    return {"path": path, "output": output, **state(model, optimizer)}


def under_two_names(folder):
    model, output = make_model(sequential)
    optimizer = make_optimizer("adam")
    train(model, optimizer, range(5))
    root = tf.train.Checkpoint(a=optimizer, model=model, b=optimizer)
    path = os.path.relpath(root.save(os.path.join(folder, "checkpoint")), folder)
    return {"path": path, "output": output, **state(model, optimizer)}


# --- What tests are refused ---------------------------------------------------------


def without_optimizer(folder, save):
    model, _ = make_model(sequential)
    if save.startswith("checkpoint"):
        path = tf.train.Checkpoint(model=model).save(f"{folder}/checkpoint")
        path = os.path.relpath(path if save == "checkpoint" else folder, folder)
    else:
        path = write(model, None, save, folder)
    return {"path": path}


def untrained(folder, save):
    """A legacy optimizer, whose slots come with its first step."""
    model, _ = make_model(sequential)
    optimizer = make_optimizer("adam", legacy=True)
    model.compile(optimizer, "mse")
    return {"path": write(model, optimizer, save, folder)}


def without_its_optimizer(folder, save):
    model, _ = make_model(sequential)
    optimizer = make_optimizer("adam")
    model.compile(optimizer, "mse")
    train(model, optimizer, range(2))
    path = "model.h5" if save == "h5" else "model"
    model.save(os.path.join(folder, path), include_optimizer=False)
    return {"path": path}


def with_two_optimizers(folder):
    optimizers = [make_optimizer("adam"), make_optimizer("adam", legacy=True)]
    models = []
    for optimizer in optimizers:
        model, _ = make_model(sequential)
        train(model, optimizer, range(2))
        models.append(model)
    root = tf.train.Checkpoint(
        model=models, generator=optimizers[0], critic=optimizers[1]
    )
    path = root.save(os.path.join(folder, "checkpoint"))
    return {"path": os.path.relpath(path, folder)}


def of_a_session(folder):
    """A checkpoint of names, as TF1's `Saver` writes it."""
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        tf.compat.v1.get_variable("x", initializer=1.0)
        session.run(tf.compat.v1.global_variables_initializer())
        saver = tf.compat.v1.train.Saver(save_relative_paths=True)
        path = saver.save(session, os.path.join(folder, "model"))
    return {"path": os.path.relpath(path, folder)}
