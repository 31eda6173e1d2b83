"""One step of a run, compared with the bare optimizer's and with the models."""

import itertools
import re

import numpy as np

from integration_tests.attack import gradients, reference, setups
from integration_tests.attack.execution import BACKEND, array, bits, tensor
from integration_tests.attack.reference import Fault, RowsSummed, State


class EndOfRun(Exception):
    """Nothing more can be compared."""


class JudgedStep:
    """A step of a run, from gradients with such numbers.

    Args:
        run: A `runs.Run`.
        numbers: `setups.Numbers`.
        bad_rate: A learning rate for this step that is not finite, or None.
    """

    def __init__(self, run, numbers, bad_rate):
        self.run, self.setup, self.step = run, run.setup, run.step_taken
        self.bad_rate = bad_rate
        run.judge.is_spike = False
        self.scale = 1.0
        if self.step.flow != setups.SAYS_UNSCALED:
            self.scale = float(array(run.optimizer.loss_scale))
        self.gradients = self._gradients(numbers)
        self.present = [g for g in self.gradients if g is not None]
        self.inverse = np.float32(1) / np.float32(self.scale)
        self.unscaled = [g and g.times(self.inverse) for g in self.gradients]
        self.state = State.of(run)
        self.loss_scale = run.policy.scale

    def _gradients(self, numbers):
        """Returns a `Gradient` or None for each variable."""
        random, setup, found = np.random.default_rng(numbers.seed), self.setup, []
        bad, value = numbers.bad or (None, None)
        for i, (weight, layout) in enumerate(
            zip(setup.weights, self._layouts(), strict=True)
        ):
            size, dtype = numbers.size * self.scale, weight.gradient_dtype
            size *= 10 ** random.uniform(-1, 1)
            is_unscaled = self.step.flow == setups.SAYS_UNSCALED
            if is_unscaled and setup.is_compiled and dtype != "float64":
                # Keras clips it in its own dtype, in which a compiler may not round.
                dtype = "float32"
            if dtype == "float16" and random.random() < 0.95:
                size = min(size, 1e4)
            if self.run.policy.needs_amax and size:
                # A policy gets the largest in float32, scaled and unscaled.
                low, high = max(self.scale, 1.0), min(self.scale, 1.0)
                size = np.clip(size, 1e-35 * low, 1e37 * high)
            if layout == "missing":
                found.append(None)
                continue
            of_this = (
                value if bad is not None and i == bad % len(setup.weights) else None
            )
            found.append(
                gradients.gradient(random, weight.shape, dtype, layout, size, of_this)
            )
        return found

    def _layouts(self):
        """Returns the layouts of the gradients, as the optimizer can take them."""
        inner, is_compiled = self.setup.optimizer, self.setup.is_compiled
        given = itertools.cycle(self.step.layouts)
        layouts = list(itertools.islice(given, len(self.setup.weights)))
        if self.setup.guard is not None and inner.window > 1:
            # A spike is not defined in a window without some of its gradients.
            layouts = ["plain" if way == "missing" else way for way in layouts]
        if is_compiled and inner.accumulates:
            # A traced step of Keras's multiplies sparse sums, which fails.
            layouts = ["missing" if way == "missing" else "plain" for way in layouts]
        if is_compiled and set(layouts) == {"missing"}:
            # No step could ever be taken.
            layouts[0] = "plain"
        return layouts

    def take(self, twin=None):
        """Takes the step, by a twin run too; raises a `Fault` if it is wrong.

        Raises `EndOfRun` if there is nothing to compare after it.
        """
        run = self.run
        given = [g.bits() for g in self.present]
        tensors = [g and g.tensor for g in self.gradients]
        try:
            self._apply(tensors)
        except Exception as error:
            self._expect_error(error)
        if [g.bits() for g in self.present] != given:
            raise Fault("A gradient of the caller's was written to")
        if twin is not None:
            self._compare_with_twin(twin, tensors)
        must = reference.must_apply(run, self.state, self.unscaled, self.scale)
        if must and any(g.may_overflow_in_its_dtype for g in self.present):
            must = None
        is_applied = self._compare(must)
        self._count(is_applied)
        if self.setup.records and must is not None:
            self._check_records(is_applied)
        if not all(np.isfinite(array(v)).all() for v in run.trained):
            raise EndOfRun

    def _apply(self, tensors):
        optimizer, rate = self.run.optimizer, None
        if self.bad_rate is not None:
            rate = float(array(optimizer.learning_rate))
            optimizer.learning_rate = self.bad_rate
        try:
            self.run.apply(tensors, tensors)
        finally:
            if rate is not None:
                optimizer.learning_rate = rate

    def _compare_with_twin(self, twin, tensors):
        twin.step_taken = self.step
        twin.apply(tensors, tensors)
        if bits(twin.saved) != bits(self.run.saved):
            raise Fault("A copy goes on in another way than the original")

    def _choices(self):
        """Yields lists of gradients with which Keras may step, the likeliest first.

        It clips the rows of a sparse gradient. Its optimizers of PyTorch compute in the
        dtypes of the gradients, which are the caller's where those are not unscaled
        here; and some take none but the variables'.
        """
        unscaled, pairs = (
            self.unscaled,
            list(zip(self.gradients, self.unscaled, strict=True)),
        )
        own_dtypes = [weight.gradient_dtype for weight in self.setup.weights]

        def in_dtypes(dtypes, values=unscaled):
            columns = zip(values, dtypes, strict=True)
            return [u if u is None else tensor(u, dtype) for u, dtype in columns]

        yield unscaled
        is_own = self.step.flow == setups.SAYS_UNSCALED
        if any(g.rows is not None for g in self.present):
            rows = [g and g.sparse_times(self.inverse, u) for g, u in pairs]
            yield rows
            yield [RowsSummed(r) if gradients.is_sparse(r) else r for r in rows]
            if is_own:
                yield [g and g.tensor for g in self.gradients]
        if is_own:
            narrow = in_dtypes(own_dtypes)
            yield narrow
            # On PyTorch the rows of sparse ones are summed in float32.
            columns = zip(self.gradients, unscaled, narrow, strict=True)
            yield [u if g is None or g.rows is not None else n for g, u, n in columns]
        yield in_dtypes([v.dtype for v in self.run.optimizer._masters.trained])

    def _expect_error(self, error):
        """Ends the run if Keras refuses such gradients as well.

        Compiled: then the first step of a window has the error of its last, which
        clips sums of several dtypes, say.
        """
        run, state, refused = self.run, self.state, []
        is_changed = bits(run.trained) != state.bits
        if is_refused_slot(error) and not is_changed:
            raise EndOfRun from error
        for choice in self._choices():
            try:
                reference.bare_step(run, state, choice, execution=self.setup.execution)
            except Exception as reason:
                refused.append(type(reason))
        if is_changed and type(error) not in refused:
            raise Fault("It raised, and has changed something") from error
        if not refused:
            raise error
        raise EndOfRun from error

    def _compare(self, must):
        """Compares the result of a step; returns whether it was applied."""
        run, judge = self.run, self.run.judge
        if self.bad_rate is not None:
            inner = self.setup.optimizer
            # It may count as an overflow, or as a rate alone.
            if must is None:
                raise EndOfRun
            # The rate of a window's earlier micro-batches is used by a LARC alone.
            is_used = not inner.accumulates or (inner.larc or {}).get("mode") == "clip"
            must = None if must and not is_used else False
        elif must:
            must = judge.applies(self.unscaled)
        if must is None and self.setup.guard is not None:
            raise EndOfRun
        is_applied = bool(run.optimizer.last_step_applied)
        if must is not None and must != is_applied:
            raise Fault(f"The step was applied: {is_applied}, and {must} is right")
        if not is_applied:
            self._check_skip()
        else:
            if reference.has_squares(run, self.state, self.unscaled):
                reference.compare(run, self.state, self._choices())
            if BACKEND == "torch" and self.step.call != setups.STATELESS:
                self._check_versions()
        return is_applied

    def _check_skip(self):
        """A skipped step changes no bit; a spike undoes its window."""
        run = self.run
        columns = zip(bits(run.trained), self.state.bits, run.trained, strict=True)
        changed = [v for new, old, v in columns if new != old]
        if run.judge.is_spike and run.judge.window > 1:
            sums = set(map(id, run.sums))
            undone = re.compile("gradient_accumulator|iteration$")
            changed = [v for v in changed if id(v) not in sums]
            changed = [v for v in changed if not undone.search(v.path)]
        if changed:
            raise Fault(f"A skipped step changed {', '.join(v.path for v in changed)}")

    def _check_versions(self):
        """PyTorch has to know of each write to a weight, or gradients are wrong."""
        variables, state = self.run.variables, self.state
        rows = zip(variables, state.bits, bits(variables), state.versions, strict=False)
        for variable, before, after, version in rows:
            if before != after and variable.value._version <= version:
                raise Fault(f"{variable.path} was written to without its version")

    def _count(self, is_applied):
        """Lets the models count the step."""
        judge, counters = self.run.judge, self.run.counters
        present = [u for u in self.unscaled if u is not None]
        is_finite = is_applied or judge.is_spike
        if self.bad_rate is not None:
            is_finite = all(np.isfinite(u).all() for u in present)
        if is_finite and not is_applied:
            # The scale does not change: see `_keras_internals/rules.py`.
            counters.step_without_overflow((judge.window - 1) * judge.is_spike)
            return
        amax = np.float32(max(np.abs(u).max(initial=0) for u in present))
        counters.step(is_finite, amax, self.step.update_scale, self.run.policy)

    def _check_records(self, is_applied):
        """Compares the optimizer's records of the step."""
        run, unscaled, records = self.run, self.unscaled, self.setup.records
        are_finite = [u is None or np.isfinite(u).all() for u in unscaled]
        if "record_overflows" in records:
            found = set(map(id, run.optimizer._variables_overflowed()))
            if is_applied and found:
                raise Fault("The record of overflows is of a step that was applied")
            for v, u, ok in zip(run.variables, unscaled, are_finite, strict=True):
                # A large one may overflow as it is applied.
                is_known = not ok or u is None or np.abs(u).max(initial=0) < 1e3
                if is_known and (id(v) in found) == ok:
                    raise Fault(f"The record of overflows has it that {v.path}: {ok}")
        if "record_steps" in records:
            columns = run.optimizer.read_record().items()
            found = {name: column[-1] for name, column in columns}
            outcomes = {"applied", "accumulated"}
            if not all(are_finite):
                outcomes = {"overflow"}
            elif not is_applied:
                outcomes = {"spike" if run.judge.is_spike else "rate"}
            norm = np.sqrt(reference.squares(unscaled))
            # XLA and TensorFlow flush numbers below 2**-126 to 0, and their squares, of
            # scaled gradients as well.
            smallest = 2.0**-126 / min(self.loss_scale, 1.0)
            smallest = smallest * np.sqrt(sum(np.size(g) for g in unscaled)) + 1e-37
            is_right = (
                found["outcome"] in outcomes
                and (found["loss_scale"] == self.loss_scale or run.policy.tolerance)
                and not abs(found["gradient_norm"] - norm) > 1e-5 * norm + smallest
            )
            if not is_right:
                right = outcomes, self.loss_scale, norm
                raise Fault(f"{found} was recorded, and {right} is right")


def is_refused_slot(error):
    """Whether an error says that `slot_dtype` needs another optimizer or step."""
    return isinstance(error, ValueError) and "`slot_dtype=" in str(error)
