"""The update of variables by the rule of their optimizer, in one pass."""

from functools import cached_property, partial
from typing import Any, NamedTuple, Self

import keras
from keras import ops

from keras_lso._backend import backend
from keras_lso._backend.framework import GradientStats, MeasureOptions
from keras_lso._backend.leaves import Leaf, Leaves
from keras_lso._backend.rule import Rule
from keras_lso._backend.tensors import Tensor, Variables
from keras_lso._core.flag import Flag
from keras_lso._core.master_weights import MasterWeights
from keras_lso._keras_internals.optimizers import (
    accumulators_of,
    index_of,
    iteration_variable,
    moving_averages_of,
    variables_of,
)
from keras_lso._keras_internals.rules import (
    SGD,
    Average,
    Overwrite,
    fitting_rule,
    headroom_of,
    rate_of,
    registered_rule,
    slot_lists_of,
    updates_of,
)
from keras_lso._keras_internals.variables import (
    assign,
    have_shapes_of,
    read,
    storage_of,
)


class PendingUpdate(NamedTuple):
    """What an optimizer applies in a step, once micro-batches are added up."""

    grads: list  # May hold None.
    factor: Any  # Unscales and averages the gradients.
    norm: Any  # The norm of `factor * grads`, if it is known.
    flag: Flag  # Whether to apply them.
    ends: Flag  # Whether a guard judges the norm: not before all are added up.


class StepLeaves(NamedTuple):
    """The tensors that a step writes."""

    weights: Leaves
    averages: Leaves | None = None  # Those of the weights, with `use_ema`.
    overwritten: Leaves | None = None  # The weights, where averages overwrite them.


class Part:
    """Variables of an update, and which of them the backend updates together."""

    def __init__(self, leaves: Leaves, groups: list | None = None):
        self._leaves = leaves
        self._groups = [None] * len(leaves.variables) if groups is None else groups
        self._chunks: Any = None

    def stored(self) -> Leaves:
        """Returns the tensors that a step writes."""
        return self.chunked(self._leaves.mapped(storage_of))

    def chunked(self, stored: Leaves) -> Leaves:
        """Returns these tensors with the chunks of the first ones."""
        if self._chunks is None:
            self._chunks = backend.chunked(self._groups, stored)
        return stored._replace(chunks=self._chunks)


class RuleUpdate:
    """The update of these variables by a rule, with its accumulation and averages."""

    # Micro-batches are added up in the optimizer's accumulators. With
    # `use_ema`, Keras averages after each step, including those that only accumulate,
    # and every `ema_overwrite_frequency` updates the averages overwrite the weights.

    def __init__(
        self,
        rule: type[Rule],
        optimizer: Any,
        variables: list,
        masters: MasterWeights | None = None,
        is_guarded: bool = False,
    ):
        self.is_guarded = is_guarded
        indices = [index_of(optimizer, v) for v in variables]
        self.rule, self.optimizer = rule, optimizer
        self.groups = rule.groups_of(optimizer, indices)
        self.headroom = headroom_of(optimizer)
        slots = [[slot[i] for i in indices] for slot in slot_lists_of(rule, optimizer)]
        weights = [Leaf(v) for v in variables]
        if masters is not None:
            weights = masters.leaves_of(variables)
        leaves = Leaves.of(weights, slots)._replace(positions=indices)
        if masters is not None and masters.scales:
            leaves = leaves._replace(scales=list(map(masters.scales_of, slots)))
        # The optimizer itself would round to the nearest.
        self._rounds_slots = leaves.rounds_slots
        if leaves.codecs or self._rounds_slots:
            leaves = leaves._replace(iterations=iteration_variable(optimizer))
        self.weights = Part(leaves, self.groups)
        self._sums: Part | None = None
        self._averages: Part | None = None
        if optimizer.gradient_accumulation_steps:
            sums = accumulators_of(optimizer)
            sums = [sums[i] for i in indices]
            self._sums = Part(Leaves(sums, [], are_private=True, follow_gradients=True))
        if optimizer.use_ema:
            averages = moving_averages_of(optimizer)
            averages = [averages[i] for i in indices]
            self._averages = Part(Leaves(averages, [], follow_gradients=True))
            self._overwritten = Part(leaves.for_second_rounding)

    @classmethod
    def of(
        cls,
        optimizer: keras.Optimizer,
        variables: Variables,
        masters: MasterWeights | None = None,
        is_guarded: bool = False,
    ) -> Self | None:
        """Returns the update of some of an optimizer's variables; None without one."""
        rule = fitting_rule(optimizer, variables)
        if rule is None:
            return None
        # Keras also clears the sums, and averages the weights, without a gradient.
        needs_all = optimizer.gradient_accumulation_steps or optimizer.use_ema
        if needs_all and len(variables) < len(variables_of(optimizer)):
            return None
        return cls(rule, optimizer, variables, masters, is_guarded)

    def begin(self, grads: list) -> "RuleStep | None":
        """Returns the step with these gradients; None if none fits them."""
        weights = self.weights.stored()
        sums = None if self._sums is None else self._sums.stored()
        pairs = [(self.rule, weights, grads)]
        if sums is not None:
            pairs = [(self.rule, weights, sums.variables), (SGD, sums, grads)]
        averages = overwritten = None
        if self._averages is not None:
            averages = self._averages.stored()
            pairs.append((Average, averages, weights.variables))
            # Not read again: in a `StatelessScope` that would be other tensors.
            overwritten = self._overwritten.chunked(weights.for_second_rounding)
        for pair in pairs:
            if not backend.takes_update(*pair, self._rounds_slots):
                return None
        leaves = StepLeaves(weights, averages, overwritten)
        if sums is None:
            return RuleStep(self, grads, leaves)
        return AccumulatingStep(self, grads, leaves, sums)


