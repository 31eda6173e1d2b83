"""`RuleOptimizer`: the base of this package's optimizers, whose step is a rule."""

from collections.abc import Iterable
from typing import Any

import keras
from keras import ops

from keras_lso._backend import backend, xp
from keras_lso._backend.rule import Rule, always
from keras_lso._backend.tensors import Tensor, in_float32
from keras_lso._keras_internals.distribution import (
    has_reduced_gradients,
    reduced_gradients,
    shard_slot,
)
from keras_lso._keras_internals.optimizers import names_excluded_by, uses_weight_decay
from keras_lso._keras_internals.rules import slot_lists_of
from keras_lso._keras_internals.variables import held_by, is_found


class RuleOptimizer(keras.optimizers.Optimizer):
    """An optimizer of this package, with a rule (`rules.steps_by`) and its slots.

    A subclass has two more methods. `_may_decay(variable)` returns whether the
    arguments of its constructor let a variable decay. `_update_by_rule(grads,
    variables, learning_rate)` updates them in one pass, and returns whether it did.
    """

    _casts_gradients = False  # See `dtypes_as_applied`.
    _changes_gradients = False  # See `changes_gradients`.
    _rule: type[Rule]

    def build(self, variables: Iterable[keras.Variable]) -> None:
        super().build(variables)
        self._decayable = tuple(map(self._may_decay, self._trainable_variables))

    def _use_weight_decay(self, variable):
        """Whether a variable decays, by Keras's rules and by `_may_decay`."""
        # Keras searches the name of the argument, which on TensorFlow may be a
        # `tf.Variable`. This method searches the variable's own name on each backend.
        index = self._get_variable_index(variable)
        own, names = self._trainable_variables[index], names_excluded_by(self)
        return (
            self._decayable[index]
            and super()._use_weight_decay(own)
            and not (names and is_found(names, own.name))
        )

    def _groups_of(self, indices):
        """Returns whether each variable decays: see `Rule.groups_of`."""
        return [uses_weight_decay(self, self._trainable_variables[i]) for i in indices]

    def add_variable_from_reference(
        self, reference_variable: keras.Variable, *args: Any, **kwargs: Any
    ) -> keras.Variable:
        slot = super().add_variable_from_reference(reference_variable, *args, **kwargs)
        return shard_slot(slot, reference_variable)

    def _rule_and_slots_of(self, variable, learning_rate):
        """Returns the rule of this step for a variable, and its slots."""
        index = self._get_variable_index(variable)
        [group] = self._groups_of([index])
        rule = self._rule.of_groups(self, learning_rate)[group]
        return rule, [slots[index] for slots in slot_lists_of(type(rule), self)]

    def update_step(
        self, gradient: Tensor, variable: keras.Variable, learning_rate: Tensor
    ) -> None:
        """Updates one variable, of any dtype, with a dense or sparse gradient."""
        value = in_float32(variable)
        learning_rate = ops.cast(learning_rate, value.dtype)
        rule, slots = self._rule_and_slots_of(variable, learning_rate)
        tensors = [
            ops.cast(tensor, value.dtype)
            for tensor in (backend.to_dense(gradient), value, *slots)
        ]
        new_values = rule(xp, always, *tensors, norms=backend.norms)
        for v, new in zip((variable, *slots), new_values, strict=True):
            self.assign(v, ops.cast(new, v.dtype))

    def _backend_update_step(self, grads, trainable_variables, learning_rate):
        # Keras's optimizers also take a bare `tf.Variable`.
        are_kerass = all(isinstance(v, keras.Variable) for v in trainable_variables)
        tensors, values = backend.as_gradients(grads), map(held_by, trainable_variables)
        args = tensors, trainable_variables, values
        tensors = backend.replicas.sharded_alike(*args)
        if not has_reduced_gradients():
            tensors = backend.replicas.reduce_gradients(tensors)
        step = tensors, trainable_variables, learning_rate
        if are_kerass and self._update_by_rule(*step):
            return
        with reduced_gradients(self):
            super()._backend_update_step(*step)
