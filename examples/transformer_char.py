"""A Transformer that learns to write like Python's manual, in float16.

Trains a language model on the license and the documentation that every Python
brings along, from the same weights and on the same batches

- in float32, and
- in float16 (Keras's `mixed_float16` dtype policy) with `LogMaxLossScale`.

The learning rate is that of "Attention Is All You Need": `TransformerPolicy`.

    python examples/transformer_char.py [--steps 400] [--output .]

prints a table and what the float16 model writes, and draws the losses and the loss
scale into `transformer_char.png`. It trains on the backend in KERAS_BACKEND.

The two loss curves lie on each other: float16 rounds to three digits, and batches
differ by more. The loss scale starts at 1 and measures the size of the gradients in
one step. It is then as high as float16 allows with three standard deviations to spare.
This costs no step, whereas a scale that starts too high costs one for each halving. Its
bound is 2**24 here, not 2**14 as by default, so that you can see it move.
"""

import argparse
import math
import pathlib
import pydoc_data.topics
import sys
import sysconfig
import time

import keras
import matplotlib
import numpy as np
from keras import layers, ops
from rich import box
from rich.console import Console
from rich.table import Table

import keras_lso
from keras_lso.compat import open_seq2seq

matplotlib.use("Agg")
import matplotlib.pyplot as plt

LENGTH, BATCH_SIZE = 32, 32  # characters in a window, windows in a batch
WIDTH, HEADS, BLOCKS = 64, 4, 2
STEPS_AN_EPOCH = 10  # the curves have one point for each
PROMPT = "If a class defines a method that"

# Float32 is broad and pale: what lies on top of it is seen to do so. "C0" is the first
# colour of matplotlib's style.
STYLES = {
    "float32": {"color": "gray", "alpha": 0.8, "linewidth": 5},
    "mixed_float16": {"color": "C0", "linewidth": 1.8},
}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=400, help="at least 10")
    parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path("."))
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    text = load_text()
    runs = [train(policy, text, arguments.steps) for policy in STYLES]
    picture = arguments.output / "transformer_char.png"
    draw(runs, picture)
    console = Console(highlight=False)
    console.print(make_table(runs))
    apart = np.abs(np.subtract(runs[0]["losses"], runs[1]["losses"]))
    console.print(
        f"The losses differ by {apart.max():.4f} at most, by {apart.mean():.4f} on "
        f"average (means of {STEPS_AN_EPOCH} steps). The float16 model writes:\n"
    )
    console.print(runs[1]["sample"], markup=False)
    console.print(
        f"\nTrained on {keras.backend.backend()}. Wrote {picture}. All of it took "
        f"{time.perf_counter() - start:.0f} s."
    )


def load_text():
    """Returns what the standard library holds in plain text: license and manual."""
    library = pathlib.Path(sysconfig.get_path("stdlib"))
    # Where `license()` looks. Some installations have it elsewhere, or not at all.
    folders, names = (library.parent, library), ("LICENSE.txt", "LICENSE")
    files = [folder / name for folder in folders for name in names]
    license = next((f.read_text("utf-8") for f in files if f.is_file()), sys.copyright)
    return "\n\n".join([license, *pydoc_data.topics.topics.values()])


def windows_at(starts, numbers):
    """Returns windows of the text as inputs, and each one character on as targets."""
    windows = numbers[starts[:, None] + np.arange(LENGTH + 1)]
    return windows[:, :-1], windows[:, 1:]


def batches(numbers):
    random = np.random.default_rng(0)
    while True:
        starts = random.integers(len(numbers) - LENGTH, size=BATCH_SIZE)
        yield windows_at(starts, numbers)


def build_model(policy, characters):
    """Returns a Transformer; with the same weights, whatever the dtype policy."""
    keras.utils.set_random_seed(0)
    keras.config.set_dtype_policy(policy)
    inputs = keras.Input((LENGTH,), dtype="int32")
    places = ops.cumsum(ops.ones_like(inputs), axis=1) - 1
    x = layers.Embedding(characters, WIDTH)(inputs)
    x = x + layers.Embedding(LENGTH, WIDTH)(places)
    for _ in range(BLOCKS):
        normal = layers.LayerNormalization()(x)
        # Who asks for the scores gets Keras's plain attention: JAX's fused one has no
        # float16 on a CPU.
        attended, _ = layers.MultiHeadAttention(HEADS, WIDTH // HEADS)(
            normal, normal, use_causal_mask=True, return_attention_scores=True
        )
        x = x + attended
        normal = layers.LayerNormalization()(x)
        x = x + layers.Dense(WIDTH)(layers.Dense(4 * WIDTH, activation="relu")(normal))
    x = layers.LayerNormalization()(x)
    # The loss is computed in float32, as Keras's guide has it.
    return keras.Model(inputs, layers.Dense(characters, dtype="float32")(x))


