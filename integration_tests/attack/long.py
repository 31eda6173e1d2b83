"""A long run with 5% overflows at random: does anything drift, or grow?"""

import dataclasses
import gc

import keras
import numpy as np
import psutil
from keras import ops

import keras_lso
from integration_tests.attack.execution import BACKEND, array, bits, compiled
from integration_tests.attack.gradients import NOT_FINITE
from integration_tests.attack.policies import model_of
from integration_tests.attack.reference import Fault

OVERFLOWS = 0.05
BATCHES, BATCH_SIZE = 16, 8
# With an overflow in 20 steps the scale wanders up and down between its bounds, and
# stands at each of them now and then.
MIN_SCALE, MAX_SCALE = 2.0**-2, 2.0**6
POLICY = {
    "initial_loss_scale": MAX_SCALE,
    "increment_period": 13,
    "min_scale": MIN_SCALE,
    "max_scale": MAX_SCALE,
}
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
        self.policy = keras_lso.loss_scales.DynamicLossScale(**POLICY)
        self.optimizer = keras_lso.LossScaleOptimizer(
            keras.optimizers.SGD(0.01, momentum=0.9), loss_scale=self.policy
        )
        self.optimizer.build(self.weights)
        variables = [*self.weights, *self.optimizer.variables]
        execution = {"tensorflow": "xla", "jax": "jit", "torch": "eager"}[BACKEND]
        self.step = compiled(self._step, variables, execution)

    def _step(self, x, y):
        """Returns what is compared, in one tensor: exact up to 2**24 steps."""
        optimizer = self.optimizer
        optimizer.minimize(lambda: self._loss(x, y), self.weights)
        counts = optimizer.step_counter, optimizer.iterations, optimizer.skipped_steps
        found = optimizer.loss_scale, *counts, optimizer.last_step_applied
        return ops.stack([ops.cast(value, "float32") for value in found])

    def _loss(self, x, y):
        kernel, bias = (ops.cast(w, "float16") for w in self.weights)
        predicted = ops.matmul(ops.cast(x, "float16"), kernel) + bias
        return ops.mean(ops.square(ops.subtract(ops.cast(predicted, "float32"), y)))


def run(steps, seed=0):
    """Trains for so many steps, and compares each with NumPy."""
    random = np.random.default_rng(seed)
    training, start = Training(), None
    policy = model_of(training.policy)
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
