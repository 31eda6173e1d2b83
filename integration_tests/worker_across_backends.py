"""Writes the files that `test_across_backends.py` reads under another backend.

    KERAS_BACKEND=... python -m integration_tests.worker_across_backends FOLDER

For each run: NAME.keras, NAME.weights.h5, NAME.h5, and NAME.npz with what the other
side must find in them (`state_0`, ...: the optimizer's variables; `weights_0`, ...: the
model's), what it needs to go on (`x`, `y`), and where this side went from there
(`later_scale`, `later_iterations`, `later_weights_0`, ...). And early.keras, early.h5
and early.npz, of a run that has seen no finite step.
"""

import pathlib
import sys

import keras
import numpy as np

from integration_tests.saved_models import (
    decaying_adam,
    momentum_sgd,
    small_model,
    wide_layers,
)
from keras_lso import LossScaleOptimizer
from keras_lso.loss_scales import DynamicLossScale


def both():
    if not hasattr(keras.optimizers, "MultiOptimizer"):  # Keras 3.12
        return decaying_adam()
    return keras.optimizers.MultiOptimizer(
        keras.optimizers.OptimizerMap(momentum_sgd(), {".*bias": decaying_adam()})
    )


def adamw(**options):
    inner = keras.optimizers.AdamW(0.05)
    return LossScaleOptimizer(inner, dynamic=False, initial_scale=128.0, **options)


# Name: the dtype policy of the layers, and the optimizer.
RUNS = {
    "default": (
        "float32",
        lambda: LossScaleOptimizer(
            momentum_sgd(), initial_scale=2.0**10, dynamic_growth_steps=3
        ),
    ),
    "hysteresis": (
        "mixed_float16",
        lambda: LossScaleOptimizer(
            both(), loss_scale=DynamicLossScale(2.0**10, 50, hysteresis=4)
        ),
    ),
    # Float16 variables have float32 masters.
    "fixed": ("float16", adamw),
    "remainder": ("float16", lambda: adamw(master_weights="remainder")),
    "remainder8": ("float16", lambda: adamw(master_weights="remainder8")),
    "stochastic": ("float16", lambda: adamw(master_weights="stochastic")),
    "narrow slots": ("float16", lambda: adamw(slot_dtype="bfloat16")),
    "int8": ("float16", lambda: adamw(slot_dtype="int8")),
    "24 bits, int8": (
        "float16",
        lambda: adamw(master_weights="remainder8", slot_dtype="int8"),
    ),
    "keras": (
        "float32",
        lambda: keras.optimizers.LossScaleOptimizer(momentum_sgd(), 2.0**10, 3),
    ),
    # Keras's class saves less than this has.
    "keras adafactor": (
        "float32",
        lambda: keras.optimizers.LossScaleOptimizer(
            keras.optimizers.Adafactor(0.05), 2.0**10, 3
        ),
    ),
    "bare": ("float32", decaying_adam),
}


def batches(name):
    """Four batches of four rows; the gradients of the second overflow."""
    numbers = np.random.default_rng(0)
    x = numbers.normal(size=(16, 4)).astype("float32")
    y = numbers.normal(size=(16, 2)).astype("float32")
    if name != "bare":
        x[4, 0] = np.inf
    return x, y


def named(prefix, arrays):
    return {f"{prefix}_{i}": array for i, array in enumerate(arrays)}


def write(folder, name):
    dtype, make_optimizer = RUNS[name]
    wide = wide_layers(dtype) if "int8" in name else ()
    model = small_model(make_optimizer(), dtype, wide)
    x, y = batches(name)

    def fit(epochs):
        model.fit(x, y, batch_size=4, epochs=epochs, shuffle=False, verbose=0)

    fit(epochs=2)
    model.save(folder / f"{name}.keras")
    model.save_weights(folder / f"{name}.weights.h5")
    if name != "keras adafactor":  # Two of its variables have one name.
        model.save(folder / f"{name}.h5")
    found = {
        **named("state", [v.numpy() for v in model.optimizer.variables]),
        **named("weights", model.get_weights()),
    }
    fit(epochs=1)
    optimizer = model.optimizer
    scale = getattr(optimizer, "dynamic_scale", None)
    np.savez(
        folder / f"{name}.npz",
        x=x,
        y=y,
        **found,
        later_scale=1.0 if scale is None else scale.numpy(),
        later_iterations=int(optimizer.iterations),
        **named("later_weights", model.get_weights()),
    )


def write_early(folder):
    optimizer = LossScaleOptimizer(momentum_sgd(), initial_scale="auto")
    model = small_model(optimizer, "float32")
    x = np.full((4, 4), np.inf, "float32")
    model.fit(x, x[:, :2], verbose=0)
    model.save(folder / "early.keras")
    model.save(folder / "early.h5")
    state = [v.numpy() for v in optimizer.variables]
    np.savez(folder / "early.npz", **named("state", state))


def main(folder):
    folder = pathlib.Path(folder)
    for name in RUNS:
        keras.utils.set_random_seed(0)
        write(folder, name)
    write_early(folder)


if __name__ == "__main__":
    main(sys.argv[1])