# --8<-- [start:optimizer]
def make_optimizer(policy, steps):
    rate = open_seq2seq.TransformerPolicy(
        learning_rate=0.7, d_model=WIDTH, warmup_steps=max(1, steps // 4)
    )
    optimizer = keras.optimizers.Adam(rate, beta_2=0.98)
    if policy == "float32":
        return optimizer
    log_max = keras_lso.loss_scales.LogMaxLossScale(scale_max=2.0**24)
    return keras_lso.LossScaleOptimizer(optimizer, loss_scale=log_max)


# --8<-- [end:optimizer]


class Recorder(keras.callbacks.Callback):
    """Keeps the loss scale of each step."""

    def __init__(self):
        super().__init__()
        self.scales = []

    def on_train_batch_begin(self, batch, logs=None):
        # Through `self.model`, which on JAX brings the variables up to date.
        optimizer = self.model.optimizer
        self.scales.append(float(getattr(optimizer, "loss_scale", 1.0)))


def train(policy, text, steps):
    alphabet, numbers = np.unique(list(text), return_inverse=True)
    numbers = numbers.astype("int32")
    model = build_model(policy, len(alphabet))
    optimizer = make_optimizer(policy, steps)
    loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss_fn)
    recorder = Recorder()
    history = model.fit(
        batches(numbers),
        steps_per_epoch=STEPS_AN_EPOCH,
        epochs=max(1, steps // STEPS_AN_EPOCH),
        callbacks=[recorder],
        shuffle=False,
        verbose=0,
    )
    # All over the text. (The manual repeats itself: no part of it is new.)
    starts = np.linspace(0, len(numbers) - LENGTH - 1, 1024).astype(int)
    return {
        "policy": policy,
        "losses": history.history["loss"],
        "final_loss": model.evaluate(*windows_at(starts, numbers), verbose=0),
        "scales": recorder.scales,
        "skipped": int(getattr(optimizer, "skipped_steps", 0)),
        "sample": write(model, alphabet),
    }


def write(model, alphabet, characters=150):
    """Lets the model go on from the prompt, one character at a time."""
    random = np.random.default_rng(0)
    text = PROMPT
    for _ in range(characters):
        window = np.searchsorted(alphabet, list(text[-LENGTH:])).astype("int32")
        logits = np.asarray(model.predict_on_batch(window[None])[0, -1], "float64")
        # A little less daring than the model is unsure.
        likely = np.exp((logits - logits.max()) / 0.7)
        text += random.choice(alphabet, p=likely / likely.sum())
    return text


def make_table(runs):
    title = "A two-layer Transformer on Python's manual"
    table = Table(title=title, box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("policy", no_wrap=True)
    for name in ("final\nloss", "steps", "skipped\nsteps", "final\nscale"):
        table.add_column(name, justify="right")
    for run in runs:
        scale = math.log2(run["scales"][-1])
        table.add_row(
            run["policy"],
            f"{run['final_loss']:.4f}",
            str(len(run["scales"])),
            str(run["skipped"]),
            "-" if run["policy"] == "float32" else f"2^{scale:.1f}",
        )
    return table


def draw(runs, path):
    """Draws the losses of both, and the loss scale of float16."""
    figure, (losses, scales) = plt.subplots(
        1, 2, figsize=(9.0, 3.6), layout="constrained"
    )
    for run in runs:
        policy = run["policy"]
        steps = STEPS_AN_EPOCH * np.arange(1, len(run["losses"]) + 1)
        losses.plot(steps, run["losses"], label=policy, **STYLES[policy])
    losses.set_ylabel("training loss (nats a character)")
    losses.legend(frameon=False)
    scales.plot(runs[1]["scales"], **STYLES["mixed_float16"])
    scales.set_yscale("log", base=2)
    scales.set_ylabel("loss scale")
    for axis in (losses, scales):
        axis.set_xlabel("step")
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=100)
    plt.close(figure)


if __name__ == "__main__":
    main()
