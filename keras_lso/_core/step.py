"""A step of a `LossScaleOptimizer`: measure the gradients, apply or skip, count.

    loss -> scaled
    gradients of all replicas -> measured: are they finite?
        -> unscaled and applied in one pass, or by the inner optimizer's own step
        -> counted -> the loss scale moves

`LossScaling` knows whether gradients are scaled, and `Step` takes the step. The host
reads nothing, except where `backend.run_if` says so.
"""

import contextlib
import enum
import weakref
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
from keras import ops

from keras_lso._backend import backend
from keras_lso._backend.framework import GradientStats, MeasureOptions
from keras_lso._backend.tensors import Grads, Tensor, Variables, shown, times
from keras_lso._core.checks import is_number, warn
from keras_lso._core.counters import LOOK_FOR
from keras_lso._core.flag import Flag
from keras_lso._core.gradients import AxisName, reduce_gradients
from keras_lso._core.inner_update import InnerStep
from keras_lso._core.master_weights import MasterWeights, as_rules_take
from keras_lso._core.rule_update import PendingUpdate, RuleStep, RuleUpdate
from keras_lso._keras_internals.optimizers import (
    index_of,
    is_of_packages,
    optimizers_in,
    warn_of_missing,
)
from keras_lso._keras_internals.rules import (
    Hyperparameters,
    optimizer_signature,
    why_skipped,
)
from keras_lso._keras_internals.variables import live_storage_of, variable_signature

if TYPE_CHECKING:
    from keras_lso.loss_scale_optimizer import LossScaleOptimizer
    from keras_lso.loss_scales.loss_scale import LossScale

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
    """Multiplies losses by the loss scale, and gradients by its inverse."""

    # It does not belong to a trace: a function that is traced or called again finds the
    # value that the last call left.
    gradients = Gradients.UNKNOWN

    def __init__(self, policy: "LossScale"):
        self._policy = policy
        # Maps the memory of each gradient that was unscaled to a weak reference and a
        # version, which changes when the gradient is written to.
        self._unscaled: dict = {}
        # Weak references to what was scaled, and to what was unscaled, last.
        self._scaled_loss: weakref.ref | None = None
        self._result: weakref.ref | None = None
        self._has_warned = False

    @property
    def scales_by_one(self) -> bool:
        """Whether the loss scale is 1 at each step."""
        return self._policy.min_scale == self._policy.max_scale == 1

    @property
    def are_unscaled(self) -> bool:
        """Whether `get_unscaled_gradients` was called last."""
        return self.gradients is Gradients.UNSCALED

    @are_unscaled.setter
    def are_unscaled(self, value: bool) -> None:
        self.gradients = Gradients.UNSCALED if value else Gradients.SCALED

    @backend.do_not_convert
    def scale(self, loss: float | Tensor) -> Tensor:
        """Returns the loss times the loss scale, in float32 or wider."""
        if _is_any_of([loss], self._scaled_loss):
            raise ValueError(
                "This loss has been multiplied by the loss scale already. Scale it "
                "once: `fit`, `minimize` and `compute_gradients` do it themselves, so "
                "pass them the loss as it is. Received: the result of `scale_loss` or "
                "`get_scaled_loss`"
            )
        scaled = times(as_loss(loss), self._policy.value)
        self._scaled_loss = backend.host.reference_to(scaled)
        return scaled

    @backend.do_not_convert
    def unscale(self, grads: list[Any]) -> Grads:
        """Returns the gradients times the inverse of the loss scale; None stays."""
        if _is_any_of(grads, self._result):
            raise ValueError(
                "These gradients have been divided by the loss scale already. Pass the "
                "results of `get_unscaled_gradients` to `apply`. Received: some of them"
            )
        tensors = backend.as_gradients(grads)
        results = iter(self.unscaled([g for g in tensors if g is not None]))
        unscaled = [None if g is None else next(results) for g in tensors]
        present = [g for g in unscaled if g is not None]
        self._result = backend.host.reference_to(present[-1]) if present else None
        # Without those whose tensors are gone.
        items = self._unscaled.items()
        references = {key: item for key, item in items if item[0]() is not None}
        self._unscaled = references | _references(grads)
        return unscaled

    def unscaled(self, grads: list[Tensor]) -> list[Tensor]:
        """Returns tensors times the inverse of the loss scale."""
        return backend.unscaled(grads, self.inv_scale(are_scaled=True))

    def are_scaled(self, grads: list[Any]) -> bool:
        """Whether gradients are scaled, if the caller of `apply` did not say so."""
        if not self.are_unscaled:
            if self.gradients is Gradients.UNKNOWN:
                self._warn_of_unknown()
            return True
        present = [g for g in grads if g is not None]
        are_arguments = [self._is_argument(g) for g in present]
        if any(are_arguments) and not all(are_arguments):
            raise ValueError(
                "Some of the gradients are the scaled arguments of "
                "`get_unscaled_gradients`, and others are not. Pass either all of its "
                "results, or all of its arguments, or say which they are with "
                "`scaled=True` or `scaled=False`. Received: "
                f"{sum(are_arguments)} of {len(present)} gradients are its arguments"
            )
        return any(are_arguments)

    def _is_argument(self, grad: Any) -> bool:
        """Whether a gradient was passed to `unscale`, and not written to since."""
        memory, _ = backend.memory_of(grad)
        original, version = self._unscaled.get(memory, (lambda: None, None))
        tensor = original()
        if tensor is None:
            return False
        _, now = backend.memory_of(tensor)
        if version != now:
            raise ValueError(
                "A gradient was written to after it was passed to "
                "`get_unscaled_gradients`, so it may be scaled or not. If it is "
                "scaled, as after `grad.mul_(factor)`, write `apply(..., scaled=True)`."
                " If the unscaled gradient was copied into it, write `scaled=False`. "
                f"Received: a gradient of shape {tuple(grad.shape)}"
            )
        return True

    def _warn_of_unknown(self) -> None:
        """Warns once that gradients are unscaled although no loss was ever scaled."""
        if self._has_warned or self.scales_by_one:
            return
        self._has_warned = True
        warn(
            "LossScaleOptimizer divides gradients by the loss scale, but no loss has "
            "been multiplied by it: the steps are too small by that factor. In your "
            "own training step, scale the loss before you differentiate it:"
            f"\n\n{backend.host.HOW_TO_SCALE}\n\n"
            "Or say what the gradients are: `apply(..., scaled=False)` if the loss is "
            "not scaled, `scaled=True` if you have multiplied the loss by "
            "`optimizer.loss_scale`."
        )

    def inv_scale(self, are_scaled: bool) -> Tensor | float:
        """Returns the factor that unscales gradients: a float32 scalar, or 1.0."""
        if not are_scaled:
            return 1.0
        return self._policy._computed(backend.xp.reciprocal)


