"""The update of variables by the rule of their optimizer, in one pass."""

import functools
import math
from typing import Any, NamedTuple, Self

from keras import ops

from keras_lso._backend import backend
from keras_lso._backend.framework import Measurement
from keras_lso._backend.leaves import Leaf, Leaves
from keras_lso._backend.rule import Rule
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
from keras_lso._keras_internals.variables import assign, read, storage_of


class Due(NamedTuple):
    """What an optimizer applies in a step: at the end of a window, its mean."""

    grads: list  # May hold None.
    factor: Any  # Unscales and averages the gradients.
    norm: Any  # The norm of `factor * grads`, if it is known.
    flag: Any  # Whether to apply them.
    ends: Any  # Whether a guard judges the norm: at the end of a window.


class RuleUpdate:
    """The update of these variables by a rule, with its windows and averages."""

    # A window of micro-batches is added up in the optimizer's accumulators. With
    # `use_ema`, Keras averages after each step, including those that only accumulate,
    # and every `ema_overwrite_frequency` updates the averages overwrite the weights.

    def __init__(
        self,
        rule: type[Rule],
        optimizer: Any,
        variables: list,
        masters: MasterWeights | None = None,
    ):
        indices = [index_of(optimizer, v) for v in variables]
        self.rule, self.optimizer = rule, optimizer
        self.groups = rule.groups_of(optimizer, indices)
        self.headroom = headroom_of(optimizer)
        slots = [[slot[i] for i in indices] for slot in slot_lists_of(rule, optimizer)]
        weights = list(map(Leaf, variables))
        if masters is not None:
            weights = masters.leaves_of(variables)
        leaves = Leaves.of(weights, slots)._replace(positions=indices)
        # The optimizer itself would round to the nearest.
        self._rounds_slots = leaves.rounds_slots
        if leaves.are_random:
            leaves = leaves._replace(iterations=iteration_variable(optimizer))
        self._parts = {"weights": leaves}
        if optimizer.gradient_accumulation_steps:
            sums = accumulators_of(optimizer)
            sums = [sums[i] for i in indices]
            self._parts["sums"] = Leaves(sums, [], are_private=True)
        if optimizer.use_ema:
            averages = moving_averages_of(optimizer)
            self._parts["averages"] = Leaves([averages[i] for i in indices], [])
        self._chunks: dict[str, Any] = {}

    @classmethod
    def of(
        cls, optimizer: Any, variables: list, masters: MasterWeights | None = None
    ) -> Self | None:
        """Returns the update of some of an optimizer's variables; None without one."""
        rule = fitting_rule(optimizer, variables)
        if rule is None:
            return None
        # Keras also clears the sums, and averages the weights, without a gradient.
        needs_all = optimizer.gradient_accumulation_steps or optimizer.use_ema
        if needs_all and len(variables) < len(variables_of(optimizer)):
            return None
        return cls(rule, optimizer, variables, masters)

    def begin(self, grads: list) -> "RuleStep | None":
        """Returns the step with these gradients; None if none fits them."""
        parts = dict(zip(self._parts, map(self.stored, self._parts), strict=True))
        weights, sums = parts["weights"], parts.get("sums")
        pairs = [(self.rule, weights, sums.variables if sums else grads)]
        if sums:
            pairs.append((SGD, sums, grads))
        if "averages" in parts:
            pairs.append((Average, parts["averages"], weights.variables))
            # Not read again: in a `StatelessScope` that would be other tensors.
            parts["overwritten"] = self._chunked(
                "overwritten", weights.for_second_rounding
            )
        for pair in pairs:
            if not backend.takes_update(*pair, self._rounds_slots):
                return None
        return (WindowStep if sums else RuleStep)(self, grads, parts)

    def stored(self, name: str) -> Leaves:
        """Returns the tensors of a part that a step writes."""
        return self._chunked(name, self._parts[name].mapped(storage_of))

    def _chunked(self, name: str, stored: Leaves) -> Leaves:
        """Returns the tensors of a part with what `Framework.chunked` says of them."""
        if name not in self._chunks:
            groups = self.groups if name == "weights" else [None] * len(self.groups)
            self._chunks[name] = backend.chunked(groups, stored)
        return stored._replace(chunks=self._chunks[name])


