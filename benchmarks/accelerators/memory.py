"""The memory of a whole training step on JAX, as XLA plans it for a GPU or a TPU.

The step is that of Keras's `fit`: forward pass, backward pass and optimizer. The batch
is so small that a step holds little but weights, gradients and slots.
"""

import contextlib
import functools

import jax
import keras
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from keras import layers

import keras_lso
from benchmarks.accelerators import on_jax
from benchmarks.inner import INNER

VOCABULARY, WIDTH, LAYERS, HEADS = 16384, 2048, 2, 16
TOKENS = 256
BARE = "AdamW alone"
# The dtype policy, `master_weights`, and the dtype of slots.
RECIPES = [
    (policy, masters, slots)
    for policy in ("float32", "mixed_bfloat16", "mixed_float16")
    for masters, slots in (
        (BARE, "float32"),
        ("auto", "float32"),
        ("auto", "bfloat16"),
    )
]
# Keras's slots have the dtype of the weights.
RECIPES += [("bfloat16", BARE, "bfloat16")]
RECIPES += [
    ("bfloat16", masters, slots)
    for masters in ("float32", "remainder", "remainder8", "stochastic")
    for slots in ("float32", "bfloat16", "int8")
]


def facts(devices=1):
    """Returns what holds for all rows, a dict."""
    weights = decoder("float32", devices).count_params()
    return {"weights": weights, "batch": [devices, TOKENS]}


def measure(target):
    """Yields dicts: a recipe, and the bytes a weight that its program holds."""
    [device] = on_jax.TARGETS[target]()
    for policy, masters, slots in RECIPES:
        if policy == "mixed_float16" and device.platform == "tpu":
            # XLA has no product of float16 matrices there.
            continue
        model = model_with(policy, masters, slots)
        yield {
            "policy": policy,
            "masters": masters,
            "slots": slots,
            **sizes(model, compiled(model, [device])),
        }
        jax.clear_caches()


@contextlib.contextmanager
def shared_by(devices):
    """Returns a context in which a number of CPUs have variables, each all of them."""
    if devices > 1:
        cpus = keras.distribution.list_devices()[:devices]
        keras.distribution.set_distribution(
            keras.distribution.DataParallel(devices=cpus)
        )
    try:
        yield
    finally:
        keras.distribution.set_distribution(None)


@functools.lru_cache(maxsize=1)
def decoder(policy, devices):
    """Returns a model without an optimizer."""
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(policy)
    try:
        tokens = keras.Input((TOKENS,), dtype="int32")
        x = layers.Embedding(VOCABULARY, WIDTH)(tokens)
        for _ in range(LAYERS):
            y = layers.LayerNormalization()(x)
            attention = layers.MultiHeadAttention(HEADS, WIDTH // HEADS)
            x = layers.Add()([x, attention(y, y, use_causal_mask=True)])
            y = layers.LayerNormalization()(x)
            y = layers.Dense(4 * WIDTH, activation="gelu")(y)
            x = layers.Add()([x, layers.Dense(WIDTH)(y)])
        x = layers.LayerNormalization()(x)
        return keras.Model(tokens, layers.Dense(VOCABULARY)(x))
    finally:
        keras.config.set_dtype_policy(before)


def model_with(policy, masters, slots, devices=1, **options):
    """Returns a model with the optimizer that docs/which-setup.md names for the policy.

    The options are further ones of the optimizer.
    """
    optimizer = INNER["AdamW"].make()
    if masters != BARE:
        scales = policy == "mixed_float16"
        wrap = keras_lso.LossScaleOptimizer if scales else keras_lso.GuardedOptimizer
        slots = None if slots == "float32" else slots
        options |= {"master_weights": masters, "slot_dtype": slots}
        optimizer = wrap(optimizer, **options)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    with shared_by(devices):
        model = decoder(policy, devices)
        # Else Keras puts its own wrapper around AdamW under "mixed_float16".
        model.compile(optimizer, loss, auto_scale_loss=False)
        optimizer.build(model.trainable_variables)
    return model


def sizes(model, step):
    """Returns what a compiled step holds in each device, in bytes a weight, a dict."""
    weights = [v.value for v in model.trainable_variables]
    held = [*weights, *(v.value for v in model.optimizer.variables)]
    found = step.memory_analysis()
    in_bytes = {
        "arguments": found.argument_size_in_bytes,
        "in place": found.alias_size_in_bytes,
        "temporaries": found.temp_size_in_bytes,
        "peak": found.peak_memory_in_bytes,
        # A gradient has the dtype of its weight.
        "computed": sum(_bytes_in_a_device(array) for array in [*held, *weights]),
    }
    count = model.count_params()
    return {name: round(size / count, 2) for name, size in in_bytes.items()}


def _bytes_in_a_device(array):
    return array.addressable_shards[0].data.nbytes


def compiled(model, devices):
    """Returns the step that `fit` jits, compiled for devices which share the batch."""
    mesh = Mesh(np.array(devices), ("batch",))

    def described(shape, dtype, axes=()):
        sharding = NamedSharding(mesh, PartitionSpec(*axes))
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    state = (
        model.trainable_variables,
        model.non_trainable_variables,
        model.optimizer.variables,
        model.metrics_variables,
    )
    state = [
        [described(v.shape, v.value.dtype, _axes_of(v.value)) for v in some]
        for some in state
    ]
    tokens = described((len(devices), TOKENS), "int32", ("batch",))
    step = jax.jit(
        lambda *given: model.train_step(*given),
        donate_argnums=0,
        out_shardings=(None, jax.tree.map(lambda array: array.sharding, tuple(state))),
    )
    return on_jax.compiled_for(devices, step, state, (tokens, tokens))


def _axes_of(value):
    """Returns the axis of the devices that share each axis of an array."""
    return getattr(value.sharding, "spec", ())
