"""This package and Keras's class, in the custom loop of each backend's guide."""

import keras
import numpy as np

import keras_lso
from conformance.adapter import RATE, Adapter, State


class Keras(Adapter):
    """`keras.optimizers.LossScaleOptimizer`."""

    name, packages = "Keras", ("keras",)
    offers = dict(
        floor="`dynamic_scale.assign(...)` after each step",
        fixed="`loss_scale_factor` of the inner optimizer",
        micro_batches="`gradient_accumulation_steps`",
        skipped="`iterations` stays",
    )

    def start(self, floor=0.0, fixed=False, micro_batches=None, **options):
        self.floor, self.fixed, self.skipped = floor, fixed, None
        self.variables = [keras.Variable(w) for w in self.weights]
        self.inner = keras.optimizers.Adam(
            RATE, gradient_accumulation_steps=micro_batches
        )
        self.optimizer = self.wrap(**options)
        self.optimizer.build(self.variables)
        self.one_step = STEPS[keras.backend.backend()](self.optimizer, self.variables)

    def wrap(self):
        if self.fixed:  # What the class says to write in place of a fixed scale.
            self.inner.loss_scale_factor = self.scale
            return self.inner
        return keras.optimizers.LossScaleOptimizer(
            self.inner, self.scale, self.growth_steps
        )

    def step(self, slopes, gain=1.0):
        before = int(self.optimizer.iterations)
        self.one_step([np.float32(s) for s in slopes], np.float32(gain))
        self.skipped = int(self.optimizer.iterations) == before
        if not self.fixed and float(self.optimizer.dynamic_scale) < self.floor:
            self.optimizer.dynamic_scale.assign(self.floor)

    def state(self):
        scale = self.scale if self.fixed else float(self.optimizer.dynamic_scale)
        slots = _numpy(self.inner.variables)
        return State(_numpy(self.variables), slots, scale, self.skipped)

    def save(self):
        store = {}
        self.optimizer.save_own_variables(store)
        return {name: np.array(a) for name, a in store.items()}

    def load(self, saved):
        self.optimizer.load_own_variables(saved)


class KerasLso(Keras):
    """`keras_lso.LossScaleOptimizer`."""

    name, packages = "keras_lso", ()
    offers = dict(
        floor="`min_scale=...`",
        fixed="`dynamic=False`",
        micro_batches="`gradient_accumulation_steps`",
        observed="`record_steps`",
        guard="`spike_guard=...`",
        skipped="`last_step_applied`",
    )

    def wrap(self, guard=False, observed=False):
        given = {} if self.fixed else {"dynamic_growth_steps": self.growth_steps}
        if self.floor:
            given["min_scale"] = self.floor
        optimizer = keras_lso.LossScaleOptimizer(
            self.inner,
            dynamic=not self.fixed,
            initial_scale=self.scale,
            spike_guard=keras_lso.SpikeGuard() if guard else None,
            **given,
        )
        if observed:
            optimizer.record_steps()
        return optimizer

    def step(self, slopes, gain=1.0):
        super().step(slopes, gain)
        self.skipped = not bool(self.optimizer.last_step_applied)


def _numpy(variables):
    # Copies: later steps write into the memory.
    return [np.array(keras.ops.convert_to_numpy(v)) for v in variables]


def gradients(optimizer, slopes, gain):
    """Returns those of `loss_of`, scaled."""
    scaled = optimizer.scale_loss(gain)
    return [scaled * s for s in slopes]


def on_tensorflow(optimizer, variables):
    import tensorflow as tf

    @tf.function
    def step(*data):
        optimizer.apply(gradients(optimizer, *data), variables)

    return lambda *data: step(*tf.nest.map_structure(tf.constant, data))


def on_jax(optimizer, variables):
    import jax

    @jax.jit
    def step(weights, state, *data):
        with keras.StatelessScope(list(zip(optimizer.variables, state, strict=True))):
            scaled = gradients(optimizer, *data)
        return optimizer.stateless_apply(state, scaled, weights)

    def run(*data):
        both = [*variables], [*optimizer.variables]
        values = step(*([v.value for v in each] for each in both), *data)
        for variable, value in zip(sum(both, []), values[0] + values[1], strict=True):
            variable.assign(value)

    return run


def on_torch(optimizer, variables):
    import torch

    def run(slopes, gain):
        with torch.no_grad():
            data = list(map(torch.tensor, slopes)), torch.tensor(gain)
            optimizer.apply(gradients(optimizer, *data), variables)

    return run


STEPS = {"tensorflow": on_tensorflow, "jax": on_jax, "torch": on_torch}
ADAPTERS = [Keras, KerasLso]
