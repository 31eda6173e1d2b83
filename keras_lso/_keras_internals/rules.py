"""Which optimizer has which rule, and the base of our own optimizers."""

import dataclasses
from typing import NamedTuple

import keras
from keras import ops

from keras_lso._backend import backend, rules
from keras_lso._keras_internals.distribution import (
    check_shards,
    has_reduced_gradients,
    reduced_gradients,
    shard_slot,
)
from keras_lso._keras_internals.optimizers import (
    canonical_class,
    index_of,
    iteration_variable,
    uses_weight_decay,
)
from keras_lso._keras_internals.variables import is_overwritten, storage_of


def rule_of(optimizer, variables):
    """Returns the rule that says all that the optimizer does to these variables.

    Returns:
        A class of `rules.py`; None for an optimizer of an unknown class, and for
        one that clips, accumulates, averages or constrains.
    """
    if _does_more_than_its_rule(optimizer, variables):
        return None
    if isinstance(optimizer, RuleOptimizer):
        # Theirs have a decay of their own. Keras's comes on top of it.
        return optimizer._rule() if optimizer.weight_decay is None else None
    cls = canonical_class(optimizer)
    return _RULES[cls](optimizer) if cls in _RULES else None


class FusedStep(NamedTuple):
    """What `backend.fused_step` takes beside the gradients."""

    rules: list
    variables: list
    slots: list
    low_precision_variables: list | None

    @property
    def rules_to_measure(self):
        """The rules whose norms `backend.measure` can take, with this `state`.

        None with masters: the step may re-initialise them, so their norms cannot be
        precomputed.
        """
        return self.rules if self.low_precision_variables is None else None

    @property
    def state(self):
        return [
            (v, *slots) for v, slots in zip(self.variables, self.slots, strict=True)
        ]


def fused_step_of(
    rule,
    optimizer,
    grads,
    variables,
    learning_rate=None,
    low_precision_variables=None,
):
    """Returns the optimizer's step as `backend.fused_step` does it.

    Args:
        rule: What `rule_of` returned.
        optimizer: The optimizer.
        grads: List of tensors. No None.
        variables: List of its trainable variables.
        learning_rate: Scalar tensor, of this step. Defaults to `None`: the
            optimizer is asked for it.
        low_precision_variables: List of variables and None, those that `variables` are
            the masters of. Defaults to `None`: there are no masters.

    Returns:
        A `FusedStep`; None where the optimizer's own step is the better way, or the
        only one.
    """
    if rule is None:
        return None
    stored = storage_of(variables)
    if not backend.fused_step_takes(rule, stored, grads):
        return None
    rules, slots = make_rules(rule, optimizer, variables, learning_rate)
    low = low_precision_variables
    return FusedStep(
        rules,
        stored,
        storage_of(slots),
        low and [None if v is None else storage_of([v])[0] for v in low],
    )


def find_fused_step(optimizer, grads, variables, low_precision_variables=None):
    """Returns the fused step of an optimizer of any class; see `fused_step_of`."""
    return fused_step_of(
        rule_of(optimizer, variables),
        optimizer,
        grads,
        variables,
        low_precision_variables=low_precision_variables,
    )


def make_rules(rule, optimizer, variables, learning_rate=None):
    """Returns the optimizer's rules for this step, and its slots.

    Args:
        rule: See `fused_step_of`.
        optimizer: See there.
        variables: See there.
        learning_rate: See there. Defaults to `None`.

    Returns:
        A tuple of two lists with an item for each of `variables`: the rule with the
        coefficients of this step, and the tuple of slot variables.
    """
    if learning_rate is None:
        learning_rate = rate_of(optimizer)
    learning_rate = ops.cast(ops.convert_to_tensor(learning_rate), "float32")
    indices = [index_of(optimizer, v) for v in variables]
    if isinstance(optimizer, RuleOptimizer):
        made = optimizer._make_rules(indices, learning_rate)
    else:
        made = _with_decay(
            _COEFFICIENTS[rule](optimizer, learning_rate),
            optimizer,
            variables,
            learning_rate,
        )
    columns = [getattr(optimizer, name) for name in _SLOTS[rule]]
    return made, [tuple([column[i] for column in columns]) for i in indices]


