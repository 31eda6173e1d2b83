"""What to do without a rule: let the inner optimizer's own `apply` step, or refuse."""

from itertools import compress
from typing import TYPE_CHECKING, Any

import keras
from keras import ops

from keras_lso._backend import backend
from keras_lso._backend.framework import GradientStats, MeasureOptions
from keras_lso._backend.rule import Rule
from keras_lso._backend.tensors import Grads, Tensor, Variables
from keras_lso._core.flag import Flag
from keras_lso._core.master_weights import MasterWeights
from keras_lso._core.rule_update import PendingUpdate, undo_accumulation
from keras_lso._keras_internals.distribution import reduced_gradients
from keras_lso._keras_internals.optimizers import (
    accumulators_of,
    bases_of,
    innermost_of,
    iteration_variable,
    most_accumulation_steps,
)
from keras_lso._keras_internals.rules import (
    classes_with_moments,
    fitting_rule,
    headroom_of,
    rates_of,
)
from keras_lso._keras_internals.state import (
    as_accumulated,
    cast,
    dtypes_as_applied,
    sums_of,
)
from keras_lso._keras_internals.variables import (
    copy_in_scope,
    is_overwritten,
    read,
    storage_of,
)

if TYPE_CHECKING:
    from keras_lso.loss_scale_optimizer import LossScaleOptimizer


class InnerStep:
    """One step by the inner optimizer, which adds up and averages on its own."""

    inner_counts = True

    def __init__(
        self,
        optimizer: "LossScaleOptimizer",
        masters: MasterWeights,
        grads: Grads,
        variables: Variables,
    ):
        self._inner, self._masters = optimizer.inner_optimizer, masters
        self._spikes = optimizer._spikes
        self._grads, self._variables = grads, variables
        self._trained = masters.trained_of(optimizer, variables)
        if optimizer.slot_dtype is not None:
            check_own_step(self._inner, self._trained, optimizer.slot_dtype)
        self._bases = bases_of(self._inner)
        self._accumulation_steps = most_accumulation_steps(self._inner)
        if self._accumulation_steps:
            backend.replicas.check_accumulates(self._inner)
        # A gradient that overwrites its variable is neither scaled nor added up.
        is_new_value = [is_overwritten(v) for v in variables]
        pairs = list(zip(grads, is_new_value, strict=True))
        self._is_of_loss = [g is not None and not is_new for g, is_new in pairs]
        self._values = [g for g, is_new in pairs if g is not None and is_new]
        self._dtypes = dtypes_as_applied(
            self._inner, self._of_loss(grads), self._of_loss(self._trained)
        )

    def _of_loss(self, items: list) -> list:
        """Returns the items of the variables that have a gradient of the loss."""
        return list(compress(items, self._is_of_loss))

    def rates_are_finite(self, are_rescaled: bool) -> Flag:
        """See `RuleStep.rates_are_finite`."""
        return Flag.all_finite(rates_of(self._bases, are_rescaled))

    def measure(self, options: MeasureOptions) -> GradientStats:
        """See `RuleStep.measure`. Values that overwrite variables have to be finite."""
        of_loss, checked = self._of_loss(self._grads), self._values
        if self._dtypes:
            applied = self._applied(options.inv_scale)
            checked = [*checked, *compress(applied, self._dtypes)]
        if not of_loss:
            finite, none = backend.measure(checked).finite, backend.scalar(0, "float32")
            return GradientStats(finite, amax=none, norm=none)
        stats = backend.measure(of_loss, self._as_applied(options))
        if not checked:
            return stats
        are_alike = MeasureOptions(are_alike=options.are_alike)
        finite = backend.measure(checked, are_alike).finite
        finite = backend.xp.logical_and(stats.finite, finite)
        return stats._replace(finite=finite)

    def _as_applied(self, options: MeasureOptions) -> MeasureOptions:
        """See `RuleStep._as_applied`."""
        clips = any(o.global_clipnorm for o in innermost_of(self._inner))
        return options._replace(clips=clips, headroom=headroom_of(self._inner))

    def are_finite(self, options: MeasureOptions) -> list[Tensor]:
        """See `RuleStep.are_finite`."""

        def each(values: list, options: MeasureOptions) -> list:
            return [backend.measure([v], options).finite for v in values]

        as_is = MeasureOptions(are_alike=options.are_alike)
        of_loss = each(self._of_loss(self._grads), self._as_applied(options))
        if self._dtypes:
            narrowed = each(self._applied(options.inv_scale), as_is)
            of_loss = list(map(backend.xp.logical_and, of_loss, narrowed))
        found, of_values = iter(of_loss), iter(each(self._values, as_is))
        return [
            next(found if is_of_loss else of_values)
            for g, is_of_loss in zip(self._grads, self._is_of_loss, strict=True)
            if g is not None
        ]

    def _applied(self, inv_scale: Any) -> list:
        """Returns the unscaled gradients, or sums, as the optimizer casts them."""
        unscaled = backend.unscaled(self._of_loss(self._grads), inv_scale)
        columns = self._dtypes, unscaled, self._sums()
        applied = []
        for dtype, grad, total in zip(*columns, strict=True):
            if dtype is not None:
                grad = cast(grad, dtype)
                if total is not None:
                    grad = backend.to_dense(grad) + ops.convert_to_tensor(total)
            applied.append(grad)
        return applied

    def _sums(self) -> list:
        """Returns the accumulators of the variables with a gradient of the loss."""
        return sums_of(self._inner, self._of_loss(self._trained))

    def accumulate(
        self, stats: GradientStats, inv_scale: Tensor | float, flag: Flag
    ) -> PendingUpdate:
        """See `RuleStep.accumulate`. The optimizer adds up micro-batches itself."""
        spikes = self._spikes
        if spikes is None or not self._accumulation_steps:
            return PendingUpdate(self._grads, inv_scale, stats.norm, flag, flag)
        optimizer = self._accumulating
        count = optimizer.gradient_accumulation_steps
        ends = flag & Flag((read(iteration_variable(optimizer)) + 1) % count == 0)
        unscaled = backend.unscaled(self._of_loss(self._grads), inv_scale)
        guard_sums = spikes.sums_of(self._of_loss(self._variables))
        sums = guard_sums or self._sums()
        totals = [
            # Not `+`, which takes one dtype on TensorFlow.
            ops.add(backend.to_dense(g), ops.convert_to_tensor(total))
            for g, total in zip(unscaled, sums, strict=True)
        ]
        options = MeasureOptions(inv_scale=1.0 / count, norm=True)
        norm = backend.measure(totals, options).norm
        if guard_sums:
            spikes.assign_sums(guard_sums, totals, flag.tensor, ends.tensor)
        return PendingUpdate(self._grads, inv_scale, norm, flag, ends)

    @property
    def _accumulating(self) -> Any:
        """The optimizer that adds up micro-batches: a guard allows one alone."""
        [optimizer] = [o for o in self._bases if o.gradient_accumulation_steps]
        return optimizer

    def drop_unless(self, is_inlier: Flag, pending: PendingUpdate) -> PendingUpdate:
        """See `RuleStep.drop_unless`."""
        if self._accumulation_steps:
            sums = storage_of(accumulators_of(self._accumulating))
            backend.clear(sums, (~is_inlier).tensor)
            undo_accumulation(self._accumulating, is_inlier)
        return pending._replace(flag=pending.flag & is_inlier)

    def average(self, flag: Flag) -> None:
        """See `RuleStep.average`. The optimizer averages itself."""

    def apply(self, pending: PendingUpdate) -> None:
        """See `RuleStep.apply`."""
        inner, masters, trained = self._inner, self._masters, self._trained

        def update(grads: Grads) -> None:
            # Unscaled here, since each replica runs this with its own gradients. Always
            # in float32: Keras clips in their dtype, where a float16 norm overflows.
            of_loss = iter(backend.unscaled(self._of_loss(grads), pending.factor))
            pairs = zip(grads, self._is_of_loss, strict=True)
            grads = [next(of_loss) if is_of_loss else g for g, is_of_loss in pairs]
            # Entered here, since each replica runs this in its own thread.
            with masters.in_step(), reduced_gradients(inner):
                inner.apply(as_accumulated(inner, grads, trained), trained)

        state = self._variables + masters.variables + inner.variables
        copy_in_scope(state)
        backend.run_if(pending.flag.tensor, update, self._grads, state)


