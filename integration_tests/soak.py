"""A long run with 5% overflows at random: does anything drift, or grow?

```sh
KERAS_BACKEND=jax python -m integration_tests.soak --steps 100000
```

After each step the loss scale and all counters must be those of a model in NumPy. A
skipped step must leave the weights as they were. At the end the process must not have
grown since it was warm: neither its memory nor the number of objects and arrays in it.
"""

import argparse
import dataclasses
import gc
import sys
import time

import keras
import numpy as np
import psutil
from keras import ops

import keras_lso

OVERFLOWS = 0.05
BATCHES, BATCH_SIZE = 16, 8
# With an overflow in 20 steps the scale wanders up and down between its bounds, and
# stands at each of them now and then.
GROWTH_STEPS = 13
MIN_SCALE, MAX_SCALE = 2.0**-2, 2.0**6

# Objects: Python's own caches settle late. One object in ten steps would be 9,000 in
# a run of 100,000.
MORE_OBJECTS = 50
# Bytes: allocators take memory from the system in pieces of up to some MiB, and the
# pieces that are in use are not always the same. One float32 array in ten steps, of
# Keras's (some 500 bytes with what holds it), would be 4.5 MiB in 90,000 steps.
MORE_BYTES = 4 * 2**20


class Model:
    """`DynamicLossScale` and the counters of the optimizer, in NumPy."""

    def __init__(self):
        self.scale, self.good_steps = np.float32(MAX_SCALE), 0
        self.applied = self.skipped = 0

    def step(self, finite):
        self.applied += finite
        self.skipped += not finite
        self.good_steps = self.good_steps + 1 if finite else 0
        if not finite:
            self.scale = np.maximum(self.scale / np.float32(2), np.float32(MIN_SCALE))
        elif self.good_steps == GROWTH_STEPS:
            self.scale = np.minimum(self.scale * np.float32(2), np.float32(MAX_SCALE))
            self.good_steps = 0

    def state(self, finite):
        """Returns what `FIELDS` names."""
        return [self.scale, self.good_steps, self.applied, self.skipped, finite]


FIELDS = [
    "loss_scale",
    "good_steps",
    "iterations",
    "skipped_steps",
    "last_step_applied",
]


def state_of(optimizer):
    """Returns what `FIELDS` names, one tensor: one read a step, inside of the step."""
    found = (
        optimizer.loss_scale,
        optimizer.step_counter,
        optimizer.iterations,
        optimizer.skipped_steps,
        optimizer.last_step_applied,
    )
    # Exact in float32 up to 2**24 steps.
    return ops.stack([ops.cast(value, "float32") for value in found])


@dataclasses.dataclass
class Footprint:
    """What a process holds: bytes, objects that Python tracks, arrays of JAX."""

    bytes: int
    objects: int
    arrays: int

    @classmethod
    def now(cls):
        gc.collect()
        return cls(
            psutil.Process().memory_info().rss, len(gc.get_objects()), live_arrays()
        )

    def growth(self, before):
        fields = [field.name for field in dataclasses.fields(self)]
        return Footprint(*(getattr(self, f) - getattr(before, f) for f in fields))


def live_arrays():
    if keras.backend.backend() != "jax":
        return 0
    import jax

    return len(jax.live_arrays())


class Training:
    """A linear model in mixed float16, its optimizer, and the step of this backend."""

    def __init__(self):
        self.weights = [
            keras.Variable(np.full((4, 1), 0.1, "float32")),
            keras.Variable(np.zeros(1, "float32")),
        ]
        self.optimizer = keras_lso.LossScaleOptimizer(
            keras.optimizers.SGD(0.01, momentum=0.9),
            initial_scale=MAX_SCALE,
            dynamic_growth_steps=GROWTH_STEPS,
            min_scale=MIN_SCALE,
            max_scale=MAX_SCALE,
        )
        self.optimizer.build(self.weights)
        make_step = getattr(self, f"_{keras.backend.backend()}_step")
        self.step = make_step()

    def scaled_loss(self, x, y):
        kernel, bias = (ops.cast(w, "float16") for w in self.weights)
        predicted = ops.matmul(ops.cast(x, "float16"), kernel) + bias
        loss = ops.mean(ops.square(ops.cast(predicted, "float32") - y))
        return self.optimizer.scale_loss(loss)

    def _tensorflow_step(self):
        import tensorflow as tf

        @tf.function(jit_compile=True)
        def step(x, y):
            with tf.GradientTape() as tape:
                loss = self.scaled_loss(x, y)
            gradients = tape.gradient(loss, [w.value for w in self.weights])
            self.optimizer.apply(gradients, self.weights)
            return state_of(self.optimizer)

        return step

    def _jax_step(self):
        import jax

        variables = [*self.weights, *self.optimizer.variables]
        count = len(self.weights)

        def scaled_loss(weights, others, x, y):
            mapping = zip(variables, [*weights, *others], strict=True)
            with keras.StatelessScope(list(mapping)):
                return self.scaled_loss(x, y)

        @jax.jit
        def step(values, x, y):
            weights, others = values[:count], values[count:]
            gradients = jax.grad(scaled_loss)(weights, others, x, y)
            weights, others = self.optimizer.stateless_apply(others, gradients, weights)
            values = [*weights, *others]
            with keras.StatelessScope(list(zip(variables, values, strict=True))):
                return values, state_of(self.optimizer)

        def step_in_place(x, y):
            values, state = step([v.value for v in variables], x, y)
            for variable, value in zip(variables, values, strict=True):
                variable.assign(value)
            return state

        return step_in_place

    def _torch_step(self):
        import torch

        def step(x, y):
            loss = self.scaled_loss(torch.from_numpy(x), torch.from_numpy(y))
            gradients = torch.autograd.grad(loss, [w.value for w in self.weights])
            self.optimizer.apply(gradients, self.weights)
            return state_of(self.optimizer)

        return step


