"""Step time of the inner optimizer alone, of Keras's wrapper, and of this one.

Runs on the backend in `KERAS_BACKEND`, on the shapes of a ResNet-50. The three
are timed in turn, round after round in one process, so that a machine whose
speed drifts treats them alike; read the ratios of the medians, not the times.

    KERAS_BACKEND=jax python benchmarks/step_time.py [--rounds 30]
"""

import argparse
import platform
import time

import keras
import numpy as np
from rich.console import Console
from rich.table import Table

import keras_lso

SCALE = 2.0**15
KERAS = "Keras's wrapper"


def resnet50_shapes():
    """The 161 trainable tensors of a ResNet-50: 25.6 million parameters."""

    def conv(kernel, inputs, outputs):
        return [(kernel, kernel, inputs, outputs), (outputs,), (outputs,)]

    shapes = conv(7, 3, 64)
    inputs = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            if block == 0:
                shapes += conv(1, inputs, 4 * width)
            shapes += conv(1, inputs, width)
            shapes += conv(3, width, width)
            shapes += conv(1, width, 4 * width)
            inputs = 4 * width
    return [*shapes, (inputs, 1000), (1000,)]


INNER = {
    "SGD+momentum": lambda: keras.optimizers.SGD(0.01, momentum=0.9),
    "Adam": lambda: keras.optimizers.Adam(1e-3),
}
ROWS = {
    "inner alone": lambda inner: inner,
    KERAS: lambda inner: keras.optimizers.LossScaleOptimizer(inner),
    "keras_lso": lambda inner: keras_lso.LossScaleOptimizer(inner),
}


def make_variables(shapes):
    rng = np.random.default_rng(0)
    return [keras.Variable(0.05 * rng.standard_normal(s, "float32")) for s in shapes]


def make_gradients(shapes, scale):
    rng = np.random.default_rng(1)
    return [
        keras.ops.convert_to_tensor(rng.standard_normal(s, "float32") * 1e-3 * scale)
        for s in shapes
    ]


def jax_step(optimizer, variables, grads):
    """A jitted step; the state is donated, and leaves in the order it came in."""
    import jax

    optimizer.build(variables)

    def step(state, grads):
        trainable, own = state
        return optimizer.stateless_apply(own, grads, trainable)

    step = jax.jit(step, donate_argnums=0)
    state = (
        [jax.numpy.copy(v.value) for v in variables],
        [jax.numpy.copy(v.value) for v in optimizer.variables],
    )

    def run():
        nonlocal state
        state = jax.block_until_ready(step(state, grads))

    return run


def tensorflow_step(jit_compile):
    def make(optimizer, variables, grads):
        import tensorflow as tf

        optimizer.build(variables)

        @tf.function(jit_compile=jit_compile)
        def step():
            optimizer.apply(grads, variables)
            return optimizer.iterations + 0

        return lambda: step().numpy()

    return make


def torch_step(optimizer, variables, grads):
    import torch

    optimizer.build(variables)

    def run():
        with torch.no_grad():
            optimizer.apply(grads, variables)
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    return run


MODES = {
    "jax": {"jit": jax_step},
    "tensorflow": {
        "jit_compile=False": tensorflow_step(False),
        "jit_compile=True": tensorflow_step(True),
    },
    "torch": {"eager": torch_step},
}


def measure(make_step, make_inner, rounds, warmup=3):
    """Returns the seconds of each step of each row, a list a row."""
    shapes = resnet50_shapes()
    steps = {}
    for name, wrap in ROWS.items():
        scale = 1.0 if name == "inner alone" else SCALE
        steps[name] = make_step(
            wrap(make_inner()), make_variables(shapes), make_gradients(shapes, scale)
        )
    seconds = {name: [] for name in steps}
    for round_ in range(warmup + rounds):
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            if round_ >= warmup:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=30)
    rounds = parser.parse_args().rounds
    backend = keras.backend.backend()
    count = sum(int(np.prod(s)) for s in resnet50_shapes())
    table = Table(
        title=f"{backend}: one step on {len(resnet50_shapes())} tensors, "
        f"{count / 1e6:.1f} M parameters; medians of {rounds} rounds",
        caption=f"Keras {keras.__version__}, Python {platform.python_version()}, "
        f"{platform.machine()}",
    )
    for column in ("mode", "inner optimizer", "row"):
        table.add_column(column)
    for column in ("ms", "quartiles", "x inner alone", "x Keras's wrapper"):
        table.add_column(column, justify="right")
    for mode, make_step in MODES[backend].items():
        for inner, make_inner in INNER.items():
            seconds = measure(make_step, make_inner, rounds)
            medians = {name: np.median(s) for name, s in seconds.items()}
            for name, median in medians.items():
                low, high = np.percentile(seconds[name], [25, 75]) * 1e3
                table.add_row(
                    mode,
                    inner,
                    name,
                    f"{median * 1e3:.1f}",
                    f"{low:.1f} to {high:.1f}",
                    f"{median / medians['inner alone']:.2f}",
                    f"{median / medians[KERAS]:.2f}",
                )
            table.add_section()
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
