"""What this package knows of Keras's own optimizers.

The only place that touches Keras's private attributes. Everything that another
version of Keras might spell differently stands here.
"""

import re

import keras
from keras import ops

from keras_lso import backend
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


def chain(optimizer):
    """Returns the optimizer, what it wraps, what that wraps, and so on."""
    optimizers = [optimizer]
    while isinstance(vars(optimizers[-1]).get("inner_optimizer"), keras.Optimizer):
        optimizers.append(optimizers[-1].inner_optimizer)
    return optimizers


def count_by(wrapper, inner):
    """Lets a wrapper without state of its own count its inner optimizer's steps."""
    wrapper._iterations = iteration_variable(inner)


def exclude_twins_from_weight_decay(optimizer, variables, twins):
    """Carries exclusions that name a variable itself over to its twin."""
    innermost = chain(optimizer)[-1]
    excluded = getattr(innermost, "_exclude_from_weight_decay", None)
    if excluded:
        for variable, its_twin in zip(variables, twins, strict=True):
            if innermost._var_key(variable) in excluded:
                excluded.add(innermost._var_key(its_twin))


def check_known(optimizer, variables):
    """Refuses variables that the optimizer was not built for."""
    optimizer._check_variables_are_known(variables)


def path_matches(variable, patterns):
    """Whether one of the regular expressions is found in the variable's path."""
    # Keras's optimizers also take a bare `tf.Variable`, which has no path.
    path = getattr(variable, "path", variable.name)
    return any(re.search(pattern, path) for pattern in patterns or [])


def uses_weight_decay(optimizer, variable):
    """Whether the variable decays, unless `exclude_from_weight_decay` was called."""
    return optimizer._use_weight_decay(variable)


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
    if _does_more_than_its_rule(optimizer, variables):
        return None
    if isinstance(optimizer, RuleOptimizer):
        return optimizer._rule()
    cls = canonical_class(optimizer)
    return _RULES[cls](optimizer) if cls in _RULES else None


def make_rules(rule, optimizer, variables, learning_rate=None):
    """Returns the optimizer's rules for this step, and its slots.

    Args:
        rule: What `rule_of` returned.
        optimizer: The optimizer.
        variables: List of its trainable variables.
        learning_rate: Scalar tensor, of this step. Defaults to `None`: the
            optimizer is asked for it.

    Returns:
        A tuple of two lists with an item for each of `variables`: the rule with the
        coefficients of this step, and the tuple of slot variables.
    """
    if learning_rate is None:
        learning_rate = optimizer.learning_rate
    learning_rate = ops.cast(ops.convert_to_tensor(learning_rate), "float32")
    indices = [index_of(optimizer, v) for v in variables]
    if isinstance(optimizer, RuleOptimizer):
        made = optimizer._make_rules(indices, learning_rate)
    else:
        made = [_COEFFICIENTS[rule](optimizer, learning_rate)] * len(indices)
    slots = [getattr(optimizer, name) for name in _SLOTS[rule]]
    return made, [tuple(slot[i] for slot in slots) for i in indices]


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


def _sgd(optimizer, learning_rate):
    return rules.SGD(learning_rate)


def _momentum(optimizer, learning_rate):
    return rules.Momentum(learning_rate, optimizer.momentum, optimizer.nesterov)


def _adam(optimizer, learning_rate):
    step = ops.cast(iteration_variable(optimizer) + 1, "float32")
    beta_1_power = ops.power(ops.cast(optimizer.beta_1, "float32"), step)
    beta_2_power = ops.power(ops.cast(optimizer.beta_2, "float32"), step)
    return rules.Adam(
        alpha=learning_rate * ops.sqrt(1 - beta_2_power) / (1 - beta_1_power),
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
    rules.LARS: ("momentums",),
}


class RuleOptimizer(keras.optimizers.Optimizer):
    """An optimizer of our own, whose step is a rule of `rules.py`.

    A subclass names the rule as `_rule_class`, builds the lists of slots that
    `_SLOTS` has for it and `_may_decay`, a bool for each variable, and makes the
    rules of each step.
    """

    def _rule(self):
        """Returns `_rule_class`; None in a subclass, which may do something else."""
        return vars(type(self)).get("_rule_class")

    def _make_rules(self, indices, learning_rate):
        """Returns a rule for each of the variables at `indices`.

        Args:
            indices: List of integers, positions among the variables that the
                optimizer was built for.
            learning_rate: Float32 scalar tensor, or float64 for float64 variables.

        Returns:
            A list of rules. Variables that are treated alike share one.
        """
        raise NotImplementedError

    def _use_weight_decay(self, variable):
        """Whether a variable decays, by Keras's rules and by `_may_decay`."""
        return self._may_decay[
            self._get_variable_index(variable)
        ] and super()._use_weight_decay(variable)

    def update_step(self, gradient, variable, learning_rate):
        """Updates one variable, of any dtype, with a dense or sparse gradient."""
        index = self._get_variable_index(variable)
        value = backend.in_float32(variable)
        [rule] = self._make_rules([index], ops.cast(learning_rate, value.dtype))
        slots = [getattr(self, name)[index] for name in _SLOTS[type(rule)]]
        new_values = rule(
            lambda new, old: new,
            ops.cast(backend.to_dense(gradient), value.dtype),
            value,
            *(ops.cast(slot, value.dtype) for slot in slots),
        )
        for v, new in zip((variable, *slots), new_values, strict=True):
            self.assign(v, ops.cast(new, v.dtype))

    def _backend_update_step(self, grads, trainable_variables, learning_rate):
        rule, grads = self._rule(), [backend.as_tensor(g) for g in grads]
        if (
            rule is None
            or not all(isinstance(v, keras.Variable) for v in trainable_variables)
            or not backend.fused_step_takes(rule, trainable_variables, grads)
        ):
            super()._backend_update_step(grads, trainable_variables, learning_rate)
            return
        step_rules, slots = make_rules(rule, self, trainable_variables, learning_rate)
        backend.fused_step(step_rules, trainable_variables, slots, grads)
