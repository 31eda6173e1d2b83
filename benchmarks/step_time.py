"""Step time of the inner optimizer alone, of Keras's wrapper, and of this one.

Runs on the backend in `KERAS_BACKEND`, on the shapes of a ResNet-50. The rows of
an inner optimizer are timed in turn, round after round in one process, so that a
machine whose speed drifts treats them alike; read the ratios of the medians, not
the times. LARS has a peer beside it: what a user of the bare framework would run.

    KERAS_BACKEND=jax python benchmarks/step_time.py [--rounds 30] [--inner LARS]
"""

import argparse
import importlib.metadata
import importlib.util
import platform
import time

import keras
import numpy as np
from rich.console import Console
from rich.table import Table

import keras_lso

SCALE = 2.0**15
KERAS = "Keras's wrapper"
WEIGHT_DECAY = 1e-4


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
    "LARS": lambda: keras_lso.LARS(1.0, momentum=0.9, weight_decay_rate=WEIGHT_DECAY),
    "NovoGrad": lambda: keras_lso.NovoGrad(0.01, weight_decay_rate=WEIGHT_DECAY),
}
ROWS = {
    "inner alone": lambda inner: inner,
    KERAS: lambda inner: keras.optimizers.LossScaleOptimizer(inner),
    "keras_lso": lambda inner: keras_lso.LossScaleOptimizer(inner),
    "keras_lso, LogMax": lambda inner: keras_lso.LossScaleOptimizer(
        inner, loss_scale=keras_lso.loss_scales.LogMaxLossScale()
    ),
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


# --- Peers ------------------------------------------------------------------------


def torch_fused_sgd(shapes):
    """The least that a step with momentum and weight decay can cost."""
    import torch

    weights = [torch.nn.Parameter(v.value.detach()) for v in make_variables(shapes)]
    for weight, grad in zip(weights, make_gradients(shapes, 1.0), strict=True):
        weight.grad = grad
    return torch.optim.SGD(
        weights, lr=0.01, momentum=0.9, weight_decay=WEIGHT_DECAY, fused=True
    ).step


def optax_lars(shapes):
    import jax
    import optax

    optimizer = optax.lars(1.0, weight_decay=WEIGHT_DECAY, momentum=0.9)
    grads = make_gradients(shapes, 1.0)
    weights = [jax.numpy.copy(v.value) for v in make_variables(shapes)]
    state = weights, optimizer.init(weights)

    def step(state, grads):
        weights, own = state
        updates, own = optimizer.update(grads, own, weights)
        return optax.apply_updates(weights, updates), own

    step = jax.jit(step, donate_argnums=0)

    def run():
        nonlocal state
        state = jax.block_until_ready(step(state, grads))

    return run


def model_garden_lars(jit_compile):
    def make(shapes):
        import tensorflow as tf

        optimizer = load_model_garden("lars").LARS(
            1.0, momentum=0.9, weight_decay_rate=WEIGHT_DECAY
        )
        variables = [tf.Variable(v.value) for v in make_variables(shapes)]
        grads = make_gradients(shapes, 1.0)

        @tf.function(jit_compile=jit_compile)
        def step():
            optimizer.apply_gradients(zip(grads, variables, strict=True))
            return optimizer.iterations + 0

        # Slots may be created outside XLA only.
        optimizer._create_all_weights(variables)
        return lambda: step().numpy()

    return make


def load_model_garden(name):
    """Loads a file of the Model Garden without the package around it."""
    path = f"official/modeling/optimization/{name}.py"
    files = importlib.metadata.files("tf-models-official")
    [file] = [f for f in files if str(f) == path]
    spec = importlib.util.spec_from_file_location(name, file.locate())
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


PEERS = {
    ("torch", "eager", "LARS"): ("torch.optim.SGD, fused", torch_fused_sgd),
    ("jax", "jit", "LARS"): ("optax.lars", optax_lars),
    ("tensorflow", "jit_compile=False", "LARS"): (
        "Model Garden's LARS",
        model_garden_lars(False),
    ),
    ("tensorflow", "jit_compile=True", "LARS"): (
        "Model Garden's LARS",
        model_garden_lars(True),
    ),
}


# --- The table --------------------------------------------------------------------


def make_steps(make_step, make_inner, peer):
    """Returns a step to time for each row."""
    shapes = resnet50_shapes()
    steps = {}
    for name, wrap in ROWS.items():
        scale = 1.0 if name == "inner alone" else SCALE
        steps[name] = make_step(
            wrap(make_inner()), make_variables(shapes), make_gradients(shapes, scale)
        )
    if peer is not None:
        name, make = peer
        steps[name] = make(shapes)
    return steps


def measure(steps, rounds, warmup=3):
    """Returns the seconds of each step of each row, a list a row."""
    seconds = {name: [] for name in steps}
    for round_ in range(warmup + rounds):
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            if round_ >= warmup:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def ratio(medians, name, reference):
    return f"{medians[name] / medians[reference]:.2f}" if reference in medians else ""


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--inner", choices=INNER, nargs="+", default=list(INNER))
    options = parser.parse_args()
    backend = keras.backend.backend()
    count = sum(int(np.prod(s)) for s in resnet50_shapes())
    table = Table(
        title=f"{backend}: one step on {len(resnet50_shapes())} tensors, "
        f"{count / 1e6:.1f} M parameters; medians of {options.rounds} rounds",
        caption=f"Keras {keras.__version__}, Python {platform.python_version()}, "
        f"{platform.machine()}",
    )
    for column in ("mode", "inner optimizer", "row"):
        table.add_column(column)
    for column in ("ms", "quartiles", "x inner alone", "x Keras's wrapper", "x peer"):
        table.add_column(column, justify="right")
    for mode, make_step in MODES[backend].items():
        for inner in options.inner:
            peer = PEERS.get((backend, mode, inner))
            steps = make_steps(make_step, INNER[inner], peer)
            seconds = measure(steps, options.rounds)
            medians = {name: np.median(s) for name, s in seconds.items()}
            for name, median in medians.items():
                low, high = np.percentile(seconds[name], [25, 75]) * 1e3
                table.add_row(
                    mode,
                    inner,
                    name,
                    f"{median * 1e3:.1f}",
                    f"{low:.1f} to {high:.1f}",
                    ratio(medians, name, "inner alone"),
                    ratio(medians, name, KERAS),
                    ratio(medians, name, peer and peer[0]),
                )
            table.add_section()
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