class RuleStep:
    """One step of a `RuleUpdate`."""

    # Whether the optimizer counts its own steps.
    inner_counts = False

    def __init__(self, update: RuleUpdate, grads: list[Tensor], leaves: StepLeaves):
        self.rule_update, self.grads, self._leaves = update, grads, leaves
        self._optimizer, self.weights = update.optimizer, leaves.weights
        self.rules: list = []
        self._norms: list | None = None

    def make_rules(self, learning_rate: Any = None) -> list:
        """Makes the rule of each variable; returns their coefficients, tensors."""
        if learning_rate is None:
            learning_rate = rate_of(self._optimizer)
        rate = backend.scalar(learning_rate, "float32")
        groups = self.rule_update.groups
        rule_of = self.rule_update.rule.of_groups(self._optimizer, rate)
        self.rules = [rule_of[group] for group in groups]
        # Rules may share coefficients.
        coefficients = {
            id(value): value
            for group in dict.fromkeys(groups)
            for value in vars(rule_of[group]).values()
            if ops.is_tensor(value)
        }
        return list(coefficients.values())

    def rates_are_finite(self, are_rescaled: bool) -> Flag:
        """Returns whether the coefficients of the step are finite.

        `are_rescaled`: a `LARC` divides the gradients of each micro-batch by the rate.
        """
        return Flag.all_finite(self.make_rules())

    def measure(self, options: MeasureOptions) -> GradientStats:
        """Returns the `GradientStats` of the gradients: see `Framework.measure`."""
        # The update may re-initialise masters, and clip: the norms are not known yet.
        optimizer = self._optimizer
        clips = optimizer.clipnorm or optimizer.clipvalue or optimizer.global_clipnorm
        is_coded = self.weights.codecs or self.weights.scales
        takes_norms = not (is_coded or optimizer.gradient_accumulation_steps or clips)
        options = self._as_applied(options)._replace(
            rules=self.rules if takes_norms else None, leaves=self.weights
        )
        return backend.measure(self.grads, options)

    def _as_applied(self, options: MeasureOptions) -> MeasureOptions:
        """Returns options with what decides whether gradients can be applied."""
        clips = bool(self._optimizer.global_clipnorm)
        return options._replace(clips=clips, headroom=self.rule_update.headroom)

    def are_finite(self, options: MeasureOptions) -> list[Tensor]:
        """Returns whether each gradient is finite, by the check of `measure`."""
        options = self._as_applied(options)
        return [backend.measure([g], options).finite for g in self.grads]

    def accumulate(
        self, stats: GradientStats, inv_scale: Tensor | float, flag: Flag
    ) -> PendingUpdate | None:
        """Returns what to apply now; None if micro-batches are to follow."""
        self._norms = stats.rule_norms
        return PendingUpdate(self.grads, inv_scale, stats.norm, flag, flag)

    def drop_unless(self, is_inlier: Flag, pending: PendingUpdate) -> PendingUpdate:
        """Drops an outlier, and returns what is left to apply."""
        return pending._replace(flag=pending.flag & is_inlier)

    def apply(self, pending: PendingUpdate) -> None:
        """Updates the variables."""
        grads, factor, flag = pending.grads, pending.factor, pending.flag.tensor
        optimizer = self._optimizer
        if optimizer.clipnorm or optimizer.clipvalue:
            grads = backend.clipped(
                grads, factor, optimizer.clipnorm, optimizer.clipvalue
            )
            factor = 1.0
        elif optimizer.global_clipnorm:
            factor = self._clipping_factor(pending)
        weights, norms = self.weights, self._norms
        backend.update(self.rules, weights, grads, factor, flag, norms)
        if self.rule_update.rule.finish:
            self.rules[0].finish(optimizer, flag)

    def _clipping_factor(self, pending: PendingUpdate) -> Any:
        """Returns the factor that unscales gradients and clips the norm of all."""
        limit, norm = self._optimizer.global_clipnorm, pending.norm
        if norm is None:
            norm = self._norm_of(pending.grads, pending.factor)
        share = limit * backend.xp.clip(1.0 / norm, 0.0, 1.0 / limit)
        return pending.factor * share

    def _norm_of(self, grads: list, factor: Any) -> Any:
        """Returns the norm of `factor * grads`."""
        options = MeasureOptions(
            inv_scale=factor, leaves=self.weights, are_alike=True, norm=True
        )
        return backend.measure(grads, options).norm

    # --- Averages -------------------------------------------------------------------

    def average(self, flag: Flag) -> None:
        """Moves the averages if `flag`, and lets them overwrite the weights if due."""
        _, averages, weights = self._leaves
        if averages is None or weights is None:
            return
        optimizer, is_applied = self._optimizer, flag.tensor
        if optimizer.gradient_accumulation_steps and weights.with_masters:
            # A micro-batch that updates nothing has not checked the masters.
            synchronise = partial(backend.synchronise_masters, weights, is_applied)
            backend.run_masked(is_applied, synchronise)
        updates = updates_of(optimizer)
        momentum = backend.scalar(updates != 0, "float32")
        # The formulas contain Python numbers.
        values = backend.without_host(partial(weights.read, backend), near=momentum)
        rule = Average(momentum * optimizer.ema_momentum)
        _update_all(averages, rule, values, is_applied)
        if frequency := optimizer.ema_overwrite_frequency:
            is_due = (updates + 1) % frequency == 0
            is_due = backend.xp.logical_and(is_applied, is_due)
            overwritten = weights, Overwrite(), averages.variables, is_due
            backend.run_masked(is_due, partial(_update_all, *overwritten))


