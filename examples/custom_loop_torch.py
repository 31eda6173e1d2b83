"""A PyTorch training loop in float16, with the loss scaled by keras_lso.

python examples/custom_loop_torch.py
"""

import os

os.environ["KERAS_BACKEND"] = "torch"

import keras
import torch
from keras import layers
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

import keras_lso

keras.utils.set_random_seed(0)
keras.config.set_dtype_policy("mixed_float16")

digits = load_digits()
# On the device that Keras uses.
images = keras.ops.convert_to_tensor(digits.images[..., None] / 16, dtype="float32")
labels = keras.ops.convert_to_tensor(digits.target, dtype="int64")
train = DataLoader(TensorDataset(images[:1400], labels[:1400]), 100, shuffle=True)

model = keras.Sequential(
    [
        keras.Input((8, 8, 1)),
        layers.Conv2D(16, 3, activation="relu"),
        layers.Flatten(),
        layers.Dense(64, activation="relu"),
        layers.Dense(10, dtype="float32"),
    ]
)
loss_fn = torch.nn.CrossEntropyLoss()
optimizer = keras_lso.LossScaleOptimizer(
    keras.optimizers.Adam(0.002),
    # The defaults are 2**15 and 2000. This short run starts too high and grows
    # often, so that one can see the scale move.
    initial_scale=2.0**24,
    dynamic_growth_steps=50,
)


# --8<-- [start:step]
def train_step(x, y):
    model.zero_grad()
    loss = loss_fn(model(x, training=True), y)
    optimizer.scale_loss(loss).backward()
    gradients = [v.value.grad for v in model.trainable_variables]
    with torch.no_grad():
        optimizer.apply(gradients, model.trainable_variables)
    return loss.detach()


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

with torch.no_grad():
    predicted = model(images[1400:]).argmax(dim=-1)
accuracy = (predicted == labels[1400:]).float().mean()
print(f"test accuracy {accuracy:.3f}")