# --- Slots in 16 or 8 bits, which only a rule rounds: see `slot_dtype` ----------------


def check_has_moments(inner: Any, trained: list, slot_dtype: str) -> None:
    """Raises a `ValueError` for an optimizer whose slots a step cannot round."""
    if inner.built:
        raise ValueError(
            "The inner optimizer has been built already, with slots of its own dtype. "
            "With `slot_dtype`, pass an optimizer that has not been used. Received: "
            f"inner_optimizer={inner!r}"
        )
    _rule_with_moments(inner, trained, slot_dtype)
    dtypes = {keras.backend.standardize_dtype(v.dtype) for v in trained} - {"float32"}
    if dtypes:
        raise ValueError(
            f"`slot_dtype={slot_dtype!r}` needs weights that are trained in float32: "
            "float32 weights, or 16-bit weights with masters, such as "
            "`master_weights='stochastic'`. Received: weights that are trained in "
            f"{', '.join(sorted(dtypes))}"
        )


def _rule_with_moments(inner: Any, trained: list, slot_dtype: str) -> type[Rule]:
    """Returns the rule whose slots are rounded; raises a `ValueError` without one."""
    rule = fitting_rule(inner, trained)
    if rule is not None and rule.has_moments:
        return rule
    raise ValueError(
        f"`slot_dtype={slot_dtype!r}` rounds the moments of an optimizer by its own "
        f"formula, which exists for {', '.join(classes_with_moments())}, without "
        "`amsgrad`, `centered` and RMSprop's `momentum`, with one kind of clipping, "
        "and for variables without a constraint. Leave `slot_dtype` out, or set a "
        f"changed attribute back. Received: inner_optimizer={inner!r}"
    )


def check_own_step(inner: Any, trained: list, slot_dtype: str) -> None:
    """Raises a `ValueError` if the optimizer's own step would round slots itself."""
    if not _rule_with_moments(inner, trained, slot_dtype).slots:
        return
    raise ValueError(
        f"With `slot_dtype={slot_dtype!r}` each step is by a formula of this package, "
        "which cannot make this step. It needs a gradient for each variable if the "
        "optimizer has `use_ema` or `gradient_accumulation_steps`; on PyTorch, "
        "weights without gaps in memory on a CPU or a CUDA device, whose rows stay in "
        "the order that they had in `build` if their slots are in 8 bits (write "
        "`parameter.data = parameter.data.contiguous()`), and for Muon whole, "
        "contiguous matrices; on TensorFlow, one device or a `MirroredStrategy`. "
        "Nothing was changed. "
        f"Received: inner_optimizer={inner!r}"
    )
