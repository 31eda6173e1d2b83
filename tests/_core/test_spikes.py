"""A `SpikeGuard` skips steps whose gradients are outliers."""

import keras
import numpy as np
import pytest
from keras import ops

import keras_lso
from testing.harness import Harness, array, bits
from testing.keras_versions import multi_optimizer
from testing.spikes import PEERS, Model, by_peer
from testing.trained_optimizers import saved

K = keras.optimizers
SHAPES = [(3, 4), (5,)]
# Fused steps, and inner optimizers that take their own.
MAKES = {
    "momentum": lambda **options: K.SGD(0.01, momentum=0.9, **options),
    "adam": lambda **options: K.Adam(0.01, **options),
    "lars": lambda **options: keras_lso.LARS(0.01, **options),
    "adadelta": lambda **options: K.Adadelta(1.0, **options),
    "larc": lambda **options: keras_lso.LARC(K.SGD(0.01, **options)),
    "own": lambda **options: Shrinking(0.01, **options),
}


class Shrinking(K.SGD):
    """A user's optimizer, which changes gradients before it adds them up."""

    def apply(self, grads, trainable_variables=None):
        super().apply([0.01 * g for g in grads], trainable_variables)


def built(inner, dtype="float32", **arguments):
    arguments = {"initial_scale": 4.0, **arguments}
    optimizer = keras_lso.LossScaleOptimizer(inner, **arguments)
    return Harness(optimizer, SHAPES, dtype)


def guarded(make=K.SGD, guard=None, of_wrapper=(), **options):
    guard = guard or keras_lso.SpikeGuard(3.0, window=8, warmup=4)
    return built(make(**options), spike_guard=guard, **dict(of_wrapper))


def applied(run, norms):
    """Takes a step with each norm; returns which ones were applied."""
    return [run.step(norm=norm) for norm in norms]


def recorded(kind, length=60):
    """Sequences of norms: steady, with single spikes, with a new level, growing."""
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


KINDS = ["steady", "spikes", "level", "huge level", "falling"]


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("make", MAKES.values(), ids=MAKES)
def test_skipped_spikes_match_numpy_model(make, kind, way):
    run, norms = guarded(make), recorded(kind)
    model = Model(run.optimizer.spike_guard)
    assert applied(run, norms) == [model.applies(n) for n in norms]
    assert int(run.optimizer.skipped_spikes) == run.skipped == model.skipped
    assert int(run.optimizer.iterations) == len(norms) - model.skipped
    assert kind == "steady" or (model.skipped > 0) is (kind != "falling")


@pytest.mark.parametrize("kind", ["steady", "falling"])
def test_decisions_on_steady_norms_match_those_of_peers(kind):
    guard = keras_lso.SpikeGuard(6.0, window=16, warmup=8)
    norms = recorded(kind)
    decisions = applied(guarded(guard=guard), norms)
    for peer in PEERS:
        assert by_peer(peer, norms, 16)[0] == decisions, peer


def skipped_by_guard(norms):
    """Returns the skipped steps, and whether the weights are finite at the end."""
    guard = keras_lso.SpikeGuard()
    run = built(K.SGD(0.01), spike_guard=guard, dynamic=False)
    skipped = np.flatnonzero(~np.array(applied(run, norms)))
    return skipped.tolist(), all(np.isfinite(value).all() for value in run.values())


def skipped_by_peers(norms):
    """Returns the same for each peer."""
    results = {peer: by_peer(peer, norms) for peer in PEERS}
    return {
        peer: (np.flatnonzero(~np.array(decisions)).tolist(), bool(np.isfinite(weight)))
        for peer, (decisions, weight) in results.items()
    }


def test_only_guard_skips_second_spike_of_half_the_size():
    norms = recorded("steady", 100)
    norms[[80, 84]] = 20.0, 10.0
    assert skipped_by_peers(norms) == dict.fromkeys(PEERS, ([80], True))
    assert skipped_by_guard(norms) == ([80, 84], True)


def test_peers_accept_new_level_sooner_than_guard():
    norms = recorded("steady", 200)
    norms[130:] *= 50.0
    for peer, (skipped, _) in skipped_by_peers(norms).items():
        assert skipped[0] == 130 and 3 <= len(skipped) <= 5, peer
    assert 20 <= len(skipped_by_guard(norms)[0]) <= 60


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_only_guard_judges_and_trains_on_after_step_that_is_not_finite(value):
    norms = recorded("steady", 240)
    norms[80] = value
    skipped = [80, *range(81, 81 + 128)]
    with np.errstate(invalid="ignore"):  # inf - inf and 0 * inf.
        assert skipped_by_peers(norms) == {
            "OLMo-core": (skipped, False),
            "levanter": (skipped, False),
            "MaxText": (skipped, True),
        }
    # It skips the next spike.
    norms[90] = 20.0
    assert skipped_by_guard(norms) == ([80, 90], True)