def rate_of(optimizer):
    """Returns the learning rate of this step, a scalar tensor on the device.

    Where it is a schedule it is computed there; a callable may return a number.
    """
    if isinstance(optimizer._learning_rate, keras.Variable):
        return optimizer.learning_rate

    def rate():
        return ops.convert_to_tensor(optimizer.learning_rate)

    steps = ops.convert_to_tensor(iteration_variable(optimizer))
    return backend.without_host(rate, near=steps)


def _with_decay(rule, optimizer, variables, learning_rate):
    """Returns a rule for each variable: some decay, others are excluded from it."""
    if optimizer.weight_decay is None:
        return [rule] * len(variables)
    decaying = dataclasses.replace(rule, decay=learning_rate * optimizer.weight_decay)
    return [decaying if uses_weight_decay(optimizer, v) else rule for v in variables]


def _does_more_than_its_rule(optimizer, variables):
    return (
        optimizer.clipnorm
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
    step = ops.cast(iteration_variable(optimizer), "float32") + 1
    beta_1_power = optimizer.beta_1**step
    beta_2_power = optimizer.beta_2**step
    return rules.Adam(
        alpha=learning_rate * ops.sqrt(1 - beta_2_power) / (1 - beta_1_power),
        beta_1=optimizer.beta_1,
        beta_2=optimizer.beta_2,
        epsilon=optimizer.epsilon,
    )


_RULES = {
    keras.optimizers.SGD: lambda o: rules.SGD if o.momentum == 0 else rules.Momentum,
    keras.optimizers.Adam: lambda o: rules.Adam,
    keras.optimizers.AdamW: lambda o: rules.Adam,
}
_COEFFICIENTS = {rules.SGD: _sgd, rules.Momentum: _momentum, rules.Adam: _adam}
# Where the optimizer keeps the slots, in the order of `rule.slots`.
_SLOTS: dict[type, tuple[str, ...]] = {
    rules.SGD: (),
    rules.Momentum: ("momentums",),
    rules.Adam: ("_momentums", "_velocities"),
    rules.LARS: ("momentums",),
    rules.NovoGrad: ("momentums", "second_moments"),
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

    def add_variable_from_reference(self, reference_variable, *args, **kwargs):
        slot = super().add_variable_from_reference(reference_variable, *args, **kwargs)
        return shard_slot(slot, reference_variable)

    def update_step(self, gradient, variable, learning_rate):
        """Updates one variable, of any dtype, with a dense or sparse gradient."""
        index = self._get_variable_index(variable)
        value = backend.in_float32(variable)
        [rule] = self._make_rules([index], ops.cast(learning_rate, value.dtype))
        slots = [getattr(self, name)[index] for name in _SLOTS[type(rule)]]
        tensors = [
            ops.cast(tensor, value.dtype)
            for tensor in (backend.to_dense(gradient), value, *slots)
        ]
        norms = backend.norms_of(rule, *tensors)
        new_values = rule(rules.always, *tensors, norms=norms)
        for v, new in zip((variable, *slots), new_values, strict=True):
            self.assign(v, ops.cast(new, v.dtype))

    def _backend_update_step(self, grads, trainable_variables, learning_rate):
        # Keras's optimizers also take a bare `tf.Variable`.
        are_kerass = all(isinstance(v, keras.Variable) for v in trainable_variables)
        tensors = [backend.as_gradient(g) for g in grads]
        check_shards(tensors, trainable_variables)
        if not has_reduced_gradients():
            tensors = backend.reduce_gradients(tensors)
        fused = fused_step_of(
            self._rule() if are_kerass else None,
            self,
            tensors,
            trainable_variables,
            learning_rate,
        )
        if fused is None:
            with reduced_gradients(self):
                super()._backend_update_step(
                    tensors, trainable_variables, learning_rate
                )
        else:
            backend.fused_step(fused.rules, fused.variables, fused.slots, tensors)
