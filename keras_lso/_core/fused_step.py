"""Fused steps: steps of an optimizer in one pass over memory.

`Choice` decides once between a fused step and the optimizer's own step.
"""

import functools

from keras import ops

from keras_lso._backend import backend
from keras_lso._backend.measurement import Measurement
from keras_lso._backend.targets import Targets
from keras_lso._keras_internals.optimizers import (
    accumulators_of,
    index_of,
    iteration_variable,
    moving_averages_of,
)
from keras_lso._keras_internals.rates import rate_of, updates_of
from keras_lso._keras_internals.rules import (
    SGD,
    Average,
    Overwrite,
    fitting_rule,
    optimizer_guards,
    slot_lists_of,
)
from keras_lso._keras_internals.variables import assign, hold, read, storage_of


class FusedStep:
    """The constant part of an optimizer's update of these variables in one pass.

    Args:
        rule: Class of rules.
        optimizer: The optimizer.
        grads: List of tensors. No None.
        written: `Targets` of the optimizer's variables.
        targets: `Targets` of the storage that a step changes: see `stored_in`.

    Attributes:
        clips: Bool. Whether the gradients are clipped by their joint norm.
        targets: `Targets` that the step writes.
    """

    def __init__(self, rule, optimizer, grads, written, targets):
        indices = [index_of(optimizer, v) for v in written.variables]
        self._optimizer, self._rule = optimizer, rule
        self._groups = rule.groups_of(optimizer, indices)
        self._first_of_each = list(map(self._groups.index, set(self._groups)))
        # The positions of the rules, and the names, of the fields that are tensors.
        # Found in the first step.
        self._coefficients: tuple | None = None
        self.clips = bool(optimizer.global_clipnorm)
        chunks = backend.chunked(self._groups, targets, grads)
        self.targets = targets._replace(chunks=chunks)
        self._written, self._storage = written.written, targets.written

    def holds(self):
        """Whether the variables still hold the tensors that the step would change."""
        return hold(self._written, self._storage, self.targets.chunks)

    # `holds` already checks every part of the step.
    holds_all = holds

    def take(self, grads, inv_scale, amax, are_alike, spikes=None, norm=False):
        """Updates the variables, unless the gradients are not finite.

        Args:
            grads: List of tensors. No None.
            inv_scale: Float32 scalar tensor, or 1.0, which unscales them.
            amax: See `Framework.measure`.
            are_alike: See `Framework.measure`.
            spikes: `SpikeHistory`, which judges the step. Defaults to `None`.
            norm: Bool. Whether the `Measurement` must have the norm of all gradients.
                Defaults to `False`.

        Returns:
            A tuple of the `Measurement` of the gradients, and a flag: whether finite
            gradients are applied. The flag is a boolean scalar tensor, or None if they
            certainly are. Neither outliers nor steps with coefficients that are not
            finite are applied.
        """
        rules = self.rules()
        permitted = self.rates_finite(rules)
        found = backend.measure(
            grads,
            amax,
            inv_scale,
            # The step may re-initialise masters, so their norms are not known yet.
            rules=None if self.targets.narrow else rules,
            targets=self.targets,
            are_alike=are_alike,
            norm=norm or spikes is not None,
            clips=self.clips,
        )
        if spikes is not None:
            judged = _restricted(found, permitted).finite
            permitted = both(permitted, spikes.judge(found.norm, judged))
        grads, inv_scale = self.clipped(grads, inv_scale, found.norm)
        judged = found if permitted is None else _restricted(found, permitted)
        self.update(rules, grads, judged, inv_scale)
        return found, permitted

    def rules(self, learning_rate=None):
        """Returns the rule of each variable, with the coefficients of this step.

        Variables of one group share a rule.

        Args:
            learning_rate: Scalar tensor. Defaults to `None`: the result of `rate_of`.
        """
        if learning_rate is None:
            learning_rate = rate_of(self._optimizer)
        rate = backend.scalar(learning_rate, "float32")
        made = self._rule.of_groups(self._optimizer, rate)
        return list(map(made.__getitem__, self._groups))

    def rates_finite(self, rules):
        """Whether all coefficients of rules are finite: see `Framework.are_finite`."""
        if self._coefficients is None:
            found = [
                (i, name)
                for i in self._first_of_each
                for name, value in vars(rules[i]).items()
                if ops.is_tensor(value)
            ]
            self._coefficients = [i for i, _ in found], [name for _, name in found]
        positions, names = self._coefficients
        values = map(getattr, map(rules.__getitem__, positions), names)
        return backend.are_finite(list(values))

    def clipped(self, grads, inv_scale, norm):
        """Returns gradients, and the factor that unscales and clips them.

        Args:
            grads: List of tensors. No None.
            inv_scale: Float32 scalar tensor, or 1.0.
            norm: Float32 scalar tensor, the norm of all unscaled gradients, if the
                step `clips`.
        """
        of_each, value = self._optimizer.clipnorm, self._optimizer.clipvalue
        if of_each or value:
            return backend.clipped(grads, inv_scale, of_each, value), 1.0
        if not self.clips:
            return grads, inv_scale
        limit = self._optimizer.global_clipnorm
        factor = backend.scalars.clip(1.0 / norm, 0.0, 1.0 / limit)
        return grads, inv_scale * (limit * factor)

    def update(self, rules, grads, found=None, inv_scale=None):
        """Updates the variables; see `Framework.fused_step`."""
        backend.fused_step(rules, self.targets, grads, found, inv_scale)
        if self._rule.finish:
            rules[0].finish(self._optimizer, found.finite)