@pytest.mark.parametrize("growth", [1.0, 10.0, 30.0])
def test_guard_skips_at_most_window_consecutive_steps(growth):
    """Even if the norms grow faster than the limit does."""
    norms = [*np.linspace(1, 1.1, 8), *(1e3 * growth ** np.arange(11))]
    decisions = applied(guarded(), norms)
    skips = "".join("ax"[not is_applied] for is_applied in decisions).split("a")
    assert 1 <= max(map(len, skips)) <= 8


DECISIONS = {
    # It skips no step during the warm-up, ...
    "warmup": ([1.0, 1.1, 1.2, 50.0], [True] * 4),
    # ... then judges by a history that is partly filled.
    "partly filled": ([1.0, 1.1, 1.2, 1.1, 2.0], [True] * 4 + [False]),
    # Norms that differ by rounding are no spikes.
    "rounding": ([*[1.0] * 8, 1.000001, 1.0], [True] * 10),
}


@pytest.mark.parametrize("norms, expected", DECISIONS.values(), ids=DECISIONS)
def test_guard_judges_by_history_after_warmup(norms, expected):
    guard = keras_lso.SpikeGuard(3.0, window=16, warmup=4)
    assert applied(guarded(guard=guard), norms) == expected


@pytest.mark.exhaustive
@pytest.mark.parametrize("make", MAKES.values(), ids=MAKES)
@pytest.mark.parametrize("options", [{}, {"use_ema": True}, {"global_clipnorm": 1.0}])
def test_spike_leaves_weights_slots_and_scale_unchanged(make, options, way):
    run = guarded(make, **options)
    applied(run, np.linspace(1, 1.2, 6))
    with run.unchanged(run.optimizer.dynamic_scale, run.optimizer.step_counter):
        assert not run.step(norm=100.0)
    assert run.step(norm=1.0)


def test_spike_neither_lowers_nor_raises_loss_scale():
    guard = keras_lso.SpikeGuard(3.0, window=8, warmup=4)
    run = built(K.SGD(0.01), dynamic_growth_steps=6, spike_guard=guard)
    applied(run, np.linspace(1, 1.2, 5))
    applied(run, [100.0] * 2)
    assert run.scale == 4.0
    assert int(run.optimizer.step_counter) == 5
    applied(run, [1.0])
    assert run.scale == 8.0


def test_overflow_is_not_counted_as_spike_and_stays_out_of_history():
    run = guarded()
    applied(run, np.linspace(1, 1.2, 5))
    with run.unchanged(*run.optimizer._spikes.variables):
        run.overflow()
    assert int(run.optimizer.skipped_spikes) == 0
    assert run.scale == 2.0


def test_norm_above_max_norm_is_spike_from_first_step_on():
    # Also one whose square exceeds float32.
    for limit in (2.0, 2.0**124):
        guard = keras_lso.SpikeGuard(window=8, warmup=4, max_norm=limit)
        norms = limit / 2 * np.array([3.0, 1.0, 2.5, 1.1, *[3.5] * 12, 1.0])
        assert applied(guarded(guard=guard), norms) == (norms <= limit).tolist()


def test_guard_judges_unscaled_norms():
    run = guarded()
    applied(run, np.linspace(1, 1.2, 6))
    run.optimizer.loss_scale_policy.assign_scale(1024.0)
    assert run.step(norm=1.1)
    run.apply([*map(ops.convert_to_tensor, run.gradients(norm=50.0))], scaled=False)
    assert not run.optimizer.last_step_applied


def values(variables):
    """Returns the bits without the signs of zeros: Keras multiplies sums by 0."""
    return [(array(v) + 0.0).tobytes() for v in variables]


# Sums in other dtypes than the gradients', and sums of other gradients.
IN_16_BITS = {"dtype": "bfloat16", "master_weights": False}
ACCUMULATED = [
    *(("adam", {}), ("adadelta", {}), ("larc", {}), ("own", {})),
    *(("adam", IN_16_BITS), ("larc", IN_16_BITS)),
    ("larc", {"dtype": "bfloat16", "master_weights": "remainder"}),
]


@pytest.mark.parametrize("name, of_wrapper", ACCUMULATED, ids=str)
def test_accumulation_with_spike_is_rolled_back(name, of_wrapper, way):
    make = MAKES[name]
    run = guarded(make, of_wrapper=of_wrapper, gradient_accumulation_steps=3)
    model = Model(run.optimizer.spike_guard)
    sizes = np.random.default_rng(5).uniform(1.0, 1.3, (12, 3))
    sizes[[6, 9], [1, 2]] *= 40.0
    for norms in sizes:
        before = values(run.state)
        micro_batches = [run.gradients(norm=norm) for norm in norms]
        for grads in micro_batches:
            is_applied = run.step(grads, dtype="float32")
        means = [np.mean(column, 0, "float64") for column in zip(*micro_batches)]  # noqa: B905
        assert is_applied is model.applies(np.sqrt(sum((m**2).sum() for m in means)))
        assert (values(run.state) == before) is (not is_applied)
    assert int(run.optimizer.skipped_spikes) == model.skipped == 2
    assert int(run.optimizer.iterations) == 10


