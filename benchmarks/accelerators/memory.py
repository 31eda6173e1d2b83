"""The memory of a whole training step on JAX, as XLA plans it for a GPU or a TPU.

The step is that of Keras's `fit`: forward pass, backward pass and optimizer. The batch
is so small that a step holds little but weights, gradients and slots.
"""

import functools
from unittest import mock

import jax
import keras
from jax.sharding import SingleDeviceSharding
from keras import layers

import keras_lso
from benchmarks.accelerators import on_jax
from benchmarks.inner import INNER

VOCABULARY, WIDTH, LAYERS, HEADS = 16384, 2048, 2, 16
BATCH = (1, 256)
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
    for masters in ("float32", "remainder", "stochastic")
    for slots in ("float32", "bfloat16")
]


def facts():
    """Returns what holds for all rows, a dict."""
    return {"weights": decoder("float32").count_params(), "batch": BATCH}


def measure(target):
    """Yields dicts: a recipe, and the bytes a weight that its program holds."""
    [device] = on_jax.TARGETS[target]()
    for policy, masters, slots in RECIPES:
        if policy == "mixed_float16" and device.platform == "tpu":
            # XLA has no product of float16 matrices there.
            continue
        model = decoder(policy)
        compile_model(model, policy, masters, slots)
        yield {
            "policy": policy,
            "masters": masters,
            "slots": slots,
            **sizes(model, device),
        }
        jax.clear_caches()


@functools.lru_cache(maxsize=1)
def decoder(policy):
    """Returns a model without an optimizer."""
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(policy)
    try:
        tokens = keras.Input(BATCH[1:], dtype="int32")
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


def compile_model(model, policy, masters, slots):
    """Gives the model the optimizer that docs/which-setup.md names for the policy."""
    optimizer = INNER["AdamW"].make()
    if masters != BARE:
        scales = policy == "mixed_float16"
        wrap = keras_lso.LossScaleOptimizer if scales else keras_lso.GuardedOptimizer
        slots = None if slots == "float32" else slots
        optimizer = wrap(optimizer, master_weights=masters, slot_dtype=slots)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    # Else Keras puts its own wrapper around AdamW under "mixed_float16".
    model.compile(optimizer, loss, auto_scale_loss=False)
    optimizer.build(model.trainable_variables)


def sizes(model, device):
    """Returns what a step holds, in bytes a weight, a dict."""
    weights = [v.value for v in model.trainable_variables]
    held = [*weights, *(v.value for v in model.optimizer.variables)]
    found = compiled(model, device).memory_analysis()
    in_bytes = {
        "arguments": found.argument_size_in_bytes,
        "in place": found.alias_size_in_bytes,
        "temporaries": found.temp_size_in_bytes,
        "peak": found.peak_memory_in_bytes,
        # A gradient has the dtype of its weight.
        "computed": sum(array.nbytes for array in [*held, *weights]),
    }
    count = model.count_params()
    return {name: round(size / count, 2) for name, size in in_bytes.items()}


def compiled(model, device):
    """Returns the step that `fit` jits, compiled for the device."""
    sharding = SingleDeviceSharding(device)

    def described(shape, dtype):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    state = (
        model.trainable_variables,
        model.non_trainable_variables,
        model.optimizer.variables,
        model.metrics_variables,
    )
    state = [[described(v.shape, v.value.dtype) for v in some] for some in state]
    tokens = described(BATCH, "int32")
    step = jax.jit(lambda *given: model.train_step(*given), donate_argnums=0)
    with mock.patch(on_jax.ASKS_FOR_CPU, lambda: False):
        return step.lower(state, (tokens, tokens)).compile()
