"""Writes files and configs for the versions to come, which have to read them.

Run by the version whose files are wanted, once:

    KERAS_BACKEND=tensorflow python integration_tests/written_before/write.py FOLDER

Names of optimizers after it leave those out: what a version does not have.
"""

import json
import pathlib
import sys
import zipfile

import keras
import numpy as np

import keras_lso
from keras_lso import compat, loss_scales, schedules
from keras_lso import mixed_precision as tf_keras_names
from keras_lso.compat import model_garden, open_seq2seq

X = np.array([[1.0, -2.0], [0.5, 3.0]], "float32")
Y = np.array([[1.0], [-1.0]], "float32")


def sgd():
    return keras.optimizers.SGD(0.125, momentum=0.9, nesterov=True)


def adam():
    return keras.optimizers.Adam(0.125)


# Callables, since names are counted. None has a number in its name.
OPTIMIZERS = {
    "default": lambda: keras_lso.LossScaleOptimizer(sgd()),
    "fixed": lambda: keras_lso.LossScaleOptimizer(
        adam(), dynamic=False, initial_scale=512, name="guard"
    ),
    "bounds": lambda: keras_lso.LossScaleOptimizer(
        keras.optimizers.RMSprop(0.125),
        initial_scale=64,
        dynamic_growth_steps=2,
        min_scale=32,
        max_scale=128,
    ),
    "hysteresis": lambda: keras_lso.LossScaleOptimizer(
        keras.optimizers.AdamW(0.125, weight_decay=0.25),
        loss_scale=loss_scales.DynamicLossScale(
            1024, 3, growth_factor=4.0, hysteresis=2, consecutive_hysteresis=True
        ),
    ),
    "log_max": lambda: keras_lso.LossScaleOptimizer(
        sgd(), loss_scale=loss_scales.LogMaxLossScale(beta1=0.5)
    ),
    "searching": lambda: keras_lso.LossScaleOptimizer(adam(), initial_scale="auto"),
    "masters": lambda: keras_lso.LossScaleOptimizer(adam(), master_weights=True),
    "accumulation": lambda: keras_lso.LossScaleOptimizer(
        keras.optimizers.Adam(
            schedules.LinearWarmup(0.125, 4),
            gradient_accumulation_steps=2,
            use_ema=True,
            global_clipnorm=1.0,
        )
    ),
    "lars": lambda: keras_lso.LARS(
        8.0,
        weight_decay_rate=0.25,
        exclude_from_weight_decay=["bias"],
        trust_ratio="paper",
        decay=0.5,
        trust_clip=True,
    ),
    "larc": lambda: keras_lso.LossScaleOptimizer(
        keras_lso.LARC(sgd(), eta=0.5, mode="scale", exclude=["bias"])
    ),
    "novograd": lambda: keras_lso.LossScaleOptimizer(
        keras_lso.NovoGrad(0.125, weight_decay_rate=0.25, grad_averaging=True)
    ),
    "experimental": lambda: tf_keras_names.experimental.LossScaleOptimizer(
        sgd(), "dynamic"
    ),
    "v1": lambda: compat.v1.mixed_precision.MixedPrecisionLossScaleOptimizer(
        sgd(), 1024, use_locking=True
    ),
    "open_seq2seq": lambda: compat.open_seq2seq.MixedPrecisionOptimizerWrapper(
        adam(), compat.open_seq2seq.AutomaticLossScaler("LogMax")
    ),
}
SCHEDULES = {
    "CosineDecay": lambda: open_seq2seq.CosineDecayPolicy(0.5, 100, 1.5, 10, 0.25, 5),
    "CosineDecayWithOffset": lambda: model_garden.CosineDecayWithOffset(
        7, initial_learning_rate=0.5, decay_steps=100, alpha=0.25
    ),
    "DirectPowerDecay": lambda: model_garden.DirectPowerDecay(0.5, -0.5),
    "ExpDecay": lambda: open_seq2seq.ExpDecay(0.5, 100, 0.25, True, 5, 0.125),
    "ExponentialDecayWithOffset": lambda: model_garden.ExponentialDecayWithOffset(
        7, initial_learning_rate=0.5, decay_steps=100, decay_rate=0.25, staircase=True
    ),
    "FixedLR": lambda: open_seq2seq.FixedLR(0.5),
    "InvPolyDecay": lambda: open_seq2seq.InvPolyDecay(0.5, 100, 0.125, 2.0, 5, 10),
    "LinearWarmup": lambda: schedules.LinearWarmup(
        keras.optimizers.schedules.ExponentialDecay(0.5, 100, 0.25), 10, 0.125
    ),
    "PiecewiseConstant": lambda: open_seq2seq.PiecewiseConstant(
        0.5, [1, 2.5], [0.5, 0.25], 10
    ),
    "PiecewiseConstantDecayWithOffset": lambda: (
        model_garden.PiecewiseConstantDecayWithOffset(
            7, boundaries=[10, 20], values=[0.5, 0.25, 0.125]
        )
    ),
    "PolyDecay": lambda: open_seq2seq.PolyDecay(0.5, 100, 2.0, 5, 0.125, 10),
    "PolynomialDecayWithOffset": lambda: model_garden.PolynomialDecayWithOffset(
        7,
        initial_learning_rate=0.5,
        decay_steps=100,
        end_learning_rate=0.125,
        power=2.0,
        cycle=True,
    ),
    "PolynomialWarmUp": lambda: model_garden.PolynomialWarmUp(0.5, 10, 2.0),
    "PowerAndLinearDecay": lambda: model_garden.PowerAndLinearDecay(
        0.5, 100, -0.5, 0.25, offset=7
    ),
    "PowerDecayWithOffset": lambda: model_garden.PowerDecayWithOffset(
        0.5, -0.5, 7, 0.75
    ),
    "Sequential": lambda: schedules.JoinedSchedules(
        [0.5, open_seq2seq.FixedLR(0.25)], [10]
    ),
    "StepCosineDecayWithOffset": lambda: model_garden.StepCosineDecayWithOffset(
        [10, 20], [0.5, 0.25], offset=7
    ),
    "TransformerPolicy": lambda: open_seq2seq.TransformerPolicy(0.5, 64, 10, 0.25, 2.0),
}


