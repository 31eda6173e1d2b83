"""A long run with 5% overflows at random: does anything drift, or grow?"""

import dataclasses
import gc

import keras
import numpy as np
import psutil
from keras import ops

import keras_lso
from integration_tests.attack.cases import BACKEND
from integration_tests.attack.execution import array, bits
from integration_tests.attack.gradients import NOT_FINITE
from integration_tests.attack.policies import ExpectedDynamic
from integration_tests.attack.reference import Fault

OVERFLOWS = 0.05
BATCHES, BATCH_SIZE = 16, 8
# With an overflow in 20 steps the scale wanders up and down between its bounds, and
# stands at each of them now and then.
GROWTH_STEPS = 13
MIN_SCALE, MAX_SCALE = 2.0**-2, 2.0**6
# Python's own caches settle late. One object in ten steps would be 9,000 in 100,000.
MORE_OBJECTS = 50
# Allocators take memory in pieces of up to some MiB. One float32 array in ten steps, of
# 500 bytes with what holds it, would be 4.5 MiB in 90,000.
MORE_BYTES = 4 * 2**20


@dataclasses.dataclass
class Footprint:
    """What a process holds: bytes, objects that Python tracks, arrays of JAX."""

    bytes: int
    objects: int
    arrays: int

    @classmethod
    def now(cls):
        gc.collect()
        memory = psutil.Process().memory_info().rss
        return cls(memory, len(gc.get_objects()), live_arrays())

    def check_against(self, start):
        """Raises a `Fault` if it is larger than at the start."""
        has_grown = (
            self.bytes > start.bytes + MORE_BYTES
            or self.objects > start.objects + MORE_OBJECTS
            or self.arrays > start.arrays
        )
        if has_grown:
            raise Fault(f"The process has grown: {start} before, {self} now")


def live_arrays():
    if BACKEND != "jax":
        return 0
    import jax

    return len(jax.live_arrays())


class Training:
    """A linear model in mixed float16, its optimizer, and the step of this backend."""

    def __init__(self):
        start = np.full((4, 1), 0.1, "float32"), np.zeros(1, "float32")
        self.weights = [keras.Variable(value) for value in start]
        self.optimizer = keras_lso.LossScaleOptimizer(
            keras.optimizers.SGD(0.01, momentum=0.9),
            initial_scale=MAX_SCALE,
            dynamic_growth_steps=GROWTH_STEPS,
            min_scale=MIN_SCALE,
            max_scale=MAX_SCALE,
        )
        self.optimizer.build(self.weights)
        self.step = getattr(self, f"_{BACKEND}_step")()

    def scaled_loss(self, x, y):
        kernel, bias = (ops.cast(w, "float16") for w in self.weights)
        predicted = ops.matmul(ops.cast(x, "float16"), kernel) + bias
        loss = ops.mean(ops.square(ops.cast(predicted, "float32") - y))
        return self.optimizer.scale_loss(loss)

    def state(self):
        """Returns what is compared, in one tensor: exact up to 2**24 steps."""
        optimizer = self.optimizer
        counts = optimizer.step_counter, optimizer.iterations, optimizer.skipped_steps
        found = optimizer.loss_scale, *counts, optimizer.last_step_applied
        return ops.stack([ops.cast(value, "float32") for value in found])

    def _tensorflow_step(self):
        import tensorflow as tf

        @tf.function(jit_compile=True)
        def step(x, y):
            with tf.GradientTape() as tape:
                loss = self.scaled_loss(x, y)
            gradients = tape.gradient(loss, [w.value for w in self.weights])
            self.optimizer.apply(gradients, self.weights)
            return self.state()

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
                return values, self.state()

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
            return self.state()

        return step


def run(steps, seed=0):
    """Trains for so many steps, and compares each with NumPy."""
    random = np.random.default_rng(seed)
    training, start = Training(), None
    policy = ExpectedDynamic(MAX_SCALE, MIN_SCALE, MAX_SCALE, GROWTH_STEPS, 2.0, 0.5)
    # Gradients that no scale here makes overflow.
    x = random.normal(size=(BATCHES, BATCH_SIZE, 4)).astype("float32")
    y = (x @ np.array([[0.5], [-0.75], [0.25], [0.5]])).astype("float32")
    applied, scales = 0, {}
    for number in range(steps):
        if number in (steps // 20, steps // 10):
            # The first list of all objects takes memory itself.
            start = Footprint.now()
        batch, finite = x[number % BATCHES], bool(random.random() >= OVERFLOWS)
        if not finite:
            batch, before = batch.copy(), bits(training.weights)
            batch.flat[random.integers(batch.size)] = random.choice(NOT_FINITE)
        found = array(training.step(batch, y[number % BATCHES])).tolist()
        policy.step(finite, None)
        applied += finite
        right = [policy.scale, policy.counter, applied, number + 1 - applied, finite]
        if found != right:
            raise Fault(f"Step {number}: {found} came, and {right} is right")
        if not finite and bits(training.weights) != before:
            raise Fault(f"Step {number} was not skipped")
        scales[found[0]] = scales.get(found[0], 0) + 1
    Footprint.now().check_against(start)
    return scales, steps - applied
