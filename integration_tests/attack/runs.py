"""Runs of a case: the optimizer, and a model of what it counts."""

import copy
import dataclasses
import pickle

import keras
import numpy as np
import pytest
from keras import ops

import keras_lso
from integration_tests.attack import cases
from integration_tests.attack.execution import array, compiled, stateless_apply, tensor
from testing.spikes import Model

NAMES = ["kernel", "bias"]
F32 = np.float32


@dataclasses.dataclass
class Step:
    """How a step is taken: one of `cases.FLOWS`, of `cases.CALLS`, and for `apply`."""

    flow: str
    call: str
    update_scale: bool


@keras.saving.register_keras_serializable("keras_lso_attack")
class Holder(keras.layers.Layer):
    """A layer that has weights, and does nothing with them."""

    def __init__(self, shapes, dtypes, **options):
        super().__init__(**options)
        self.shapes, self.dtypes = shapes, dtypes
        for i, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=True)):
            self.add_weight(
                shape=tuple(shape), dtype=dtype, name=NAMES[i % 2], initializer="zeros"
            )

    def call(self, x):
        return x

    def get_config(self):
        return {**super().get_config(), "shapes": self.shapes, "dtypes": self.dtypes}


def make_model(case, optimizer):
    holder = Holder([list(w.shape) for w in case.start], case.dtypes)
    model = keras.Sequential([keras.Input((1,)), holder])
    model.compile(optimizer, loss="mse")
    return model


def make_variables(start, dtypes):
    return [
        keras.Variable(tensor(w, dtype), dtype=dtype, name=NAMES[i % 2])
        for i, (w, dtype) in enumerate(zip(start, dtypes, strict=True))
    ]


@dataclasses.dataclass
class Counters:
    """What an optimizer counts."""

    attempted: int = 0
    applied: int = 0
    in_a_row: int = 0
    at_lowest: int = 0
    since_update: int = 0
    amax: float = 0.0

    def step(self, finite, amax, update_scale, policy):
        """Counts a step, then lets the model of the policy take it."""
        is_lowest = policy.scale <= policy.low
        self.attempted += 1
        self.applied += finite
        self.in_a_row = 0 if finite else self.in_a_row + 1
        self.at_lowest = self.at_lowest + 1 if not finite and is_lowest else 0
        self.since_update += not finite
        self.amax = np.fmax(self.amax, amax)
        if update_scale:
            policy.step(not self.since_update, self.amax)
            self.since_update, self.amax = 0, 0.0

    @property
    def is_settled(self):
        """Whether nothing waits for an update of the scale; no file would hold it."""
        return not self.since_update and not self.amax

    def after_loading(self):
        return Counters(self.attempted, self.applied)


class Judge:
    """The model of a `SpikeGuard`, which also adds up the windows that it judges."""

    def __init__(self, case):
        guard = case.guard and keras_lso.SpikeGuard(**case.guard)
        self.model = guard and Model(guard)
        self.window = case.inner.options.get("gradient_accumulation_steps", 1)
        self.sums, self.count, self.is_spike = 0.0, 0, False

    def applies(self, unscaled):
        """Whether finite gradients are no outlier; None if that is a close call."""
        if self.model is None:
            return True
        flat = [np.ravel(u).astype("float64") for u in unscaled if u is not None]
        self.sums, self.count = self.sums + np.concatenate(flat), self.count + 1
        if self.count < self.window:
            return True
        norm = np.linalg.norm(self.sums / self.window)
        self.sums, self.count = 0.0, 0
        limits = [self.model.limit()] if len(self.model.norms) > 1 else []
        limits += [self.model.guard.max_norm or norm + 1]
        # A spread of norms is a difference, with the rounding errors of norms.
        if norm > 2.0**100 or any(abs(norm - at) <= 1e-3 * norm for at in limits):
            return None
        self.is_spike = not self.model.applies(norm)
        return not self.is_spike