def make_model(name):
    """Returns a new compiled model with the optimizer of that name."""
    keras.utils.set_random_seed(1)
    dtype = "float16" if name == "masters" else "float32"
    model = keras.Sequential(
        [
            keras.layers.Dense(3, activation="relu", name="hidden", dtype=dtype),
            keras.layers.Dense(1, name="out", dtype=dtype),
        ],
        name="model",
    )
    model.build((None, 2))
    model.compile(OPTIMIZERS[name](), loss="mse", jit_compile=False)
    return model


def train(model):
    """Makes three steps, the second of which is skipped."""
    for x in (X, X * np.inf, X):
        is_guarded = isinstance(model.optimizer, keras_lso.LossScaleOptimizer)
        if is_guarded or np.isfinite(x).all():
            model.train_on_batch(x, Y)


def deflate(path):
    """Compresses the members of an archive, which Keras only stores."""
    with zipfile.ZipFile(path) as archive:
        members = {item.filename: archive.read(item) for item in archive.infolist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)


def main(folder, *left_out):
    folder.mkdir(parents=True, exist_ok=True)
    weights = {}
    for name in [name for name in OPTIMIZERS if name not in left_out]:
        model = make_model(name)
        train(model)
        model.save(folder / f"{name}.keras")
        deflate(folder / f"{name}.keras")
        if keras.backend.backend() == "tensorflow" and name in ("default", "log_max"):
            import tensorflow as tf

            checkpoint = tf.train.Checkpoint(optimizer=model.optimizer)
            checkpoint.write(str(folder / f"{name}.checkpoint"))
        model.train_on_batch(X, Y)
        for i, value in enumerate(model.get_weights()):
            weights[f"{name}/{i}"] = value
    np.savez_compressed(folder / "after_one_more_step.npz", **weights)
    written = {
        name: keras.saving.serialize_keras_object(make())
        for name, make in SCHEDULES.items()
    }
    text = json.dumps(written, indent=1, sort_keys=True)
    (folder / "schedules.json").write_text(text + "\n")


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]), *sys.argv[2:])
