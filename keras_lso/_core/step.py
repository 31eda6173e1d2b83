"""A step of a `LossScaleOptimizer`: look at the gradients, update or skip, move on.

    gradients of all replicas -> measured: are they finite?
        -> unscaled and applied in one pass, or by the inner optimizer's own step
        -> counted -> the loss scale moves

Nothing is read by the host, except where `backend.run_if` says so.
"""

from itertools import compress

from keras import ops

from keras_lso._backend import backend
from keras_lso._core.gradients import reduce_gradients
from keras_lso._core.plan import Plan
from keras_lso._core.scaling import unscale
from keras_lso._keras_internals.distribution import reduced_gradients
from keras_lso._keras_internals.optimizers import (
    as_accumulated,
    clips_by_the_norm_of_all,
    index_of,
    variables_of,
    warn_of_missing,
)
from keras_lso._keras_internals.variables import is_overwritten


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
            inv_scale = 1.0 / self._policy.value
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
