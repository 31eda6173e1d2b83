"""The runs of one backend, for `train_digits.py`, which says what they show.

Prints JSON, one object a line: each run when it is done.
"""

import json
import math
import random
import sys

import keras
import numpy as np
from keras import layers, ops
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import keras_lso
from keras_lso._backend import backend

# What to call it, Keras's dtype policy, and whether to scale the loss.
RUNS = (
    ("float32", "float32", False),
    ("float16", "mixed_float16", False),
    ("float16, keras_lso", "mixed_float16", True),
)
SEEDS = range(4)
BATCH_SIZE = 225  # a sixth of the training data
LEARNING_RATE = 0.03
MEASUREMENTS = 4
LAYERS = ("conv 1", "conv 2", "dense 1", "dense 2", "output")
ON_TORCH = keras.backend.backend() == "torch"
if ON_TORCH:
    import torch

    # On a CPU, oneDNN's float16 convolutions take twice as long as PyTorch's own, and
    # on TensorFlow eight times as long as XLA's.
    torch.backends.mkldnn.enabled = False


def main():
    epochs = int(sys.argv[1])
    data = load_data()
    starts = [build_model(seed, "float32").get_weights() for seed in SEEDS]
    reference = build_model(SEEDS[0], "float32")
    for precision, policy, scaled in RUNS:
        model = compiled_model(policy, scaled, epochs * steps_an_epoch(data))
        fresh = [ops.convert_to_numpy(v) for v in model.optimizer.variables]
        for seed, start in zip(SEEDS, starts, strict=True):
            # The next seed trains the same model, so that it is compiled only once.
            model.set_weights(start)
            for variable, value in zip(model.optimizer.variables, fresh, strict=True):
                variable.assign(value)
            set_seed(seed)
            run = train(model, reference, data, epochs, measure=seed == SEEDS[0])
            tell({"precision": precision, "seed": seed, **run})


def tell(run):
    print(json.dumps(run), flush=True)


def load_data():
    """Returns images, 8 by 8 with mean 0 and deviation 1, and one-hot labels."""
    digits = load_digits()
    images = digits.images[..., np.newaxis]
    images = ((images - images.mean()) / images.std()).astype("float32")
    labels = np.eye(10, dtype="float32")[digits.target]
    train_x, test_x, train_y, test_y = train_test_split(
        images, labels, test_size=450, stratify=digits.target, random_state=0
    )
    return (train_x, train_y), (test_x, test_y)


def steps_an_epoch(data):
    (images, _), _ = data
    return math.ceil(len(images) / BATCH_SIZE)


def set_seed(seed):
    """Does what `keras.utils.set_random_seed` does, which imports TensorFlow."""
    if keras.backend.backend() == "tensorflow":
        return keras.utils.set_random_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
    if ON_TORCH:
        torch.manual_seed(seed)


def build_model(seed, policy):
    """Returns a small LeNet, with the same weights under each dtype policy."""
    set_seed(seed)
    keras.config.set_dtype_policy(policy)
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(8, 3, padding="same", activation="sigmoid"),
            layers.AveragePooling2D(2),
            layers.Conv2D(16, 3, padding="same", activation="sigmoid"),
            layers.AveragePooling2D(2),
            layers.Flatten(),
            layers.Dense(32, activation="sigmoid"),
            layers.Dense(32, activation="sigmoid"),
            # The loss is computed in float32, as Keras's guide has it.
            layers.Dense(10, activation="softmax", dtype="float32"),
        ]
    )


def compiled_model(policy, scaled, steps):
    # It falls to 0, so that the loss is flat at the end.
    learning_rate = keras.optimizers.schedules.CosineDecay(LEARNING_RATE, steps)
    # Shorter averages than the defaults, for a run of so few steps.
    optimizer = keras.optimizers.Adam(learning_rate, beta_1=0.8, beta_2=0.98)
    if scaled:
        optimizer = keras_lso.LossScaleOptimizer(optimizer)
    model = build_model(SEEDS[0], policy)
    model.compile(
        optimizer,
        loss="mean_squared_error",
        metrics=["accuracy"],
        # Else Keras would give plain float16 a loss scale of its own.
        auto_scale_loss=False,
        jit_compile=not ON_TORCH,
    )
    optimizer.build(model.trainable_variables)
    return model


def train(model, reference, data, epochs, measure):
    train_data, test_data = data
    counter = FlushCounter(reference, [array[:BATCH_SIZE] for array in train_data])
    history = model.fit(
        *train_data,
        batch_size=BATCH_SIZE,
        epochs=epochs,
        verbose=0,
        callbacks=[counter] if measure else [],
    ).history
    # In float32, so that this is compiled only once as well.
    reference.set_weights(model.get_weights())
    predicted = reference.predict(test_data[0], batch_size=450, verbose=0)
    right = predicted.argmax(axis=1) == test_data[1].argmax(axis=1)
    run = {
        "accuracy": float(right.mean()),
        "losses": history["loss"],
        "steps": epochs * steps_an_epoch(data),
        "skipped": int(getattr(model.optimizer, "skipped_steps", 0)),
        "final_scale": scale_of(model),
    }
    if counter.counts:
        flushed, not_zero = np.sum(counter.counts, axis=0).T
        run["flushed"] = flushed.sum() / not_zero.sum()
        run["flushed_by_layer"] = dict(zip(LAYERS, flushed / not_zero, strict=True))
    return run


def scale_of(model):
    return float(getattr(model.optimizer, "loss_scale", 1.0))


class FlushCounter(keras.callbacks.Callback):
    """Counts in float16, now and then, the gradient values flushed to zero."""

    def __init__(self, reference, batch):
        super().__init__()
        self.reference, self.batch = reference, batch
        self.counts = []

    def on_epoch_begin(self, epoch, logs=None):
        if self.model.layers[0].compute_dtype != "float16":
            return
        if epoch % max(1, self.params["epochs"] // MEASUREMENTS) == 0:
            self.reference.set_weights(self.model.get_weights())
            models, scale = (self.reference, self.model), scale_of(self.model)
            self.counts.append(count_flushed(*models, scale, self.batch))


def count_flushed(reference, model, scale, batch):
    """Returns, for each layer, the gradient values flushed and those not zero."""
    true_gradients = gradients(reference, batch)
    counts = []
    for true, computed in zip(
        true_gradients, gradients(model, batch, scale), strict=True
    ):
        matters = true != 0
        counts.append((np.sum(matters & (computed == 0)), np.sum(matters)))
    # The kernel and the bias of a layer together.
    return np.reshape(counts, (-1, 2, 2)).sum(axis=1)


def gradients(model, batch, scale=1.0):
    images, labels = batch
    loss_fn = keras.losses.MeanSquaredError()

    def scaled_loss():
        return loss_fn(labels, model(images, training=True)) * scale

    _, grads = backend.host.compute_gradients(scaled_loss, model.trainable_variables)
    return [ops.convert_to_numpy(g) for g in grads]


if __name__ == "__main__":
    main()
