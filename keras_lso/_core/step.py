"""A step of a `LossScaleOptimizer`: measure the gradients, apply or skip, count.

    loss -> scaled
    gradients of all replicas -> measured: are they finite?
        -> unscaled and applied in one pass, or by the inner optimizer's own step
        -> counted -> the loss scale moves

`LossScaling` knows whether gradients are scaled. A `Plan` holds the decisions of a step
that depend on no value, and `Step` takes the step. The host reads nothing, except where
`backend.run_if` says so.
"""

import contextlib
import enum
import operator
import weakref
from itertools import compress

import keras
import numpy as np
from keras import ops

from keras_lso._backend import backend
from keras_lso._backend.measurement import Measurement
from keras_lso._core.checks import is_number, warn
from keras_lso._core.fused_step import Choice, both, undo_window
from keras_lso._core.gradients import reduce_gradients
from keras_lso._keras_internals.distribution import reduced_gradients
from keras_lso._keras_internals.optimizers import (
    accumulators_of,
    as_accumulated,
    cast,
    clips_by_the_norm_of_all,
    dtypes_as_applied,
    have_rates,
    index_of,
    iteration_variable,
    largest_window,
    optimizers_in,
    sums_of,
    variables_of,
    warn_of_missing,
)
from keras_lso._keras_internals.rates import (
    Hyperparameters,
    check_no_own_scale,
    rates_of,
    why_skipped,
)
from keras_lso._keras_internals.variables import (
    live_storage_of,
    overwritten,
    own_in_scope,
    read,
    storage_of,
    tensors_of,
    variable_guards,
)

# --- Scaled or unscaled -------------------------------------------------------------


