"""A step of a `LossScaleOptimizer`: look at the gradients, update or skip, move on.

    gradients of all replicas -> measured: are they finite?
        -> unscaled and applied in one pass, or by the inner optimizer's own step
        -> counted -> the loss scale moves

Nothing is read by the host, except where `backend.run_if` says so.
"""

from keras import ops

from keras_lso._backend import backend
from keras_lso._core.gradients import reduce_gradients
from keras_lso._core.scaling import unscale
from keras_lso._keras_internals.distribution import reduced_gradients
from keras_lso._keras_internals.optimizers import (
    as_accumulated,
    index_of,
    iteration_variable,
    warn_of_missing,
)
from keras_lso._keras_internals.variables import is_overwritten


class Step:
    """Takes the steps of a built optimizer.

    Args:
        optimizer: The `LossScaleOptimizer`. Its `_fused_step_of`, where it has one,
            returns the inner optimizer's step as `backend.fused_step` takes it, or
            None if there is no such step; then the inner optimizer makes its own.
        masters: Its `MasterWeights`.
    """

    def __init__(self, optimizer, masters):
        self._optimizer, self._inner = optimizer, optimizer.inner_optimizer
        self._policy, self._masters = optimizer.loss_scale_policy, masters
        self._scaling, self._counters = optimizer._scaling, optimizer._counters

    def __call__(self, grads, variables, scaled, update_scale, axis_name):
        """Updates the variables, or skips the step; see `LossScaleOptimizer.apply`.

        Args:
            grads: List of tensors or None.
            variables: List of the variables that they belong to.
            scaled: See `apply`.
            update_scale: See `apply`.
            axis_name: See `apply`.
        """
        grads, are_alike = reduce_gradients(
            self._optimizer, grads, variables, axis_name
        )
        inv_scale = self._scaling.inv_scale(scaled)
        fused = self._as_fused(grads, variables)
        present = [g for g in grads if g is not None]
        found = backend.measure(
            present,
            amax=self._policy.needs_amax,
            inv_scale=inv_scale,
            rules=fused and fused.rules_to_measure,
            state=fused and fused.state,
            are_alike=are_alike,
        )
        if fused:
            warn_of_missing(self._inner, grads, variables)
            self._update_in_one_pass(fused, present, found, inv_scale)
        else:
            are_scaled = self._scaling.are_scaled(scaled)
            self._let_inner_update(grads, variables, found.finite, are_scaled)
        if self._counters.overflows is not None:
            positions = [index_of(self._optimizer, v) for v in variables]
            self._counters.note_overflows(grads, positions, inv_scale)
        self._move_scale(found, grads, variables, inv_scale, update_scale)

    def trained(self, variables):
        """Returns what the inner optimizer trains in place of each variable."""
        if not self._masters.variables:
            return list(variables)
        trained = self._masters.trained
        return [trained[index_of(self._optimizer, v)] for v in variables]

    def _as_fused(self, grads, variables):
        """Returns the step as `backend.fused_step` takes it, None if it does not."""
        if self._optimizer._fused_step_of is None:
            return None
        if any(g is None for g in grads):
            pairs = zip(grads, variables, strict=True)
            grads, variables = zip(*(p for p in pairs if p[0] is not None), strict=True)
        trained = self.trained(variables)
        low_precision_variables = self._masters.low_precision_variables(trained)
        return self._optimizer._fused_step_of(
            self._inner, grads, trained, low_precision_variables
        )

    def _update_in_one_pass(self, fused, grads, found, inv_scale):
        backend.fused_step(
            fused.rules,
            fused.variables,
            fused.slots,
            grads,
            found,
            inv_scale,
            fused.low_precision_variables,
        )
        iteration = iteration_variable(self._inner)
        iteration.assign_add(ops.cast(found.finite, iteration.dtype))

    def _let_inner_update(self, grads, variables, finite, are_scaled):
        inner, masters, trained = self._inner, self._masters, self.trained(variables)

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

    def _move_scale(self, found, grads, variables, inv_scale, update_scale):
        """Counts the step, and moves the loss scale by what was found."""
        all_finite = self._counters.count(found.finite, update_scale)
        amax = None
        if self._policy.needs_amax:
            amax = _largest_of_the_loss(found, grads, variables) * inv_scale
            amax = self._counters.count_amax(amax, update_scale)
        if update_scale:
            self._policy.step(all_finite, amax)


def _largest_of_the_loss(found, grads, variables):
    """Returns the largest magnitude among gradients that come from the loss."""
    if not any(map(is_overwritten, variables)):
        return found.amax
    of_the_loss = [
        g
        for g, v in zip(grads, variables, strict=True)
        if g is not None and not is_overwritten(v)
    ]
    if not of_the_loss:
        return ops.zeros((), dtype="float32")
    return backend.measure(of_the_loss, amax=True).amax