def test_resumed_run_skips_same_spikes_as_uninterrupted_run():
    run, new, norms = guarded(), guarded(), recorded("spikes")
    applied(run, norms[:21])
    new.optimizer.load_own_variables(saved(run.optimizer))
    assert applied(new, norms[21:]) == applied(run, norms[21:])
    skipped = [int(r.optimizer.skipped_spikes) for r in (run, new)]
    assert skipped[0] == skipped[1] > 0


@pytest.mark.parametrize("name", ["adadelta", "larc"])
def test_resumed_accumulation_is_judged_as_a_whole(name):
    guard = keras_lso.SpikeGuard(max_norm=2.0)
    run, new = (
        guarded(MAKES[name], guard, gradient_accumulation_steps=3) for _ in "ab"
    )
    grads = run.gradients(norm=1.0)

    def apply(run, *factors):
        for factor in factors:
            run.step([np.float32(factor) * g for g in grads])

    # The overflow is no micro-batch of the accumulation.
    apply(run, 90.0, np.inf, -1.0)
    new.optimizer.load_own_variables(saved(run.optimizer))
    sums = [v for v in new.inner.variables if v.name.endswith("_gradient_sum")]
    assert len(sums) == (len(new.weights) if name == "larc" else 0)
    for factors, spikes in ([-84.5], 0), ([1.0, 1.0, 4.5], 1):
        apply(new, *factors)
        assert int(new.optimizer.skipped_spikes) == spikes
        assert int(new.optimizer.iterations) == 1


@pytest.mark.parametrize("window", [8, 5, None])
@pytest.mark.parametrize("other", [8, 5, None])
def test_loaded_state_restores_history_only_if_windows_are_equal(window, other):
    def make(length):
        guard = length and keras_lso.SpikeGuard(3.0, length, 4)
        return built(K.Adam(0.01), spike_guard=guard)

    run, new = make(window), make(other)
    applied(run, np.linspace(1, 1.2, 6))
    new.optimizer.load_own_variables(saved(run.optimizer))
    assert int(new.optimizer.iterations) == 6
    assert bits(run.inner.variables) == bits(new.inner.variables)
    is_same = window == other and window is not None
    assert new.step(norm=100.0) is not is_same


def of_two_weights(masters, guard):
    """Returns a harness with as many masters as a guard has variables."""
    inner = K.Adam(0.01)
    return built(inner, "float16", master_weights=masters, spike_guard=guard)


@pytest.mark.parametrize("has_guard", [False, True])
def test_state_without_masters_and_with_history_loads_into_masters(has_guard):
    guard = keras_lso.SpikeGuard(3.0, window=8, warmup=4)
    old = of_two_weights(False, guard)
    applied(old, np.linspace(1, 1.2, 6))
    new = of_two_weights("float32", guard if has_guard else None)
    new.optimizer.load_own_variables(saved(old.optimizer))
    assert int(new.optimizer.iterations) == 6
    if has_guard:
        history = new.optimizer._spikes.variables
        assert bits(history) == bits(old.optimizer._spikes.variables)


def test_masters_are_not_loaded_as_history_of_spikes():
    old = of_two_weights("float32", None)
    applied(old, np.linspace(1, 1.2, 6))
    new = of_two_weights(False, keras_lso.SpikeGuard(3.0, window=8, warmup=4))
    with pytest.warns(UserWarning, match="Skipping variable loading"):
        new.optimizer.load_own_variables(saved(old.optimizer))
    assert int(new.optimizer.iterations) == 0


def test_members_chosen_by_function_may_not_accumulate_with_guard():
    sgd, adam = K.SGD(0.01, gradient_accumulation_steps=3), K.Adam(0.02)
    inner = multi_optimizer(lambda v: sgd if len(v.shape) == 2 else adam)
    optimizer = keras_lso.GuardedOptimizer(inner, spike_guard=keras_lso.SpikeGuard())
    variables = [keras.Variable(np.ones(s, "float32")) for s in SHAPES]
    with pytest.raises(ValueError, match="its own window"):
        optimizer.build(variables)


def test_config_of_guarded_optimizer_round_trips_spike_guard():
    guard = keras_lso.SpikeGuard(5.0, 32, 16, 100.0)
    config = keras_lso.GuardedOptimizer(K.SGD(), spike_guard=guard).get_config()
    again = keras_lso.GuardedOptimizer.from_config(config).spike_guard
    assert again == guard and again is not guard
    arguments = "threshold=5.0, window=32, warmup=16, max_norm=100.0"
    assert repr(again) == f"SpikeGuard({arguments})"


def test_optimizer_without_guard_counts_no_spikes():
    optimizer = keras_lso.LossScaleOptimizer(K.SGD())
    assert int(optimizer.skipped_spikes) == 0


@pytest.mark.parametrize("options", [{}, {"gradient_accumulation_steps": 2}], ids=str)
def test_stateless_apply_skips_same_spikes_as_apply(options):
    make = MAKES["larc" if options else "momentum"]
    run, twin = guarded(make, **options), guarded(make, **options)
    steps = [run.gradients(norm=norm) for norm in recorded("spikes")[:24]]
    run.assert_stateless_steps_equal_those_of(twin, steps)
    assert int(twin.optimizer.skipped_spikes) > 0


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