class AccumulatedStep:
    """A `FusedStep` with the mean gradient of a window of micro-batches, as in Keras.

    Each micro-batch is unscaled and added to the sums of its window in one pass, unless
    it overflows. The last of `gradient_accumulation_steps` then updates the variables
    and clears the sums. The number of finite micro-batches decides which one is the
    last. On an accelerator the host does not know this number, so every micro-batch
    calls all kernels, which write nothing before the last.

    Args:
        step: `FusedStep`, whose gradients are the sums.
        optimizer: The optimizer.
        accumulators: List of the variables that hold the sums.
        sums: List of the sums' storage: `storage_of(accumulators)`.
        grads: List of tensors. No None.

    Attributes:
        targets: `Targets` that the step writes at the end of a window.
    """

    def __init__(self, step, optimizer, accumulators, sums, grads):
        self._step, self._optimizer = step, optimizer
        self.targets = step.targets
        self._accumulators, self._applied = accumulators, iteration_variable(optimizer)
        # Adding is SGD with a rate of -1.
        self._adding = [SGD(learning_rate=-1.0)] * len(sums)
        targets = _without_slots(sums)._replace(are_private=True)
        self._sums = _chunked(targets, grads)

    def holds(self):
        """Whether the variables still hold the tensors that the step would change.

        The variables that only the update changes are checked only if this micro-batch
        may be the last of its window.
        """
        return self._sums_hold() and (self._window_goes_on() or self._step.holds())

    def holds_all(self):
        """Whether this also holds for the update at the end of the window."""
        return self._sums_hold() and self._step.holds()

    def _sums_hold(self):
        return hold(self._accumulators, self._sums.variables, self._sums.chunks)

    def _window_goes_on(self):
        """Whether the host knows that this micro-batch is not the last of a window."""
        applied = backend.known(read(self._applied))
        count = self._optimizer.gradient_accumulation_steps
        return applied is not None and (applied + 1) % count != 0

    def take(self, grads, inv_scale, amax, are_alike, spikes=None, norm=False):
        """Adds a micro-batch, and updates the variables if it is the last of a window.

        For the arguments and the return value see `FusedStep.take`. Coefficients that
        are not finite matter only at the last micro-batch of a window, which is then
        skipped. An outlier is a whole window: its sums are cleared.
        """
        count = self._optimizer.gradient_accumulation_steps
        goes_on = self._window_goes_on()
        rules = permitted = may_end = None
        if not goes_on:
            # Before anything changes: a schedule may raise an error.
            rules = self._step.rules()
            permitted = self._step.rates_finite(rules)
            may_end = (read(self._applied) + 1) % count == 0
        if permitted is not None:
            permitted = backend.scalars.logical_or(
                permitted, backend.scalars.logical_not(may_end)
            )
        found = backend.measure(
            grads,
            amax,
            inv_scale,
            targets=self._sums,
            are_alike=are_alike,
            norm=norm,
            clips=self._step.clips,
            # Neither the sum of a window nor its norm can overflow then, whatever the
            # rounding.
            headroom=2.0 * count,
        )
        added = _restricted(found, permitted)
        backend.fused_step(self._adding, self._sums, grads, added, inv_scale)
        if not goes_on:
            is_last = backend.scalars.logical_and(added.finite, may_end)
            permitted = self._finish(rules, is_last, count, permitted, spikes)
        return found, permitted

    def _finish(self, rules, is_last, count, permitted, spikes):
        """Updates the variables if a window has ended; returns `permitted`."""
        is_due = is_last
        if spikes is not None:
            # Outside the branch below, in which no replica may assign the history.
            calm = spikes.judge(self._norm(count), is_last)
            is_due = backend.scalars.logical_and(is_last, calm)
            permitted = both(permitted, calm)
            undo_window(self._optimizer, calm)
        update = functools.partial(self._update, rules, is_due, count)
        backend.run_masked(is_due, update)
        clear = functools.partial(backend.clear, self._sums.variables, is_last)
        backend.run_masked(is_last, clear)
        return permitted

    def _norm(self, count):
        """Returns the norm of the mean gradient of a window."""
        factor = backend.scalar(1.0 / count, "float32")
        return backend.measure(
            self._sums.variables,
            inv_scale=factor,
            targets=self._step.targets,
            are_alike=True,
            norm=True,
        ).norm

    def _update(self, rules, is_due, count):
        step, sums = self._step, self._sums.variables
        factor = backend.scalar(1.0 / count, "float32")
        norm = self._norm(count) if step.clips else None
        means, factor = step.clipped(sums, factor, norm)
        step.update(rules, means, Measurement(is_due), factor)


