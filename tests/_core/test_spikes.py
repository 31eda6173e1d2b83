"""Steps whose gradients are outliers are skipped, by a `SpikeGuard`."""

import keras
import numpy as np
import pytest
from keras import ops

import keras_lso
from testing.beside_keras import bits
from testing.keras_versions import multi_optimizer
from testing.spikes import PEERS, Model, by_peer
from testing.trained_optimizers import saved

K = keras.optimizers
# One pass, and steps that the inner optimizer takes by itself.
MAKES = {
    "momentum": lambda **told: K.SGD(0.01, momentum=0.9, **told),
    "adam": lambda **told: K.Adam(0.01, **told),
    "lars": lambda **told: keras_lso.LARS(0.01, **told),
    "adadelta": lambda **told: K.Adadelta(1.0, **told),
    "larc": lambda **told: keras_lso.LARC(K.SGD(0.01, **told)),
    "own": lambda **told: Shrinking(0.01, **told),
}


class Shrinking(K.SGD):
    """A user's optimizer, which changes gradients before it adds them up."""

    def apply(self, grads, trainable_variables=None):
        super().apply([0.01 * g for g in grads], trainable_variables)


def built(inner, dtype="float32", **told):
    """Returns an optimizer of two variables, and these."""
    optimizer = keras_lso.LossScaleOptimizer(inner, initial_scale=4.0, **told)
    variables = [keras.Variable(np.ones(s), dtype=dtype) for s in ((3, 4), (5,))]
    optimizer.build(variables)
    return optimizer, variables


def guarded(make=K.SGD, guard=None, of_wrapper=(), **told):
    guard = guard or keras_lso.SpikeGuard(3.0, window=8, warmup=4)
    return built(make(**told), spike_guard=guard, **dict(of_wrapper))


def gradients(norm, seed=0, scale=4.0):
    """Gradients of 17 elements together, with a norm."""
    random = np.random.default_rng(seed)
    found = [random.normal(size=s) for s in ((3, 4), (5,))]
    size = np.sqrt(sum((g**2).sum() for g in found))
    return [
        ops.convert_to_tensor((g / size * norm * scale).astype("float32"))
        for g in found
    ]


def applied(optimizer, variables, norms):
    """Takes a step of each norm; returns which were applied."""
    found = []
    for i, norm in enumerate(norms):
        optimizer.apply(gradients(norm, i), variables, scaled=True, update_scale=True)
        found.append(bool(optimizer.last_step_applied))
    return found


def recorded(kind, length=60):
    """Sequences of norms: calm, with single spikes, with a new level, growing."""
    random = np.random.default_rng(3)
    norms = random.lognormal(0.0, 0.2, length)
    if kind == "spikes":
        norms[[20, 21, 35, 50]] *= [30.0, 1e4, 8.0, 1e6]
    if kind == "level":
        norms[30:] *= 50.0
    if kind == "huge level":
        norms[30:] *= 1e15
    if kind == "falling":
        norms *= np.geomspace(1, 1e-3, length)
    return norms


KINDS = ["calm", "spikes", "level", "huge level", "falling"]


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("make", MAKES.values(), ids=MAKES)
def test_skipped_spikes_match_numpy_model(make, kind, way):
    optimizer, variables = guarded(make)
    model, norms = Model(optimizer.spike_guard), recorded(kind)
    assert applied(optimizer, variables, norms) == [model.applies(n) for n in norms]
    assert int(optimizer.skipped_spikes) == model.skipped
    assert int(optimizer.skipped_steps) == model.skipped
    assert int(optimizer.iterations) == len(norms) - model.skipped
    assert kind == "calm" or (model.skipped > 0) is (kind != "falling")


@pytest.mark.parametrize("kind", ["calm", "falling"])
def test_decisions_on_calm_norms_match_those_of_peers(kind):
    guard = keras_lso.SpikeGuard(6.0, window=16, warmup=8)
    optimizer, variables = guarded(guard=guard)
    norms = recorded(kind)
    found = applied(optimizer, variables, norms)
    for peer in PEERS:
        assert by_peer(peer, norms, 16)[0] == found, peer


def skipped_by_guard(norms):
    """Returns the skipped steps, and whether the weights are finite at the end."""
    optimizer, variables = built(
        K.SGD(0.01), spike_guard=keras_lso.SpikeGuard(), dynamic=False
    )
    found = np.flatnonzero(~np.array(applied(optimizer, variables, norms)))
    is_finite = all(np.isfinite(ops.convert_to_numpy(v)).all() for v in variables)
    return found.tolist(), is_finite


def skipped_by_peers(norms):
    """Returns the same for each peer."""
    found = {peer: by_peer(peer, norms) for peer in PEERS}
    return {
        peer: (np.flatnonzero(~np.array(decisions)).tolist(), bool(np.isfinite(weight)))
        for peer, (decisions, weight) in found.items()
    }