class RuleStep:
    """One step of a `RuleUpdate`; `parts` are the tensors that it writes."""

    def __init__(self, update: RuleUpdate, grads: list, parts: dict[str, Leaves]):
        self._update, self._grads, self._parts = update, grads, parts
        self._optimizer, self._weights = update.optimizer, parts["weights"]
        self.rules: list = []
        self._norms: list | None = None

    def make_rules(self, learning_rate: Any = None) -> list:
        """Makes the rule of each variable; returns their coefficients, tensors."""
        if learning_rate is None:
            learning_rate = rate_of(self._optimizer)
        rate = backend.scalar(learning_rate, "float32")
        made = self._update.rule.of_groups(self._optimizer, rate)
        self.rules = list(map(made.__getitem__, self._update.groups))
        tensors = {}
        for group in dict.fromkeys(self._update.groups):
            for value in vars(made[group]).values():
                if ops.is_tensor(value):
                    tensors[id(value)] = value
        return list(tensors.values())

    def permitted(self) -> Any:
        """Returns whether finite gradients may apply; None if they certainly may."""
        return are_finite(self.make_rules())

    def measure(self, **asked: Any) -> Measurement:
        """Returns the `Measurement` of the gradients: see `Framework.measure`."""
        # The update may re-initialise masters, and clip: the norms are not known yet.
        one = self._optimizer
        clips = one.clipnorm or one.clipvalue or one.global_clipnorm
        takes_norms = not (self._weights.codecs or "sums" in self._parts or clips)
        return backend.measure(
            self._grads,
            **asked,
            rules=self.rules if takes_norms else None,
            leaves=self._weights,
            clips=bool(one.global_clipnorm),
            headroom=self._update.headroom,
        )

    def applied(self, inv_scale: Any) -> list:
        """Returns the gradients as they are applied."""
        return backend.unscaled(self._grads, inv_scale)

    def due(
        self, measured: Measurement, inv_scale: Any, flag: Any, is_judged: bool
    ) -> Due | None:
        """Returns what to apply now, after adding to a window; None if it goes on."""
        self._norms = measured.rule_norms
        return Due(self._grads, inv_scale, measured.norm, flag, flag)

    def drop_unless(self, calm: Any, due: Due) -> Due:
        """Undoes a window that is an outlier, and returns what is still due."""
        return due._replace(flag=backend.xp.logical_and(due.flag, calm))

    def apply(self, due: Due) -> None:
        """Updates the variables with what is due."""
        grads, factor = due.grads, due.factor
        one = self._optimizer
        if one.clipnorm or one.clipvalue:
            grads = backend.clipped(grads, factor, one.clipnorm, one.clipvalue)
            factor = 1.0
        elif one.global_clipnorm:
            factor = self._clipping_factor(due)
        weights, norms = self._weights, self._norms
        backend.update(self.rules, weights, grads, factor, due.flag, norms)
        if self._update.rule.finish:
            self.rules[0].finish(one, due.flag)

    def _clipping_factor(self, due: Due) -> Any:
        """Returns the factor that unscales gradients and clips the norm of all."""
        limit, norm = self._optimizer.global_clipnorm, due.norm
        if norm is None:
            norm = self._norm_of(due.grads, due.factor)
        return due.factor * (limit * backend.xp.clip(1.0 / norm, 0.0, 1.0 / limit))

    def _norm_of(self, grads: list, factor: Any) -> Any:
        """Returns the norm of `factor * grads`."""
        return backend.measure(
            grads, inv_scale=factor, leaves=self._weights, are_alike=True, norm=True
        ).norm

    # --- Averages -------------------------------------------------------------------

    def average(self, flag: Any) -> None:
        """Moves the averages if `flag`, and lets them overwrite the weights if due."""
        averages, weights = self._parts["averages"], self._parts["overwritten"]
        if "sums" in self._parts and weights.with_masters:
            # A micro-batch that updates nothing has not checked the masters.
            synchronise = functools.partial(backend.synchronise_masters, weights, flag)
            backend.run_masked(flag, synchronise)
        updates = updates_of(self._optimizer)
        momentum = backend.scalar(updates != 0, "float32")
        # The formulas contain Python numbers.
        numbers = backend.without_host(lambda: weights.read(backend), near=momentum)
        rule = Average(momentum * self._optimizer.ema_momentum)
        _update_all(averages, rule, numbers, flag)
        frequency = self._optimizer.ema_overwrite_frequency
        if frequency:
            is_due = (updates + 1) % frequency == 0
            is_due = backend.xp.logical_and(flag, is_due)
            overwritten = weights, Overwrite(), averages.variables, is_due
            backend.run_masked(is_due, lambda: _update_all(*overwritten))


