"""A KerasHub backbone trained in 16 bits, first all of it, then by LoRA.

A small BERT of characters, made from its constructor, so that nothing is downloaded,

- learns to tell the prose of Python's manual from the code of its library: LoRA is off,
  and all weights are trained;
- is then frozen and learns the same of NumPy's documentation and other code, through
  `backbone.enable_lora(rank)` and a new head.

It has the settings of a fine-tuning recipe: `AdamW` with a linear warm-up, decay that
leaves out biases and normalisation, `global_clipnorm`, and gradients accumulated over
several batches. The dtype policy determines the optimizer around `AdamW`:

- `mixed_float16`, the default: `keras_lso.LossScaleOptimizer`;
- `bfloat16`, whose weights have 16 bits: none, and from the same weights
  `keras_lso.GuardedOptimizer`, which trains masters.

    pip install keras-hub
    python examples/keras_hub_finetune.py [--policy bfloat16] [--steps 200]

prints a table of the trainings. It trains on the backend in KERAS_BACKEND.
"""

import argparse
import inspect
import math
import pathlib
import pydoc_data.topics
import time
import tokenize
from collections.abc import Callable

import keras
import keras_hub
import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

import keras_lso

LENGTH, BATCH_SIZE = 32, 32  # characters in a window, windows in a batch
CHARACTERS = 128  # those of ASCII; the last is for all others
ACCUMULATED = 2  # batches in an update
RANK = 4

MANUAL = "\n\n".join(pydoc_data.topics.topics.values())

# What is around AdamW, by the dtype policy.
OPTIMIZERS: dict[str, dict[str, Callable]] = {
    "mixed_float16": {"LossScaleOptimizer": keras_lso.LossScaleOptimizer},
    "bfloat16": {
        "AdamW alone": lambda inner: inner,
        "GuardedOptimizer": keras_lso.GuardedOptimizer,
    },
}
if keras.backend.backend() == "tensorflow":
    # Where gradients have two dtypes, Keras's `global_clipnorm` fails there.
    del OPTIMIZERS["bfloat16"]["AdamW alone"]
LOSSES = ("loss\nbefore", "loss\nafter", "accuracy")
COLUMNS = {
    "mixed_float16": ("trained", "parameters", *LOSSES, "scale", "skipped\nsteps"),
    "bfloat16": ("trained", "optimizer", "parameters", *LOSSES, "weights\nchanged"),
}


