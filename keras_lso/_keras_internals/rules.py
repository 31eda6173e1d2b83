"""Which optimizer steps by which rule of `_backend/rules.py`: a registry.

`register` says of an optimizer's class which rule its step is, what the rule's
coefficients are in this step, and where the optimizer keeps the slots. Those of Keras
are registered at the end of this file, our own where their classes are made.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import keras
from keras import ops

from keras_lso._backend import backend, layer_rules, rules
from keras_lso._keras_internals.optimizers import (
    public_class,
    updates_of,
    uses_weight_decay,
    variables_of,
)
from keras_lso._keras_internals.variables import is_overwritten, read

# --- The registry -------------------------------------------------------------------


class Registration(NamedTuple):
    """How the optimizers of a class make their rules.

    Attributes:
        rule: Class of `_backend/rules.py`.
        slots: Tuple of strings, the optimizer's attributes that hold the lists of
            slots, in the order of `rule.slots`.
        make: Callable `(optimizer, learning_rate)` that returns the rules of this step,
            a dict by treatment. The learning rate is a float32 scalar tensor.
        treatments: Callable `(optimizer, indices)` that returns the list of how the
            variables at `indices`, among those that the optimizer was built for, are
            treated: keys of that dict.
        when: Callable of the optimizer, whether it steps by this rule; None if it
            always does, unless a registration before this one applies.
        after: Callable `(optimizer, rule, finite)`, which moves what the optimizer
            keeps besides slots once it has stepped by such rules, where `finite`, a
            boolean scalar tensor, says so. None if it keeps nothing.
    """

    rule: type[rules.Rule]
    slots: tuple[str, ...]
    make: Callable
    treatments: Callable
    when: Callable | None
    after: Callable | None


def decays(optimizer, indices):
    """Returns for each variable whether it decays, as Keras's optimizers treat them."""
    if optimizer.weight_decay is None:
        return [False] * len(indices)
    variables = variables_of(optimizer)
    return [uses_weight_decay(optimizer, variables[i]) for i in indices]


# By the optimizer's class, which may have one for each of its forms.
_registrations: dict[type, list[Registration]] = {}


def register(*classes, rule, slots=(), treatments=decays, when=None, after=None):
    """Returns a decorator that registers `make` for optimizers of these classes.

    Not for those of their subclasses, which may do something else. For the arguments
    see `Registration`.
    """

    def decorate(make):
        for cls in classes:
            found = _registrations.setdefault(cls, [])
            found.append(Registration(rule, slots, make, treatments, when, after))
        _registrations_of.cache_clear()
        return make

    return decorate


def registered_rule(optimizer):
    """Returns the rule of the optimizer's class, None if it has none."""
    for registration in _registrations_of(optimizer.__class__):
        if registration.when is None or registration.when(optimizer):
            return registration.rule
    return None


@functools.cache
def _registrations_of(cls):
    """Returns the registrations of a class, by its public one if it is private."""
    return _registrations.get(public_class(cls), [])


def columns_of(rule, optimizer):
    """Returns the optimizer's lists of slots, in the order of `rule.slots`."""
    return [getattr(optimizer, name) for name in registration_of(rule, optimizer).slots]


def registration_of(rule, optimizer):
    """Returns how the optimizer makes a rule, which its class or one above it has."""
    return next(
        registration
        for cls in type(optimizer).__mro__
        for registration in _registrations.get(cls, ())
        if registration.rule is rule
    )


def rule_of(optimizer, variables):
    """Returns the rule that says all that the optimizer does to these variables.

    But for the clipping of gradients, and for what `AccumulatedStep` and `AveragedStep`
    do besides. None for an optimizer of an unknown class, and for one that constrains.
    """
    rule = registered_rule(optimizer)
    if rule is None or _does_more_than(rule, optimizer, variables):
        return None
    return rule


