"""What a user of bare JAX would run: optax, and jmp's loss scale around it."""

from functools import partial

import jax.numpy as jnp
import jmp
import optax

from benchmarks import inner as hyper
from benchmarks.rows_jax import jitted_step

_ADAM = {"b1": hyper.BETA_1, "b2": hyper.BETA_2, "eps": hyper.EPSILON}
_OPTIMIZERS = {
    "SGD": partial(optax.sgd, hyper.SGD_RATE),
    "SGD+momentum": partial(optax.sgd, hyper.SGD_RATE, momentum=hyper.MOMENTUM),
    "Adam": partial(optax.adam, hyper.ADAM_RATE, **_ADAM),
    "AdamW": partial(
        optax.adamw, hyper.ADAM_RATE, **_ADAM, weight_decay=hyper.WEIGHT_DECAY
    ),
    "LARS": partial(
        optax.lars,
        hyper.LARS_RATE,
        weight_decay=hyper.WEIGHT_DECAY,
        momentum=hyper.MOMENTUM,
    ),
}


def peers(mode, inner):
    """Returns the peers of an inner optimizer: names, and what makes each `Step`."""
    if inner not in _OPTIMIZERS:
        return {}
    checks = {"optax + jmp": jmp.all_finite, "optax + jmp, norm": _norm_is_finite}
    return {n: partial(_step, _OPTIMIZERS[inner], c) for n, c in checks.items()}


def _norm_is_finite(gradients):
    """What many write in place of `jmp.all_finite`, which has a flaw under XLA.

    It looks at every tensor again for each that it selects: 200 tensors take a minute
    to compile on two cores, a thousand more memory than most machines have.
    """
    return jnp.isfinite(optax.global_norm(gradients))


def _step(make_optimizer, all_finite, tensors):
    """Returns the step of jmp's own example, jitted and donated.

    Float16 weights are cast from float32 masters, as its policies have it.
    """
    optimizer = make_optimizer()
    weights = tensors.weights()
    loss_scale = jmp.DynamicLossScale(jnp.float32(hyper.SCALE))
    narrow = jmp.cast_to_half(weights) if tensors.dtype == jnp.float16 else []

    def step(state, gradients):
        weights, own, loss_scale, narrow = state
        gradients = jmp.cast_to_full(gradients)
        gradients = loss_scale.unscale(gradients)
        finite = all_finite(gradients)
        updates, new_own = optimizer.update(gradients, own, weights)
        new_weights = optax.apply_updates(weights, updates)
        weights, own = jmp.select_tree(finite, (new_weights, new_own), (weights, own))
        if narrow:
            narrow = jmp.cast_to_half(weights)
        return weights, own, loss_scale.adjust(finite), narrow

    state = weights, optimizer.init(weights), loss_scale, narrow
    return jitted_step(step, state, tensors.gradients[True])
