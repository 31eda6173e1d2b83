"""What the constructor of `LossScaleOptimizer` takes: checks, and what it means.

The same arguments are read from configs, those of Keras and tf.keras included.
"""

import warnings

import keras

from keras_lso._checks import (
    check_bounds,
    check_config,
    check_positive_int,
    check_scale,
)
from keras_lso._core import configs
from keras_lso._core.wrapper import check_optimizer
from keras_lso._keras_internals.optimizers import chain_of
from keras_lso._keras_internals.rates import check_rates
from keras_lso.loss_scales import (
    DEFAULT_GROWTH_STEPS,
    DEFAULT_INITIAL_SCALE,
    DEFAULT_MAX_SCALE,
    DEFAULT_MIN_SCALE,
    DynamicLossScale,
    FixedLossScale,
    SearchingLossScale,
    get,
)

# Older versions of Keras wrote these, which never had an effect, into the config.
_IGNORED_AT_THEIR_DEFAULTS = {
    "weight_decay": None,
    "clipnorm": None,
    "global_clipnorm": None,
    "clipvalue": None,
    "use_ema": False,
    "ema_momentum": 0.99,
    "ema_overwrite_frequency": None,
    "loss_scale_factor": None,
    "gradient_accumulation_steps": None,
}


def refuse_unsupported(kwargs):
    """Refuses all keywords, in Keras's own words."""
    for argument, default in _IGNORED_AT_THEIR_DEFAULTS.items():
        if kwargs.pop(argument, default) != default:
            raise ValueError(
                f"LossScaleOptimizer does not support `{argument}`. "
                f"Instead, set `{argument}` on the `inner_optimizer`."
            )
    if kwargs:
        raise ValueError(
            "LossScaleOptimizer does not support arguments: "
            f"`{'`, `'.join(kwargs.keys())}`."
        )


def check_inner_optimizer(inner, argument="inner_optimizer"):
    """Refuses what is not an optimizer, and what scales the loss already."""
    check_optimizer(inner, argument)
    check_rates(inner)
    scaler = keras.optimizers.LossScaleOptimizer
    if any(isinstance(optimizer, scaler) for optimizer in chain_of(inner)):
        raise TypeError(
            f"Argument `{argument}` must not be a LossScaleOptimizer, nor wrap "
            "one: the loss would be scaled twice. Pass its `inner_optimizer` instead. "
            f"Received: {argument}={inner!r}"
        )


def clear_loss_scale_factor(inner):
    """Clears the inner optimizer's own scaling, with a warning."""
    factor = inner.loss_scale_factor
    if factor is None:
        return
    inner.loss_scale_factor = None
    warnings.warn(
        f"The inner optimizer has loss_scale_factor={factor}, which would scale the "
        "loss twice. It has been set to None. For a fixed loss scale, leave it out "
        "and write `LossScaleOptimizer(inner_optimizer, dynamic=False, "
        f"initial_scale={factor})`.",
        stacklevel=3,
    )


def make_policy(
    dynamic, initial_scale, dynamic_growth_steps, loss_scale, min_scale, max_scale
):
    """Returns the loss-scale policy that the constructor's arguments describe."""
    if not isinstance(dynamic, bool):
        raise TypeError(
            "Argument `dynamic` must be True or False. Received: "
            f"dynamic={dynamic!r}. To start at a scale, write "
            "`LossScaleOptimizer(inner_optimizer, initial_scale=...)`; to fix it, add "
            "`dynamic=False`."
        )
    moves = {
        "dynamic_growth_steps": dynamic_growth_steps,
        "min_scale": _unless_default("min_scale", min_scale, DEFAULT_MIN_SCALE),
        "max_scale": _unless_default("max_scale", max_scale, DEFAULT_MAX_SCALE),
    }
    if loss_scale is not None:
        others = {
            "dynamic=False": None if dynamic else False,
            "initial_scale": initial_scale,
            **moves,
        }
        given = [name for name, value in others.items() if value is not None]
        if given:
            raise ValueError(
                "`loss_scale` is a whole loss-scale policy and does not go together "
                f"with {', '.join(given)}. Set them there instead, for "
                "example `loss_scale=keras_lso.loss_scales.DynamicLossScale(...)`. "
                f"Received: loss_scale={loss_scale!r}"
            )
        return get(loss_scale)
    if not dynamic:
        return _fixed_policy(initial_scale, moves)
    return _dynamic_policy(initial_scale, dynamic_growth_steps, min_scale, max_scale)


