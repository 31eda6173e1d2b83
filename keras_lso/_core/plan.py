"""`Plan`: what a step does that does not depend on values, decided once.

A step has to know which variables are masters, which gradients are missing, whether
there is a fused step, and that its arguments fit together. To find that out takes
longer than to update small tensors. It stays as it is from step to step, and to see
that it does takes little.
"""

import operator
from itertools import compress

from keras_lso._backend import backend
from keras_lso._keras_internals.variables import overwritten, traits_of


class Plan:
    """The decisions of a step, for gradients and variables that have been checked.

    Args:
        optimizer: The `LossScaleOptimizer`.
        masters: Its `MasterWeights`.
        grads: List of tensors or None.
        variables: List of the variables that they belong to.

    Attributes:
        variables: The list of variables.
        trained: List of what the inner optimizer trains in place of each.
        has_gradient: List of bools, one for each variable.
        is_overwritten: List of bools, whether a variable takes its gradient as its
            value; None if none does.
        fused: The inner optimizer's step as one pass; None if it makes its own.
    """

    def __init__(self, optimizer, masters, grads, variables):
        self.variables = variables
        self.trained = masters.trained_of(optimizer, variables)
        self.has_gradient = [g is not None for g in grads]
        self.is_overwritten = overwritten(variables)
        self._types = list(map(type, grads))
        self._traits = traits_of(variables)
        present = list(compress(grads, self.has_gradient))
        self._signature = backend.signature_of(present)
        self._circumstances = backend.circumstances()
        self._choice = self._choose(optimizer, masters, present)
        self.fused = self._choice and self._choice.fused

    def _choose(self, optimizer, masters, grads):
        if optimizer._choose_step is None:
            return None
        trained = list(compress(self.trained, self.has_gradient))
        low_precision_variables = masters.low_precision_variables(trained)
        return optimizer._choose_step(
            optimizer.inner_optimizer, grads, trained, low_precision_variables
        )

    def holds(self, grads, variables):
        """Whether a step on these, not checked yet, would be decided so again.

        Args:
            grads: What `apply` was called with.
            variables: What `apply` was called with, not None.
        """
        return (
            self._circumstances is not None
            and type(grads) is type(variables) is list
            and list(map(type, grads)) == self._types
            and all(map(operator.is_, variables, self.variables))
            and backend.circumstances() == self._circumstances
            and backend.signature_of(list(compress(grads, self.has_gradient)))
            == self._signature
            and traits_of(variables) == self._traits
            and (self._choice is None or self._choice.holds())
        )
