"""Times `fit(jit_compile=True)` on PyTorch: a batch, and its compilation by Inductor.

    KERAS_BACKEND=torch python -m benchmarks.compiled_fit

Before Keras 3.16 the backward pass is not in the graph.
"""

from functools import partial

import keras
import torch
from rich.progress import track
from torch._inductor.utils import fresh_cache

import keras_lso
from benchmarks import evidence, fit, machine

RESULTS = evidence.RESULTS / "compiled" / "fit.json"
# Name: role, what wraps the optimizer.
ROWS = {
    "inner alone": ("inner", lambda inner: inner),
    "Keras's wrapper": ("keras", keras.optimizers.LossScaleOptimizer),
    "GuardedOptimizer": ("guarded", keras_lso.GuardedOptimizer),
    "LossScaleOptimizer": ("ours", keras_lso.LossScaleOptimizer),
}
MODELS = {
    **fit.MODELS,
    "160 tensors": partial(fit.many_small, depth=80, width=16),
}
RUNS = [
    ("digits CNN", "float32"),
    ("digits CNN", "mixed_float16"),
    ("small Transformer", "float32"),
    ("small Transformer", "mixed_float16"),
    ("160 tensors", "float32"),
]
_ROUNDS = 60


def measure(name, policy):
    """Returns the time that a model takes for a batch, for each of `ROWS`."""
    torch._dynamo.reset()
    # Whatever the first compilation of a process loads.
    torch.compile(torch.neg)(torch.ones(2))
    clocks = {}
    # Keras would put its wrapper around an optimizer.
    options = {"jit_compile": True, "auto_scale_loss": False}
    for row, (_, wrap) in ROWS.items():
        clocks[row], model = fit.clock_of(
            MODELS[name], policy, wrap, (), fit.BATCHES, **options
        )
    # Nothing may be compiled already.
    rows = fit.timed(clocks, ROWS, fit.BATCHES, _ROUNDS, first=fresh_cache)
    tensors = len(model.trainable_variables)
    return {"model": name, "policy": policy, "tensors": tensors, "rows": rows}


def main():
    torch.set_num_threads(1)
    groups = [measure(*run) for run in track(RUNS, "Compiling")]
    command = f"KERAS_BACKEND=torch python -m {__spec__.name}"
    facts = machine.facts("torch")
    evidence.write(RESULTS, command, facts, {"rounds": _ROUNDS, "groups": groups})


if __name__ == "__main__":
    main()