def main():
    arguments = parse_arguments()
    policy, steps = arguments.policy, arguments.steps
    start = time.perf_counter()
    keras.utils.set_random_seed(0)
    keras.config.set_dtype_policy(policy)
    backbone = make_backbone()
    code = source_of(argparse) + source_of(inspect)
    runs = train_by_each("all weights", backbone, [MANUAL, code], policy, steps)
    backbone.enable_lora(RANK)
    before = values_of(backbone.non_trainable_weights)
    texts = [numpy_manual(), source_of(tokenize)]
    runs += train_by_each("LoRA", backbone, texts, policy, steps)
    after = values_of(backbone.non_trainable_weights)
    changed = sum(map(np.any, map(np.not_equal, before, after)))
    seconds = time.perf_counter() - start
    console = Console(highlight=False)
    console.print(make_table(runs, policy))
    if "weights\nchanged" in COLUMNS[policy]:
        console.print("Weights changed: by one update, of those trained in bfloat16.")
    console.print(
        f"{steps // ACCUMULATED} updates each, of {ACCUMULATED} batches of "
        f"{BATCH_SIZE}, on {keras.backend.backend()}, in {seconds:.0f} s.\n"
        f"Of the {len(before)} frozen weights LoRA has changed {changed}."
    )


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    least = 3 * ACCUMULATED
    parser.add_argument("--policy", choices=OPTIMIZERS, default="mixed_float16")
    help = f"batches of each training, at least {least}"
    parser.add_argument("--steps", type=int, default=200, help=help)
    arguments = parser.parse_args()
    if arguments.steps < least:
        parser.error(f"--steps must be at least {least}")
    return arguments


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
def make_adamw(batches):
    """Returns the AdamW of a fine-tuning of so many batches."""
    updates = batches // ACCUMULATED
    decay = keras.optimizers.schedules.PolynomialDecay(5e-3, updates)
    warmup = keras_lso.schedules.LinearWarmup(decay, warmup_steps=max(1, updates // 10))
    adamw = keras.optimizers.AdamW(
        # Keras's optimizers call a schedule with the number of the batch.
        keras_lso.schedules.PerUpdate(warmup, ACCUMULATED),
        weight_decay=0.01,
        global_clipnorm=1.0,
        gradient_accumulation_steps=ACCUMULATED,
    )
    # Names of variables, not of layers: gamma and beta are those of normalisation.
    adamw.exclude_from_weight_decay(var_names=["bias", "gamma", "beta"])
    return adamw


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


def train_by_each(trained, backbone, texts, policy, steps):
    """Trains by each optimizer from the same weights; those of the last one stay."""
    start, runs = values_of(backbone.weights), []
    for name, wrap in OPTIMIZERS[policy].items():
        backbone.set_weights(start)
        cells = train(backbone, texts, wrap(make_adamw(steps)), steps)
        runs.append({"trained": trained, "optimizer": name, **cells})
    return runs


def train(backbone, texts, optimizer, steps):
    """Trains a new head, and what of the backbone is not frozen."""
    keras.utils.set_random_seed(1)  # the same head for each optimizer
    inputs, labels = windows_of(texts)
    model = make_classifier(backbone)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, metrics=["accuracy"])
    before, _ = model.evaluate(inputs, labels, batch_size=128, verbose=0)
    changed = fit(model, batches(inputs, labels), steps)
    after, accuracy = model.evaluate(inputs, labels, batch_size=128, verbose=0)
    trained, every = map(size_of, (model.trainable_variables, model.variables))
    return {
        "parameters": f"{trained:,} ({trained / every:.0%})",
        "loss\nbefore": f"{before:.3f}",
        "loss\nafter": f"{after:.3f}",
        "accuracy": f"{accuracy:.1%}",
        "weights\nchanged": f"{changed:.1%}",
        # AdamW alone has neither.
        "scale": f"2^{math.log2(float(getattr(optimizer, 'loss_scale', 1))):g}",
        "skipped\nsteps": str(int(getattr(optimizer, "skipped_steps", 0))),
    }


def fit(model, batches, steps):
    """Fits; returns what share of the weights the update half-way has changed.

    Of those in the dtype policy's own dtype: not of a head in float32, nor of LoRA's
    matrices, which are float32 since Keras 3.15.
    """
    dtype = keras.config.dtype_policy().variable_dtype
    weights = [v for v in model.trainable_variables if v.dtype == dtype]
    half = steps // (2 * ACCUMULATED) * ACCUMULATED
    options = {"shuffle": False, "verbose": 0}
    model.fit(batches, steps_per_epoch=half, **options)
    before = values_of(weights)
    model.fit(batches, steps_per_epoch=ACCUMULATED, **options)
    after = values_of(weights)
    model.fit(batches, steps_per_epoch=steps - half - ACCUMULATED, **options)
    changed = sum(map(np.count_nonzero, map(np.not_equal, before, after)))
    return changed / size_of(weights)


def values_of(variables):
    return [keras.ops.convert_to_numpy(v) for v in variables]


def size_of(variables):
    return sum(math.prod(v.shape) for v in variables)


def make_table(runs, policy):
    title = f"A KerasHub BERT in {policy}"
    table = Table(
        title=title, box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True
    )
    for name in COLUMNS[policy]:
        justify = "left" if name in ("trained", "optimizer") else "right"
        table.add_column(name, justify=justify, no_wrap=True)
    for run in runs:
        table.add_row(*(run[name] for name in COLUMNS[policy]))
    return table


if __name__ == "__main__":
    main()