class AveragedStep:
    """A step that also updates the averages of the weights, as with `use_ema`.

    Keras averages after each of its steps, including those that only accumulate. Every
    `ema_overwrite_frequency` updates the averages then overwrite the weights.

    Args:
        step: `FusedStep` or `AccumulatedStep`, of all variables of the optimizer.
        optimizer: The optimizer.
        averages: List of the variables that hold the averages.
        stored: List of the averages' storage: `storage_of(averages)`.
    """

    def __init__(self, step, optimizer, averages, stored):
        self._step, self._optimizer = step, optimizer
        averaged = _without_slots(stored)
        weights = step.targets._replace(
            slots=averaged.slots,
            narrow=step.targets.narrow and [n and n.again for n in step.targets.narrow],
            owns_gradients=False,
            chunks=None,
        )
        self._weights = _chunked(weights, stored)
        self._averages = _chunked(averaged, weights.variables)
        self._variables = averages

    def holds(self):
        """Whether the variables still hold the tensors that the step would change."""
        averages = self._averages
        # Each step reads the weights, even one that updates nothing.
        return self._step.holds_all() and hold(
            self._variables, averages.variables, averages.chunks
        )

    def take(self, grads, inv_scale, amax, are_alike, spikes=None, norm=False):
        """Updates the variables and their averages, if the gradients are finite.

        For the arguments and the return value see `FusedStep.take`.
        """
        found, permitted = self._step.take(
            grads, inv_scale, amax, are_alike, spikes, norm
        )
        applied = _restricted(found, permitted).finite
        if self._optimizer.gradient_accumulation_steps:
            # A micro-batch that updates nothing has not checked the masters.
            backend.synchronise_masters(self._weights, applied)
        updates = updates_of(self._optimizer)
        momentum = backend.scalar(updates != 0, "float32")
        rule = Average(momentum * self._optimizer.ema_momentum)
        # The formulas contain Python numbers.
        numbers = backend.without_host(
            lambda: self._weights.numbers(backend), near=momentum
        )
        self._let(self._averages, rule, numbers, applied)
        frequency = self._optimizer.ema_overwrite_frequency
        if frequency:
            is_due = (updates + 1) % frequency == 0
            is_due = backend.scalars.logical_and(applied, is_due)
            overwrite = functools.partial(
                self._let,
                self._weights,
                Overwrite(),
                self._averages.variables,
                is_due,
            )
            backend.run_masked(is_due, overwrite)
        return found, permitted

    def _let(self, targets, rule, values, flag):
        """Updates variables from float32 tensors by a rule, if `flag`."""
        backend.fused_step([rule] * len(values), targets, values, Measurement(flag))


def undo_window(optimizer, calm):
    """Undoes the count of the micro-batches of a window, unless it is calm.

    The last micro-batch was never counted, since its step is skipped.
    """
    applied = iteration_variable(optimizer)
    steps = read(applied)
    undone = backend.scalars.cast(backend.scalars.logical_not(calm), applied.dtype)
    assign(applied, steps - undone * (optimizer.gradient_accumulation_steps - 1))


def _restricted(found, permitted):
    """Returns a `Measurement` that is finite only if the step is also permitted."""
    if permitted is None:
        return found
    return found._replace(finite=both(permitted, found.finite))


