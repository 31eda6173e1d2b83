"""Which optimizer steps by which rule of `_backend/rules.py`: a registry.

`register` says of an optimizer's class which rule its step is, what the rule's
coefficients are in this step, and where the optimizer keeps the slots. Those of Keras
are registered at the end of this file, our own where their classes are made.
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import keras
from keras import ops

from keras_lso._backend import backend, rules
from keras_lso._keras_internals.optimizers import (
    canonical_class,
    index_of,
    iteration_variable,
    uses_weight_decay,
    variables_of,
)
from keras_lso._keras_internals.variables import is_overwritten, storage_of

# --- The registry -------------------------------------------------------------------


class Registration(NamedTuple):
    """How the optimizers of a class make a rule.

    Attributes:
        rule: Class of `_backend/rules.py`.
        slots: Tuple of strings, the optimizer's attributes that hold the lists of
            slots, in the order of `rule.slots`.
        make: Callable `(optimizer, indices, learning_rate)` that returns the list of
            the rules of this step, one for each of the variables at `indices` among
            those that the optimizer was built for. Variables that are treated alike
            share one. The learning rate is a float32 scalar tensor.
        when: Callable of the optimizer. Whether it steps by this rule.
    """

    rule: type[rules.Rule]
    slots: tuple[str, ...]
    make: Callable
    when: Callable


# By the optimizer's class, which may have one for each of its forms.
_registrations: dict[type, list[Registration]] = {}


def register(*classes, rule, slots=(), when=lambda optimizer: True):
    """Returns a decorator that registers `make` for optimizers of these classes.

    Not for those of their subclasses, which may do something else. For the arguments
    see `Registration`.
    """

    def decorate(make):
        for cls in classes:
            found = _registrations.setdefault(cls, [])
            found.append(Registration(rule, slots, make, when))
        return make

    return decorate


def registered_rule(optimizer):
    """Returns the rule of the optimizer's class, None if it has none."""
    for registration in _registrations.get(canonical_class(optimizer), ()):
        if registration.when(optimizer):
            return registration.rule
    return None


def columns_of(rule, optimizer):
    """Returns the optimizer's lists of slots, in the order of `rule.slots`."""
    return [getattr(optimizer, name) for name in _registration(rule, optimizer).slots]


def _registration(rule, optimizer):
    # A user's subclass has no rule, but it inherits the slots.
    return next(
        registration
        for cls in type(optimizer).__mro__
        for registration in _registrations.get(cls, ())
        if registration.rule is rule
    )


def rule_of(optimizer, variables):
    """Returns the rule that says all that the optimizer does to these variables.

    None for an optimizer of an unknown class, and for one that clips, accumulates,
    averages or constrains.
    """
    rule = registered_rule(optimizer)
    if rule is None or _does_more_than(rule, optimizer, variables):
        return None
    return rule


def _does_more_than(rule, optimizer, variables):
    has_other_decay = not issubclass(rule, rules.KerasRule)
    return (
        optimizer.clipnorm
        or optimizer.clipvalue
        or optimizer.global_clipnorm
        or optimizer.use_ema
        or optimizer.gradient_accumulation_steps
        or getattr(optimizer, "amsgrad", False)
        or (has_other_decay and optimizer.weight_decay is not None)
        or not all(_is_plain(v) for v in variables)
    )


def _is_plain(variable):
    # Keras's optimizers also take a bare `tf.Variable`.
    return (
        isinstance(variable, keras.Variable)
        and variable.constraint is None
        and not is_overwritten(variable)
    )


# --- A step -------------------------------------------------------------------------


