"""A step of a `LossScaleOptimizer`: look at the gradients, update or skip, move on.

    loss -> scaled
    gradients of all replicas -> measured: are they finite?
        -> unscaled and applied in one pass, or by the inner optimizer's own step
        -> counted -> the loss scale moves

`LossScaling` knows whether gradients are scaled, a `Plan` what a step does that depends
on no value, and `Step` takes it. Nothing is read by the host, except where
`backend.run_if` says so.
"""

import enum
import operator
from itertools import compress

from keras import ops

from keras_lso._backend import backend
from keras_lso._core.gradients import reduce_gradients
from keras_lso._keras_internals.distribution import reduced_gradients
from keras_lso._keras_internals.optimizers import (
    as_accumulated,
    clips_by_the_norm_of_all,
    index_of,
    variables_of,
    warn_of_missing,
)
from keras_lso._keras_internals.variables import (
    is_overwritten,
    overwritten,
    read,
    traits_of,
)

# --- Scaled or unscaled -------------------------------------------------------------


class Gradients(enum.Enum):
    """What the gradients are that `apply` gets next."""

    UNKNOWN = "unknown"
    """No loss was scaled yet: taken for scaled, as Keras's trainers hand them over."""
    SCALED_BY_KERAS = "scaled by Keras"
    """`scale_loss` was called last, which Keras's trainers do."""
    SCALED = "scaled"
    """`get_scaled_loss` was called last."""
    UNSCALED = "unscaled"
    """`get_unscaled_gradients` was called last."""


class LossScaling:
    """Multiplies losses by the loss scale, and gradients by its inverse.

    Args:
        policy: The `LossScale` that holds the loss scale.

    Attributes:
        gradients: A `Gradients`. It is tied to no trace: a function that is traced
            again, or called once more, finds it as the last call left it.
    """

    def __init__(self, policy):
        self._policy = policy
        self.gradients = Gradients.UNKNOWN

    @backend.as_written
    def scale(self, loss):
        """Returns the loss times the loss scale, in float32 or wider."""
        # A copy: on PyTorch the variable's own tensor changes in place, and autograd
        # keeps what the loss was multiplied by.
        return backend.times(loss, backend.scalars.copy(read(self._policy.scale)))

    @backend.as_written
    def unscale(self, grads):
        """Returns the gradients times the inverse of the loss scale; None stays."""
        inv_scale = self.inv_scale(scaled=True)
        grads = [backend.as_gradient(g) for g in grads]
        return [None if g is None else unscale(g, inv_scale) for g in grads]

    def are_scaled(self, scaled=None):
        """Whether the gradients are scaled that `apply(..., scaled=scaled)` gets."""
        return self.gradients is not Gradients.UNSCALED if scaled is None else scaled

    def inv_scale(self, scaled=None):
        """Returns what unscales those gradients: a float32 scalar tensor, or 1.0."""
        if not self.are_scaled(scaled):
            return 1.0
        return backend.scalars.reciprocal(read(self._policy.scale))


def unscale(grad, inv_scale):
    """Returns a gradient, dense or sparse, times the inverse of a loss scale."""
    # Not a division: it takes twice as long in XLA's Adam, and is the same for the
    # powers of two that loss scales are.
    return backend.map_values(lambda v: backend.times(v, inv_scale), grad)


# --- What is decided once -----------------------------------------------------------
#
# A step has to know which variables are masters, which gradients are missing, whether
# there is a fused step, and that its arguments fit together. To find that out takes
# longer than to update small tensors. It stays as it is from step to step, and to see
# that it does takes little.


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


# --- What is done each time ---------------------------------------------------------


