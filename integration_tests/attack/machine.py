"""What the package promises, as a state machine of Hypothesis.

A program trains some variables. Between its steps its author assigns weights, rates and
counters, replaces memory, or saves and loads everything. After each step:

- an applied step is that of the bare optimizer, from the same state;
- a skipped step has changed no bit;
- the scale, the counters, the outliers and the records are those of models in NumPy;
- the caller's gradients have not been written to;
- a run that was saved and loaded goes on as the one that was not.
"""

import dataclasses
import math
import warnings

import hypothesis
import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from integration_tests.attack import optimizers, reference, runs, setups
from integration_tests.attack.execution import BACKEND, array, bits, tensor
from integration_tests.attack.reference import Fault
from integration_tests.attack.steps import EndOfRun, JudgedStep, is_refused_slot

# How many rules a program runs. To compile a step, and the reference's, takes seconds.
RULES, COMPILED_RULES = 15, 8

# How each step of a compiled run is taken, which is one program, and of another run.
STEPS = st.runner().flatmap(
    lambda self: st.just(self.run.step_taken) if self.is_compiled else setups.steps()
)


def steps_of(*sizes, max_size=6, **options):
    """How some steps are taken, and the numbers of their gradients."""
    numbers = setups.numbers(*sizes, **options)
    return st.tuples(STEPS, st.lists(numbers, min_size=1, max_size=max_size))


