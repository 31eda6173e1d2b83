"""Counts the graphs that PyTorch makes of a training step, and the breaks between them.

    KERAS_BACKEND=torch python -m benchmarks.graphs

trains two layers by `fit(jit_compile=True)` with an optimizer alone, in Keras's wrapper
and in this package's, or by a compiled loop. One graph without a break is a whole step.
Before Keras 3.16 the backward pass breaks it.
"""

import argparse
import logging
import pathlib
from dataclasses import dataclass, field
from functools import partial
from unittest import mock

import keras
import numpy as np
import torch
from keras import layers
from keras import optimizers as K
from torch._dynamo.utils import counters

import keras_lso
from benchmarks import evidence, machine

RESULTS = evidence.RESULTS / "compiled" / "graphs.json"
RATE = 0.01
SCHEDULE = K.schedules.CosineDecay(0.0, 100, warmup_target=RATE, warmup_steps=5)
LOG_MAX = keras_lso.loss_scales.LogMaxLossScale()
HALF = ("mixed_float16", "float16")


@dataclass
class Recipe:
    """What is trained: an optimizer, its wrapper and a dtype policy.

    Attributes:
        inner: Makes the optimizer.
        options: Dict. Arguments of our wrapper. Nothing else has them.
        policy: String. The dtype policy.
        prepare: Called with our optimizer once it is built.
        unused: Bool. Whether a weight has no gradient.
        loop: Bool. Whether a loop takes the steps, in place of `fit`.
    """

    inner: object = partial(K.AdamW, RATE)
    options: dict = field(default_factory=dict)
    policy: str = "float32"
    prepare: object = None
    unused: bool = False
    loop: bool = False

    def optimizers(self):
        """Returns a function that makes the optimizer of each column."""
        ours = keras_lso.GuardedOptimizer
        if self.policy in HALF:
            ours = keras_lso.LossScaleOptimizer
        columns = {"keras_lso": lambda: ours(self.inner(), **self.options)}
        if not self.options and self.prepare is None:
            columns["alone"] = self.inner
            columns["keras"] = lambda: K.LossScaleOptimizer(self.inner())
        return columns


def record(optimizer):
    """Lets an optimizer record its steps."""
    optimizer.record_steps(8)
    optimizer.record_overflows()


def larc():
    """Returns LARC around momentum."""
    return keras_lso.LARC(K.SGD(RATE, momentum=0.9))


def _with(**arguments):
    return Recipe(partial(K.AdamW, **{"learning_rate": RATE} | arguments))


_OPTIMIZERS = ["SGD", "Adam", "AdamW", "Lion", "RMSprop", "Nadam", "Adagrad", "Lamb"]
_OPTIMIZERS += ["Muon"]
_OWN_STEP = ["Adadelta", "Adafactor", "Ftrl"]
RECIPES = {
    **{name: Recipe(partial(getattr(K, name), RATE)) for name in _OPTIMIZERS},
    "SGD, momentum": Recipe(partial(K.SGD, RATE, momentum=0.9)),
    **{n: Recipe(partial(getattr(keras_lso, n), RATE)) for n in ("LARS", "LAMB")},
    "NovoGrad": Recipe(partial(keras_lso.NovoGrad, RATE)),
    "LARC": Recipe(larc),
    **{name: Recipe(partial(getattr(K, name), RATE)) for name in _OWN_STEP},
    "AdamW, `clipnorm`": _with(clipnorm=0.5),
    "AdamW, `global_clipnorm`": _with(global_clipnorm=0.5),
    "AdamW, accumulation": _with(gradient_accumulation_steps=2),
    "AdamW, `use_ema`": _with(use_ema=True, ema_overwrite_frequency=2),
    "AdamW, a schedule of Keras": _with(learning_rate=SCHEDULE),
    "AdamW, a weight without a gradient": Recipe(unused=True),
    **{
        f"AdamW, {policy}": Recipe(policy=policy)
        for policy in ("mixed_float16", "float16", "mixed_bfloat16", "bfloat16")
    },
    "AdamW, float16, a fixed scale": Recipe(
        options={"dynamic": False, "initial_scale": 128.0}, policy="mixed_float16"
    ),
    "AdamW, float16, LogMax": Recipe(
        options={"loss_scale": LOG_MAX}, policy="mixed_float16"
    ),
    **{
        f"AdamW, bfloat16, {kind} masters": Recipe(
            options={"master_weights": kind}, policy="bfloat16"
        )
        for kind in ("float32", "remainder", "remainder8", "stochastic")
    },
    "AdamW, `slot_dtype`": Recipe(options={"slot_dtype": "bfloat16"}),
    "AdamW, a spike guard": Recipe(
        options={"spike_guard": keras_lso.SpikeGuard(max_norm=100.0)}
    ),
    "AdamW, a record of steps": Recipe(prepare=record),
    "AdamW, mixed_float16, a loop": Recipe(policy="mixed_float16", loop=True),
}