class Gradients(enum.Enum):
    """The kind of the gradients in the next call of `apply`."""

    UNKNOWN = "unknown"
    """No loss was scaled yet. Gradients count as scaled, as from Keras's trainers."""
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
        gradients: A `Gradients`. It does not belong to a trace: a function that is
            traced again, or called again, finds the value that the last call left.
    """

    def __init__(self, policy):
        self._policy = policy
        self.gradients = Gradients.UNKNOWN
        # Maps the memory of each gradient that was unscaled to a weak reference and a
        # version, which changes when the gradient is written to.
        self._unscaled: dict = {}
        self._has_warned = False

    def __getstate__(self):
        """Returns the state of a copy, without references to gradients."""
        return {**vars(self), "_unscaled": {}}

    @backend.as_written
    def scale(self, loss):
        """Returns the loss times the loss scale, in float32 or wider."""
        # A copy: on PyTorch the variable's own tensor changes in place, and autograd
        # keeps the factor of the loss.
        return backend.times(
            as_loss(loss), backend.scalars.copy(read(self._policy.scale))
        )

    @backend.as_written
    def unscale(self, grads):
        """Returns the gradients times the inverse of the loss scale; None stays."""
        inv_scale = self.inv_scale(are_scaled=True)
        tensors = [backend.as_gradient(g) for g in grads]
        present = [g for g in tensors if g is not None]
        results = iter(backend.unscaled(present, inv_scale))
        unscaled = [None if g is None else next(results) for g in tensors]
        alive = {i: seen for i, seen in self._unscaled.items() if seen[0]() is not None}
        self._unscaled = alive | _references(grads)
        return unscaled

    def are_scaled(self, grads):
        """Whether gradients are scaled, if the caller of `apply` did not say so.

        Args:
            grads: List of the gradients that `apply` was called with.

        Raises:
            ValueError: If only some of the gradients are arguments of
                `get_unscaled_gradients`, or if one was written to since.
        """
        if self.gradients is not Gradients.UNSCALED:
            if self.gradients is Gradients.UNKNOWN:
                self._warn_of_unknown()
            return True
        present = [g for g in grads if g is not None]
        are_arguments = list(map(self._is_argument, present))
        if any(are_arguments) and not all(are_arguments):
            raise ValueError(
                "Some of the gradients are the scaled arguments of "
                "`get_unscaled_gradients`, and others are not. Pass either all of its "
                "results, or all of its arguments, or say which they are with "
                "`scaled=True` or `scaled=False`. Received: "
                f"{sum(are_arguments)} of {len(present)} gradients are its arguments"
            )
        return any(are_arguments)

    def _is_argument(self, grad):
        original, version = self._unscaled.get(
            backend.memory_of(grad), (lambda: None, None)
        )
        tensor = original()
        if tensor is None:
            return False
        if version != backend.version_of(tensor):
            raise ValueError(
                "A gradient was written to after it was passed to "
                "`get_unscaled_gradients`, so it may be scaled or not. If it is "
                "scaled, as after `grad.mul_(factor)`, write `apply(..., scaled=True)`."
                " If the unscaled gradient was copied into it, write `scaled=False`. "
                f"Received: a gradient of shape {tuple(grad.shape)}"
            )
        return True

    def _warn_of_unknown(self):
        """Warns once that gradients are unscaled although no loss was ever scaled."""
        policy = self._policy
        if self._has_warned or policy.min_scale == policy.max_scale == 1:
            return
        self._has_warned = True
        warn(
            "LossScaleOptimizer divides gradients by the loss scale, but no loss has "
            "been multiplied by it: the steps are too small by that factor. In your "
            "own training step, scale the loss before you differentiate it:"
            f"\n\n{backend.HOW_TO_SCALE}\n\n"
            "Or say what the gradients are: `apply(..., scaled=False)` if the loss is "
            "not scaled, `scaled=True` if you have multiplied the loss by "
            "`optimizer.loss_scale`."
        )

    def inv_scale(self, are_scaled):
        """Returns the factor that unscales gradients: a float32 scalar, or 1.0."""
        if not are_scaled:
            return 1.0
        return backend.scalars.reciprocal(read(self._policy.scale))


class NoLossScaling(LossScaling):
    """Leaves losses and gradients unchanged, at a loss scale of 1."""

    def __init__(self, policy):
        super().__init__(policy)
        # Without a scale, it does not matter whether a loss was scaled.
        self.gradients = Gradients.UNSCALED

    def scale(self, loss):
        return as_loss(loss)

    def unscale(self, grads):
        return list(grads)

    def are_scaled(self, grads):
        return False

    def inv_scale(self, are_scaled):
        return 1.0


def as_loss(loss):
    """Returns a loss unchanged; raises an error if it is not a loss."""
    if ops.is_tensor(loss) or isinstance(loss, np.ndarray) or is_number(loss):
        dtype = keras.backend.standardize_dtype(getattr(loss, "dtype", "float32"))
        if "complex" in dtype:
            raise ValueError(
                "A loss must be real. Pass its absolute value, `keras.ops.abs(loss)`, "
                f"or its real part, `keras.ops.real(loss)`. Received: loss={loss!r}"
            )
        return loss
    if backend.is_variable(loss):
        return ops.convert_to_tensor(loss)
    raise TypeError(
        "A loss must be a tensor or a number. If you have several losses, scale their "
        "sum, or scale each separately. Received: "
        f"loss={loss!r} of type {type(loss).__name__}"
    )


def _references(grads):
    """Returns weak references to gradients and their versions, by their memory."""
    found = {}
    for grad in grads:
        # None, and Python's numbers and lists, cannot have weak references.
        with contextlib.suppress(TypeError):
            reference = weakref.ref(grad)
            found[backend.memory_of(grad)] = reference, backend.version_of(grad)
    return found


# --- Decisions that are made once ---------------------------------------------------
#
# A step has to know which variables are masters, which gradients are missing, whether
# there is a fused step, and that its arguments fit together. Finding this out takes
# longer than updating small tensors. The answers stay the same from step to step, and
# checking that they do is cheap.


class Plan:
    """The decisions of a step, for gradients and variables that have been checked.

    Args:
        optimizer: The `LossScaleOptimizer`.
        masters: Its `MasterWeights`.
        grads: List of tensors or None.
        variables: List of the variables that they belong to.

    Attributes:
        variables: The list of variables.
        trained: List of the variables that the inner optimizer trains in their place.
        has_gradient: List of bools, one for each variable.
        is_overwritten: List of bools, whether a variable takes its gradient as its
            value; None if no variable does.
        of_loss: List of bools, whether a variable has a gradient of the loss: one that
            is neither missing nor its new value.
        is_steppable: Bool. Whether `Framework.steppable` returns the same gradients.
        has_float16: Bool. Whether a float16 variable is trained without a master.
        fused: The inner optimizer's step as one pass; None if it takes its own step.
        dtypes: List with an entry for each gradient of the loss: the narrower dtype to
            which the inner optimizer's own step casts it, or None. None if the step
            casts no gradient.
    """

    def __init__(self, optimizer, masters, grads, variables):
        self.variables = variables
        self.trained = masters.trained_of(optimizer, variables)
        self.has_gradient = [g is not None for g in grads]
        self.is_overwritten = overwritten(variables)
        values = self.is_overwritten or [False] * len(variables)
        pairs = zip(self.has_gradient, values, strict=True)
        self.of_loss = [has and not is_value for has, is_value in pairs]
        self._types = list(map(type, grads))
        self._variable_guards = variable_guards(variables)
        present = list(compress(grads, self.has_gradient))
        self._are_alike = backend.tensor_guards(present)
        steppable = backend.steppable(present)
        self.is_steppable = all(map(operator.is_, present, steppable))
        present = steppable
        self._context = backend.context_guards()
        self.has_float16 = any(v.dtype == "float16" for v in self.trained)
        trained = list(compress(self.trained, self.has_gradient))
        self._choice = Choice(
            optimizer.inner_optimizer,
            present,
            trained,
            masters,
        )
        self.fused = self._choice.fused
        self._are_uncast = None
        if backend.STEPS_WRITE_TENSORS and not self.fused:
            # If a module was cast, `check_not_narrowed` has to run again. A fused step
            # checks the tensors that it writes.
            self._are_uncast = backend.tensor_guards(tensors_of(variables))
        self.dtypes = None
        if not self.fused:
            of_loss = [
                list(compress(each, self.of_loss)) for each in (grads, self.trained)
            ]
            self.dtypes = dtypes_as_applied(optimizer.inner_optimizer, *of_loss)

    def values_in(self, grads):
        """Returns the gradients that are new values of their variables, a list."""
        columns = zip(grads, self.has_gradient, self.of_loss, strict=True)
        return [g for g, is_present, is_of_loss in columns if is_present > is_of_loss]

    def merged(self, of_loss, grads):
        """Returns gradients in which those of the loss are replaced, a list."""
        new = iter(of_loss)
        pairs = zip(grads, self.of_loss, strict=True)
        return [next(new) if is_of_loss else g for g, is_of_loss in pairs]

    def holds(self, grads, variables):
        """Whether the same decisions hold for these arguments, which are unchecked.

        Args:
            grads: The argument of `apply`.
            variables: The argument of `apply`, not None.
        """
        return (
            self._context is not None
            and type(grads) is type(variables) is list
            and list(map(type, grads)) == self._types
            and all(map(operator.is_, variables, self.variables))
            and backend.context_guards() == self._context
            and self._are_alike(list(compress(grads, self.has_gradient)))
            and variable_guards(variables) == self._variable_guards
            and self._choice.holds()
            and (self._are_uncast is None or self._are_uncast(tensors_of(variables)))
        )


# --- Work that is done at each step -------------------------------------------------


class Step:
    """Takes the steps of a built optimizer.

    Args:
        optimizer: The `LossScaleOptimizer`.
        masters: Its `MasterWeights`.
    """

    def __init__(self, optimizer, masters):
        self._optimizer, self._inner = optimizer, optimizer.inner_optimizer
        self._policy, self._masters = optimizer.loss_scale_policy, masters
        self._scaling, self._counters = optimizer._scaling, optimizer._counters
        self._spikes = optimizer._spikes
        self._optimizers = optimizers_in(self._inner)
        self._hyperparameters = Hyperparameters(self._optimizers)
        self._plan = None
        self._has_warned = False

    def __getstate__(self):
        """Returns the state of a copy, without the plan: it has other variables."""
        return {**vars(self), "_plan": None}

    def remembered_plan(self, grads, variables):
        """Returns the `Plan` of the last step; None if it is no longer valid.

        Args:
            grads: The argument of `apply`.
            variables: The argument of `apply`.
        """
        plan = self._plan
        if variables is None:
            variables = variables_of(self._optimizer)
        return plan if plan is not None and plan.holds(grads, variables) else None

    def new_plan(self, grads, variables):
        """Returns a new `Plan` for gradients and variables that have been checked."""
        self._plan = plan = Plan(self._optimizer, self._masters, grads, variables)
        return plan

    def __call__(self, plan, grads, scaled, update_scale, axis_name):
        """Updates the variables, or skips the step; see `LossScaleOptimizer.apply`.

        Args:
            plan: A `Plan` that is valid for the gradients.
            grads: List of tensors or None.
            scaled: See `apply`.
            update_scale: See `apply`.
            axis_name: See `apply`.
        """
        stray = self._hyperparameters.stray()
        if stray:
            check_no_own_scale(*stray)
        record = self._counters.record
        # Before anything changes: a schedule may raise an error.
        before = None if record is None else record.before()
        are_alike = True
        if backend.REDUCES_GRADIENTS:
            grads, are_alike = reduce_gradients(
                self._optimizer, grads, plan.variables, plan.is_overwritten, axis_name
            )
        if not plan.is_steppable:
            grads = backend.steppable(grads)
        inv_scale = self._scaling.inv_scale(scaled)
        if stray:
            found = self._measured(plan, grads, inv_scale, are_alike)
            permitted = backend.scalar(False, "bool")
        elif plan.fused:
            if not all(plan.has_gradient):
                warn_of_missing(self._inner, grads, plan.variables)
            amax, norm = self._policy.needs_amax, record is not None
            present = list(compress(grads, plan.has_gradient))
            found, permitted = plan.fused.take(
                present, inv_scale, amax, are_alike, self._spikes, norm
            )
        else:
            found = self._measured(plan, grads, inv_scale, are_alike)
            permitted = self._let_inner_update(plan, grads, found, scaled)
        if self._counters.overflows is not None:
            self._note_overflows(plan, grads, inv_scale)
        if stray or (permitted is not None and backend.known(permitted) is False):
            self.warn_of_rates()
        largest = self._move_scale(found, permitted, plan, inv_scale, update_scale)
        if record is not None:
            record.write(before, found, permitted, largest)

    def _measured(self, plan, grads, inv_scale, are_alike):
        """Returns the `Measurement` of the gradients for the inner optimizer's step.

        Gradients that overwrite their variables only have to be finite.
        """
        of_loss, checked = list(compress(grads, plan.of_loss)), plan.values_in(grads)
        if plan.dtypes is not None:
            applied = self._as_applied(plan, grads, inv_scale)
            checked += compress(applied, plan.dtypes)
        if not of_loss:
            finite, none = backend.measure(checked).finite, backend.scalar(0, "float32")
            return Measurement(finite, amax=none, norm=none)
        window = largest_window(self._inner)
        found = backend.measure(
            of_loss,
            self._policy.needs_amax,
            inv_scale,
            are_alike=are_alike,
            norm=self._spikes is not None or self._counters.record is not None,
            clips=clips_by_the_norm_of_all(self._inner),
            # As in `AccumulatedStep`: no sum of a window overflows.
            headroom=2.0 * window if window else 1.0,
        )
        if not checked:
            return found
        finite = backend.measure(checked, are_alike=are_alike).finite
        return found._replace(finite=backend.scalars.logical_and(found.finite, finite))

    def _as_applied(self, plan, grads, inv_scale):
        """Returns unscaled gradients of the loss, as the inner optimizer casts them.

        If it adds up micro-batches, they are the sums in its dtype.
        """
        unscaled = backend.unscaled(list(compress(grads, plan.of_loss)), inv_scale)
        if plan.dtypes is None:
            return unscaled
        trained = list(compress(plan.trained, plan.of_loss))
        columns = plan.dtypes, unscaled, sums_of(self._inner, trained)
        applied = []
        for dtype, grad, total in zip(*columns, strict=True):
            if dtype is not None:
                grad = cast(grad, dtype)
                if total is not None:
                    grad = backend.to_dense(grad) + ops.convert_to_tensor(total)
            applied.append(grad)
        return applied

    def _note_overflows(self, plan, grads, inv_scale):
        """Records for each gradient whether it is finite as it is applied."""
        applied = plan.merged(self._as_applied(plan, grads, inv_scale), grads)
        pairs = zip(plan.variables, applied, strict=True)
        noted = [(g, index_of(self._optimizer, v)) for v, g in pairs if g is not None]
        self._counters.note_overflows(*map(list, zip(*noted, strict=True)))

    def _let_inner_update(self, plan, grads, found, are_scaled):
        """Lets the inner optimizer step; returns whether finite gradients may apply."""
        inner, masters = self._inner, self._masters
        variables, trained = plan.variables, plan.trained
        # Before anything changes: a schedule may raise an error.
        permitted = backend.are_finite(
            rates_of(have_rates(self._optimizers), plan.has_float16)
        )
        if self._spikes is not None:
            permitted = self._judged(plan, grads, found, permitted, are_scaled)
        finite = both(permitted, found.finite)

        def update(grads):
            # Unscaled here, since each replica runs this with its own gradients.
            unscaled = self._unscaled(plan, grads, are_scaled)
            unscaled = as_accumulated(inner, unscaled, trained)
            # Entered here, since each replica runs this in its own thread.
            with masters.in_step(), reduced_gradients(inner):
                inner.apply(unscaled, trained)

        state = variables + masters.variables + inner.variables
        own_in_scope(state)
        backend.run_if(finite, update, grads, state)
        return permitted

    def _judged(self, plan, grads, found, permitted, are_scaled):
        """Returns whether the inner optimizer may step and the step is no outlier."""
        windows = [o for o in have_rates(self._optimizers) if largest_window(o)]
        finite = both(permitted, found.finite)
        if not windows:
            return both(permitted, self._spikes.judge(found.norm, finite))
        [optimizer] = windows
        count = optimizer.gradient_accumulation_steps
        may_end = (read(iteration_variable(optimizer)) + 1) % count == 0
        is_last = backend.scalars.logical_and(finite, may_end)
        present = list(compress(grads, plan.of_loss))
        sums = sums_of(self._inner, list(compress(plan.trained, plan.of_loss)))
        unscaled = backend.unscaled(present, self._scaling.inv_scale(are_scaled))
        totals = [
            backend.to_dense(g) + ops.convert_to_tensor(total)
            for g, total in zip(unscaled, sums, strict=True)
        ]
        norm = backend.measure(totals, inv_scale=1.0 / count, norm=True).norm
        calm = self._spikes.judge(norm, is_last)
        is_dropped = backend.scalars.logical_not(calm)
        backend.clear(storage_of(accumulators_of(optimizer)), is_dropped)
        undo_window(optimizer, calm)
        return both(permitted, calm)

    def _unscaled(self, plan, grads, are_scaled):
        """Returns gradients in float32 or wider; leaves None and overwriting ones."""
        of_loss = list(compress(grads, plan.of_loss))
        if are_scaled:
            unscaled = backend.unscaled(of_loss, self._scaling.inv_scale(True))
        else:
            # Keras clips in the gradient's dtype: in float16 a norm overflows.
            unscaled = [backend.map_values(backend.in_float32, g) for g in of_loss]
        return plan.merged(unscaled, grads)

    def _move_scale(self, found, permitted, plan, inv_scale, update_scale):
        """Counts the step, and moves the loss scale according to the `Measurement`.

        Returns:
            The largest magnitude of the unscaled gradients, a float32 scalar tensor, if
            the loss-scale policy needs it. None otherwise.
        """
        has_counted = plan.fused is None
        all_finite = self._counters.count(
            found.finite, permitted, update_scale, has_counted
        )
        amax = found.amax * inv_scale if self._policy.needs_amax else None
        if permitted is None:
            self._update_scale(all_finite, amax, update_scale)
        else:
            self._update_scale_unless_kept(
                found.finite, permitted, all_finite, amax, update_scale
            )
        return amax

    def _update_scale(self, all_finite, amax, update_scale):
        if amax is not None:
            amax = self._counters.count_amax(amax, update_scale)
        if update_scale:
            self._policy.step(all_finite, amax)

    def _update_scale_unless_kept(self, finite, permitted, *arguments):
        """Updates the loss scale, unless finite gradients were not permitted."""
        scalars = backend.scalars
        keeps = scalars.logical_and(finite, scalars.logical_not(permitted))
        moved = [*self._policy.variables, *self._counters.moved_with_scale]
        before = backend.copies_of(live_storage_of(moved))
        self._update_scale(*arguments)
        backend.restore(live_storage_of(moved), before, keeps)

    def warn_of_rates(self):
        """Warns once that steps are skipped because a coefficient is not finite."""
        if self._has_warned:
            return
        message = why_skipped(self._inner, self._hyperparameters)
        if message is not None:
            self._has_warned = True
            warn(message)
