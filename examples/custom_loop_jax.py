"""A jitted JAX training loop in float16, with the loss scaled by keras_lso.

python examples/custom_loop_jax.py
"""

import os

os.environ["KERAS_BACKEND"] = "jax"

from functools import partial

import jax
import keras
import numpy as np
from keras import layers
from sklearn.datasets import load_digits

import keras_lso

keras.utils.set_random_seed(0)
keras.config.set_dtype_policy("mixed_float16")

digits = load_digits()
images = (digits.images / 16).astype("float32")[..., None]
labels = digits.target

model = keras.Sequential(
    [
        keras.Input((8, 8, 1)),
        layers.Conv2D(16, 3, activation="relu"),
        layers.Flatten(),
        layers.Dense(64, activation="relu"),
        layers.Dense(10, dtype="float32"),
    ]
)
loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
optimizer = keras_lso.LossScaleOptimizer(
    keras.optimizers.Adam(0.002),
    # The defaults are 2**15 and 2000. This short run starts too high and grows
    # often, so that one can see the scale move.
    initial_scale=2.0**24,
    dynamic_growth_steps=50,
)
optimizer.build(model.trainable_variables)


# --8<-- [start:step]
def compute_loss(trainable, non_trainable, optimizer_state, x, y):
    logits, non_trainable = model.stateless_call(
        trainable, non_trainable, x, training=True
    )
    loss = loss_fn(y, logits)
    # The scale is part of the state. Without this scope its value of the first
    # step would be compiled in, as a constant.
    mapping = list(zip(optimizer.variables, optimizer_state, strict=True))
    with keras.StatelessScope(mapping):
        scaled_loss = optimizer.scale_loss(loss)
    return scaled_loss, (loss, non_trainable)


# The old state is donated, so that the new one can take its memory. It goes in and
# comes out in the same order.
@partial(jax.jit, donate_argnums=0)
def train_step(state, x, y):
    gradients, (loss, non_trainable) = jax.grad(compute_loss, has_aux=True)(
        *state, x, y
    )
    trainable, _, optimizer_state = state
    trainable, optimizer_state = optimizer.stateless_apply(
        optimizer_state, gradients, trainable
    )
    return (trainable, non_trainable, optimizer_state), loss


# --8<-- [end:step]


# --8<-- [start:loop]
variables = (
    model.trainable_variables,
    model.non_trainable_variables,
    optimizer.variables,
)
state = keras.tree.map_structure(lambda v: v.value, variables)

for epoch in range(12):
    for batch in np.random.permutation(1400).reshape(-1, 100):
        state, loss = train_step(state, images[batch], labels[batch])
    # The variables do not follow the state automatically. This and the next lines
    # read from the device: do so now and then, not at every step.
    keras.tree.map_structure(lambda v, value: v.assign(value), variables, state)
    # --8<-- [end:loop]
    optimizer.check_stalled()
    print(
        f"epoch {epoch + 1:2}: loss {loss:.3f}, "
        f"loss scale {optimizer.loss_scale:.0f}, "
        f"skipped steps {optimizer.skipped_steps}"
    )

accuracy = np.mean(np.argmax(model(images[1400:]), axis=-1) == labels[1400:])
print(f"test accuracy {accuracy:.3f}")
