"""The steps of a case, each of which is judged."""

import contextlib
import dataclasses
import re
import tempfile
from pathlib import Path

import keras
import numpy as np

from integration_tests.attack import between, cases, gradients, reference, runs
from integration_tests.attack.execution import array, bits, tensor
from integration_tests.attack.optimizers import one_of
from integration_tests.attack.reference import Fault, State

SIZES = one_of(
    *[1.0] * 12,
    *[1e-3, 30.0, 1e4] * 2,
    *(1e-40, 1e-37, 1e-30, 1e-15, 1e-8, 1e15, 1e30, 1e37, 3e38, 0.0),
)


class EndOfCase(Exception):
    """Nothing more can be compared."""


class Attacked(runs.Run):
    """A run whose steps are drawn as they are taken."""

    def __init__(self, case, random, tally, of=None, folder=None):
        super().__init__(case, of, folder)
        self.random, self.tally = random, tally
        self.settings = {} if of is None else of.settings
        self.rate_after, self.happened = None, [] if of is None else of.happened
        self.way = self._way() if of is None else of.way
        # The run that this one was copied from, until something else happens to it.
        self.twin = of

    @property
    def has_rate(self):
        """Whether a learning rate may be assigned."""
        found = self.optimizer.inner_optimizer
        found = getattr(found, "inner_optimizer", found)
        return isinstance(found._learning_rate, keras.Variable) and (
            "members" not in self.case.inner.options
        )

    # --- What is drawn --------------------------------------------------------------

    def _way(self):
        """Returns how a step is taken; a compiled one is one program."""
        random, case = self.random, self.case
        call = one_of(*cases.CALLS)(random)
        update_scale = bool(random.random() < 0.85)
        flow = one_of(*cases.FLOWS)(random)
        step = runs.Step(flow, call, update_scale)
        is_compiled = case.execution != "eager"
        layouts = [gradients.layout(random, w.shape, is_compiled) for w in case.start]
        if is_compiled and "gradient_accumulation_steps" in case.inner.words:
            # A traced step of Keras's multiplies sparse sums, which fails.
            layouts = ["plain"] * len(layouts)
        is_missing = random.random(len(layouts)) < 0.1
        if case.guard is not None and self.judge.window > 1:
            # What a window without some of its gradients is judged by is not defined.
            is_missing[:] = False
        return step, layouts, is_missing

    def _gradients(self, step, layouts, is_missing):
        """Returns a `Gradient` or None for each variable, as the step gets them."""
        random, size = self.random, SIZES(self.random)
        is_scaled = step.flow != cases.SAYS_UNSCALED
        scale = float(array(self.optimizer.loss_scale)) if is_scaled else 1.0
        columns = self.case.start, self.case.gradient_dtypes, layouts, is_missing
        bad = random.integers(len(layouts)) if random.random() < 0.15 else None
        found = []
        for i, (start, dtype, layout, missing) in enumerate(zip(*columns, strict=True)):
            scaled = size * scale * 10 ** random.uniform(-1, 1)
            if not is_scaled and self.case.execution != "eager":
                # Keras clips it in its own dtype, in which a compiler may not round.
                dtype = {"float64": "float64"}.get(dtype, "float32")
            if dtype == "float16" and random.random() < 0.95:
                scaled = min(scaled, 1e4)
            if self.policy.needs_amax and scaled:
                # A policy gets the largest in float32, scaled and unscaled.
                scaled = np.clip(scaled, 1e-35 * max(scale, 1.0), 1e37)
            found.append(
                None
                if missing
                else gradients.gradient(
                    random, start.shape, dtype, layout, scaled, i == bad
                )
            )
        return found, scale

    # --- What is done ---------------------------------------------------------------

    def step(self):
        """Takes a random step, and raises a `Fault` if it is wrong."""
        if self.case.execution == "eager":
            self.way = self._way()
        step, layouts, is_missing = self.way
        self.step_taken, self.judge.is_spike = step, False
        self.happened.append(f"{step.flow}, {step.call}: {', '.join(layouts)}")
        found, scale = self._gradients(step, layouts, is_missing)
        inverse = np.float32(1) / np.float32(scale)
        unscaled = [None if g is None else g.times(inverse) for g in found]
        present = [g for g in found if g is not None]
        state, given = State.of(self), [g.bits() for g in present]
        choices = self._choices(found, unscaled, inverse)
        tensors = [None if g is None else g.tensor for g in found]
        try:
            self.apply(tensors, tensors)
        except Exception as error:
            self._reference_error(error, state, choices)
        if [g.bits() for g in present] != given:
            raise Fault("A gradient of the caller's was written to")
        self._compare_with_twin(tensors)
        self.tally["gradients untouched"] += len(present)
        self.tally["steps"] += 1
        must = reference.must_apply(self, state, unscaled, scale)
        if must and any(g.may_overflow_in_its_dtype for g in present):
            must = None
        before = {"scale": self.policy.scale, "rate": self.rate_after}
        is_applied = self._reference(must, state, unscaled, choices)
        self._count(unscaled, is_applied)
        if self.case.records and must is not None:
            self._check_records(before, unscaled, is_applied)
        if not all(np.isfinite(array(v)).all() for v in self.trained):
            self.tally["ended at inf or NaN, as Keras's"] += 1
            raise EndOfCase

    def _compare_with_twin(self, tensors):
        if self.twin is not None:
            self.twin.step_taken = self.step_taken
            self.twin.apply(tensors, tensors)
            if not all(map(is_contiguous, self.twin.saved)):
                # The copy is, and adds up in another order.
                return
            if bits(self.twin.saved) != bits(self.saved):
                raise Fault("A copy goes on in another way than the original")
            self.tally["steps as of the original"] += 1

    def _choices(self, gradients, unscaled, inverse):
        """Yields lists of gradients with which Keras may step, the likeliest first.

        It clips the rows of a sparse gradient. Its optimizers of PyTorch compute in the
        dtypes of the gradients, which are the caller's where those are not unscaled
        here; and some take none but the variables'.
        """

        def in_dtypes(dtypes):
            pairs = zip(unscaled, dtypes, strict=True)
            return [u if u is None else tensor(u, dtype) for u, dtype in pairs]

        yield unscaled
        is_own = self.step_taken.flow == cases.SAYS_UNSCALED
        if any(g is not None and g.rows is not None for g in gradients):
            pairs = zip(unscaled, gradients, strict=True)
            yield [u if g is None else g.sparse_times(inverse, u) for u, g in pairs]
            if is_own:
                yield [g and g.tensor for g in gradients]
        if is_own:
            yield in_dtypes(self.case.gradient_dtypes)
            # On PyTorch the rows of sparse ones are summed in float32.
            columns = zip(gradients, unscaled, self.case.gradient_dtypes, strict=True)
            yield [
                u if u is None or g.rows is not None else tensor(u, dtype)
                for g, u, dtype in columns
            ]
        yield in_dtypes([v.dtype for v in self.optimizer._masters.trained])

    def _reference_error(self, error, state, choices):
        """Ends the case if Keras refuses such gradients as well.

        Compiled: then the first step of a window has the error of its last, which
        clips sums of several dtypes, say.
        """
        refused, execution = [], self.case.execution
        if is_refused_slot(error) and bits(self.trained) == state.bits:
            self.tally["steps without narrow slots refused"] += 1
            raise EndOfCase from error
        for choice in choices:
            try:
                reference.bare_step(self, state, choice, execution=execution)
            except Exception as reason:
                refused.append(type(reason))
        is_changed = bits(self.trained) != state.bits
        if is_changed and type(error) not in refused:
            raise Fault("It raised, and has changed something") from error
        if not refused:
            raise error
        self.tally["both refuse" + ", halfway" * is_changed] += 1
        raise EndOfCase from error

    def _reference(self, must, state, unscaled, choices):
        """Compares what came of a step; returns whether it was applied."""
        if self.rate_after is not None:
            if must is None:
                # It may count as an overflow, or as a rate alone.
                raise EndOfCase
            is_window = "gradient_accumulation_steps" in self.case.inner.words
            must = None if is_window and must else False
        elif must:
            must = self.judge.applies(unscaled)
        if must is None and self.case.guard is not None:
            raise EndOfCase
        is_applied = bool(self.optimizer.last_step_applied)
        self.tally["left to the wrapper"] += must is None
        if must is not None and must != is_applied:
            raise Fault(f"The step was applied: {is_applied}, and {must} is right")
        if not is_applied:
            self.tally["skipped steps"] += 1
            pairs = zip(bits(self.trained), state.bits, self.trained, strict=True)
            changed = [v for new, old, v in pairs if new != old]
            if self.judge.is_spike and self.judge.window > 1:
                # It undoes the window.
                sums = set(map(id, self.optimizer._spikes._sums.values()))
                undone = re.compile("gradient_accumulator|iteration$")
                changed = [v for v in changed if id(v) not in sums]
                changed = [v for v in changed if not undone.search(v.path)]
            if changed:
                paths = ", ".join(v.path for v in changed)
                raise Fault(f"A skipped step changed {paths}")
            self.tally["tensors untouched by a skip"] += len(state.bits)
            return False
        if reference.has_squares(self, state, unscaled):
            self.tally.update(reference.compare(self, state, choices))
        if cases.BACKEND == "torch" and self.step_taken.call != cases.STATELESS:
            self._check_versions(state)
        return True

    def _check_versions(self, state):
        """PyTorch has to know of each write to a weight, or gradients are wrong."""
        now = bits(self.variables)
        rows = zip(self.variables, state.bits, now, state.versions, strict=False)
        for variable, before, after, version in rows:
            if before != after and variable.value._version <= version:
                raise Fault(f"{variable.path} was written to without its version")
            self.tally["versions"] += before != after

    def _count(self, unscaled, is_applied):
        """Lets the models count, and compares the scale and the counters."""
        present = [u for u in unscaled if u is not None]
        finite = is_applied or self.judge.is_spike
        if self.rate_after is not None:
            finite = all(np.isfinite(u).all() for u in present)
            self.optimizer.learning_rate, self.rate_after = self.rate_after, None
        counters = self.counters
        if finite and not is_applied:
            # The scale is kept: see `_keras_internals/rules.py`.
            undone = (self.judge.window - 1) * self.judge.is_spike
            counters.applied -= undone
            counters.attempted, counters.at_lowest = counters.attempted + 1 - undone, 0
            counters.in_a_row += 1
        else:
            amax = np.float32(max(np.abs(u).max(initial=0) for u in present))
            update_scale = self.step_taken.update_scale
            counters.step(finite, amax, update_scale, self.policy)
        try:
            self.check_state()
        except AssertionError as error:
            raise Fault(f"The scale or a counter is wrong: {error}") from error
        self.tally["scale and counters"] += 1

    def _check_records(self, before, unscaled, is_applied):
        """Compares what the optimizer has recorded of a step."""
        are_finite = [u is None or np.isfinite(u).all() for u in unscaled]
        if "record_overflows" in self.case.records:
            found = set(map(id, self.optimizer.overflowed_variables()))
            for v, u, ok in zip(self.variables, unscaled, are_finite, strict=True):
                # A large one may overflow as it is applied.
                is_known = not ok or u is None or np.abs(u).max(initial=0) < 1e3
                if is_known and (id(v) in found) == ok:
                    raise Fault(f"The record of overflows has it that {v.path}: {ok}")
        if "record_steps" in self.case.records:
            recorded = self.optimizer.read_record()
            found = {name: column[-1] for name, column in recorded.items()}
            outcomes = {"applied", "accumulated"}
            if not all(are_finite):
                outcomes = {"overflow"}
            elif not is_applied:
                outcomes = {"spike" if self.judge.is_spike else "rate"}
            norm = np.sqrt(reference.squares(unscaled))
            # XLA flushes numbers below 2**-126 to 0, and their squares.
            smallest = 2.0**-126 * np.sqrt(sum(np.size(g) for g in unscaled)) + 1e-37
            is_right = (
                found["outcome"] in outcomes
                and (found["loss_scale"] == before["scale"] or self.policy.tolerance)
                and not abs(found["gradient_norm"] - norm) > 1e-5 * norm + smallest
            )
            if not is_right:
                raise Fault(f"{found} was recorded of {outcomes}, {before}, {norm}")
        self.tally["records"] += 1

    # --- The case -------------------------------------------------------------------

    def saved_and_loaded(self, folder):
        """Returns a run that goes on from a copy of this one, or from its file."""
        holds_nan = any(np.isnan(array(v)).any() for v in self.saved)
        try:
            new = Attacked(self.case, self.random, self.tally, self, folder)
        except ValueError as error:
            if holds_nan and "must not be NaN" in str(error):
                self.tally["files with NaN refused"] += 1
                raise EndOfCase from error
            raise
        new.check_state()
        self.tally["tensors saved and loaded"] += len(self.saved)
        if self.case.loaded_as != self.case.master_weights:
            reference.compare_kinds(self, new)
            new.twin = None
            return new
        pairs = zip(self.saved, new.saved, strict=True)
        if not all(bits([a]) == bits([b]) for a, b in pairs):
            raise Fault(f"A copy by {self.case.saved[1]} is not what was saved")
        return new


