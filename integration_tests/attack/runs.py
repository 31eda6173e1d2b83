"""A run: the optimizer of a set-up, its variables, and a model of what it counts."""

import copy
import dataclasses
import pickle
import tempfile
from pathlib import Path

import keras
import numpy as np
import pytest
from keras import ops

import keras_lso
from integration_tests.attack import policies, setups
from integration_tests.attack.execution import array, compiled, stateless_apply, tensor
from testing.spikes import Model

NAMES = ["kernel", "bias"]
F32 = np.float32
# How a run is saved: by the optimizer's methods, or in a model's file.
OWN_VARIABLES, VARIABLES = "save_own_variables", "variables"
WEIGHTS_FILE, KERAS_FILE, PICKLED_MODEL = ".weights.h5", ".keras", "pickled model"
SAVED = [OWN_VARIABLES, VARIABLES, WEIGHTS_FILE, KERAS_FILE, PICKLED_MODEL]
# These contain only numbers, so that masters of another kind may load them.
OF_NUMBERS = [OWN_VARIABLES, WEIGHTS_FILE]
# How its optimizer is made anew, without its state.
COPIES = {
    "from_config": lambda made: type(made).from_config(made.get_config()),
    "deepcopy": copy.deepcopy,
    "pickle": lambda made: pickle.loads(pickle.dumps(made)),
}


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


def make_model(optimizer, variables):
    """Returns a model with such variables, which are zero."""
    holder = Holder([list(v.shape) for v in variables], [v.dtype for v in variables])
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

    def step_without_overflow(self, undone):
        """Counts a step skipped for its rate or as a spike, which keeps the scale."""
        self.applied -= undone
        self.attempted += 1 - undone
        self.in_a_row, self.at_lowest = self.in_a_row + 1, 0

    @property
    def is_settled(self):
        """Whether nothing waits for an update of the scale; no file would hold it."""
        return not self.since_update and not self.amax


class Judge:
    """The model of a `SpikeGuard`, which also adds up the windows that it judges."""

    def __init__(self, setup):
        guard = setup.guard and keras_lso.SpikeGuard(**setup.guard)
        self.model, self.window = guard and Model(guard), setup.optimizer.window
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
        # XLA and TensorFlow flush numbers below 2**-126 to 0.
        if norm > 2.0**100 or 0 < norm < 2.0**-100:
            return None
        # A spread of norms is a difference, with the rounding errors of norms.
        if any(abs(norm - at) <= 1e-3 * norm for at in limits):
            return None
        self.is_spike = not self.model.applies(norm)
        return not self.is_spike


