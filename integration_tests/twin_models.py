"""Models and optimizers that are alike in tf.keras and in Keras 3, and their steps."""

import numpy as np

WIDTH = 4


def sequential(k):
    """Two layers of the same shapes, which do not show a swap."""
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
    """A model between two layers: their variables are not the first in a file."""
    inputs = k.Input((WIDTH,))
    inner = k.Sequential(
        [k.Input((WIDTH,)), k.layers.Dense(WIDTH, name="inner"), k.layers.Dense(WIDTH)]
    )
    x = inner(k.layers.Dense(WIDTH)(inputs))
    return k.Model(inputs, k.layers.Dense(WIDTH)(x))


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


def dense(*names, width=WIDTH, **options):
    """Returns a function that makes a model with a layer of each name."""

    def make(k):
        layers = [k.layers.Dense(width, name=name, **options) for name in names]
        return k.Sequential([k.Input((WIDTH,)), *layers])

    return make


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


def start(model):
    """Assigns the weights that its twin has; returns inputs for a comparison."""
    random = np.random.default_rng(1)
    for variable in model.trainable_variables:
        variable.assign(random.normal(size=variable.shape).astype("float32"))
    return random.normal(size=(2, WIDTH)).astype("float32")


def gradients(model, step, size=1.0):
    random = np.random.default_rng(100 + step)
    return [
        np.float32(size) * random.normal(size=v.shape).astype("float32")
        for v in model.trainable_variables
    ]
