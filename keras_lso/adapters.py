"""What this package knows of Keras's own optimizers.

The only place that touches Keras's private attributes. Everything that another
version of Keras might spell differently stands here.
"""

import keras
from keras import ops

from keras_lso.backend import rules

_TORCH_OPTIMIZERS = "keras.src.backend.torch.optimizers"


# --- Canonical classes ------------------------------------------------------


def canonical_class(optimizer):
    """Returns the public Keras class that `optimizer` is an instance of.

    On PyTorch `keras.optimizers.SGD(...)` is an instance of another, private
    class. A user's own subclass is its own canonical class.
    """
    cls = type(optimizer)
    if cls.__module__.startswith(_TORCH_OPTIMIZERS):
        return getattr(keras.optimizers, cls.__name__, cls)
    return cls


def public_config(config):
    """Returns a copy of `config` in which torch-only classes have public names.

    Keras writes the private class that it swaps in on PyTorch into its configs,
    and no other backend can read those.
    """
    if isinstance(config, list | tuple):
        return type(config)(public_config(item) for item in config)
    if not isinstance(config, dict):
        return config
    config = {key: public_config(value) for key, value in config.items()}
    if str(config.get("module", "")).startswith(_TORCH_OPTIMIZERS):
        config["module"] = "keras.optimizers"
        config["registered_name"] = None
    return config


# --- The state of an optimizer ----------------------------------------------


def iteration_variable(optimizer):
    """Returns the variable that counts the optimizer's applied steps."""
    return optimizer._iterations


def base_variables(optimizer):
    """Returns `[iteration, learning_rate]`, which every optimizer starts with."""
    return optimizer._variables[:2]


def trainable_variables(optimizer):
    """Returns the variables that the optimizer was built for."""
    return list(optimizer._trainable_variables)


def remember_trainable_variables(optimizer, variables):
    """Does what `BaseOptimizer.build` does for an optimizer without slots.

    That method would also create EMA and accumulation variables, by hyper-
    parameters that a wrapper only reads through from its inner optimizer.
    """
    # Plain attributes: the tracker would count the model's variables among the
    # optimizer's.
    object.__setattr__(optimizer, "_trainable_variables", list(variables))
    object.__setattr__(
        optimizer,
        "_trainable_variables_indices",
        {optimizer._var_key(v): i for i, v in enumerate(variables)},
    )


def index_of(optimizer, variable):
    """Returns the position of a variable among those the optimizer was built for."""
    return optimizer._get_variable_index(variable)


def twin(variable, dtype):
    """Returns a new variable with another dtype, and all else like `variable`.

    It carries the same path, by which patterns exclude variables and pick their
    optimizer, and the same constraint and layout.
    """
    twin = keras.Variable(
        lambda shape, dtype: ops.cast(ops.convert_to_tensor(variable), dtype),
        shape=variable.shape,
        dtype=dtype,
        trainable=variable.trainable,
        aggregation=variable.aggregation,
        layout=getattr(variable, "_layout", None),
        name=variable.name,
    )
    twin._path = variable.path
    twin.constraint = variable.constraint
    return twin


def exclude_twins_from_weight_decay(optimizer, variables, twins):
    """Carries exclusions that name a variable itself over to its twin."""
    excluded = getattr(optimizer, "_exclude_from_weight_decay", None)
    if excluded:
        for variable, its_twin in zip(variables, twins, strict=True):
            if optimizer._var_key(variable) in excluded:
                excluded.add(optimizer._var_key(its_twin))


def check_known(optimizer, variables):
    """Refuses variables that the optimizer was not built for."""
    optimizer._check_variables_are_known(variables)


def is_overwritten(variable):
    """Whether the variable takes its gradient as its new value (float8 scales).

    Such a gradient does not come from the loss, so it is never scaled.
    """
    return getattr(variable, "overwrite_with_gradient", False)


# --- Rules ------------------------------------------------------------------


def rule_of(optimizer, variables):
    """Returns the rule that says all that the optimizer does to these variables.

    Returns:
        A class of `rules.py`; None for an optimizer of an unknown class, and for
        one that clips, decays, accumulates, averages or constrains.
    """
    cls = canonical_class(optimizer)
    if cls not in _RULES or _does_more_than_its_rule(optimizer, variables):
        return None
    return _RULES[cls](optimizer)


def make_rule(optimizer, variables):
    """Returns the optimizer's rule for this step, and its slots.

    Returns:
        A tuple of a rule with the coefficients of this step, and a list with a
        tuple of slot variables for each of `variables`.
    """
    rule = _COEFFICIENTS[rule_of(optimizer, variables)](optimizer)
    slots = [getattr(optimizer, name) for name in _SLOTS[type(rule)]]
    indices = [index_of(optimizer, v) for v in variables]
    return rule, [tuple(slot[i] for slot in slots) for i in indices]


def _does_more_than_its_rule(optimizer, variables):
    return (
        optimizer.weight_decay is not None
        or optimizer.clipnorm
        or optimizer.clipvalue
        or optimizer.global_clipnorm
        or optimizer.use_ema
        or optimizer.gradient_accumulation_steps
        or getattr(optimizer, "amsgrad", False)
        or not all(_is_plain(v) for v in variables)
    )


def _is_plain(variable):
    # Keras's optimizers also take a bare `tf.Variable`.
    return (
        isinstance(variable, keras.Variable)
        and variable.constraint is None
        and not is_overwritten(variable)
    )


def _learning_rate(optimizer):
    return ops.cast(ops.convert_to_tensor(optimizer.learning_rate), "float32")


def _sgd(optimizer):
    return rules.SGD(_learning_rate(optimizer))


def _momentum(optimizer):
    return rules.Momentum(
        _learning_rate(optimizer), optimizer.momentum, optimizer.nesterov
    )


def _adam(optimizer):
    step = ops.cast(iteration_variable(optimizer) + 1, "float32")
    beta_1_power = ops.power(ops.cast(optimizer.beta_1, "float32"), step)
    beta_2_power = ops.power(ops.cast(optimizer.beta_2, "float32"), step)
    return rules.Adam(
        alpha=_learning_rate(optimizer)
        * ops.sqrt(1 - beta_2_power)
        / (1 - beta_1_power),
        beta_1=optimizer.beta_1,
        beta_2=optimizer.beta_2,
        epsilon=optimizer.epsilon,
    )


_RULES = {
    keras.optimizers.SGD: lambda o: rules.SGD if o.momentum == 0 else rules.Momentum,
    keras.optimizers.Adam: lambda o: rules.Adam,
}
_COEFFICIENTS = {rules.SGD: _sgd, rules.Momentum: _momentum, rules.Adam: _adam}
# Where the optimizer keeps the slots, in the order of `rule.slots`.
_SLOTS: dict[type, tuple[str, ...]] = {
    rules.SGD: (),
    rules.Momentum: ("momentums",),
    rules.Adam: ("_momentums", "_velocities"),
}
