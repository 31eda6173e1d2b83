"""What four devices that share the batch exchange and hold on JAX, as XLA plans it.

The step is that of `memory.py`: each device has the whole state of the optimizer, or
with `shard_state=True` a part.
"""

import collections
import itertools

import jax

from benchmarks.accelerators import memory, on_jax
from benchmarks.accelerators.program import Program

DEVICES = 4
# The dtype policy, `master_weights`, and the dtype of slots.
RECIPES = [
    ("bfloat16", "float32", "float32"),
    ("bfloat16", "stochastic", "bfloat16"),
    ("mixed_bfloat16", "auto", "float32"),
]
# What each device sends at least, of each byte of the arrays that are exchanged.
_SHARE = (DEVICES - 1) / DEVICES
_SENT = {
    "all-reduce": 2 * _SHARE,
    "reduce-scatter": _SHARE,
    "all-gather": _SHARE,
    "collective-permute": 1,
}


def facts():
    """Returns what holds for all rows, a dict."""
    return memory.facts(DEVICES)


def measure(target):
    """Yields dicts: a recipe, and the bytes a weight that a device sends and holds."""
    devices = on_jax.TARGETS[target]()
    for recipe, is_shared in itertools.product(RECIPES, (False, True)):
        model = memory.model_with(*recipe, DEVICES, shard_state=is_shared)
        step, count = memory.compiled(model, devices), model.count_params()
        whole = collections.Counter()
        for kind, given in Program(step.as_text()).messages():
            # A device gives a part to this one alone.
            parts = DEVICES if kind == "all-gather" else 1
            whole[kind] += parts * given / count
        policy, masters, slots = recipe
        yield {
            "policy": policy,
            "masters": masters,
            "slots": slots,
            "shard_state": is_shared,
            **{kind: round(whole[kind], 2) for kind in _SENT},
            "sent": round(sum(_SENT[kind] * whole[kind] for kind in _SENT), 2),
            **memory.sizes(model, step),
        }
        jax.clear_caches()