class Training(RuleBasedStateMachine):
    """A program."""

    mode = "eager"
    run = None
    # The run that this one was copied from, until something else happens to it.
    twin = None

    @initialize(
        setup=st.runner().flatmap(lambda self: setups.setups(self.mode)),
        step=st.runner().flatmap(lambda self: setups.steps(self.is_compiled)),
    )
    def begin(self, setup, step):
        try:
            self.run = runs.Run(setup)
        except ValueError as error:
            # Not each optimizer has slots in bfloat16.
            if not is_refused_slot(error):
                raise
            self.run = runs.Run(dataclasses.replace(setup, slot_dtype=None))
        self.run.step_taken, self.twin = step, None
        self.check_config()

    def take(self, step, numbers, bad_rate):
        self.run.step_taken = step
        try:
            JudgedStep(self.run, numbers, bad_rate).take(self.twin)
        except EndOfRun:
            # A weight is inf or NaN, say. Compiled, the next run would take seconds.
            hypothesis.assume(not self.is_compiled)
            self.begin(self.run.setup, step)

    # --- Steps ------------------------------------------------------------------------

    # The first rule of all that have one argument is the simplest for Hypothesis.

    @rule(steps=steps_of(1.0))
    def apply(self, steps, bad_rate=None):
        step, numbers = steps
        for of_a_step in numbers:
            self.take(step, of_a_step, bad_rate)
            self.counters_match_models()

    @rule(steps=steps_of(1e-3, 30.0, 1e4))
    def apply_off_scale(self, steps):
        self.apply(steps)

    @rule(steps=steps_of(*setups.EXTREMES))
    def apply_at_extremes(self, steps):
        self.apply(steps)

    @rule(steps=steps_of(1.0, 1e-3, 1e4, is_bad=True, max_size=3))
    def apply_overflow(self, steps):
        """Each step has an inf or NaN in a gradient."""
        self.apply(steps)

    @precondition(lambda self: self.run.has_rate)
    @rule(steps=steps_of(1.0, max_size=2), rate=st.sampled_from([math.inf, math.nan]))
    def apply_at_bad_rate(self, steps, rate):
        self.twin = None
        self.apply(steps, rate)

    # --- Between steps ----------------------------------------------------------------

    @precondition(lambda self: self.run.has_rate)
    @rule(rate=optimizers.power_of_ten(-4, 0))
    def assign_rate(self, rate):
        self.twin, self.run.optimizer.learning_rate = None, rate

    @precondition(lambda self: not self.inner.accumulates and not self.inner.biases)
    @rule(now=st.sampled_from([0, 1, 7, 1000, 2**24 + 1]))
    def assign_iterations(self, now):
        self.twin, counters = None, self.run.counters
        self.run.optimizer.iterations.assign(now)
        counters.attempted += now - counters.applied
        counters.applied = now

    @precondition(lambda self: not self.is_compiled and not self.inner.biases)
    @rule(
        change=st.sampled_from(list(optimizers.CHANGES)).flatmap(
            lambda name: st.tuples(st.just(name), optimizers.CHANGES[name])
        ),
    )
    def assign_attribute(self, change):
        """Assigns an attribute, if the optimizer has it. A compiled step is blind."""
        optimizer, (name, value) = self.run.optimizer, change
        # Keras's config takes one of the clips.
        clips = [n for n in optimizers.CLIPS if getattr(optimizer, n, None)]
        if name in optimizers.CLIPS:
            applies = not clips or name in clips
        else:
            now = getattr(optimizer, name, None)
            applies = isinstance(now, float) and (name != "momentum" or now)
        if applies:
            self.twin = None
            setattr(optimizer, name, value)
            self.run.settings[name] = value
            self.check_config()

    @rule(
        position=st.integers(0, 5),
        seed=setups.SEEDS,
        is_special=optimizers.one_in(5),
        is_partial=st.booleans(),
    )
    def assign_weight(self, position, seed, is_special, is_partial):
        self.twin, variable = None, self.variable_at(position)
        random = np.random.default_rng(seed)
        values = np.asarray(random.normal(size=variable.shape))
        if is_special:
            values = setups.special(random, values, variable.dtype)
        if is_partial:
            keep = random.random(size=variable.shape) < 0.5
            values = np.where(keep, array(variable), values)
        variable.assign(tensor(values, variable.dtype))

    if BACKEND == "torch":

        @rule(position=st.integers(0, 5))
        def write_weight(self, position):
            """Halves a weight in a way that PyTorch does not count."""
            self.twin = None
            self.variable_at(position).value.data.mul_(0.5)

        @rule(moves=st.lists(st.sampled_from(["strided", "cloned", None]), min_size=1))
        def move_memory(self, moves):
            """Moves weights, masters and slots, as `module.to(...)` replaces them."""
            import torch

            self.twin = None
            for variable, move in zip(self.run.trained, moves, strict=False):
                value = variable.value
                if move is None or not value.is_floating_point():
                    continue
                memory = torch.zeros((*value.shape, 2), dtype=value.dtype)
                memory[..., 0] = value.data
                value.data = memory[..., 0] if move == "strided" else value.data.clone()

    # --- Files ------------------------------------------------------------------------

    def can_be_saved(self):
        # What a method has excluded from decay is in no config.
        excludes_bias = any(member.excludes_bias for member in self.inner.members)
        return not excludes_bias and self.run.counters.is_settled

    @precondition(can_be_saved)
    @rule(
        way=st.sampled_from(runs.SAVED),
        copied=st.sampled_from(list(runs.COPIES)),
        master_weights=st.sampled_from([None, None, "auto", *setups.MASTERS[2:]]),
    )
    def save_and_load(self, way, copied, master_weights):
        """Goes on with a copy, which may have masters of another kind."""
        run = self.run
        is_fixed = way not in runs.OF_NUMBERS or run.setup.slot_dtype is not None
        if master_weights is None or is_fixed:
            master_weights = run.setup.master_weights
        holds_nan = any(np.isnan(array(v)).any() for v in run.saved)
        try:
            new = run.saved_and_loaded(way, copied, master_weights)
        except ValueError as error:
            if holds_nan and "must not be NaN" in str(error):
                return
            raise
        self.run, self.twin = new, None
        if master_weights != run.setup.master_weights:
            reference.compare_kinds(run, new)
            return
        saved, loaded = list(map(array, run.saved)), list(map(array, new.saved))
        if bits(saved) != bits(loaded):
            # TensorFlow and XLA flush numbers below 2**-126: see docs/proved.md.
            is_flushed = bits(map(flushed, saved)) == bits(map(flushed, loaded))
            if not is_flushed or run.setup.slot_dtype != "int8":
                raise Fault(f"A copy by {way} is not what was saved")
            return
        # A copy is contiguous. Others add up in another order, or refuse a step.
        self.twin = run if all(map(is_contiguous, run.saved)) else None

    # ----------------------------------------------------------------------------------

    @invariant()
    def counters_match_models(self):
        if self.run is not None:
            try:
                self.run.check_counters()
            except AssertionError as error:
                raise Fault(f"The scale or a counter is wrong: {error}") from error

    def check_config(self):
        """Checks that an optimizer is made anew from its config."""
        config = self.run.optimizer.get_config()
        if type(self.run.optimizer).from_config(config).get_config() != config:
            raise Fault("A config does not come back")

    @property
    def is_compiled(self):
        return self.mode in setups.EXECUTIONS

    @property
    def inner(self):
        return self.run.setup.optimizer

    def variable_at(self, position):
        return self.run.variables[position % len(self.run.variables)]


def flushed(values):
    """Returns an array with zeros in place of what is below the normal numbers."""
    return np.where(np.abs(values) < 2.0**-126, 0, values)


def is_contiguous(variable):
    """Whether a tensor of PyTorch has its elements in order; others always have."""
    value = getattr(variable, "value", variable)
    return getattr(value, "is_contiguous", lambda: True)()


def attack(mode, seeds, **options):
    """Runs programs, and raises what the shortest one raises that finds a fault.

    Args:
        mode: One of `setups.EXECUTIONS`, or another name for eager steps.
        seeds: Iterable of integers, each of which is a random program's.
        options: For `hypothesis.settings`.
    """
    # Its name is part of the key by which the database finds a program.
    machine = type(f"{mode.title()}Training", (Training,), {"mode": mode})
    of_all = hypothesis.settings(
        deadline=None,
        # The simplest one, and one at random, of which Hypothesis would vary a few
        # rules next. A new one has another set-up.
        max_examples=2,
        stateful_step_count=COMPILED_RULES if mode in setups.EXECUTIONS else RULES,
        suppress_health_check=list(hypothesis.HealthCheck),
        **options,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for seed in seeds:
            run_state_machine_as_test(hypothesis.seed(seed)(machine), settings=of_all)