def test_only_guard_skips_second_spike_of_half_the_size():
    norms = recorded("calm", 100)
    norms[[80, 84]] = 20.0, 10.0
    assert skipped_by_peers(norms) == dict.fromkeys(PEERS, ([80], True))
    assert skipped_by_guard(norms) == ([80, 84], True)


def test_peers_accept_new_level_sooner_than_guard():
    norms = recorded("calm", 200)
    norms[130:] *= 50.0
    for peer, (skipped, _) in skipped_by_peers(norms).items():
        assert skipped[0] == 130 and 3 <= len(skipped) <= 5, peer
    assert 20 <= len(skipped_by_guard(norms)[0]) <= 60


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_only_guard_judges_and_trains_on_after_step_that_is_not_finite(value):
    norms = recorded("calm", 240)
    norms[80] = value
    skipped = [80, *range(81, 81 + 128)]
    with np.errstate(invalid="ignore"):  # inf - inf and 0 * inf.
        found = skipped_by_peers(norms)
    assert found == {
        "OLMo-core": (skipped, False),
        "levanter": (skipped, False),
        "MaxText": (skipped, True),
    }
    # A spike after it is still found.
    norms[90] = 20.0
    assert skipped_by_guard(norms) == ([80, 90], True)


@pytest.mark.parametrize("growth", [1.0, 10.0, 30.0])
def test_guard_skips_at_most_window_consecutive_steps(growth):
    """Whatever the norms are: here they grow faster than the limit does."""
    optimizer, variables = guarded()
    norms = [*np.linspace(1, 1.1, 8), *(1e3 * growth ** np.arange(11))]
    found = applied(optimizer, variables, norms)
    skips = "".join("ax"[not calm] for calm in found).split("a")
    assert 1 <= max(map(len, skips)) <= 8


def test_guard_skips_no_step_during_warmup():
    guard = keras_lso.SpikeGuard(3.0, window=16, warmup=4)
    optimizer, variables = guarded(guard=guard)
    assert applied(optimizer, variables, [1.0, 1.1, 1.2, 50.0]) == [True] * 4


def test_guard_judges_by_partly_filled_history_after_warmup():
    guard = keras_lso.SpikeGuard(3.0, window=16, warmup=4)
    optimizer, variables = guarded(guard=guard)
    found = applied(optimizer, variables, [1.0, 1.1, 1.2, 1.1, 1.0, 2.0])
    assert found == [True] * 5 + [False]


def test_norms_that_differ_by_rounding_are_not_spikes():
    optimizer, variables = guarded()
    for _ in range(8):
        optimizer.apply(gradients(1.0), variables, scaled=True)
    assert applied(optimizer, variables, [1.000001, 1.0]) == [True] * 2


@pytest.mark.exhaustive
@pytest.mark.parametrize("make", MAKES.values(), ids=MAKES)
@pytest.mark.parametrize("told", [{}, {"use_ema": True}, {"global_clipnorm": 1.0}])
def test_spike_leaves_weights_slots_and_scale_unchanged(make, told, way):
    optimizer, variables = guarded(make, **told)
    applied(optimizer, variables, np.linspace(1, 1.2, 6))
    kept = [*variables, *optimizer.inner_optimizer.variables]
    kept += [optimizer.dynamic_scale, optimizer.step_counter]
    before = bits(kept)
    assert applied(optimizer, variables, [100.0]) == [False]
    assert bits(kept) == before
    assert applied(optimizer, variables, [1.0]) == [True]


def test_spike_neither_lowers_nor_raises_loss_scale():
    guard = keras_lso.SpikeGuard(3.0, window=8, warmup=4)
    optimizer = keras_lso.LossScaleOptimizer(
        K.SGD(0.01), initial_scale=4.0, dynamic_growth_steps=6, spike_guard=guard
    )
    w = [keras.Variable(np.ones(s, "float32")) for s in ((3, 4), (5,))]
    applied(optimizer, w, np.linspace(1, 1.2, 5))
    applied(optimizer, w, [100.0] * 2)
    assert float(optimizer.loss_scale) == 4.0
    assert int(optimizer.step_counter) == 5
    applied(optimizer, w, [1.0])
    assert float(optimizer.loss_scale) == 8.0


def test_overflow_is_not_counted_as_spike_and_stays_out_of_history():
    optimizer, variables = guarded()
    applied(optimizer, variables, np.linspace(1, 1.2, 5))
    history = bits(optimizer._spikes.variables)
    bad = gradients(1.0)
    bad[0] = bad[0] * np.inf
    optimizer.apply(bad, variables, scaled=True)
    assert bits(optimizer._spikes.variables) == history
    assert int(optimizer.skipped_spikes) == 0
    assert int(optimizer.skipped_steps) == 1
    assert float(optimizer.loss_scale) == 2.0


