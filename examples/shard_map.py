"""A JAX training loop over four devices, with `jax.shard_map`, in float16.

python examples/shard_map.py

Four devices of a CPU represent four accelerators. Each computes the gradients of its
part of a batch; `axis_name` says that they are still to be averaged. A step in which
one device overflows is skipped on all of them.
"""

import os

os.environ["KERAS_BACKEND"] = "jax"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"

import jax
import keras
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from keras import layers
from sklearn.datasets import load_digits

import keras_lso

keras.utils.set_random_seed(0)
keras.config.set_dtype_policy("mixed_float16")

digits = load_digits()
images = (digits.images / 16).astype("float32").reshape(-1, 64)
labels = digits.target

model = keras.Sequential(
    [
        keras.Input((64,)),
        layers.Dense(64, activation="relu"),
        layers.Dense(10, dtype="float32"),
    ]
)
loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
optimizer = keras_lso.LossScaleOptimizer(
    keras_lso.LARS(0.1, eeta=0.05),
    # The defaults are 2**15 and 2000. This short run starts too high and grows
    # often, so that one can see the scale move.
    initial_scale=2.0**24,
    dynamic_growth_steps=50,
)
optimizer.build(model.trainable_variables)


def compute_loss(trainable, optimizer_state, x, y):
    logits, _ = model.stateless_call(trainable, [], x, training=True)
    loss = loss_fn(y, logits)
    # The scale is part of the state.
    mapping = list(zip(optimizer.variables, optimizer_state, strict=True))
    with keras.StatelessScope(mapping):
        return optimizer.scale_loss(loss), loss


# --8<-- [start:step]
def train_step(state, x, y):
    trainable, optimizer_state = state
    # JAX would add up the gradients of weights that all devices share: a sum, not a
    # mean. Each device has copies of its own, whose gradients `axis_name` averages.
    copies = jax.lax.pcast(trainable, "batch", to="varying")
    gradients, loss = jax.grad(compute_loss, has_aux=True)(
        copies, optimizer_state, x, y
    )
    trainable, optimizer_state = optimizer.stateless_apply(
        optimizer_state, gradients, trainable, axis_name="batch"
    )
    return (trainable, optimizer_state), jax.lax.pmean(loss, "batch")


mesh = Mesh(jax.devices(), "batch")
train_step = jax.jit(
    jax.shard_map(
        train_step,
        mesh=mesh,
        in_specs=(P(), P("batch"), P("batch")),
        out_specs=P(),
    ),
    donate_argnums=0,
)
# --8<-- [end:step]

variables = model.trainable_variables, optimizer.variables
state = keras.tree.map_structure(lambda v: v.value, variables)
for epoch in range(8):
    for batch in np.random.permutation(1400).reshape(-1, 100):
        state, loss = train_step(state, images[batch], labels[batch])
    # The variables do not follow the state automatically.
    host_state = jax.device_get(state)
    keras.tree.map_structure(lambda v, value: v.assign(value), variables, host_state)
    print(
        f"epoch {epoch + 1}: loss {loss:.3f}, "
        f"loss scale {optimizer.loss_scale:.0f}, "
        f"skipped steps {optimizer.skipped_steps}"
    )

copies = [[shard.data.tobytes() for shard in v.addressable_shards] for v in state[0]]
print("weights alike on all devices:", all(len(set(c)) == 1 for c in copies))
accuracy = np.mean(np.argmax(model(images[1400:]), axis=-1) == labels[1400:])
print(f"test accuracy {accuracy:.3f}")