class Unused(layers.Layer):
    """Has a weight, and does not use it."""

    def build(self, shape):
        self.unused = self.add_weight(shape=(2,))

    def call(self, x):
        return x


def loop(model, optimizer, x, y):
    """Takes six steps, each by one function that is compiled."""
    optimizer.build(model.trainable_variables)
    tensors = [v.value for v in model.trainable_variables]

    def step(x, y):
        loss = torch.mean(torch.square(model(x, training=True) - y))
        grads = torch.autograd.grad(optimizer.scale_loss(loss), tensors)
        optimizer.apply(grads, model.trainable_variables)

    with torch._dynamo.config.patch(trace_autograd_ops=True):
        step = torch.compile(step)
        for _ in range(6):
            step(torch.tensor(x[:16]), torch.tensor(y[:16]))


def count(make_optimizer, recipe):
    """Returns the numbers of graphs and of breaks of six steps."""
    torch._dynamo.reset()
    counters.clear()
    keras.utils.set_random_seed(0)
    keras.config.set_dtype_policy(recipe.policy)
    body = [layers.Dense(8, activation="relu"), *([Unused()] if recipe.unused else [])]
    model = keras.Sequential([keras.Input((8,)), *body, layers.Dense(1)])
    optimizer = make_optimizer()
    # Otherwise Keras puts its wrapper around an optimizer.
    model.compile(optimizer, "mse", jit_compile=True, auto_scale_loss=False)
    if recipe.prepare is not None:
        optimizer.build(model.trainable_variables)
        recipe.prepare(optimizer)
    x = np.random.default_rng(0).normal(size=(48, 8)).astype("float32")
    # What Inductor would make of the graphs is not counted.
    compile_ = partial(torch.compile, backend="eager")
    with mock.patch.object(torch, "compile", compile_):
        if recipe.loop:
            # The first call of a model changes it.
            model(x)
            loop(model, optimizer, x, x[:, :1])
        else:
            model.fit(x, x[:, :1], batch_size=16, epochs=2, verbose=0)
    if not all(np.isfinite(w.astype("float32")).all() for w in model.get_weights()):
        raise RuntimeError("A weight is not finite any more.")
    breaks = sum(counters["graph_break"].values())
    return {"graphs": counters["stats"]["unique_graphs"], "breaks": breaks}


def measure(name):
    """Returns a recipe's name, and for each column a pair of numbers, or an error."""
    recipe = RECIPES[name]
    row = {"recipe": name}
    for column, make in recipe.optimizers().items():
        try:
            row[column] = count(make, recipe)
        except Exception as error:
            row[column] = {"error": f"{type(error).__name__}: {error}"[:200]}
        finally:
            keras.config.set_dtype_policy("float32")
    return row


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=list(RECIPES))
    parser.add_argument("--out", type=pathlib.Path, default=RESULTS)
    options = parser.parse_args()
    logging.getLogger("torch._dynamo").setLevel(logging.ERROR)
    rows = []
    for name in options.recipes:
        rows.append(measure(name))
        print(rows[-1], flush=True)
    command = "KERAS_BACKEND=torch python -m benchmarks.graphs"
    evidence.write(options.out, command, machine.facts("torch"), {"rows": rows})


if __name__ == "__main__":
    main()