def test_norm_above_max_norm_is_spike_from_first_step_on():
    # Also one whose square exceeds float32.
    for limit in (2.0, 2.0**124):
        guard = keras_lso.SpikeGuard(window=8, warmup=4, max_norm=limit)
        optimizer, variables = guarded(guard=guard)
        norms = limit / 2 * np.array([3.0, 1.0, 2.5, 1.1, *[3.5] * 12, 1.0])
        assert applied(optimizer, variables, norms) == (norms <= limit).tolist()


def test_guard_judges_unscaled_norms():
    optimizer, variables = guarded()
    applied(optimizer, variables, np.linspace(1, 1.2, 6))
    optimizer.loss_scale_policy.assign_scale(1024.0)
    optimizer.apply(gradients(1.1, scale=1024.0), variables, scaled=True)
    assert bool(optimizer.last_step_applied)
    optimizer.apply(gradients(50.0, scale=1.0), variables, scaled=False)
    assert not bool(optimizer.last_step_applied)


def values(variables):
    """As `bits`, but for the signs of zeros: Keras multiplies sums by 0."""
    return [(ops.convert_to_numpy(v) + 0.0).tobytes() for v in variables]


# Sums in other dtypes than the gradients', and sums of other gradients.
IN_16_BITS = {"dtype": "bfloat16", "master_weights": False}
WINDOWS = [
    *(("adam", {}), ("adadelta", {}), ("larc", {}), ("own", {})),
    *(("adam", IN_16_BITS), ("larc", IN_16_BITS)),
    ("larc", {"dtype": "bfloat16", "master_weights": "remainder"}),
]


@pytest.mark.parametrize("name, of_wrapper", WINDOWS, ids=str)
def test_window_with_spike_is_rolled_back(name, of_wrapper, way):
    make = MAKES[name]
    optimizer, variables = guarded(
        make, of_wrapper=of_wrapper, gradient_accumulation_steps=3
    )
    model = Model(optimizer.spike_guard)
    kept = [*variables, *optimizer.inner_optimizer.variables]
    sizes = np.random.default_rng(5).uniform(1.0, 1.3, (12, 3))
    sizes[[6, 9], [1, 2]] *= 40.0
    for i, window in enumerate(sizes):
        before = values(kept)
        grads = [gradients(size, 3 * i + j) for j, size in enumerate(window)]
        for one in grads:
            optimizer.apply(one, variables, scaled=True)
        columns = [sum(map(ops.convert_to_numpy, c)) / 12.0 for c in zip(*grads)]  # noqa: B905
        norm = np.sqrt(sum((c.astype("float64") ** 2).sum() for c in columns))
        is_applied = model.applies(norm)
        assert bool(optimizer.last_step_applied) is is_applied
        assert (values(kept) == before) is (not is_applied)
    assert int(optimizer.skipped_spikes) == model.skipped == 2
    assert int(optimizer.iterations) == 10


def test_resumed_run_skips_same_spikes_as_uninterrupted_run():
    norms = recorded("spikes")
    optimizer, variables = guarded()
    applied(optimizer, variables, norms[:21])
    new, others = guarded()
    new.load_own_variables(saved(optimizer))
    rest = norms[21:]
    assert applied(new, others, rest) == applied(optimizer, variables, rest)
    assert int(new.skipped_spikes) == int(optimizer.skipped_spikes) > 0


@pytest.mark.parametrize("name", ["adadelta", "larc"])
def test_resumed_window_is_judged_as_a_whole(name):
    def make():
        guard = keras_lso.SpikeGuard(max_norm=2.0)
        return guarded(MAKES[name], guard, gradient_accumulation_steps=3)

    def apply(optimizer, variables, *factors):
        for factor in factors:
            grads = [factor * g for g in gradients(1.0, scale=1.0)]
            optimizer.apply(grads, variables, scaled=False)

    (one, variables), (other, others) = make(), make()
    # The overflow is no part of the window.
    apply(one, variables, 90.0, np.inf, -1.0)
    other.load_own_variables(saved(one))
    apply(other, others, -84.5)
    assert int(other.skipped_spikes) == 0 and int(other.iterations) == 1
    apply(other, others, 1.0, 1.0, 4.5)
    assert int(other.skipped_spikes) == 1 and int(other.iterations) == 1


@pytest.mark.parametrize("window", [8, 5, None])
@pytest.mark.parametrize("other", [8, 5, None])
def test_loaded_state_restores_history_only_if_windows_are_equal(window, other):
    def make(length):
        guard = length and keras_lso.SpikeGuard(3.0, length, 4)
        return built(K.Adam(0.01), spike_guard=guard)

    optimizer, variables = make(window)
    applied(optimizer, variables, np.linspace(1, 1.2, 6))
    new, others = make(other)
    new.load_own_variables(saved(optimizer))
    assert int(new.iterations) == 6
    slots = optimizer.inner_optimizer.variables, new.inner_optimizer.variables
    assert bits(slots[0]) == bits(slots[1])
    is_same = window == other and window is not None
    is_calm = applied(new, others, [100.0]) == [True]
    assert is_calm is not is_same