def both(permitted, flag):
    """Returns whether both flags are true. `permitted` counts as true if it is None."""
    return flag if permitted is None else backend.scalars.logical_and(permitted, flag)


def _without_slots(variables):
    """Returns the `Targets` of a step that writes only these variables."""
    return Targets(variables, [()] * len(variables))


def _chunked(targets, values):
    """Returns `Targets` with the chunks of a step that treats all variables alike."""
    kinds = [None] * len(targets.variables)
    return targets._replace(chunks=backend.chunked(kinds, targets, values))


# --- The choice of a step -----------------------------------------------------------


class Choice:
    """The choice of an optimizer's step, and whether it is still valid.

    Args:
        optimizer: The optimizer.
        grads: List of tensors. No None.
        variables: List of the variables that they belong to.
        masters: The `MasterWeights`, if some of the variables may be masters. Defaults
            to `None`: there are none.

    Attributes:
        fused: `FusedStep` or `AccumulatedStep`, None if the optimizer's own step is
            better.
    """

    def __init__(self, optimizer, grads, variables, masters=None):
        self._optimizer, self._form = optimizer, optimizer_guards(optimizer)
        accumulates = optimizer.gradient_accumulation_steps
        self.fused = (_accumulated_step_of if accumulates else fused_step_of)(
            fitting_rule(optimizer, variables),
            optimizer,
            grads,
            variables,
            masters,
        )
        if self.fused and optimizer.use_ema:
            self.fused = _averaged_step_of(self.fused, optimizer, variables)

    def holds(self):
        """Whether the choice would be the same, for the same gradients."""
        is_same = optimizer_guards(self._optimizer) == self._form
        return is_same and (self.fused is None or self.fused.holds())


def fused_step_of(
    rule,
    optimizer,
    grads,
    variables,
    masters=None,
    owns_gradients=False,
):
    """Returns the optimizer's `FusedStep`, None if its own step is better.

    Args:
        rule: Class of rules, or None.
        optimizer: See `FusedStep`.
        grads: See `FusedStep`.
        variables: List of its trainable variables.
        masters: See `Choice`. Defaults to `None`.
        owns_gradients: See `Targets`. Defaults to `False`.
    """
    if rule is None:
        return None
    written = Targets(
        variables,
        slots_of(rule, optimizer, variables),
        masters and masters.narrow_weights(variables),
        masters and masters.iterations,
        owns_gradients,
    )
    targets = stored_in(written)
    if not backend.fused_step_takes(rule, targets, grads):
        return None
    return FusedStep(rule, optimizer, grads, written, targets)


def slots_of(rule, optimizer, variables):
    """Returns a tuple of slots for each variable, in the order of `rule.slots`."""
    lists = slot_lists_of(rule, optimizer)
    indices = [index_of(optimizer, v) for v in variables]
    return [tuple([slots[i] for slots in lists]) for i in indices]


def stored_in(written):
    """Returns the `Targets` of the storage that a step changes, given variables."""
    variables = storage_of(written.written[: len(written.variables)])
    narrow = written.narrow
    if narrow is not None:
        stored = zip(variables, narrow, strict=True)
        narrow = [n and n.stored(v, storage_of) for v, n in stored]
    return written._replace(
        variables=variables, slots=storage_of(written.slots), narrow=narrow
    )


def _accumulated_step_of(rule, optimizer, grads, variables, masters):
    """Returns the optimizer's `AccumulatedStep`, None if its own step is better."""
    if rule is None:
        return None
    accumulators = accumulators_of(optimizer, variables)
    # Keras clears the sum of a variable even if it has no gradient in the window.
    if len(accumulators) < len(accumulators_of(optimizer)):
        return None
    sums = storage_of(accumulators)
    if not backend.fused_step_takes(SGD, _without_slots(sums), grads):
        return None
    step = fused_step_of(rule, optimizer, sums, variables, masters, owns_gradients=True)
    return step and AccumulatedStep(step, optimizer, accumulators, sums, grads)


def _averaged_step_of(step, optimizer, variables):
    """Returns the optimizer's `AveragedStep`, None if its own step is better."""
    averages = moving_averages_of(optimizer, variables)
    # Keras also averages variables without a gradient.
    if len(averages) < len(moving_averages_of(optimizer)):
        return None
    stored = storage_of(averages)
    values = step.targets.variables
    if not backend.fused_step_takes(Average, _without_slots(stored), values):
        return None
    return AveragedStep(step, optimizer, averages, stored)