def is_refused_slot(error):
    """Whether an error says that `slot_dtype` needs another optimizer or step."""
    return isinstance(error, ValueError) and "`slot_dtype=" in str(error)


def is_contiguous(variable):
    """Whether a tensor of PyTorch has its elements in order; others always have."""
    value = getattr(variable, "value", variable)
    return getattr(value, "is_contiguous", lambda: True)()


def attack(mode, random, tally, words):
    """Runs a case."""
    case = cases.case(random, mode)
    words.append(cases.words(case))
    with tempfile.TemporaryDirectory() as folder, contextlib.suppress(EndOfCase):
        try:
            run = Attacked(case, random, tally)
        except ValueError as error:
            if not is_refused_slot(error):
                raise
            tally["optimizers without narrow slots refused"] += 1
            case = dataclasses.replace(case, slot_dtype=None)
            run = Attacked(case, random, tally)
        words.append(run.happened)
        is_saved = case.saved is None
        for step in range(cases.STEPS[case.execution]):
            if not is_saved and step >= case.saved[0] and run.counters.is_settled:
                run, is_saved = run.saved_and_loaded(Path(folder)), True
            run.happened.append(between.disturb(run, random))
            if run.happened[-1] is not None:
                run.twin = None
            run.step()
        config = run.optimizer.get_config()
        if type(run.optimizer).from_config(config).get_config() != config:
            raise Fault("A config does not come back")