def of_two_weights(masters, guard):
    """Returns an optimizer with as many masters as a guard has variables."""
    inner = K.Adam(0.01)
    return built(inner, "float16", master_weights=masters, spike_guard=guard)


def test_state_without_masters_and_with_history_loads_into_masters():
    guard = keras_lso.SpikeGuard(3.0, window=8, warmup=4)
    old, variables = of_two_weights(False, guard)
    applied(old, variables, np.linspace(1, 1.2, 6))
    new, _ = of_two_weights("float32", None)
    new.load_own_variables(saved(old))
    assert int(new.iterations) == 6
    # With its own guard, the history as well.
    new, _ = of_two_weights("float32", guard)
    new.load_own_variables(saved(old))
    assert int(new.iterations) == 6
    assert bits(new._spikes.variables) == bits(old._spikes.variables)


def test_masters_are_not_loaded_as_history_of_spikes():
    old, variables = of_two_weights("float32", None)
    applied(old, variables, np.linspace(1, 1.2, 6))
    new, _ = of_two_weights(False, keras_lso.SpikeGuard(3.0, window=8, warmup=4))
    with pytest.warns(UserWarning, match="Skipping variable loading"):
        new.load_own_variables(saved(old))
    assert int(new.iterations) == 0


def test_members_chosen_by_function_may_not_accumulate_with_guard():
    sgd, adam = K.SGD(0.01, gradient_accumulation_steps=3), K.Adam(0.02)
    inner = multi_optimizer(lambda v: sgd if len(v.shape) == 2 else adam)
    optimizer = keras_lso.GuardedOptimizer(inner, spike_guard=keras_lso.SpikeGuard())
    variables = [keras.Variable(np.ones(s, "float32")) for s in ((3, 4), (5,))]
    with pytest.raises(ValueError, match="its own window"):
        optimizer.build(variables)


@pytest.mark.parametrize("cls", ["LossScaleOptimizer", "GuardedOptimizer"])
def test_config_round_trips_spike_guard(cls):
    guard = keras_lso.SpikeGuard(5.0, 32, 16, 100.0)
    optimizer = getattr(keras_lso, cls)(K.SGD(), spike_guard=guard)
    config = optimizer.get_config()
    again = type(optimizer).from_config(config)
    assert again.spike_guard == guard and again.spike_guard is not guard
    assert repr(guard) == (
        "SpikeGuard(threshold=5.0, window=32, warmup=16, max_norm=100.0)"
    )
    assert "spike_guard" not in getattr(keras_lso, cls)(K.SGD()).get_config()


def test_optimizer_without_guard_counts_no_spikes():
    optimizer = keras_lso.LossScaleOptimizer(K.SGD())
    assert int(optimizer.skipped_spikes) == 0


@pytest.mark.skipif(
    keras.backend.backend() == "tensorflow", reason="TensorFlow has no stateless_apply"
)
@pytest.mark.parametrize("told", [{}, {"gradient_accumulation_steps": 2}], ids=str)
def test_stateless_apply_skips_same_spikes_as_apply(told):
    make = MAKES["larc" if told else "momentum"]
    (one, variables), (other, others) = guarded(make, **told), guarded(make, **told)
    state = [v.value for v in one.variables]
    weights = [v.value for v in variables]
    for i, norm in enumerate(recorded("spikes")[:24]):
        weights, state = one.stateless_apply(
            state, gradients(norm, i), weights, scaled=True
        )
        other.apply(gradients(norm, i), others, scaled=True)
    assert bits(state) == bits(other.variables)
    assert int(other.skipped_spikes) > 0


def test_spike_leaves_protected_statistics_unchanged():
    model = keras.Sequential(
        [keras.Input((4,)), keras.layers.BatchNormalization(), keras.layers.Dense(1)]
    )
    guard = keras_lso.SpikeGuard(3.0, window=8, warmup=4)
    model.compile(keras_lso.GuardedOptimizer(K.SGD(1e-4), spike_guard=guard), "mse")
    keras_lso.protect_statistics(model)
    random = np.random.default_rng(0)
    x, y = random.normal(size=(32, 4)), random.normal(size=(32, 1))
    for _ in range(6):
        model.train_on_batch(x, y)
    before = bits(model.weights)
    model.train_on_batch(x + 5.0, y * 1e6)
    assert int(model.optimizer.skipped_spikes) == 1
    assert bits(model.weights) == before
