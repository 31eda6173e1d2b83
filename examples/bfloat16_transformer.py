"""Does AdamW in bfloat16, with bfloat16 slots too, reach the loss of float32?

Trains the language model of `transformer_char.py` on nine tenths of Python's manual,
from three seeds in each set-up, and evaluates it on the last tenth. Run it with
`make bfloat16-transformer`, or

    python examples/bfloat16_transformer.py [--fast] [--eight-bits] [--torchao]

It prints a table, and writes `bfloat16_transformer.json` and `.png` into the output
folder. It trains on the backend in KERAS_BACKEND. `--fast` has little of everything and
proves only that it runs. `--eight-bits` trains other set-ups than without: those with
masters of 24 bits, with moments in 8 bits, and with float16 weights. `--torchao` trains
fewer set-ups, on PyTorch, and one with torchao's AdamW, which rounds weights
stochastically, too, but its moments to the nearest bfloat16 numbers.

The set-ups of a seed start from the same weights, which bfloat16 represents, and have
the same batches, learning rates (a warm-up, then half a cosine down to a tenth) and
weight decay. The loss is computed in float32, all layers in the set-up's dtype policy.
"""

import argparse
import json
import pathlib
from typing import Any

import keras
import matplotlib
import numpy as np
from keras import layers
from rich import box
from rich.console import Console
from rich.progress import track
from rich.table import Table
from transformer_char import BATCH_SIZE, LENGTH, build_model, load_text, windows_at

import keras_lso
from keras_lso import schedules

matplotlib.use("Agg")
import matplotlib.pyplot as plt

SEEDS, STEPS, STEPS_A_PART = (1, 2, 3), 2400, 200  # a part ends with an evaluation
RATE, WEIGHT_DECAY, EPSILON = 3e-3, 0.1, 1e-7

FLOAT32, ALONE, TORCHAO = "float32", "AdamW alone", "torchao"
BETA_2 = f"{ALONE}, beta_2=0.99"
# The dtype policy, the kind of masters (None is AdamW alone), and the slots.
SETUPS: dict[str, tuple[str, Any, Any]] = {
    FLOAT32: ("float32", None, None),
    "mixed_bfloat16": ("mixed_bfloat16", None, None),
    ALONE: ("bfloat16", None, None),
    BETA_2: ("bfloat16", None, None),
    "float32 masters": ("bfloat16", "float32", None),
    "remainder": ("bfloat16", "remainder", None),
    "stochastic": ("bfloat16", "stochastic", None),
    "float32 masters, bfloat16 slots": ("bfloat16", "float32", "bfloat16"),
    "remainder, bfloat16 slots": ("bfloat16", "remainder", "bfloat16"),
    "stochastic, bfloat16 slots": ("bfloat16", "stochastic", "bfloat16"),
}
EIGHT_BITS: dict[str, tuple[str, Any, Any]] = {
    "24 bits": ("bfloat16", "remainder8", None),
    "float32 masters, int8 slots": ("bfloat16", "float32", "int8"),
    "24 bits, int8 slots": ("bfloat16", "remainder8", "int8"),
    "stochastic, int8 slots": ("bfloat16", "stochastic", "int8"),
    "float16, stochastic": ("float16", "stochastic", None),
    "float16, stochastic, int8 slots": ("float16", "stochastic", "int8"),
}
WITH_TORCHAO = (FLOAT32, "stochastic, bfloat16 slots", TORCHAO)
ALL = {**SETUPS, **EIGHT_BITS, TORCHAO: ("bfloat16", None, None)}
NAMES = {"tensorflow": "TensorFlow", "jax": "JAX", "torch": "PyTorch"}
COLORS = {BETA_2: "C1", "stochastic, bfloat16 slots": "C0", "24 bits, int8 slots": "C2"}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fast", action="store_true", help="little of everything")
    parser.add_argument("--eight-bits", action="store_true", help="fewer bytes")
    parser.add_argument("--torchao", action="store_true", help="compare with torchao")
    parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path("."))
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    names = WITH_TORCHAO if arguments.torchao else list(SETUPS)
    if arguments.eight_bits:
        names = [FLOAT32, *EIGHT_BITS]
    results = compare(names, *((4, SEEDS[:1]) if arguments.fast else (STEPS, SEEDS)))
    written = arguments.output / "bfloat16_transformer.json"
    written.write_text(json.dumps({"results": results}, indent=1) + "\n")
    draw(results, written.with_suffix(".png"))
    Console(highlight=False).print(
        make_table(results),
        "The mean (lowest to highest) of the seeds, in nats a character. The last step "
        f"is below 1/512 of the weight for {results[0]['small']:.0%} of float32's.",
        f"\nWrote {written} and a picture.",
    )


