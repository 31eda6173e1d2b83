"""Which optimizer steps by which rule of `_backend/rules.py`: a registry.

`register` says of an optimizer's class which rule its step is, what the rule's
coefficients are in this step, and where the optimizer keeps the slots. Those of Keras
are registered at the end of this file, our own where their classes are made.
"""

import dataclasses
import itertools
from collections.abc import Callable
from typing import NamedTuple

import keras
from keras import ops

from keras_lso._backend import backend, rules
from keras_lso._backend.targets import Targets
from keras_lso._keras_internals.optimizers import (
    canonical_class,
    index_of,
    iteration_variable,
    uses_weight_decay,
    variables_of,
)
from keras_lso._keras_internals.variables import hold, is_overwritten, storage_of

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
        when: Callable of the optimizer. Whether it steps by this rule.
    """

    rule: type[rules.Rule]
    slots: tuple[str, ...]
    make: Callable
    treatments: Callable
    when: Callable


def decays(optimizer, indices):
    """Returns for each variable whether it decays, as Keras's optimizers treat them."""
    if optimizer.weight_decay is None:
        return [False] * len(indices)
    variables = variables_of(optimizer)
    return [uses_weight_decay(optimizer, variables[i]) for i in indices]


# By the optimizer's class, which may have one for each of its forms.
_registrations: dict[type, list[Registration]] = {}


def register(*classes, rule, slots=(), treatments=decays, when=lambda optimizer: True):
    """Returns a decorator that registers `make` for optimizers of these classes.

    Not for those of their subclasses, which may do something else. For the arguments
    see `Registration`.
    """

    def decorate(make):
        for cls in classes:
            found = _registrations.setdefault(cls, [])
            found.append(Registration(rule, slots, make, treatments, when))
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

    But for clipping by the norm of all gradients, which enters the factor that unscales
    them. None for an optimizer of an unknown class, and for one that clips otherwise,
    accumulates, averages or constrains.
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
        # The norms that such a rule takes are of gradients that have been clipped.
        or (optimizer.global_clipnorm and rule.has_norms)
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


def form_of(optimizer):
    """Returns what decides by which step an optimizer updates its variables.

    It changes with the hyperparameters that `rule_of` and the treatments look at, not
    with those that are coefficients of a rule.
    """
    state = vars(optimizer)
    return (
        registered_rule(optimizer),
        bool(optimizer.clipnorm or optimizer.clipvalue),
        bool(optimizer.global_clipnorm),
        bool(optimizer.use_ema or optimizer.gradient_accumulation_steps),
        getattr(optimizer, "amsgrad", False),
        optimizer.weight_decay is None,
        frozenset(state.get("_exclude_from_weight_decay") or ()),
        state.get("_exclude_from_weight_decay_pattern"),
    )


# --- A step -------------------------------------------------------------------------


class FusedStep:
    """How an optimizer updates these variables in one pass, as far as it stays.

    Args:
        rule: Class of `rules.py`.
        optimizer: The optimizer.
        grads: List of tensors. No None.
        variables: List of its trainable variables.
        stored: List of what a step changes of these: `storage_of(variables)`.
        low_precision_variables: List, like `variables`, of the variable of each master,
            and None for what is no master. Defaults to `None`: there are no masters.

    Attributes:
        slots: List of tuples of variables, in the order of `rule.slots`.
        clips: Bool. Whether the gradients are to be clipped by their norm.
        has_masters: Bool. Whether some of the variables are masters.
        targets: `Targets`, what the step writes.
    """

    def __init__(
        self, rule, optimizer, grads, variables, stored, low_precision_variables=None
    ):
        registration = registration_of(rule, optimizer)
        indices = [index_of(optimizer, v) for v in variables]
        columns = columns_of(rule, optimizer)
        self.slots = [tuple([column[i] for column in columns]) for i in indices]
        low = low_precision_variables
        self._optimizer, self._make = optimizer, registration.make
        self._treatments = registration.treatments(optimizer, indices)
        self.has_masters = low is not None
        self.clips = bool(optimizer.global_clipnorm)
        copies = low and [None if v is None else storage_of([v])[0] for v in low]
        targets = Targets(stored, storage_of(self.slots), copies)
        plan = backend.plan_step(self._treatments, targets, grads)
        self.targets = targets._replace(plan=plan)
        self._written = _flat(Targets(variables, self.slots, low))
        self._storage = _flat(targets)

    def holds(self):
        """Whether the variables still hold the tensors that the step would change."""
        are_same = hold(self._written, self._storage)
        plan = self.targets.plan
        return are_same and (plan is None or plan.holds())

    def rules(self, learning_rate=None):
        """Returns the rule of each variable, with the coefficients of this step.

        Variables that are treated alike share one.

        Args:
            learning_rate: Scalar tensor. Defaults to `None`: that of `rate_of`.
        """
        if learning_rate is None:
            learning_rate = rate_of(self._optimizer)
        made = self._make(self._optimizer, backend.scalar(learning_rate, "float32"))
        return [made[treatment] for treatment in self._treatments]

    def clipped(self, inv_scale, norm):
        """Returns what unscales gradients of this norm, and clips them as Keras does.

        Args:
            inv_scale: Float32 scalar tensor, or 1.0.
            norm: Float32 scalar tensor, of the unscaled gradients.
        """
        limit = self._optimizer.global_clipnorm
        factor = backend.scalars.clip(1.0 / norm, 0.0, 1.0 / limit)
        return inv_scale * (limit * factor)

    def update(self, rules, grads, found=None, inv_scale=None):
        """Updates the variables; see `Framework.fused_step`."""
        backend.fused_step(rules, self.targets, grads, found, inv_scale)