class NoLossScaling(LossScaling):
    """Leaves losses and gradients unchanged, at a loss scale of 1."""

    # Without a scale, it does not matter whether a loss was scaled.
    gradients = Gradients.UNSCALED

    def scale(self, loss: float | Tensor) -> Tensor:
        return as_loss(loss)

    def unscale(self, grads: list[Any]) -> Grads:
        return list(grads)

    def unscaled(self, grads: list[Tensor]) -> list[Tensor]:
        return grads

    def are_scaled(self, grads: list[Any]) -> bool:
        return False

    def inv_scale(self, are_scaled: bool) -> Tensor | float:
        return 1.0


def _is_any_of(values: list[Any], reference: weakref.ref | None) -> bool:
    """Whether what is referred to is still there, and one of some values."""
    found = None if reference is None else reference()
    return found is not None and any(value is found for value in values)


def as_loss(loss: Any) -> Any:
    """Returns a loss unchanged; raises an error if it is not a loss."""
    if ops.is_tensor(loss) or isinstance(loss, np.ndarray) or is_number(loss):
        dtype = keras.backend.standardize_dtype(getattr(loss, "dtype", "float32"))
        if "complex" in dtype:
            raise ValueError(
                "A loss must be real. Pass its absolute value, `keras.ops.abs(loss)`, "
                "or its real part, `keras.ops.real(loss)`. "
                f"Received: loss={shown(loss)}"
            )
        return loss
    if backend.is_variable(loss):
        return ops.convert_to_tensor(loss)
    raise TypeError(
        "A loss must be a tensor or a number. If you have several losses, scale their "
        "sum, or scale each separately. Received: "
        f"loss={shown(loss)} of type {type(loss).__name__}"
    )


def _references(grads: list[Any]) -> dict[Any, tuple[weakref.ref[Any], int | None]]:
    """Returns weak references to gradients and their versions, by their memory."""
    references = {}
    for grad in grads:
        # None, and Python's numbers and lists, cannot have weak references.
        with contextlib.suppress(TypeError):
            reference = weakref.ref(grad)
            memory, version = backend.memory_of(grad)
            references[memory] = reference, version
    return references


# --- A step -------------------------------------------------------------------------


# A loop may leave out other gradients in each step, and an update keeps memory.
_MOST_UPDATES = 8


