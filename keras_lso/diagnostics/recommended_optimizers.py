"""The optimizer of a recommendation: the model's optimizer, wrapped as recommended.

The new wrapper keeps the user's choices: the spike guard, the kind of master weights,
and the loss-scale policy, except its initial scale.
"""

import keras

from keras_lso._backend.masters import KINDS
from keras_lso.diagnostics.model_copies import made_again
from keras_lso.loss_scale_optimizer import LossScaleOptimizer
from keras_lso.optimizers.guarded import GuardedOptimizer

# The keys of the initial scale in the config of a loss-scale policy.
_INITIAL = ("initial_loss_scale", "loss_scale_value")


def wrapped_like(
    optimizer: keras.optimizers.Optimizer,
    wrapper: str | None,
    initial_scale: float | None,
) -> keras.optimizers.Optimizer:
    """Returns an optimizer of the same config, in a new wrapper.

    Args:
        optimizer: The optimizer of a model, in any wrapper or in none.
        wrapper: `"LossScaleOptimizer"`, `"GuardedOptimizer"` or None.
        initial_scale: Float, the initial scale of a `LossScaleOptimizer`.
    """
    bare, old = optimizer, None
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        bare = optimizer.inner_optimizer
        # Only the inner optimizer of Keras's own class is kept.
        old = optimizer if isinstance(optimizer, LossScaleOptimizer) else None
    inner = made_again(bare)
    arguments: dict = {}
    if old is not None:
        kind = kind_of_masters(old)
        arguments = {"spike_guard": old.spike_guard, "master_weights": kind}
    if wrapper == "LossScaleOptimizer":
        policy = _policy_like(old, initial_scale)
        return LossScaleOptimizer(inner, **policy, **arguments)
    # Without loss scaling, an optimizer that has a guard keeps it.
    is_guarded = isinstance(old, GuardedOptimizer) or arguments.get("spike_guard")
    if wrapper == "GuardedOptimizer" or is_guarded:
        return GuardedOptimizer(inner, **arguments)
    return inner


def kind_of_masters(optimizer: keras.optimizers.Optimizer | None) -> str:
    """Returns the chosen kind of an optimizer's master weights, or the default."""
    chosen = getattr(optimizer, "master_weights", None)
    is_ours = isinstance(optimizer, LossScaleOptimizer)
    return chosen if is_ours and chosen in KINDS else "float32"


def _policy_like(old, initial_scale):
    """Returns the arguments that describe the loss scale."""
    if old is None or isinstance(old, GuardedOptimizer):
        return {"initial_scale": initial_scale}
    policy = old.loss_scale_policy
    config = policy.get_config()
    for key in _INITIAL:
        if key in config:
            within = max(policy.min_scale, min(initial_scale, policy.max_scale))
            config[key] = initial_scale if key == "loss_scale_value" else within
    return {"loss_scale": type(policy).from_config(config)}