def _flat(targets):
    """Returns all that a step writes, as one list."""
    copies = [copy for copy in targets.copies or () if copy is not None]
    return [*targets.variables, *itertools.chain(*targets.slots), *copies]


class Choice:
    """Which step an optimizer makes, and whether it would be chosen again.

    Args:
        optimizer: The optimizer.
        grads: List of tensors. No None.
        variables: List of the variables that they belong to.
        low_precision_variables: See `FusedStep`.

    Attributes:
        fused: `FusedStep`, None if the optimizer's own step is better.
    """

    def __init__(self, optimizer, grads, variables, low_precision_variables=None):
        self._optimizer, self._form = optimizer, form_of(optimizer)
        rule = rule_of(optimizer, variables)
        self.fused = fused_step_of(
            rule, optimizer, grads, variables, low_precision_variables
        )

    def holds(self):
        """Whether the choice would be the same, for the same gradients."""
        is_same = form_of(self._optimizer) == self._form
        return is_same and (self.fused is None or self.fused.holds())


def fused_step_of(rule, optimizer, grads, variables, low_precision_variables=None):
    """Returns the optimizer's `FusedStep`, None if its own step is better.

    Args:
        rule: Class of `rules.py`, or None.
        optimizer: See `FusedStep`.
        grads: See `FusedStep`.
        variables: See `FusedStep`.
        low_precision_variables: See `FusedStep`.
    """
    if rule is None:
        return None
    stored = storage_of(variables)
    if not backend.fused_step_takes(rule, stored, grads):
        return None
    return FusedStep(rule, optimizer, grads, variables, stored, low_precision_variables)


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


def with_decay(rule, optimizer, learning_rate):
    """Returns the rule of what does not decay, and of what does, by treatment."""
    if optimizer.weight_decay is None:
        return {False: rule}
    decay = learning_rate * optimizer.weight_decay
    return {False: rule, True: dataclasses.replace(rule, decay=decay)}


@register(keras.optimizers.SGD, rule=rules.SGD, when=lambda o: o.momentum == 0)
def _sgd(optimizer, learning_rate):
    return with_decay(rules.SGD(learning_rate), optimizer, learning_rate)


@register(
    keras.optimizers.SGD,
    rule=rules.Momentum,
    slots=("momentums",),
    when=lambda o: o.momentum != 0,
)
def _momentum(optimizer, learning_rate):
    rule = rules.Momentum(learning_rate, optimizer.momentum, optimizer.nesterov)
    return with_decay(rule, optimizer, learning_rate)


@register(
    keras.optimizers.Adam,
    keras.optimizers.AdamW,
    rule=rules.Adam,
    slots=("_momentums", "_velocities"),
)
def _adam(optimizer, learning_rate):
    step = backend.scalar(iteration_variable(optimizer), "float32") + 1
    beta_1_power = optimizer.beta_1**step
    beta_2_power = optimizer.beta_2**step
    rule = rules.Adam(
        alpha=learning_rate * ops.sqrt(1 - beta_2_power) / (1 - beta_1_power),
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
