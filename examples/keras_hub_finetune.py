"""A KerasHub backbone trained in float16, first all of it, then by LoRA.

A small BERT of characters, made from its constructor, so that nothing is downloaded,

- learns to tell the prose of Python's manual from the code of its library: LoRA is off,
  and all weights are trained;
- is then frozen and learns the same of NumPy's documentation and other code, through
  `backbone.enable_lora(rank)` and a new head.

Both in Keras's `mixed_float16`, with what a fine-tuning recipe has: `AdamW` with a
linear warm-up, decay that leaves out biases and normalisation, `global_clipnorm`, and
gradients accumulated over several batches; around it `keras_lso.LossScaleOptimizer`.

    pip install keras-hub
    python examples/keras_hub_finetune.py [--steps 200]

prints a table of what was trained. It trains on the backend in KERAS_BACKEND.
"""

import argparse
import inspect
import math
import pathlib
import pydoc_data.topics
import time
import tokenize

import keras
import keras_hub
import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

import keras_lso

LENGTH, BATCH_SIZE = 32, 32  # characters in a window, windows in a batch
CHARACTERS = 128  # those of ASCII; the last stands for all others
ACCUMULATED = 2  # batches in an update
RANK = 4

MANUAL = "\n\n".join(pydoc_data.topics.topics.values())


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    help = f"batches of each training, at least {2 * ACCUMULATED}"
    parser.add_argument("--steps", type=int, default=200, help=help)
    steps = parser.parse_args().steps
    start = time.perf_counter()
    keras.utils.set_random_seed(0)
    keras.config.set_dtype_policy("mixed_float16")
    backbone = make_backbone()
    code = source_of(argparse) + source_of(inspect)
    runs = [train("all weights", backbone, [MANUAL, code], steps)]
    backbone.enable_lora(RANK)
    before = frozen_weights(backbone)
    runs.append(train("LoRA", backbone, [numpy_manual(), source_of(tokenize)], steps))
    changed = sum(map(np.any, map(np.not_equal, before, frozen_weights(backbone))))
    seconds = time.perf_counter() - start
    console = Console(highlight=False)
    console.print(make_table(runs))
    console.print(
        f"{steps // ACCUMULATED} updates each, of {ACCUMULATED} batches of "
        f"{BATCH_SIZE}, on {keras.backend.backend()}, in {seconds:.0f} s.\n"
        f"Of the {len(before)} frozen weights LoRA has changed {changed}."
    )


def make_backbone():
    """Returns a BERT; `BertBackbone.from_preset(...)` would be a trained one."""
    return keras_hub.models.BertBackbone(
        vocabulary_size=CHARACTERS,
        num_layers=2,
        num_heads=4,
        hidden_dim=48,
        intermediate_dim=128,
        # With dropout Keras takes its plain attention: on a CPU the fused one of JAX
        # has no float16.
        dropout=0.1,
        max_sequence_length=LENGTH,
    )


def make_classifier(backbone):
    """Returns a model with a new head. Its loss is computed in float32."""
    head = keras.layers.Dense(2, dtype="float32", name="head")
    return keras.Model(backbone.input, head(backbone.output["pooled_output"]))


# --8<-- [start:optimizer]
def make_optimizer(updates):
    """Returns the optimizer of a fine-tuning of so many updates."""
    decay = keras.optimizers.schedules.PolynomialDecay(5e-3, updates)
    inner = keras.optimizers.AdamW(
        keras_lso.schedules.LinearWarmup(decay, warmup_steps=max(1, updates // 10)),
        weight_decay=0.01,
        global_clipnorm=1.0,
        gradient_accumulation_steps=ACCUMULATED,
    )
    # Names of variables, not of layers: gamma and beta are those of normalisation.
    inner.exclude_from_weight_decay(var_names=["bias", "gamma", "beta"])
    return keras_lso.LossScaleOptimizer(inner)


# --8<-- [end:optimizer]


def numpy_manual():
    """Returns NumPy's documentation of its public functions and classes."""
    return "\n\n".join(inspect.getdoc(getattr(np, name)) or "" for name in np.__all__)


def source_of(module):
    return pathlib.Path(module.__file__).read_text("utf-8")


def windows_of(texts):
    """Returns equally many windows of each text, what a backbone takes, and labels."""
    random = np.random.default_rng(0)
    windows = []
    for text in texts:
        numbers = np.minimum(list(map(ord, text)), CHARACTERS - 1).astype("int32")
        starts = random.integers(len(numbers) - LENGTH, size=512)
        windows.append(numbers[starts[:, None] + np.arange(LENGTH)])
    order = random.permutation(512 * len(texts))
    tokens = np.concatenate(windows)[order]
    inputs = {
        "token_ids": tokens,
        "segment_ids": np.zeros_like(tokens),
        "padding_mask": np.ones_like(tokens),
    }
    return inputs, np.repeat(np.arange(len(texts)), 512)[order]


def batches(inputs, labels):
    """Yields batches, over and over."""
    while True:
        for start in range(0, len(labels), BATCH_SIZE):
            part = slice(start, start + BATCH_SIZE)
            yield {name: x[part] for name, x in inputs.items()}, labels[part]


def train(name, backbone, texts, steps):
    """Trains a new head, and what of the backbone is not frozen."""
    inputs, labels = windows_of(texts)
    model, optimizer = make_classifier(backbone), make_optimizer(steps // ACCUMULATED)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, metrics=["accuracy"])
    before, _ = model.evaluate(inputs, labels, batch_size=128, verbose=0)
    model.fit(batches(inputs, labels), steps_per_epoch=steps, shuffle=False, verbose=0)
    after, accuracy = model.evaluate(inputs, labels, batch_size=128, verbose=0)
    sizes = {
        trained: sum(int(np.prod(v.shape)) for v in variables)
        for trained, variables in (
            ("trained", model.trainable_variables),
            ("all", model.variables),
        )
    }
    return {
        "name": name,
        "parameters": f"{sizes['trained']:,} ({sizes['trained'] / sizes['all']:.0%})",
        "before": before,
        "after": after,
        "accuracy": accuracy,
        "scale": float(optimizer.loss_scale),
        "skipped": int(optimizer.skipped_steps),
    }


def frozen_weights(backbone):
    return [keras.ops.convert_to_numpy(w) for w in backbone.non_trainable_weights]


def make_table(runs):
    title = "A KerasHub BERT in mixed_float16"
    table = Table(title=title, box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("trained", no_wrap=True)
    names = (
        "parameters",
        "loss\nbefore",
        "loss\nafter",
        "accuracy",
        "scale",
        "skipped\nsteps",
    )
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    for run in runs:
        table.add_row(
            run["name"],
            run["parameters"],
            f"{run['before']:.3f}",
            f"{run['after']:.3f}",
            f"{run['accuracy']:.1%}",
            f"2^{math.log2(run['scale']):g}",
            str(run["skipped"]),
        )
    return table


if __name__ == "__main__":
    main()