def fresh(model, policy, seed):
    """Returns a copy with other weights, and with all of its layers in `policy`."""

    def in_policy(layer):
        config = layer.get_config()
        if isinstance(layer, layers.Layer):
            config["dtype"] = policy
        return type(layer).from_config(config)

    keras.utils.set_random_seed(seed)
    return keras.models.clone_model(model, clone_function=in_policy)


def make_optimizer(name, steps):
    warmup = steps // 8
    rate = schedules.WarmupCosine(RATE, warmup, steps - warmup, RATE / 10)
    if name == TORCHAO:
        return TorchAO(rate)
    beta_2 = 0.99 if name == BETA_2 else 0.999
    inner = keras.optimizers.AdamW(rate, WEIGHT_DECAY, beta_2=beta_2, epsilon=EPSILON)
    _, masters, slots = ALL[name]
    if masters is None:
        return inner
    # Float16 needs a loss scale.
    wrapper = keras_lso.GuardedOptimizer
    if ALL[name][0] == "float16":
        wrapper = keras_lso.LossScaleOptimizer
    return wrapper(inner, master_weights=masters, slot_dtype=slots)


class TorchAO(keras.optimizers.Optimizer):
    """The AdamW of torchao, which reads the gradients from PyTorch's parameters."""

    def build(self, variables):
        from torchao.optim import _AdamW  # type: ignore

        super().build(variables)
        settings = {"weight_decay": WEIGHT_DECAY, "eps": EPSILON}
        weights = [v.value for v in variables]
        self.adamw = _AdamW(weights, bf16_stochastic_round=True, **settings)

    def apply(self, grads, trainable_variables):
        from torch.compiler import set_stance

        if not self.built:
            self.build(trainable_variables)
        self.adamw.param_groups[0]["lr"].fill_(self.learning_rate)
        with set_stance("force_eager"):  # to compile the step takes minutes
            self.adamw.step()
        self.iterations.assign_add(1)

    @property
    def variables(self):
        return [t for state in self.adamw.state.values() for t in state.values()]


