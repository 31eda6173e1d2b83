"""The update of variables by the inner optimizer's own `apply`, if there is no rule."""

from itertools import compress
from typing import Any

from keras import ops

from keras_lso._backend import backend
from keras_lso._backend.measurement import Measurement
from keras_lso._core.master_weights import MasterWeights
from keras_lso._core.rule_update import Due, undo_window
from keras_lso._keras_internals.distribution import reduced_gradients
from keras_lso._keras_internals.optimizers import (
    accumulators_of,
    as_accumulated,
    cast,
    clips_by_the_norm_of_all,
    dtypes_as_applied,
    have_rates,
    iteration_variable,
    largest_window,
    optimizers_in,
    sums_of,
)
from keras_lso._keras_internals.rates import rates_of
from keras_lso._keras_internals.variables import (
    is_overwritten,
    own_in_scope,
    read,
    storage_of,
)


class InnerStep:
    """One step by the inner optimizer, which adds up micro-batches and averages itself.

    Args:
        inner: The inner optimizer.
        masters: `MasterWeights`.
        grads: List of tensors or None.
        variables: List of variables.
        trained: List of the variables that are trained in their place.
    """

    def __init__(
        self,
        inner: Any,
        masters: MasterWeights,
        grads: list,
        variables: list,
        trained: list,
    ):
        self._inner, self._masters = inner, masters
        self._grads, self._variables, self._trained = grads, variables, trained
        # A gradient that overwrites its variable is neither scaled nor added up.
        pairs = list(zip(grads, variables, strict=True))
        self._of_loss = [g is not None and not is_overwritten(v) for g, v in pairs]
        self._values = [g for g, v in pairs if g is not None and is_overwritten(v)]
        self._window = largest_window(inner)
        own = list(compress(grads, self._of_loss))
        self._dtypes = dtypes_as_applied(inner, own, self._own(trained))

    def _own(self, items: list) -> list:
        """Returns the items of the variables that have a gradient of the loss."""
        return list(compress(items, self._of_loss))

    def permitted(self) -> Any:
        """See `RuleStep.permitted`."""
        has_float16 = any(v.dtype == "float16" for v in self._trained)
        steppers = have_rates(optimizers_in(self._inner))
        return backend.are_finite(rates_of(steppers, has_float16))

    def measure(
        self, amax: bool, inv_scale: Any, are_alike: bool, norm: bool
    ) -> Measurement:
        """See `RuleStep.measure`. Values that overwrite variables have to be finite."""
        own, checked = self._own(self._grads), self._values
        if self._dtypes is not None:
            checked = [*checked, *compress(self.applied(inv_scale), self._dtypes)]
        if not own:
            finite, none = backend.measure(checked).finite, backend.scalar(0, "float32")
            return Measurement(finite, amax=none, norm=none)
        found = backend.measure(
            own,
            amax,
            inv_scale,
            are_alike=are_alike,
            norm=norm,
            clips=clips_by_the_norm_of_all(self._inner),
            headroom=2.0 * self._window if self._window else 1.0,
        )
        if not checked:
            return found
        finite = backend.measure(checked, are_alike=are_alike).finite
        return found._replace(finite=backend.scalars.logical_and(found.finite, finite))

    def applied(self, inv_scale: Any) -> list:
        """Returns the unscaled gradients of the loss, as the optimizer casts them.

        If it adds up micro-batches, they are the sums in its dtype.
        """
        unscaled = backend.unscaled(self._own(self._grads), inv_scale)
        if self._dtypes is None:
            return unscaled
        sums = sums_of(self._inner, self._own(self._trained))
        applied = []
        for dtype, grad, total in zip(self._dtypes, unscaled, sums, strict=True):
            if dtype is not None:
                grad = cast(grad, dtype)
                if total is not None:
                    grad = backend.to_dense(grad) + ops.convert_to_tensor(total)
            applied.append(grad)
        return applied

    def merged(self, of_loss: list) -> list:
        """Returns gradients in which those of the loss are replaced."""
        new = iter(of_loss)
        pairs = zip(self._grads, self._of_loss, strict=True)
        return [next(new) if is_of_loss else g for g, is_of_loss in pairs]

    def due(
        self, found: Measurement, inv_scale: Any, flag: Any, is_judged: bool
    ) -> Due:
        """See `RuleStep.due`."""
        if not (is_judged and self._window):
            return Due(self._grads, inv_scale, found.norm, flag, flag)
        count = self._accumulating.gradient_accumulation_steps
        may_end = (read(iteration_variable(self._accumulating)) + 1) % count == 0
        unscaled = backend.unscaled(self._own(self._grads), inv_scale)
        pairs = zip(unscaled, sums_of(self._inner, self._own(self._trained)), strict=True)
        totals = [backend.to_dense(g) + ops.convert_to_tensor(total) for g, total in pairs]
        norm = backend.measure(totals, inv_scale=1.0 / count, norm=True).norm
        ends = backend.scalars.logical_and(flag, may_end)
        return Due(self._grads, inv_scale, norm, flag, ends)

    @property
    def _accumulating(self) -> Any:
        """The optimizer that adds up micro-batches: with a guard there is one at most."""
        steppers = have_rates(optimizers_in(self._inner))
        [optimizer] = [o for o in steppers if largest_window(o)]
        return optimizer

    def drop_unless(self, calm: Any, due: Due) -> Due:
        """See `RuleStep.drop_unless`."""
        if self._window:
            sums = storage_of(accumulators_of(self._accumulating))
            backend.clear(sums, backend.scalars.logical_not(calm))
            undo_window(self._accumulating, calm)
        return due._replace(flag=backend.scalars.logical_and(due.flag, calm))

    def apply(self, due: Due, flag: Any) -> None:
        """See `RuleStep.apply`."""
        inner, masters, trained = self._inner, self._masters, self._trained

        def update(grads):
            # Unscaled here, since each replica runs this with its own gradients.
            step = InnerStep(inner, masters, grads, self._variables, trained)
            grads = as_accumulated(inner, step._unscaled(due.factor), trained)
            # Entered here, since each replica runs this in its own thread.
            with masters.in_step(), reduced_gradients(inner):
                inner.apply(grads, trained)

        state = self._variables + masters.variables + inner.variables
        own_in_scope(state)
        backend.run_if(due.flag, update, self._grads, state)

    def _unscaled(self, inv_scale: Any) -> list:
        """Returns gradients in float32 or wider; leaves None and overwriting ones."""
        own = self._own(self._grads)
        if inv_scale is 1.0:
            pass
        return self.merged(backend.unscaled(own, inv_scale))