class FusedStep(NamedTuple):
    """The arguments of `backend.fused_step` but for the gradients."""

    rules: list
    variables: list
    slots: list
    low_precision_variables: list | None

    @property
    def rules_to_measure(self):
        """The rules for `backend.measure`; None with masters.

        The step may re-initialise masters, so their norms cannot be precomputed.
        """
        return self.rules if self.low_precision_variables is None else None

    @property
    def state(self):
        """The `state` for `backend.measure`."""
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
    """Returns the optimizer's step as a `FusedStep`, None if its own step is better.

    Args:
        rule: Class of `rules.py`, or None.
        optimizer: The optimizer.
        grads: List of tensors. No None.
        variables: List of its trainable variables.
        learning_rate: Scalar tensor, of this step. Defaults to `None`: that of
            `rate_of`.
        low_precision_variables: List, like `variables`, of the variable of each master,
            and None for what is no master. Defaults to `None`: there are no masters.
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
    """Returns two lists with an item for each variable: its rule, and its slots.

    The rules have the coefficients of this step; the slots are tuples of variables. For
    the arguments see `fused_step_of`.
    """
    if learning_rate is None:
        learning_rate = rate_of(optimizer)
    learning_rate = ops.cast(ops.convert_to_tensor(learning_rate), "float32")
    indices = [index_of(optimizer, v) for v in variables]
    columns = columns_of(rule, optimizer)
    slots = [tuple([column[i] for column in columns]) for i in indices]
    return _registration(rule, optimizer).make(optimizer, indices, learning_rate), slots


def rate_of(optimizer):
    """Returns the learning rate of this step, a scalar tensor computed on the device.

    It may be a variable, a schedule, or a callable that returns a number.
    """
    if isinstance(optimizer._learning_rate, keras.Variable):
        return optimizer.learning_rate

    def rate():
        return ops.convert_to_tensor(optimizer.learning_rate)

    steps = ops.convert_to_tensor(iteration_variable(optimizer))
    return backend.without_host(rate, near=steps)


# --- Keras's optimizers -------------------------------------------------------------


def with_decay(rule, optimizer, indices, learning_rate):
    """Returns a rule for each variable: some decay, others are excluded from it."""
    if optimizer.weight_decay is None:
        return [rule] * len(indices)
    decaying = dataclasses.replace(rule, decay=learning_rate * optimizer.weight_decay)
    variables = variables_of(optimizer)
    return [
        decaying if uses_weight_decay(optimizer, variables[i]) else rule
        for i in indices
    ]


@register(keras.optimizers.SGD, rule=rules.SGD, when=lambda o: o.momentum == 0)
def _sgd(optimizer, indices, learning_rate):
    rule = rules.SGD(learning_rate)
    return with_decay(rule, optimizer, indices, learning_rate)


@register(
    keras.optimizers.SGD,
    rule=rules.Momentum,
    slots=("momentums",),
    when=lambda o: o.momentum != 0,
)
def _momentum(optimizer, indices, learning_rate):
    rule = rules.Momentum(learning_rate, optimizer.momentum, optimizer.nesterov)
    return with_decay(rule, optimizer, indices, learning_rate)


@register(
    keras.optimizers.Adam,
    keras.optimizers.AdamW,
    rule=rules.Adam,
    slots=("_momentums", "_velocities"),
)
def _adam(optimizer, indices, learning_rate):
    step = ops.cast(iteration_variable(optimizer), "float32") + 1
    beta_1_power = optimizer.beta_1**step
    beta_2_power = optimizer.beta_2**step
    rule = rules.Adam(
        alpha=learning_rate * ops.sqrt(1 - beta_2_power) / (1 - beta_1_power),
        beta_1=optimizer.beta_1,
        beta_2=optimizer.beta_2,
        epsilon=optimizer.epsilon,
    )
    return with_decay(rule, optimizer, indices, learning_rate)


@register(keras.optimizers.Lion, rule=rules.Lion, slots=("_momentums",))
def _lion(optimizer, indices, learning_rate):
    rule = rules.Lion(learning_rate, optimizer.beta_1, optimizer.beta_2)
    return with_decay(rule, optimizer, indices, learning_rate)
