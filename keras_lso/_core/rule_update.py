"""The update of variables by the rule of their optimizer, in one pass."""

import functools
import itertools
import math
from typing import Any, NamedTuple, Self

from keras import ops

from keras_lso._backend import backend
from keras_lso._backend.framework import Measurement
from keras_lso._backend.rule import Rule
from keras_lso._backend.targets import Targets, stored_narrow
from keras_lso._core.master_weights import MasterWeights
from keras_lso._keras_internals.optimizers import (
    accumulators_of,
    index_of,
    iteration_variable,
    moving_averages_of,
    variables_of,
)
from keras_lso._keras_internals.rates import rate_of, updates_of
from keras_lso._keras_internals.rules import (
    SGD,
    Average,
    Overwrite,
    fitting_rule,
    headroom_of,
    registered_rule,
    slot_lists_of,
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
        weights, narrow = variables, None
        if masters is not None:
            narrow = masters.narrow_weights(variables)
        if narrow is not None:
            pairs = zip(narrow, variables, strict=True)
            weights = [v if n is None else n.weight for n, v in pairs]
        targets = Targets(weights, slots, narrow, positions=indices)
        # The optimizer itself would round to the nearest.
        self._rounds_slots = targets.has_narrow_slots
        if targets.draws:
            targets = targets._replace(iterations=iteration_variable(optimizer))
        self._parts = {"weights": targets}
        if optimizer.gradient_accumulation_steps:
            sums = accumulators_of(optimizer)
            sums = [sums[i] for i in indices]
            self._parts["sums"] = Targets(sums, [], are_private=True)
        if optimizer.use_ema:
            averages = moving_averages_of(optimizer)
            self._parts["averages"] = Targets([averages[i] for i in indices], [])
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
        """Returns the step with these gradients; None if the backend takes it not."""
        window = self.optimizer.gradient_accumulation_steps
        may_end, goes_on = None, False
        if window:
            may_end = (read(iteration_variable(self.optimizer)) + 1) % window == 0
            goes_on = backend.value_if_on_host(may_end) is False
        parts = {name: self.stored(name) for name in self._parts}
        weights, sums = parts["weights"], parts.get("sums")
        pairs = [(self.rule, weights, sums.variables if sums else grads)]
        if sums:
            pairs.append((SGD, sums, grads))
        if "averages" in parts:
            pairs.append((Average, parts["averages"], weights.variables))
            # Not read again: in a `StatelessScope` that would be other tensors.
            parts["overwritten"] = self._chunked("overwritten", weights.again)
        if all(backend.takes_update(*pair, self._rounds_slots) for pair in pairs):
            return RuleStep(self, grads, parts, may_end, goes_on)
        return None

    def stored(self, name: str) -> Targets:
        """Returns the tensors of a part that a step writes."""
        part = self._parts[name]
        variables, narrow = storage_of(part.variables), part.narrow
        if narrow is not None:
            narrow = stored_narrow(narrow, variables, storage_of)
        slots = list(map(storage_of, part.slots))
        stored = part._replace(variables=variables, slots=slots, narrow=narrow)
        return self._chunked(name, stored)

    def _chunked(self, name: str, stored: Targets) -> Targets:
        """Returns the tensors of a part with what `Framework.chunked` says of them."""
        if name not in self._chunks:
            groups = self.groups
            if name != "weights":
                groups = [None] * len(groups)
            self._chunks[name] = backend.chunked(groups, stored)
        return stored._replace(chunks=self._chunks[name])


class RuleStep:
    """One step of a `RuleUpdate`; `parts` are the tensors that it writes."""

    # `may_end` says whether the micro-batch is the last of its window, and `goes_on`
    # whether the host knows that it is not.

    def __init__(
        self,
        update: RuleUpdate,
        grads: list,
        parts: dict[str, Targets],
        may_end: Any = None,
        goes_on: bool = False,
    ):
        self._update, self._grads, self._parts = update, grads, parts
        self._optimizer, self._may_end = update.optimizer, may_end
        self._weights = parts["weights"]
        self._window = self._optimizer.gradient_accumulation_steps
        self._rules: list = []
        self._norms: list | None = None
        self._goes_on = goes_on

    def rules(self, learning_rate: Any = None) -> list:
        """Returns the rule of each variable, with the coefficients of this step."""
        if learning_rate is None:
            learning_rate = rate_of(self._optimizer)
        rate = backend.scalar(learning_rate, "float32")
        made = self._update.rule.of_groups(self._optimizer, rate)
        return list(map(made.__getitem__, self._update.groups))

    def permitted(self) -> Any:
        """Returns whether finite gradients may apply; None if they certainly may."""
        # Coefficients that are not finite matter only at the end of a window.
        if self._goes_on:
            return None
        self._rules = self.rules()
        permitted = are_finite(_tensors_in(self._rules))
        if permitted is None or not self._window:
            return permitted
        goes_on = backend.scalars.logical_not(self._may_end)
        return backend.scalars.logical_or(permitted, goes_on)

    def measure(self, **asked: Any) -> Measurement:
        """Returns the `Measurement` of the gradients: see `Framework.measure`."""
        # The update may re-initialise masters, and clip: the norms are not known yet.
        one = self._optimizer
        clips = one.clipnorm or one.clipvalue or one.global_clipnorm
        takes_norms = not (self._weights.narrow or self._window or clips)
        return backend.measure(
            self._grads,
            **asked,
            rules=self._rules if takes_norms else None,
            targets=self._weights,
            clips=bool(self._optimizer.global_clipnorm),
            headroom=self._update.headroom,
        )

    def applied(self, inv_scale: Any) -> list:
        """Returns the gradients as they are applied."""
        return backend.unscaled(self._grads, inv_scale)

    def due(
        self, measured: Measurement, inv_scale: Any, flag: Any, is_judged: bool
    ) -> Due | None:
        """Returns what to apply now, after adding to a window; None if it goes on."""
        if not self._window:
            self._norms = measured.rule_norms
            return Due(self._grads, inv_scale, measured.norm, flag, flag)
        sums = self._parts["sums"]
        # Adding is SGD with a rate of -1.
        _update_all(sums, SGD(learning_rate=-1.0), self._grads, flag, inv_scale)
        if self._goes_on:
            return None
        ends = backend.scalars.logical_and(flag, self._may_end)
        factor = backend.scalar(1.0 / self._window, "float32")
        norm = self._norm_of(sums.variables, factor) if is_judged else None
        return Due(sums.variables, factor, norm, ends, ends)

    def _norm_of(self, grads: list, factor: Any) -> Any:
        """Returns the norm of `factor * grads`."""
        return backend.measure(
            grads, inv_scale=factor, targets=self._weights, are_alike=True, norm=True
        ).norm

    def drop_unless(self, calm: Any, due: Due) -> Due:
        """Undoes a window that is an outlier, and returns what is still due."""
        if self._window:
            undo_window(self._optimizer, calm)
        return due._replace(flag=backend.scalars.logical_and(due.flag, calm))

    def apply(self, due: Due | None, flag: Any) -> None:
        """Updates the variables; `flag` says whether this micro-batch counts."""
        if due is not None and not self._window:
            self._apply(due)
        elif due is not None:
            backend.run_masked(due.flag, lambda: self._apply(due))
            backend.run_masked(due.ends, lambda: backend.clear(due.grads, due.ends))
        if "averages" in self._parts:
            self._average(flag)

    def _apply(self, due: Due) -> None:
        grads, factor = self._clipped(due)
        weights = self._weights
        if self._window:
            weights = weights._replace(owns_gradients=True)
        backend.update(self._rules, weights, grads, factor, due.flag, self._norms)
        if self._update.rule.finish:
            self._rules[0].finish(self._optimizer, due.flag)

    def _clipped(self, due: Due) -> tuple[list, Any]:
        """Returns gradients, and the factor that unscales and clips them."""
        optimizer = self._optimizer
        if optimizer.clipnorm or optimizer.clipvalue:
            limits = optimizer.clipnorm, optimizer.clipvalue
            return backend.clipped(due.grads, due.factor, *limits), 1.0
        limit = optimizer.global_clipnorm
        if not limit:
            return due.grads, due.factor
        norm = due.norm
        if norm is None:
            norm = self._norm_of(due.grads, due.factor)
        factor = backend.scalars.clip(1.0 / norm, 0.0, 1.0 / limit)
        return due.grads, due.factor * (limit * factor)

    # --- Averages -------------------------------------------------------------------

    def _average(self, flag: Any) -> None:
        """Moves the averages if `flag`, and lets them overwrite the weights if due."""
        averages, weights = self._parts["averages"], self._parts["overwritten"]
        if self._window and weights.in_place:
            # A micro-batch that updates nothing has not checked the masters.
            synchronise = functools.partial(backend.synchronise_masters, weights, flag)
            backend.run_masked(flag, synchronise)
        updates = updates_of(self._optimizer)
        momentum = backend.scalar(updates != 0, "float32")
        # The formulas contain Python numbers.
        numbers = backend.without_host(lambda: weights.numbers(backend), near=momentum)
        rule = Average(momentum * self._optimizer.ema_momentum)
        _update_all(averages, rule, numbers, flag)
        frequency = self._optimizer.ema_overwrite_frequency
        if frequency:
            is_due = (updates + 1) % frequency == 0
            is_due = backend.scalars.logical_and(flag, is_due)
            overwritten = weights, Overwrite(), averages.variables, is_due
            backend.run_masked(is_due, lambda: _update_all(*overwritten))


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
    rules = RuleStep(update, grads, {"weights": weights}).rules(learning_rate)
    backend.update(rules, weights, grads)
    return True


def _update_all(
    targets: Targets, rule: Rule, values: list, flag: Any, factor: Any = None
) -> None:
    """Updates variables from tensors by one rule, if `flag`."""
    backend.update([rule] * len(values), targets, values, factor, flag)


def _tensors_in(rules: list) -> list:
    """Returns the coefficients of rules that are tensors, each once."""
    different = {id(rule): rule for rule in rules}.values()
    values = itertools.chain(*(vars(rule).values() for rule in different))
    return list({id(v): v for v in values if ops.is_tensor(v)}.values())


def undo_window(optimizer: Any, calm: Any) -> None:
    """Undoes the count of the micro-batches of a window, unless it is calm."""
    # The last micro-batch was never counted, since its step is skipped.
    applied = iteration_variable(optimizer)
    steps = read(applied)
    undone = backend.scalars.cast(backend.scalars.logical_not(calm), applied.dtype)
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
    return functools.reduce(backend.scalars.logical_and, unknown) if unknown else None


def both(permitted: Any, flag: Any) -> Any:
    """Returns whether both flags are true; a `permitted` of None counts as true."""
    return flag if permitted is None else backend.scalars.logical_and(permitted, flag)
