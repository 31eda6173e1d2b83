"""Models of tf.keras 2 in training, and the files that it saves.

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
    """Returns the result of the function of this name, and the files it wrote."""
    # So that the numbers in the names of layers do not depend on earlier models.
    tf_keras.backend.clear_session()
    with tempfile.TemporaryDirectory() as folder, quiet():
        tree = globals()[name](folder, *arguments, **options)
        return {**tree, "files": files_in(pathlib.Path(folder))}


@contextlib.contextmanager
def quiet():
    """Silences the warnings about unscaled losses and `.h5` files."""
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
    """Returns the bytes of the files by their paths, without the date."""
    return {
        str(path.relative_to(folder)): timeless_bytes(path)
        for path in sorted(folder.rglob(pattern))
        if path.is_file()
    }


def timeless_bytes(path):
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
    """Returns JSON without its date, and with small numbers in place of addresses."""
    numbers = {}
    content = re.sub(rb'("date_saved": )"[^"]*"', rb'\1""', content)
    return re.sub(
        rb'(?<="shared_object_id": )\d+',
        lambda match: b"%d" % numbers.setdefault(match[0], len(numbers)),
        content,
    )


def make_optimizer(optimizer, legacy=False):
    """Returns the optimizer of a name in `OPTIMIZERS`, or of a function of tf_keras."""
    if callable(optimizer):
        return optimizer(tf_keras)
    cls, arguments = OPTIMIZERS[optimizer]
    module = tf_keras.optimizers.legacy if legacy else tf_keras.optimizers
    return getattr(module, cls)(**arguments)


def make_model(make):
    """Returns a model, and its outputs for the inputs of `twin_models.start`."""
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


# Keras 3 has the same format of weights.
NAMES = {
    "h5": "model.h5",
    "keras": "model.keras",
    "keras_3_weights": "model.weights.h5",
}


def write(model, save, folder):
    """Writes a file into the folder, and returns its name."""
    name = NAMES[save]
    write = model.save_weights if save == "keras_3_weights" else model.save
    write(os.path.join(folder, name))
    return name


def state(model, optimizer):
    return {"weights": weights_of(model), "slots": slots_of(model, optimizer)}


def trained(
    folder,
    make,
    optimizer,
    save,
    *,
    legacy=False,
    scaled=False,
    steps=5,
    later=0,
    size=1.0,
):
    """Trains and saves a model, then takes `later` further steps."""
    model, output = make_model(make)
    optimizer = make_optimizer(optimizer, legacy)
    if scaled:
        optimizer = tf_keras.mixed_precision.LossScaleOptimizer(optimizer)
    model.compile(optimizer, "mse")
    train(model, optimizer, range(steps), size)
    path = write(model, save, folder)
    tree = {"path": path, "output": output, **state(model, optimizer)}
    if later:
        tree["learning_rate"] = float(optimizer.learning_rate)
        train(model, optimizer, range(steps, steps + later), size)
        tree["later"] = weights_of(model)
    if getattr(optimizer, "use_ema", False):
        optimizer.finalize_variable_values(model.trainable_variables)
        tree["averages"] = weights_of(model)
    return tree


def fitted(folder, save, legacy):
    """Trains by `fit` in a strategy, which creates the slots in a graph."""
    with tf.distribute.OneDeviceStrategy("/cpu:0").scope():
        model = sequential(tf_keras)
        start(model)
        inner = make_optimizer("adam", legacy)
        optimizer = tf_keras.mixed_precision.LossScaleOptimizer(inner)
        model.compile(optimizer, "mse")
    x = np.random.default_rng(0).normal(size=(16, WIDTH)).astype("float32")
    model.fit(x, x, batch_size=4, shuffle=False, verbose=0)
    return {"path": write(model, save, folder), **state(model, optimizer)}


def numbered_otherwise(folder, *arguments, **options):
    """Does the same as `trained`, with another number in the name of a layer."""
    tf_keras.layers.PReLU()
    return trained(folder, *arguments, **options)


def without_optimizer(folder, save):
    model, _ = make_model(sequential)
    return {"path": write(model, save, folder)}


def untrained(folder, save):
    """Saves a legacy optimizer before its first step, which creates the slots."""
    model, _ = make_model(sequential)
    optimizer = make_optimizer("adam", legacy=True)
    model.compile(optimizer, "mse")
    return {"path": write(model, save, folder)}
