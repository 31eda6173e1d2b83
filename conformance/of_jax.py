"""jmp, flax's `DynamicScale` and mpx around optax's Adam, and `apply_if_finite`."""

import functools
import importlib.util

import jax
import jax.numpy as jnp
import jmp
import numpy as np
import optax

from conformance.adapter import RATE, Adapter, State, loss_of


class Jmp(Adapter):
    """The loop of jmp's README, jitted."""

    name, packages, attribute = "jmp", ("jmp",), "loss_scale"
    common = dict(micro_batches="`optax.MultiSteps`", observed="their norm")
    offers = dict(
        common,
        floor="`min_loss_scale=...`",
        fixed="`StaticLossScale`",
        skipped="`all_finite`",
    )

    def start(self, floor=1.0, fixed=False, micro_batches=None, observed=False):
        self.optimizer = optax.adam(RATE)
        if micro_batches:
            several = optax.MultiSteps(self.optimizer, micro_batches)
            self.optimizer = several.gradient_transformation()
        self.wrap()
        weights = tuple(map(jnp.asarray, self.weights))
        scaling = self.scaling(floor, fixed)
        self.carry = weights, self.optimizer.init(weights), scaling
        self.observed, self.finite = observed, True
        self.one_step = jax.jit(self.observed_step)

    def wrap(self):
        """What is around the optimizer."""

    def scaling(self, floor, fixed):
        scale, floor = jnp.float32(self.scale), jnp.float32(floor)
        if fixed:
            return jmp.StaticLossScale(scale)
        given = {} if floor == 1 else {"min_loss_scale": floor}
        return jmp.DynamicLossScale(scale, period=self.growth_steps, **given)

    def update(self, weights, slots, scaling, *data):
        """Returns the three, after a step, and the gradients and whether they count."""
        scaled_loss = lambda weights: scaling.scale(loss_of(weights, *data))  # noqa: E731
        gradients = scaling.unscale(jax.grad(scaled_loss)(weights))
        finite = jmp.all_finite(gradients)
        new = self.applied(gradients, slots, weights)
        weights, slots = jmp.select_tree(finite, new, (weights, slots))
        return weights, slots, scaling.adjust(finite), finite, gradients

    def applied(self, gradients, slots, weights):
        updates, slots = self.optimizer.update(gradients, slots, weights)
        return optax.apply_updates(weights, updates), slots

    def observed_step(self, carry, slopes, gain):
        *carry, finite, gradients = self.update(*carry, slopes, gain)
        return carry, finite, self.observed and optax.global_norm(gradients)

    def step(self, slopes, gain=1.0):
        data = tuple(map(jnp.asarray, slopes)), jnp.float32(gain)
        self.carry, self.finite, _ = self.one_step(self.carry, *data)

    def state(self):
        *trees, scaling = self.carry
        copies = ([np.array(a) for a in jax.tree.leaves(tree)] for tree in trees)
        return State(*copies, float(getattr(scaling, self.attribute)), not self.finite)

    def save(self):
        return jax.tree.map(np.array, self.carry)

    def load(self, saved):
        self.carry = jax.tree.map(jnp.asarray, saved)


class Flax(Jmp):
    """The example of `DynamicScale`."""

    name, packages, attribute = "flax", ("flax",), "scale"
    offers = dict(
        Jmp.common,
        floor="`minimum_scale=...`",
        fixed="`growth_factor=1, backoff_factor=1`",
        skipped="`is_fin`",
    )

    def scaling(self, floor, fixed):
        from flax.training.dynamic_scale import DynamicScale

        given = {} if floor == 1 else {"minimum_scale": floor}
        if fixed:
            given |= {"growth_factor": 1.0, "backoff_factor": 1.0}
        scale = jnp.float32(self.scale)
        return DynamicScale(growth_interval=self.growth_steps, scale=scale, **given)

    def update(self, weights, slots, scaling, *data):
        differentiated = scaling.value_and_grad(loss_of)
        scaling, finite, _, gradients = differentiated(weights, *data)
        new = self.applied(gradients, slots, weights)
        select = functools.partial(jnp.where, finite)
        weights, slots = jax.tree.map(select, new, (weights, slots))
        return weights, slots, scaling, finite, gradients


class Mpx(Jmp):
    """The example of mpx's README, which computes in float16."""

    name, packages = "mpx", ("mixed-precision-for-JAX",)
    attribute = "loss_scaling"
    offers = dict(
        Jmp.common,
        floor="`min_loss_scaling=...`",
        fixed="`factor=1`",
        skipped="`grads_finite`",
    )

    def scaling(self, floor, fixed):
        import mpx

        scales, factor = map(jnp.float32, (self.scale, floor)), 1 if fixed else 2
        return mpx.DynamicLossScaling(*scales, factor, self.growth_steps)

    def update(self, weights, slots, scaling, *data):
        import mpx

        differentiated = mpx.filter_value_and_grad(loss_of, scaling=scaling)
        _, scaling, finite, gradients = differentiated(weights, *data)
        updated = mpx.optimizer_update(
            weights, self.optimizer, slots, gradients, finite
        )
        return *updated, scaling, finite, gradients


class ApplyIfFinite(Jmp):
    """`optax.apply_if_finite`, which has no loss scale."""

    name, packages = "apply_if_finite", ("optax",)
    offers = dict(Jmp.common, skipped="`last_finite`")

    def wrap(self):
        # After as many in a row it applies the next.
        self.optimizer = optax.apply_if_finite(self.optimizer, 1000)

    def scaling(self, floor, fixed):
        return ()

    def update(self, weights, slots, scaling, *data):
        gradients = jax.grad(loss_of)(weights, *data)
        weights, slots = self.applied(gradients, slots, weights)
        return weights, slots, scaling, slots.last_finite, gradients

    def state(self):
        weights, slots, _ = self.carry
        copies = [np.array(w) for w in weights]
        # Without its own counters, which are to change in a skipped step.
        slots = [np.array(a) for a in jax.tree.leaves(slots.inner_state)]
        return State(copies, slots, None, not self.finite)


PEERS = {"flax": Flax, "mpx": Mpx}
INSTALLED = [a for n, a in PEERS.items() if importlib.util.find_spec(n)]
ADAPTERS = [Jmp, *INSTALLED, ApplyIfFinite]