def _does_more_than(rule, optimizer, variables):
    has_other_decay = not issubclass(rule, rules.KerasRule)
    clips = [optimizer.clipnorm, optimizer.clipvalue, optimizer.global_clipnorm]
    return (
        # The norms that such a rule takes are of gradients that have been clipped.
        (any(clips) and rule.has_norms)
        # Set later: Keras's arguments exclude each other.
        or sum(map(bool, clips)) > 1
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


def form_of(optimizer):
    """Returns what decides by which step an optimizer updates its variables.

    It changes with the hyperparameters that `rule_of` and the treatments look at, not
    with those that are coefficients of a rule.
    """
    state = vars(optimizer)
    return (
        registered_rule(optimizer),
        bool(optimizer.clipnorm),
        bool(optimizer.clipvalue),
        bool(optimizer.global_clipnorm),
        bool(optimizer.use_ema),
        bool(optimizer.gradient_accumulation_steps),
        getattr(optimizer, "amsgrad", False),
        optimizer.weight_decay is None,
        frozenset(state.get("_exclude_from_weight_decay") or ()),
        state.get("_exclude_from_weight_decay_pattern"),
    )


# --- Keras's optimizers -------------------------------------------------------------


def with_decay(rule, optimizer, learning_rate):
    """Returns the rule of what does not decay, and of what does, by treatment."""
    if optimizer.weight_decay is None:
        return {False: rule}
    decay = learning_rate * optimizer.weight_decay
    return {False: rule, True: dataclasses.replace(rule, decay=decay)}


def _this_update(optimizer):
    """Returns the number of this update, from 1, a float32 scalar tensor."""
    return backend.scalar(updates_of(optimizer), "float32") + 1


@register(
    keras.optimizers.SGD,
    rule=rules.Momentum,
    slots=("momentums",),
    when=lambda o: o.momentum != 0,
)
def _momentum(optimizer, learning_rate):
    rule = rules.Momentum(learning_rate, optimizer.momentum, optimizer.nesterov)
    return with_decay(rule, optimizer, learning_rate)


@register(keras.optimizers.SGD, rule=rules.SGD)
def _sgd(optimizer, learning_rate):
    return with_decay(rules.SGD(learning_rate), optimizer, learning_rate)


@register(
    keras.optimizers.Adam,
    keras.optimizers.AdamW,
    rule=rules.Adam,
    slots=("_momentums", "_velocities"),
)
def _adam(optimizer, learning_rate):
    step = _this_update(optimizer)
    beta_1_power = optimizer.beta_1**step
    root = backend.scalars.sqrt(1 - optimizer.beta_2**step)
    rule = rules.Adam(
        alpha=learning_rate * root / (1 - beta_1_power),
        beta_1=optimizer.beta_1,
        beta_2=optimizer.beta_2,
        epsilon=optimizer.epsilon,
    )
    return with_decay(rule, optimizer, learning_rate)


def _momenta(optimizer, step):
    """Returns Nadam's momenta of this step and of the next, and their product so far.

    This step's is a factor of that.
    """
    this, following = (
        optimizer.beta_1 * (1 - 0.5 * 0.96**number) for number in (step, step + 1)
    )
    # Keras has made it a variable that is trained.
    product = ops.stop_gradient(read(optimizer._u_product))
    return this, following, product * this


def _multiply_momenta(optimizer, rule, finite):
    this = rule.momentum
    factor = backend.scalars.where(finite, this, backend.scalars.ones_like(this))
    optimizer._u_product.assign(read(optimizer._u_product) * factor)


@register(
    keras.optimizers.Nadam,
    rule=rules.Nadam,
    slots=("_momentums", "_velocities"),
    after=_multiply_momenta,
)
def _nadam(optimizer, learning_rate):
    step = _this_update(optimizer)
    momentum, next_momentum, product = _momenta(optimizer, step)
    rule = rules.Nadam(
        learning_rate,
        momentum,
        next_momentum,
        product,
        beta_2_power=optimizer.beta_2**step,
        beta_1=optimizer.beta_1,
        beta_2=optimizer.beta_2,
        epsilon=optimizer.epsilon,
    )
    return with_decay(rule, optimizer, learning_rate)


@register(keras.optimizers.Adamax, rule=rules.Adamax, slots=("_m", "_u"))
def _adamax(optimizer, learning_rate):
    rule = rules.Adamax(
        learning_rate,
        beta_1_power=optimizer.beta_1 ** _this_update(optimizer),
        beta_1=optimizer.beta_1,
        beta_2=optimizer.beta_2,
        epsilon=optimizer.epsilon,
    )
    return with_decay(rule, optimizer, learning_rate)


@register(keras.optimizers.Lion, rule=rules.Lion, slots=("_momentums",))
def _lion(optimizer, learning_rate):
    rule = rules.Lion(learning_rate, optimizer.beta_1, optimizer.beta_2)
    return with_decay(rule, optimizer, learning_rate)


@register(
    keras.optimizers.RMSprop,
    rule=rules.RMSprop,
    slots=("_velocities",),
    when=lambda o: not (o.momentum > 0 or o.centered),
)
def _rmsprop(optimizer, learning_rate):
    rule = rules.RMSprop(learning_rate, optimizer.rho, optimizer.epsilon)
    return with_decay(rule, optimizer, learning_rate)


@register(keras.optimizers.Adagrad, rule=rules.Adagrad, slots=("_accumulators",))
def _adagrad(optimizer, learning_rate):
    rule = rules.Adagrad(learning_rate, optimizer.epsilon)
    return with_decay(rule, optimizer, learning_rate)


@register(
    keras.optimizers.Lamb,
    rule=layer_rules.KerasLamb,
    slots=("_momentums", "_velocities"),
)
def _lamb(optimizer, learning_rate):
    rule = layer_rules.KerasLamb(
        learning_rate,
        beta_1=optimizer.beta_1,
        beta_2=optimizer.beta_2,
        epsilon=optimizer.epsilon,
        weight_decay=0.0,
        trust_ratio=layer_rules.TrustRatio(),
        step=_this_update(optimizer),
    )
    return with_decay(rule, optimizer, learning_rate)