class Step:
    """Takes the steps of a built optimizer.

    Args:
        optimizer: The `LossScaleOptimizer`. Its `_choose_step`, where it has one,
            chooses between a fused step and the inner optimizer's own: see
            `_keras_internals/fused_step.py`.
        masters: Its `MasterWeights`.
    """

    def __init__(self, optimizer, masters):
        self._optimizer, self._inner = optimizer, optimizer.inner_optimizer
        self._policy, self._masters = optimizer.loss_scale_policy, masters
        self._scaling, self._counters = optimizer._scaling, optimizer._counters
        self._plan = None

    def __getstate__(self):
        """A copy decides anew: it has other variables."""
        return {**vars(self), "_plan": None}

    def plan_of(self, grads, variables):
        """Returns the `Plan` of the last step, None if it does not hold for these.

        Args:
            grads: What `apply` was called with.
            variables: What `apply` was called with.
        """
        plan = self._plan
        if variables is None:
            variables = variables_of(self._optimizer)
        return plan if plan is not None and plan.holds(grads, variables) else None

    def plan(self, grads, variables):
        """Returns a new `Plan` for gradients and variables that have been checked."""
        self._plan = plan = Plan(self._optimizer, self._masters, grads, variables)
        return plan

    def __call__(self, plan, grads, scaled, update_scale, axis_name):
        """Updates the variables, or skips the step; see `LossScaleOptimizer.apply`.

        Args:
            plan: `Plan` that holds for the gradients.
            grads: List of tensors or None.
            scaled: See `apply`.
            update_scale: See `apply`.
            axis_name: See `apply`.
        """
        are_alike = True
        if backend.REDUCES_GRADIENTS:
            grads, are_alike = reduce_gradients(
                self._optimizer, grads, plan.variables, plan.is_overwritten, axis_name
            )
        inv_scale = self._scaling.inv_scale(scaled)
        present = list(compress(grads, plan.has_gradient))
        amax = self._policy.needs_amax
        if plan.fused:
            if not all(plan.has_gradient):
                warn_of_missing(self._inner, grads, plan.variables)
            found = plan.fused.take(present, inv_scale, amax, are_alike)
        else:
            # Keras makes NaN of gradients whose norm overflows.
            clips = clips_by_the_norm_of_all(self._inner)
            found = backend.measure(
                present, amax, inv_scale, are_alike=are_alike, norm=clips
            )
            are_scaled = self._scaling.are_scaled(scaled)
            self._let_inner_update(plan, grads, found.finite, are_scaled)
        if self._counters.overflows is not None:
            positions = [index_of(self._optimizer, v) for v in plan.variables]
            self._counters.note_overflows(grads, positions, inv_scale)
        self._move_scale(found, grads, plan, inv_scale, update_scale)

    def _let_inner_update(self, plan, grads, finite, are_scaled):
        inner, masters = self._inner, self._masters
        variables, trained = plan.variables, plan.trained

        def update(grads):
            # Read here: each replica runs this, with its own gradients.
            inv_scale = self._scaling.inv_scale(are_scaled)
            unscaled = [
                g
                if g is None or not are_scaled or is_overwritten(v)
                else unscale(g, inv_scale)
                for g, v in zip(grads, variables, strict=True)
            ]
            unscaled = as_accumulated(inner, unscaled, trained)
            masters.read()
            # Here, since each replica runs this in a thread of its own.
            with reduced_gradients(inner):
                inner.apply(unscaled, trained)
            masters.write()

        state = variables + masters.variables + inner.variables
        backend.run_if(finite, update, grads, state)

    def _move_scale(self, found, grads, plan, inv_scale, update_scale):
        """Counts the step, and moves the loss scale by what was found."""
        has_counted = plan.fused is None
        all_finite = self._counters.count(found.finite, update_scale, has_counted)
        amax = None
        if self._policy.needs_amax:
            amax = _largest_of_the_loss(found, grads, plan) * inv_scale
            amax = self._counters.count_amax(amax, update_scale)
        if update_scale:
            self._policy.step(all_finite, amax)


def _largest_of_the_loss(found, grads, plan):
    """Returns the largest magnitude among gradients that come from the loss."""
    if plan.is_overwritten is None:
        return found.amax
    pairs = zip(grads, plan.is_overwritten, strict=True)
    of_the_loss = [g for g, is_own in pairs if g is not None and not is_own]
    if not of_the_loss:
        return ops.zeros((), dtype="float32")
    return backend.measure(of_the_loss, amax=True).amax