class Run:
    """An optimizer, its variables, and what its counters should be."""

    def __init__(self, setup):
        self.setup, self.counters = setup, Counters()
        self.policy, self.judge = policies.model_of(setup.policy), Judge(setup)
        # The attributes that were assigned to the optimizer.
        self.settings = {}
        self.optimizer = make_optimizer(setup)
        random = np.random.default_rng(setup.seed)
        start = [weight.start(random) for weight in setup.weights]
        self.variables = make_variables(start, [w.dtype for w in setup.weights])
        self.optimizer.build(self.variables)
        self._begin()

    def _begin(self):
        for record in self.setup.records:
            getattr(self.optimizer, record)()
        variables = [*self.variables, *self.optimizer.variables]
        self.apply = compiled(self._apply, variables, self.setup.execution)

    def saved_and_loaded(self, way, copied, master_weights):
        """Returns a run that goes on from a copy of this one, or from its file."""
        new = copy.copy(self)
        new.setup = dataclasses.replace(self.setup, master_weights=master_weights)
        new.policy, new.judge = copy.deepcopy((self.policy, self.judge))
        new.counters = Counters(self.counters.attempted, self.counters.applied)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / f"model{way}"
            if way in (OWN_VARIABLES, VARIABLES):
                new._load_variables(self, way, copied, master_weights)
            else:
                new._load_model(self, path, copied, master_weights)
        new._begin()
        return new

    def _load_variables(self, of, way, copied, master_weights):
        self.optimizer = of._copy(copied, master_weights)
        dtypes = [v.dtype for v in of.variables]
        self.variables = make_variables(map(array, of.variables), dtypes)
        self.optimizer.build(self.variables)
        if way == OWN_VARIABLES:
            store = {}
            of.optimizer.save_own_variables(store)
            store = {k: np.array(v) for k, v in store.items()}
            self.optimizer.load_own_variables(store)
            return
        # Records, which come last, begin anew.
        pairs = zip(self.optimizer.variables, of.optimizer.variables, strict=False)
        for variable, other in pairs:
            variable.assign(ops.copy(other))
        self.counters = copy.deepcopy(of.counters)

    def _load_model(self, of, path, copied, master_weights):
        model = make_model(of.optimizer, of.variables)
        for weight, variable in zip(
            model.trainable_variables, of.variables, strict=True
        ):
            weight.assign(variable)
        if path.name.endswith(WEIGHTS_FILE):
            model.save_weights(path)
            model = make_model(of._copy(copied, master_weights), of.variables)
            model.optimizer.build(model.trainable_variables)
            model.load_weights(path)
        elif path.name.endswith(KERAS_FILE):
            model.save(path)
            model = keras.saving.load_model(path)
        else:
            model = pickle.loads(pickle.dumps(model))
        self.optimizer = model.optimizer
        self.variables = list(model.trainable_variables)

    def _copy(self, way, master_weights):
        """Returns an optimizer like that of this run, without its state."""
        copied, config = COPIES[way](self.optimizer), self.optimizer.get_config()
        assert copied.get_config() == config
        if master_weights == self.setup.master_weights:
            return copied
        return type(copied).from_config({**config, "master_weights": master_weights})

    @property
    def trained(self):
        """Weights, slots, averages, accumulators, masters and the count of steps."""
        optimizer = self.optimizer
        masters = optimizer._masters.variables
        return [*self.variables, *optimizer.inner_optimizer.variables, *masters]

    @property
    def sums(self):
        """The sums of gradients that a guard keeps beside the inner optimizer's."""
        return [] if self.setup.guard is None else self.optimizer._spikes._sums.values()

    @property
    def slots(self):
        """The inner optimizer's variables, as the bare one has them."""
        sums, inner = set(map(id, self.sums)), self.optimizer.inner_optimizer
        return [v for v in inner.variables if id(v) not in sums]

    def numbers_of(self, variables):
        """Returns variables, or the numbers of those that stand for them."""
        masters = self.optimizer._masters
        entries = masters.in_file(variables)
        return [masters.saved(e) if masters.is_coded(e) else e for e in entries]

    @property
    def saved(self):
        """All that a file holds, variables and tensors."""
        return [*self.variables, *self.numbers_of(self.optimizer._state.variables)]

    @property
    def has_rate(self):
        """Whether a learning rate may be assigned."""
        inner = self.optimizer.inner_optimizer
        inner = getattr(inner, "inner_optimizer", inner)
        is_single = not hasattr(inner, "optimizers")
        return is_single and isinstance(inner._learning_rate, keras.Variable)

    def _apply(self, gradients, unscaled):
        step, optimizer = self.step_taken, self.optimizer
        options = {"update_scale": step.update_scale}
        if step.flow == setups.SCALED_BY_SCALE_LOSS:
            optimizer.scale_loss(1.0)
        elif step.flow == setups.UNSCALES:
            optimizer.get_scaled_loss(1.0)
            gradients = optimizer.get_unscaled_gradients(gradients)
        else:
            # What was called last says the opposite.
            options["scaled"] = step.flow == setups.SAYS_SCALED
            if options["scaled"]:
                optimizer.get_unscaled_gradients([])
            else:
                optimizer.scale_loss(1.0)
                gradients = unscaled
        if step.call == setups.APPLY:
            optimizer.apply(gradients, self.variables, **options)
        elif step.call == setups.PAIRS:
            pairs = zip(gradients, self.variables, strict=True)
            optimizer.apply_gradients(pairs, **options)
        else:
            stateless_apply(optimizer, self.variables, gradients, **options)

    def check_counters(self):
        """Compares the scale and the counters with the model's."""
        optimizer, counters, policy = self.optimizer, self.counters, self.policy
        scale = F32(array(optimizer.loss_scale))
        assert np.isfinite(scale) and policy.low <= scale <= policy.high
        if policy.tolerance:
            off = abs(np.log2(scale) - np.log2(policy.scale))
            assert off <= policy.tolerance, (scale, policy.scale)
        else:
            assert scale == policy.scale
        found = (
            int(optimizer.step_counter),
            int(optimizer.skipped_steps),
            bool(optimizer.last_step_applied),
            int(optimizer.iterations),
            int(optimizer.inner_optimizer.iterations),
        )
        assert found == (
            policy.counter,
            counters.attempted - counters.applied,
            not counters.in_a_row,
            counters.applied // self.judge.window,
            counters.applied // self.judge.window,
        )
        if self.judge.model is not None:
            assert int(optimizer.skipped_spikes) == self.judge.model.skipped
        optimizer.check_stalled(patience=counters.at_lowest + 1)
        if counters.at_lowest:
            with pytest.raises(FloatingPointError):
                optimizer.check_stalled(patience=counters.at_lowest)


def make_optimizer(setup):
    options = {
        "master_weights": setup.master_weights,
        "slot_dtype": setup.slot_dtype,
        "spike_guard": setup.guard and keras_lso.SpikeGuard(**setup.guard),
    }
    inner, policy = setup.optimizer.make(), setup.policy
    if policy is None:
        return keras_lso.GuardedOptimizer(inner, **options)
    policy = type(policy).from_config(policy.get_config())
    return keras_lso.LossScaleOptimizer(inner, loss_scale=policy, **options)