def train(name, steps, seed, text):
    """Returns the losses, the bytes of a weight, and how many hardly move at last."""
    _, numbers = np.unique(list(text), return_inverse=True)
    original = build_model("float32", int(numbers.max()) + 1)
    seen, held_out = np.split(numbers.astype("int32"), [len(numbers) * 9 // 10])
    model = fresh(original, ALL[name][0], seed)
    model.set_weights(fresh(original, "bfloat16", seed).get_weights())
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(make_optimizer(name, steps), loss)
    random = np.random.default_rng(seed)

    def fit(steps):
        starts = random.integers(len(seen) - LENGTH, size=steps * BATCH_SIZE)
        batches = windows_at(starts, seen)
        model.fit(*batches, batch_size=BATCH_SIZE, shuffle=False, verbose=0)

    starts = np.linspace(0, len(held_out) - LENGTH - 1, 1024).astype(int)
    validation, losses = windows_at(starts, held_out), []
    for _ in range(0, steps, STEPS_A_PART):
        fit(min(steps, STEPS_A_PART))
        losses.append(round(model.evaluate(*validation, batch_size=256, verbose=0), 5))
    before = model.get_weights()
    fit(1)
    pairs = zip(before, model.get_weights(), strict=True)
    small = sum(np.sum(np.abs(b - a) < np.abs(a) / 512) for a, b in pairs)
    # A gradient has the dtype of its weight, whose name ends with its bits.
    kept = [*2 * model.trainable_variables, *model.optimizer.variables]
    bits = sum(np.prod(v.shape) * int(str(v.dtype).split("t")[-1]) for v in kept)
    count = model.count_params()
    return losses, round(float(bits) / 8 / count, 1), float(small / count)


def compare(names, steps, seeds):
    """Returns a result for each set-up."""
    backend, text, results = keras.backend.backend(), load_text(), []
    for name in track(names, "set-ups"):
        runs = [train(name, steps, seed, text) for seed in seeds]
        losses, bytes, small = zip(*runs, strict=True)
        numbers = {"bytes": bytes[0], "small": round(np.mean(small), 3)}
        results.append({"backend": backend, "setup": name, **numbers, "losses": losses})
    return results


def above_float32(result, results):
    """Returns how far each seed's losses are above those of float32."""
    # Which comes first in each run of this program.
    before = results[: results.index(result) + 1]
    float32 = next(r for r in reversed(before) if r["setup"] == FLOAT32)
    return np.array(result["losses"]) - float32["losses"]


def make_table(results):
    def spread(form, values):
        low, mean, high = (format(f(values), form) for f in (min, np.mean, max))
        return f"{mean} ({low} to {high})"

    titles = "backend", "set-up", "bytes", "validation loss", "above float32"
    table = Table(*titles, box=box.MARKDOWN)
    for result in results:
        apart = spread("+.4f", above_float32(result, results)[:, -1])
        table.add_row(
            *(result["backend"], result["setup"], f"{result['bytes']:2.0f}"),
            spread(".3f", [losses[-1] for losses in result["losses"]]),
            "" if result["setup"] == FLOAT32 else apart,
        )
    return table


def draw(results, path):
    """Draws how far the losses are above float32: of two set-ups, and at the end."""
    others = [r for r in results if r["setup"] not in (FLOAT32, ALONE)]
    figure, (way, end) = plt.subplots(
        2,
        1,
        figsize=(6.4, 3.8 + 0.24 * len(others)),
        height_ratios=(2.6, 0.6 + 0.24 * len(others)),
        layout="constrained",
    )
    for result in results:
        name, above = result["setup"], above_float32(result, results)
        if name in COLORS and result["backend"] == results[0]["backend"]:
            steps = STEPS_A_PART * np.arange(1, above.shape[1] + 1)
            way.plot(steps, above.mean(axis=0), color=COLORS[name], label=name)
            band = above.min(axis=0), above.max(axis=0)
            way.fill_between(steps, *band, color=COLORS[name], alpha=0.25, linewidth=0)
        if name == ALONE:
            label = f"{name}: {above[:, -1].mean():+.1f} at the end, not drawn"
            way.plot([], [], " ", label=label)
    for result in others:
        color = COLORS.get(result["setup"], "gray")
        ends = above_float32(result, results)[:, -1]
        labels = [f"{result['setup']} ({NAMES[result['backend']]})"] * len(ends)
        end.plot(ends, labels, "o", color=color, alpha=0.7)
    way.axhline(0.0, color="gray")
    way.set(xlabel="step", ylabel="validation loss\nabove float32")
    way.legend(frameon=False, loc="lower left", bbox_to_anchor=(0.0, 1.0))
    end.axvline(0.0, color="gray")
    end.set(xlabel="validation loss above float32 at the end, of each seed")
    end.locator_params(axis="x", nbins=5)
    end.invert_yaxis()
    for axis in (way, end):
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
    plt.close(figure)


if __name__ == "__main__":
    main()