class Step:
    """Takes the steps of a built optimizer."""

    def __init__(self, optimizer: "LossScaleOptimizer", masters: MasterWeights):
        self._optimizer, self._inner = optimizer, optimizer.inner_optimizer
        self._policy, self._masters = optimizer.loss_scale_policy, masters
        self._scaling, self._counters = optimizer._scaling, optimizer._counters
        self._spikes = optimizer._spikes
        # The `LARC`s around the optimizer.
        self.around: list[Any] = []
        self._take_coefficients_of(self._inner)
        # Keyed by the identities of the variables that have a gradient.
        self._updates: dict[tuple, RuleUpdate | None] = {}
        self._signature: tuple[Any, ...] | None = None
        self._has_warned = False
        self._captured_steps = backend.captured_steps()

    def surround(self, larc: keras.Optimizer) -> None:
        """Remembers a `LARC` around the optimizer."""
        self.around.append(larc)
        self._take_coefficients_of(larc)

    def _take_coefficients_of(self, outermost: keras.Optimizer) -> None:
        """Lets the coefficients of an optimizer and of those in it decide on steps."""
        optimizers = [o for o in optimizers_in(outermost) if o is not self._optimizer]
        self._hyperparameters = Hyperparameters(optimizers)
        self._larcs = [o for o in optimizers if hasattr(o, "_rescales_by_rate")]

    def __call__(
        self,
        grads: Grads,
        variables: Variables,
        scaled: bool,
        update_scale: bool,
        axis_name: AxisName,
    ) -> None:
        """Updates the variables, or skips the step; see `LossScaleOptimizer.apply`."""
        self._hyperparameters.prepare()
        grads, are_alike = self._prepared(grads, variables, axis_name)
        update = self._update_of(grads, variables)
        options = scaled, update_scale, are_alike
        if isinstance(update, RuleStep) and (owners := self._owners(update)):
            self._captured_steps(
                update,
                (update.rule_update, *options),
                owners,
                live_storage_of(self._optimizer.variables),
                lambda update: self._take(update, grads, variables, *options),
            )
        else:
            self._take(update, grads, variables, *options)

    def _take(
        self,
        update: RuleStep | InnerStep,
        grads: Grads,
        variables: Variables,
        scaled: bool,
        update_scale: bool,
        are_alike: bool,
    ) -> None:
        """Applies an update of the variables, or skips it."""
        record = self._counters.record
        # Before anything changes: a schedule may raise an error.
        snapshot = None if record is None else record.snapshot()
        inv_scale = self._scaling.inv_scale(scaled)
        rates = self._rates_are_finite(update)
        options = MeasureOptions(inv_scale=inv_scale, are_alike=are_alike)
        needs_norm = self._spikes is not None or record is not None
        wanted = options._replace(amax=self._policy.needs_amax, norm=needs_norm)
        stats = update.measure(wanted)
        # A step may clear the sums with which some gradients must be finite.
        self._note_overflows(update, grads, variables, options)
        is_inlier, applies = Flag(True), Flag(stats.finite) & rates
        if rates.known is False:
            self.warn_of_rates()
        else:
            pending = update.accumulate(stats, inv_scale, applies)
            is_inlier = self._apply_unless_outlier(update, pending)
            applies = applies & is_inlier
            update.average(applies)
        flags = rates & is_inlier, applies
        amax = self._move_scale(update, stats, *flags, inv_scale, update_scale)
        if record is not None:
            record.write(snapshot, stats, rates, is_inlier, amax)

    def _owners(self, update: RuleStep) -> list[Any]:
        """Returns what a step reads attributes of; [] if it must not be captured."""
        if self._captured_steps is None or not self._hyperparameters.are_numbers():
            return []
        owners = [*self._optimizer._objects_read_by_step(), *self._larcs]
        # A user's class may read anything else.
        classes = update.rule_update.rule, *map(type, owners)
        return owners if all(map(is_of_packages, classes)) else []

    def _prepared(
        self, grads: Grads, variables: Variables, axis_name: AxisName
    ) -> tuple[Grads, bool]:
        """Returns gradients as updates take them, and whether replicas share them."""
        are_alike = True
        if backend.replicas.REDUCES_GRADIENTS:
            optimizer = self._optimizer
            backend.replicas.check_on_replicas([*variables, *optimizer.variables])
            grads, are_alike = reduce_gradients(optimizer, grads, variables, axis_name)
        grads = backend.prepare_gradients(grads)
        if self._optimizer.slot_dtype is not None:
            grads = as_rules_take(grads)
        return grads, are_alike

    def _rates_are_finite(self, update: RuleStep | InnerStep) -> Flag:
        """Returns whether all coefficients of this step are finite."""
        if self._hyperparameters.find_not_finite():
            return Flag(False)
        return update.rates_are_finite(any(o._rescales_by_rate for o in self._larcs))

    def _apply_unless_outlier(
        self, update: RuleStep | InnerStep, pending: PendingUpdate | None
    ) -> Flag:
        """Applies an update, if there is one; returns whether it is no outlier."""
        is_inlier = Flag(True)
        if pending is None:
            return is_inlier
        if self._spikes is not None:
            is_inlier = Flag(self._spikes.add(pending.norm, pending.ends.tensor))
            pending = update.drop_unless(is_inlier, pending)
        update.apply(pending)
        return is_inlier

    def _update_of(self, grads: Grads, variables: Variables) -> RuleStep | InnerStep:
        """Returns the step of the inner optimizer's rule, or its own."""
        signature = optimizer_signature(self._inner), variable_signature(variables)
        if signature != self._signature:
            if self._signature is None:
                self._optimizer._warn_of_lost_protection()
            # Other hyperparameters may ask for another rule, or for none.
            self._signature, self._updates = signature, {}
        present = [g for g in grads if g is not None]
        trained = variables
        if len(present) < len(grads):
            warn_of_missing(self._inner, grads, variables)
            pairs = zip(grads, variables, strict=True)
            trained = [v for g, v in pairs if g is not None]
        key = tuple(map(id, trained))
        if key not in self._updates:
            trained = self._masters.trained_of(self._optimizer, trained)
            is_guarded = self._spikes is not None
            update = RuleUpdate.of(self._inner, trained, self._masters, is_guarded)
            if len(self._updates) == _MOST_UPDATES:
                del self._updates[next(iter(self._updates))]
            self._updates[key] = update
        update = self._updates[key]
        step = None if update is None else update.begin(present)
        return step or InnerStep(self._optimizer, self._masters, grads, variables)

    def _note_overflows(
        self,
        update: RuleStep | InnerStep,
        grads: Grads,
        variables: Variables,
        options: MeasureOptions,
    ) -> None:
        """Records which gradients are not finite as they are applied, if asked to."""
        if self._counters.overflows is None:
            return
        present = [v for g, v in zip(grads, variables, strict=True) if g is not None]
        positions = [index_of(self._optimizer, v) for v in present]
        self._counters.note_overflows(update.are_finite(options), positions)

    def _move_scale(
        self,
        update: RuleStep | InnerStep,
        stats: GradientStats,
        accepted: Flag,
        applies: Flag,
        inv_scale: Tensor | float,
        update_scale: bool,
    ) -> Tensor | None:
        """Counts the step, moves the scale; returns the largest gradient or None."""
        finite, policy, counters = stats.finite, self._policy, self._counters
        has_counted = update.inner_counts
        all_finite = counters.count(finite, applies, update_scale, has_counted)
        # Finite gradients that were not accepted leave the scale as it is.
        moved = [] if accepted.known else counters.moved_with_scale
        if moved:
            keeps = backend.xp.logical_xor(finite, applies.tensor)
            if update_scale and policy._passes_over(keeps):
                all_finite, moved = backend.xp.logical_or(all_finite, keeps), []
        before = backend.copies_of(live_storage_of(moved)) if moved else []
        largest = amax = None
        if policy.needs_amax:
            largest = stats.amax * inv_scale
            amax = counters.count_amax(largest, update_scale)
        if update_scale:
            policy.step(all_finite, amax)
        if moved:
            backend.restore(live_storage_of(moved), before, keeps)
        return largest

    def warn_at_end(self) -> None:
        """Warns if a `fit` ends with steps skipped by a rate, or applied none."""
        missed = self._counters.mark()
        if not self._counters.skips()[0]:
            return
        self.warn_of_rates()
        if missed and why_skipped(self._inner, self._hyperparameters) is None:
            guarded = "" if self._spikes is None else ", or outliers to `spike_guard`"
            warn(
                f"No step of this `fit` was applied: all {missed} were skipped, since "
                f"their gradients were inf or NaN{guarded}. {LOOK_FOR} A loss scale "
                "that is still falling needs more steps: see `optimizer.loss_scale`."
            )

    def warn_of_rates(self) -> None:
        """Warns once that steps are skipped because a coefficient is not finite."""
        if self._has_warned:
            return
        message = why_skipped(self._inner, self._hyperparameters)
        if message is not None:
            self._has_warned = True
            warn(message)