class WindowStep(RuleStep):
    """A step with a micro-batch, which the last of a window ends with an update."""

    def __init__(self, update: RuleUpdate, grads: list, parts: dict[str, Leaves]):
        super().__init__(update, grads, parts)
        self._weights = self._weights._replace(owns_gradients=True)
        self._window = self._optimizer.gradient_accumulation_steps
        steps = read(iteration_variable(self._optimizer)) + 1
        # Whether the micro-batch is the last, and whether the host knows that it isn't.
        self._may_end = steps % self._window == 0
        self._goes_on = backend.value_if_on_host(self._may_end) is False

    def permitted(self) -> Any:
        """See `RuleStep.permitted`. Coefficients matter only at the end of a window."""
        permitted = None if self._goes_on else super().permitted()
        if permitted is None:
            return None
        goes_on = backend.xp.logical_not(self._may_end)
        return backend.xp.logical_or(permitted, goes_on)

    def due(
        self, measured: Measurement, inv_scale: Any, flag: Any, is_judged: bool
    ) -> Due | None:
        """See `RuleStep.due`."""
        sums = self._parts["sums"]
        # Adding is SGD with a rate of -1.
        _update_all(sums, SGD(learning_rate=-1.0), self._grads, flag, inv_scale)
        if self._goes_on:
            return None
        ends = backend.xp.logical_and(flag, self._may_end)
        factor = backend.scalar(1.0 / self._window, "float32")
        norm = self._norm_of(sums.variables, factor) if is_judged else None
        return Due(sums.variables, factor, norm, ends, ends)

    def drop_unless(self, calm: Any, due: Due) -> Due:
        """See `RuleStep.drop_unless`."""
        undo_window(self._optimizer, calm)
        return super().drop_unless(calm, due)

    def apply(self, due: Due | None) -> None:
        """See `RuleStep.apply`."""
        if due is None:
            return
        update = super().apply
        backend.run_masked(due.flag, lambda: update(due))
        backend.run_masked(due.ends, lambda: backend.clear(due.grads, due.ends))


def update_by_rule(
    optimizer: Any, grads: list, variables: list, learning_rate: Any
) -> bool:
    """Updates variables by the optimizer's rule alone; returns whether it did."""
    rule = registered_rule(optimizer)
    if rule is None:
        return False
    update = RuleUpdate(rule, optimizer, variables)
    weights = update.stored("weights")
    pairs = zip(grads, variables, strict=True)
    have_shapes = all(grad.shape == variable.shape for grad, variable in pairs)
    if not (have_shapes and backend.takes_update(rule, weights, grads)):
        return False
    step = RuleStep(update, grads, {"weights": weights})
    step.make_rules(learning_rate)
    backend.update(step.rules, weights, grads)
    return True


def _update_all(
    leaves: Leaves, rule: Rule, values: list, flag: Any, factor: Any = None
) -> None:
    """Updates variables from tensors by one rule, if `flag`."""
    backend.update([rule] * len(values), leaves, values, factor, flag)


def undo_window(optimizer: Any, calm: Any) -> None:
    """Undoes the count of the micro-batches of a window, unless it is calm."""
    # The last micro-batch was never counted, since its step is skipped.
    applied = iteration_variable(optimizer)
    steps = read(applied)
    undone = backend.xp.cast(backend.xp.logical_not(calm), applied.dtype)
    assign(applied, steps - undone * (optimizer.gradient_accumulation_steps - 1))


def are_finite(values: list) -> Any:
    """Returns whether scalars are finite; None if the host knows that all are."""
    unknown = []
    for value in values:
        number = backend.value_if_on_host(value)
        if number is None:
            unknown.append(ops.isfinite(value))
        elif not math.isfinite(number):
            return backend.scalar(False, "bool")
    return functools.reduce(backend.xp.logical_and, unknown) if unknown else None


def both(permitted: Any, flag: Any) -> Any:
    """Returns whether both flags are true; a `permitted` of None counts as true."""
    return flag if permitted is None else backend.xp.logical_and(permitted, flag)