class AccumulatingStep(RuleStep):
    """A step with a micro-batch; the last one before an update makes it."""

    def __init__(
        self, update: RuleUpdate, grads: list[Tensor], leaves: StepLeaves, sums: Leaves
    ):
        super().__init__(update, grads, leaves)
        self._sums = sums
        self.weights = self.weights._replace(owns_gradients=True)
        self._accumulation_steps = self._optimizer.gradient_accumulation_steps

    @cached_property
    def _is_last(self) -> Flag:
        """Whether this is the last micro-batch before an update."""
        # Not when a step begins: a replay from a graph would have no use for it.
        steps = read(iteration_variable(self._optimizer)) + 1
        return Flag(steps % self._accumulation_steps == 0)

    def rates_are_finite(self, are_rescaled: bool) -> Flag:
        """See `RuleStep.rates_are_finite`. The last micro-batch alone may need them."""
        if are_rescaled:
            return super().rates_are_finite(are_rescaled)
        if self._is_last.known is False:
            return Flag(True)
        return super().rates_are_finite(are_rescaled) | ~self._is_last

    def accumulate(
        self, stats: GradientStats, inv_scale: Tensor | float, flag: Flag
    ) -> PendingUpdate | None:
        """See `RuleStep.accumulate`."""
        sums = self._sums
        # Adding is SGD with a rate of -1.
        _update_all(sums, SGD(learning_rate=-1.0), self.grads, flag.tensor, inv_scale)
        if self._is_last.known is False:
            return None
        ends = flag & self._is_last
        factor = backend.scalar(1.0 / self._accumulation_steps, "float32")
        is_guarded = self.rule_update.is_guarded
        norm = self._norm_of(sums.variables, factor) if is_guarded else None
        return PendingUpdate(sums.variables, factor, norm, ends, ends)

    def drop_unless(self, is_inlier: Flag, pending: PendingUpdate) -> PendingUpdate:
        """See `RuleStep.drop_unless`."""
        undo_accumulation(self._optimizer, is_inlier)
        return super().drop_unless(is_inlier, pending)

    def apply(self, pending: PendingUpdate) -> None:
        """See `RuleStep.apply`."""
        update, ends = super().apply, pending.ends.tensor
        backend.run_masked(pending.flag.tensor, lambda: update(pending))
        backend.run_masked(ends, lambda: backend.clear(pending.grads, ends))


def update_by_rule(
    optimizer: Any, grads: list, variables: list, learning_rate: Any
) -> bool:
    """Updates variables by the optimizer's rule alone; returns whether it did."""
    rule = registered_rule(optimizer)
    if rule is None:
        return False
    update = RuleUpdate(rule, optimizer, variables)
    weights = update.weights.stored()
    have_shapes = have_shapes_of(variables, grads)
    if not (have_shapes and backend.takes_update(rule, weights, grads)):
        return False
    step = RuleStep(update, grads, StepLeaves(weights))
    step.make_rules(learning_rate)
    backend.update(step.rules, weights, grads)
    return True


def _update_all(
    leaves: Leaves, rule: Rule, values: list, flag: Any, factor: Any = None
) -> None:
    """Updates variables from tensors by one rule, if `flag`."""
    backend.update([rule] * len(values), leaves, values, factor, flag)


def undo_accumulation(optimizer: Any, is_inlier: Flag) -> None:
    """Undoes the count of micro-batches whose mean is an outlier."""
    # The last micro-batch was never counted, since its step is skipped.
    applied = iteration_variable(optimizer)
    steps = read(applied)
    undone = backend.xp.cast((~is_inlier).tensor, applied.dtype)
    assign(applied, steps - undone * (optimizer.gradient_accumulation_steps - 1))