def make_batches(random):
    """Batches of a linear problem, whose gradients no scale here makes overflow."""
    x = random.normal(size=(BATCHES, BATCH_SIZE, 4)).astype("float32")
    return x, (x @ np.array([[0.5], [-0.75], [0.25], [0.5]])).astype("float32")


def bits(variables):
    return [ops.convert_to_numpy(v).tobytes() for v in variables]


@dataclasses.dataclass
class Result:
    steps: int
    skipped: int
    scales: dict
    seconds: float
    start: Footprint
    end: Footprint

    def __str__(self):
        at = ", ".join(f"{s:g}: {n}" for s, n in sorted(self.scales.items()))
        return (
            f"{keras.backend.backend()}: {self.steps} steps, {self.skipped} skipped, "
            f"{self.steps / self.seconds:.0f} steps/s, each equal to the model's\n"
            f"steps at each scale: {at}\n"
            + "\n".join(
                f"{name}: {f.bytes / 2**20:.1f} MiB, {f.objects} objects, "
                f"{f.arrays} JAX arrays"
                for name, f in (("warm", self.start), ("end", self.end))
            )
        )


def soak(steps, seed=0, report_every=None):
    """Trains for so many steps, and compares each with the model.

    Args:
        steps: Int.
        seed: Int. Defaults to `0`.
        report_every: Int. Number of steps after which to say where it is. Defaults to
            `None`: it says nothing.

    Returns:
        A `Result`.

    Raises:
        AssertionError: At the first step that is not the model's.
    """
    random = np.random.default_rng(seed)
    training, expected = Training(), Model()
    weights = training.weights
    x, y = make_batches(random)
    scales, start = {}, None
    began = time.perf_counter()
    for number in range(steps):
        if number == steps // 20:
            # The list of all objects takes memory itself, the first time.
            Footprint.now()
        if number == steps // 10:
            start = Footprint.now()
        batch = x[number % BATCHES]
        finite = bool(random.random() >= OVERFLOWS)
        if not finite:
            batch = batch.copy()
            bad = random.choice([np.inf, -np.inf, np.nan])
            batch.flat[random.integers(batch.size)] = bad
            before = bits(weights)
        state = training.step(batch, y[number % BATCHES])
        expected.step(finite)
        found = ops.convert_to_numpy(state).tolist()
        wanted = expected.state(finite)
        assert found == wanted, f"step {number}: {FIELDS} {found}, not {wanted}"
        assert finite or bits(weights) == before, f"step {number} was not skipped"
        scales[found[0]] = scales.get(found[0], 0) + 1
        if report_every and (number + 1) % report_every == 0:
            print(
                f"{number + 1} steps, {psutil.Process().memory_info().rss} bytes",
                flush=True,
            )
    seconds = time.perf_counter() - began
    end = Footprint.now()
    for weight in weights:
        assert np.isfinite(ops.convert_to_numpy(weight)).all()
    return Result(steps, expected.skipped, scales, seconds, start, end)


def check_growth(result):
    """Refuses a run in which the process has grown.

    Args:
        result: `Result`.

    Raises:
        AssertionError: If it has.
    """
    growth = result.end.growth(result.start)
    assert growth.arrays <= 0, growth
    assert growth.objects <= MORE_OBJECTS, growth
    assert growth.bytes <= MORE_BYTES, growth


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    result = soak(arguments.steps, arguments.seed, arguments.steps // 10)
    print(result)
    check_growth(result)


if __name__ == "__main__":
    sys.exit(main())
