"""Several losses in one training step: a small GAN in float16, on PyTorch.

    python examples/gan.py

The generator and the discriminator each have an optimizer with its own loss scale.
Their gradients differ in size, and an overflow in one must not cost the other a step.

The discriminator has two losses, on real digits and on generated digits, and one
optimizer that applies the gradients of each. Both losses were multiplied by the same
scale, so the scale must not move between the two. Together they are one step of
training, which should count once towards `dynamic_growth_steps`. So all except the last
are applied with `update_scale=False`. An overflow in any of them skips its own step,
and lowers the scale when the last is applied.
"""

import argparse
import os

os.environ["KERAS_BACKEND"] = "torch"

import keras
import torch
from keras import layers
from sklearn.datasets import load_digits

import keras_lso

BATCH_SIZE, NOISE = 64, 16

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=500)
options = parser.parse_args()

keras.utils.set_random_seed(0)
keras.config.set_dtype_policy("mixed_float16")
# On the device that Keras uses.
digits = keras.ops.convert_to_tensor(load_digits().data / 16, dtype="float32")

generator = keras.Sequential(
    [
        keras.Input((NOISE,)),
        layers.Dense(64, activation="relu"),
        layers.Dense(64, activation="sigmoid"),
    ]
)
discriminator = keras.Sequential(
    [
        keras.Input((64,)),
        layers.Dense(64, activation="relu"),
        layers.Dense(1, dtype="float32"),
    ]
)


def make_optimizer():
    return keras_lso.LossScaleOptimizer(
        keras.optimizers.Adam(0.002, beta_1=0.5),
        # The defaults are 2**15 and 2000. This short run starts too high and grows
        # often, so that one can see the scale move.
        initial_scale=2.0**24,
        dynamic_growth_steps=50,
    )


generator_optimizer = make_optimizer()
discriminator_optimizer = make_optimizer()


def loss_of(images, target):
    """How far the discriminator is from answering `target`, 1 for a real digit."""
    answers = discriminator(images)
    targets = torch.full_like(answers, target)
    return torch.nn.functional.binary_cross_entropy_with_logits(answers, targets)


# --8<-- [start:step]
def gradients_of(loss, optimizer, model):
    """Returns the gradients of the scaled loss, which `apply` unscales."""
    values = [v.value for v in model.trainable_variables]
    return torch.autograd.grad(optimizer.scale_loss(loss), values)


def train_discriminator(real, fake):
    optimizer, variables = discriminator_optimizer, discriminator.trainable_variables
    real_loss, fake_loss = loss_of(real, 1.0), loss_of(fake, 0.0)
    real_gradients = gradients_of(real_loss, optimizer, discriminator)
    fake_gradients = gradients_of(fake_loss, optimizer, discriminator)
    with torch.no_grad():
        optimizer.apply(fake_gradients, variables, update_scale=False)
        optimizer.apply(real_gradients, variables)
    return (real_loss + fake_loss).detach()


# --8<-- [end:step]


def train_generator(noise):
    loss = loss_of(generator(noise), 1.0)
    gradients = gradients_of(loss, generator_optimizer, generator)
    with torch.no_grad():
        generator_optimizer.apply(gradients, generator.trainable_variables)
    return loss.detach()


def describe(name, loss, optimizer):
    return (
        f"{name} loss {loss:5.3f} scale {optimizer.loss_scale:8.0f} "
        f"skipped {optimizer.skipped_steps:2}"
    )


for step in range(1, options.steps + 1):
    real = digits[torch.randint(len(digits), (BATCH_SIZE,))]
    noise = torch.randn(BATCH_SIZE, NOISE, device=digits.device)
    discriminator_loss = train_discriminator(real, generator(noise).detach())
    generator_loss = train_generator(noise)
    if step == 1 or step % 50 == 0:
        print(
            f"step {step:3}",
            describe("discriminator", discriminator_loss, discriminator_optimizer),
            describe("generator", generator_loss, generator_optimizer),
            sep=" | ",
        )
