"""The three runs of one backend, for `train_digits.py`, which says what they show.

Prints JSON, one object a line: how far it is, and each run when it is done.
"""

import functools
import json
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
BATCH_SIZE = 449  # a third of the training data
LEARNING_RATE = 0.015
MEASUREMENTS = 12
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
    for precision, policy, scaled in RUNS:
        tell(precision=precision, total=epochs * len(RUNS))
        run = train(build_model(policy), make_optimizer(scaled), data, epochs)
        tell(run={"precision": precision, **run})
    tell(precision="done")


def tell(**event):
    print(json.dumps(event), flush=True)


def load_data():
    """Returns images, 16 by 16 with mean 0 and deviation 1, and one-hot labels."""
    digits = load_digits()
    images = digits.images.repeat(2, axis=1).repeat(2, axis=2)[..., np.newaxis]
    images = ((images - images.mean()) / images.std()).astype("float32")
    labels = np.eye(10, dtype="float32")[digits.target]
    train_x, test_x, train_y, test_y = train_test_split(
        images, labels, test_size=450, stratify=digits.target, random_state=0
    )
    return (train_x, train_y), (test_x, test_y)


def build_model(policy):
    """Returns a LeNet-5, with the same weights under each dtype policy."""
    keras.utils.set_random_seed(0)
    keras.config.set_dtype_policy(policy)
    dense = functools.partial(layers.Dense, kernel_initializer="random_normal")
    return keras.Sequential(
        [
            keras.Input((16, 16, 1)),
            layers.Conv2D(6, 5, activation="sigmoid"),
            layers.AveragePooling2D(2),
            layers.Conv2D(16, 5, activation="sigmoid"),
            layers.AveragePooling2D(2),
            layers.Flatten(),
            dense(120, activation="sigmoid"),
            dense(84, activation="sigmoid"),
            # The loss is computed in float32, as Keras's guide has it.
            dense(10, activation="softmax", dtype="float32"),
        ]
    )


def make_optimizer(scaled):
    # Shorter averages than the defaults, for a run of 192 steps.
    optimizer = keras.optimizers.Adam(LEARNING_RATE, beta_1=0.8, beta_2=0.98)
    if scaled:
        # Far above the defaults, and growing often: to be seen at work.
        optimizer = keras_lso.LossScaleOptimizer(
            optimizer,
            initial_scale=2.0**32,
            dynamic_growth_steps=40,
            max_scale=2.0**32,
        )
    return optimizer


def train(model, optimizer, data, epochs):
    train_data, test_data = data
    model.compile(
        optimizer,
        loss="mean_squared_error",
        metrics=["accuracy"],
        # Else Keras would give plain float16 a loss scale of its own.
        auto_scale_loss=False,
        jit_compile=not ON_TORCH,
    )
    recorder = Recorder([array[:BATCH_SIZE] for array in train_data])
    model.fit(
        *train_data,
        batch_size=BATCH_SIZE,
        epochs=epochs,
        verbose=0,
        callbacks=[recorder],
    )
    _, accuracy = model.evaluate(*test_data, batch_size=450, verbose=0)
    run = {
        "accuracy": accuracy,
        "losses": recorder.losses,
        "scales": recorder.scales,
        "final_scale": recorder.scale,
        "skipped": recorder.skipped,
    }
    if recorder.flush_counts:
        counts = np.sum(recorder.flush_counts, axis=0)
        run["flushed"] = counts[:, 0].sum() / counts[:, 1].sum()
        shares = counts[:, 0] / counts[:, 1]
        run["flushed_by_layer"] = dict(zip(LAYERS, shares, strict=True))
    return run


class Recorder(keras.callbacks.Callback):
    """Keeps the loss of each epoch and the loss scale of each step.

    In float16 it also counts, now and then, the gradient values flushed to zero.
    """

    def __init__(self, batch):
        super().__init__()
        self.reference = build_model("float32")
        self.batch = batch
        self.losses, self.scales, self.skipped, self.flush_counts = [], [], [], []

    def on_epoch_begin(self, epoch, logs=None):
        if self.model.layers[0].compute_dtype != "float16":
            return
        if epoch % max(1, self.params["epochs"] // MEASUREMENTS) == 0:
            self.reference.set_weights(self.model.get_weights())
            self.flush_counts.append(
                count_flushed(self.reference, self.model, self.scale, self.batch)
            )

    def on_train_batch_begin(self, batch, logs=None):
        self.scales.append(self.scale)

    def on_train_batch_end(self, batch, logs=None):
        if not getattr(self.model.optimizer, "last_step_applied", True):
            self.skipped.append(len(self.scales) - 1)

    def on_epoch_end(self, epoch, logs=None):
        self.losses.append(logs["loss"])
        tell(advance=1)

    @property
    def scale(self):
        return float(getattr(self.model.optimizer, "loss_scale", 1.0))


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