def _unless_default(name, value, default):
    value = check_scale(name, value)
    return None if value == default else value


def _dynamic_policy(initial_scale, dynamic_growth_steps, min_scale, max_scale):
    policy: type[DynamicLossScale] = DynamicLossScale
    if isinstance(initial_scale, str) and initial_scale == "auto":
        policy = SearchingLossScale
        initial_scale = min(max(DEFAULT_INITIAL_SCALE, min_scale), max_scale)
    elif initial_scale is None:
        initial_scale = DEFAULT_INITIAL_SCALE
    if dynamic_growth_steps is None:
        dynamic_growth_steps = DEFAULT_GROWTH_STEPS
    # Checked here too, under the names by which the user gave them.
    check_scale("initial_scale", initial_scale)
    check_bounds(min_scale, max_scale, initial_scale=initial_scale)
    check_positive_int("dynamic_growth_steps", dynamic_growth_steps)
    return policy(
        initial_scale,
        dynamic_growth_steps,
        min_scale=min_scale,
        max_scale=max_scale,
    )


def _fixed_policy(initial_scale, moves):
    if initial_scale is None:
        raise ValueError(
            "With `dynamic=False`, `initial_scale` must be given: it is the fixed "
            "scale. Received: initial_scale=None. Write for example "
            "`LossScaleOptimizer(inner_optimizer, dynamic=False, initial_scale=1024)`. "
            "(Keras's own class has no fixed scale and would say: set "
            "`loss_scale_factor` on the inner optimizer.)"
        )
    for argument, value in moves.items():
        if value is not None:
            raise ValueError(
                f"With `dynamic=False` the scale never moves, so `{argument}` must "
                f"not be given. Received: {argument}={value!r}"
            )
    check_scale("initial_scale", initial_scale)
    return FixedLossScale(initial_scale)


def policy_arguments(policy):
    """Returns the arguments that make `policy`, beyond Keras's own two.

    Those are `initial_scale` and `dynamic_growth_steps`, and all that the default
    loss scale needs.
    """
    if type(policy) is FixedLossScale:
        return {"dynamic": False}
    plain = {
        "initial_loss_scale": policy.initial_loss_scale,
        "increment_period": getattr(policy, "increment_period", None),
        "multiplier": 2.0,
    }
    config = policy.get_config()
    bounds = {k: config.pop(k) for k in ("min_scale", "max_scale") if k in config}
    if type(policy) is DynamicLossScale and config == plain:
        return bounds
    return {"loss_scale": keras.saving.serialize_keras_object(policy)}


def read_config(config, custom_objects=None):
    """Returns the arguments in a config of a `LossScaleOptimizer`.

    Args:
        config: Dict, what `get_config` returned.
        custom_objects: Dict of names to classes that the config refers to. Defaults to
            `None`.

    Returns:
        A tuple of the inner optimizer and a dict of the other arguments.
    """
    config = check_config("LossScaleOptimizer", config)
    config = configs.modernise(configs.LOSS_SCALE_OPTIMIZER, config, custom_objects)
    if not isinstance(config.get("inner_optimizer"), dict):
        raise ValueError(
            "The config of a LossScaleOptimizer must hold the config dict of its "
            "inner optimizer as 'inner_optimizer'. Received: "
            f"inner_optimizer={config.get('inner_optimizer')!r}"
        )
    inner = configs.read_optimizer(
        config.pop("inner_optimizer"), custom_objects, "`inner_optimizer`"
    )
    if config.get("loss_scale") is not None:
        # They are there for readers that know Keras's four keys only.
        config.pop("initial_scale", None)
        config.pop("dynamic_growth_steps", None)
        config["loss_scale"] = get(config["loss_scale"], custom_objects)
    return inner, config