class Run:
    """The optimizer of a case, its variables, and what is expected of its counters."""

    def __init__(self, case, of=None, folder=None):
        self.case, self.model = case, None
        in_model = case.saved is not None and case.saved[1] in cases.OF_MODELS
        if of is None:
            self.counters, self.policy = Counters(), case.policy.expected()
            self.judge = Judge(case)
            self.optimizer = case.policy.wrap(
                case.inner.make(),
                master_weights=case.master_weights,
                slot_dtype=case.slot_dtype,
                spike_guard=case.guard and keras_lso.SpikeGuard(**case.guard),
            )
            self.variables = make_variables(case.start, case.dtypes)
            if in_model:
                self.model = make_model(case, self.optimizer)
                for v, free in zip(
                    self.model.trainable_variables, self.variables, strict=True
                ):
                    v.assign(free)
                self.variables = list(self.model.trainable_variables)
            self.optimizer.build(self.variables)
        else:
            self.counters = of.counters.after_loading()
            self.policy, self.judge = copy.deepcopy((of.policy, of.judge))
            getattr(self, "_from_file" if in_model else "_from_config")(of, folder)
        for record in case.records:
            getattr(self.optimizer, record)()
        self.apply = compiled(
            self._apply, [*self.variables, *self.optimizer.variables], case.execution
        )

    def _from_config(self, of, folder):
        self.optimizer = self._copy(of)
        self.variables = make_variables(map(array, of.variables), self.case.dtypes)
        self.optimizer.build(self.variables)
        if self.case.saved[1] == cases.OWN_VARIABLES:
            store = {}
            of.optimizer.save_own_variables(store)
            self.optimizer.load_own_variables(
                {k: np.array(v) for k, v in store.items()}
            )
        else:
            # Records, which come last, begin anew.
            pairs = zip(self.optimizer.variables, of.optimizer.variables, strict=False)
            for mine, others in pairs:
                mine.assign(ops.copy(others))
            self.counters = copy.deepcopy(of.counters)

    def _copy(self, of):
        """Returns an optimizer like that of another run, without its state."""
        copied = cases.COPIES[self.case.saved[2]](of.optimizer)
        config = of.optimizer.get_config()
        assert copied.get_config() == config
        if self.case.loaded_as != self.case.master_weights:
            config = {**config, "master_weights": self.case.loaded_as}
            copied = type(copied).from_config(config)
        return copied

    def _from_file(self, of, folder):
        way = self.case.saved[1]
        path = folder / f"model{way}"
        if way == cases.WEIGHTS_FILE:
            of.model.save_weights(path)
            self.model = make_model(self.case, self._copy(of))
            self.model.optimizer.build(self.model.trainable_variables)
            self.model.load_weights(path)
        elif way == cases.KERAS_FILE:
            of.model.save(path)
            self.model = keras.saving.load_model(path)
        else:
            self.model = pickle.loads(pickle.dumps(of.model))
        self.optimizer = self.model.optimizer
        self.variables = list(self.model.trainable_variables)

    @property
    def trained(self):
        """Weights, slots, averages, accumulators, masters and the count of steps."""
        optimizer = self.optimizer
        masters = optimizer._masters.variables
        return [*self.variables, *optimizer.inner_optimizer.variables, *masters]

    def numbers_of(self, variables):
        """Returns variables, and the masters in place of those that stand for them."""
        masters = self.optimizer._masters
        narrow = set(map(id, masters.masters))
        return [masters.saved(v) if id(v) in narrow else v for v in variables]

    @property
    def saved(self):
        """All that a file holds, variables and tensors."""
        return [*self.variables, *self.numbers_of(self.optimizer._state.variables)]

    # --- Steps --------------------------------------------------------------------

    def _apply(self, gradients, unscaled):
        step, optimizer = self.step_taken, self.optimizer
        options = {"update_scale": step.update_scale}
        if step.flow == cases.SCALED_BY_SCALE_LOSS:
            optimizer.scale_loss(1.0)
        elif step.flow == cases.UNSCALES:
            optimizer.get_scaled_loss(1.0)
            gradients = optimizer.get_unscaled_gradients(gradients)
        else:
            # What was called last says the opposite.
            options["scaled"] = step.flow == cases.SAYS_SCALED
            if options["scaled"]:
                optimizer.get_unscaled_gradients([])
            else:
                optimizer.scale_loss(1.0)
                gradients = unscaled
        if step.call == cases.APPLY:
            optimizer.apply(gradients, self.variables, **options)
        elif step.call == cases.PAIRS:
            pairs = zip(gradients, self.variables, strict=True)
            optimizer.apply_gradients(pairs, **options)
        else:
            stateless_apply(optimizer, self.variables, gradients, **options)

    def check_state(self):
        """Holds the scale and the counters against the model's."""
        optimizer, counters, policy = self.optimizer, self.counters, self.policy
        scale = F32(array(optimizer.loss_scale))
        assert np.isfinite(scale) and F32(policy.low) <= scale <= F32(policy.high)
        if policy.tolerance:
            off = abs(np.log2(scale) - np.log2(policy.scale))
            assert off <= policy.tolerance, (scale, policy.scale)
        else:
            assert scale == policy.scale
        inner = optimizer.inner_optimizer
        accumulated = self.judge.window
        found = (
            int(optimizer.step_counter),
            int(optimizer.skipped_steps),
            bool(optimizer.last_step_applied),
            int(optimizer.iterations),
            int(inner.iterations),
        )
        assert found == (
            policy.counter,
            counters.attempted - counters.applied,
            not counters.in_a_row,
            counters.applied // accumulated,
            counters.applied // accumulated,
        )
        if self.judge.model is not None:
            assert int(optimizer.skipped_spikes) == self.judge.model.skipped
        optimizer.check_stalled(patience=counters.at_lowest + 1)
        if counters.at_lowest:
            with pytest.raises(FloatingPointError):
                optimizer.check_stalled(patience=counters.at_lowest)
