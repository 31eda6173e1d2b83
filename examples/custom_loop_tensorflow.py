"""A TensorFlow training loop in float16, with the loss scaled by keras_lso.

python examples/custom_loop_tensorflow.py
"""

import os

os.environ["KERAS_BACKEND"] = "tensorflow"

import keras
import tensorflow as tf
from keras import layers
from sklearn.datasets import load_digits

import keras_lso

keras.utils.set_random_seed(0)
keras.config.set_dtype_policy("mixed_float16")

digits = load_digits()
images = (digits.images / 16).astype("float32")[..., None]
labels = digits.target
train = tf.data.Dataset.from_tensor_slices((images[:1400], labels[:1400]))
train = train.shuffle(1400, seed=0).batch(100)

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
# --8<-- [start:step]
# A tf.function must not create variables after its first call.
optimizer.build(model.trainable_variables)


@tf.function
def train_step(x, y):
    with tf.GradientTape() as tape:
        loss = loss_fn(y, model(x, training=True))
        scaled_loss = optimizer.scale_loss(loss)
    gradients = tape.gradient(scaled_loss, model.trainable_variables)
    optimizer.apply(gradients, model.trainable_variables)
    return loss


# --8<-- [end:step]


for epoch in range(12):
    for x, y in train:
        loss = train_step(x, y)
    # These read from the device: now and then, not at every step.
    optimizer.check_stalled()
    print(
        f"epoch {epoch + 1:2}: loss {loss:.3f}, "
        f"loss scale {optimizer.loss_scale:.0f}, "
        f"skipped steps {optimizer.skipped_steps}"
    )

predicted = tf.argmax(model(images[1400:]), axis=-1)
accuracy = tf.reduce_mean(tf.cast(predicted == labels[1400:], tf.float32))
print(f"test accuracy {accuracy:.3f}")
