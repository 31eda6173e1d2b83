"""The runs of one backend, for `float16_digits.py`, which says what they show.

Prints them as JSON.
"""

import functools
import json
import sys

import keras
import numpy as np
from keras import layers
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import keras_lso

BATCH_SIZE = 449  # a third of the training data
ROUNDS_AN_EPOCH = 30  # epochs of three steps would be mostly overhead

# At Keras's default learning rates.
OPTIMIZERS = {
    "SGD": lambda: keras.optimizers.SGD(0.01),
    "Adam": lambda: keras.optimizers.Adam(0.001),
}


def bare(optimizer):
    return optimizer


def scaled(master_weights):
    return functools.partial(
        keras_lso.LossScaleOptimizer, master_weights=master_weights
    )


def guarded(master_weights):
    return functools.partial(keras_lso.GuardedOptimizer, master_weights=master_weights)


# What to call it, Keras's dtype policy, and what to wrap around the optimizer.
FLOAT32 = ("float32", "float32", bare)
RUNS = {
    "float16": (
        FLOAT32,
        ("float16", "float16", bare),
        ("float16, loss scale", "float16", scaled(False)),
        ("float16, loss scale, masters", "float16", scaled("float32")),
        ("float16, loss scale, remainder", "float16", scaled("remainder")),
        ("float16, loss scale, stochastic", "float16", scaled("stochastic")),
    ),
    "bfloat16": (
        FLOAT32,
        ("bfloat16", "bfloat16", bare),
        ("bfloat16, masters", "bfloat16", guarded("float32")),
        ("bfloat16, remainder", "bfloat16", guarded("remainder")),
        ("bfloat16, stochastic", "bfloat16", guarded("stochastic")),
    ),
}


def main():
    dtype, epochs = sys.argv[1], int(sys.argv[2])
    data, optimizers = load_data(), dict(OPTIMIZERS)
    if dtype == "bfloat16":
        # The default of 0.999 is 1 in bfloat16.
        optimizers["Adam, beta_2=0.99"] = lambda: keras.optimizers.Adam(beta_2=0.99)
    runs = []
    for weights, policy, wrap in RUNS[dtype]:
        for name, make_optimizer in optimizers.items():
            run = train(build_model(policy), wrap(make_optimizer()), data, epochs)
            runs.append({"weights": weights, "optimizer": name, **run})
    print(json.dumps(runs))


def load_data():
    digits = load_digits()
    pixels = (digits.data / 16).astype("float32")
    train_x, test_x, train_y, test_y = train_test_split(
        pixels, digits.target, test_size=450, stratify=digits.target, random_state=0
    )
    train_x = np.tile(train_x, (ROUNDS_AN_EPOCH, 1))
    return (train_x, np.tile(train_y, ROUNDS_AN_EPOCH)), (test_x, test_y)


def build_model(policy):
    """Returns a classifier; with the same weights, as the dtype policy rounds them."""
    keras.utils.set_random_seed(0)
    keras.config.set_dtype_policy(policy)
    model = keras.Sequential(
        [
            keras.Input((64,)),
            layers.Dense(64, activation="relu"),
            layers.Dense(64, activation="relu"),
            layers.Dense(10),
        ]
    )
    if policy != "float32":
        # Drawn in float16 they would be others.
        model.set_weights(build_model("float32").get_weights())
        keras.config.set_dtype_policy(policy)
    return model


def train(model, optimizer, data, epochs):
    train_data, test_data = data
    keras.utils.set_random_seed(1)  # the order of the images
    model.compile(
        optimizer,
        # In float32, as Keras's losses are.
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    history = model.fit(*train_data, batch_size=BATCH_SIZE, epochs=epochs, verbose=0)
    _, accuracy = model.evaluate(*test_data, batch_size=450, verbose=0)
    return {"accuracy": accuracy, "losses": history.history["loss"]}


if __name__ == "__main__":
    main()
