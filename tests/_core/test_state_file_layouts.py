"""State files of the inner optimizer, of Keras's class and of ours are recognized.

Keras's class builds the inner optimizer with tracking off, and does not save its
variables that are only attributes: one scalar of Nadam, two for each vector of
Adafactor. With two vectors its file is as long as that of the bare optimizer.
"""

import functools
import warnings

import keras
import numpy as np
import pytest

from keras_lso import GuardedOptimizer, LossScaleOptimizer, SpikeGuard
from testing.harness import Harness
from testing.trained_optimizers import filled, named_slots, number, saved

SHAPES = {
    "a matrix": [(3, 2)],
    "a vector": [(3,)],
    "two vectors": [(3,), (3,)],
    "two scalars": [(), ()],
    "two layers": [(3, 2), (2,), (2, 2), (2,)],
    "two vectors first": [(2,), (2,), (3, 2), (2, 2)],
}
INNER = {
    "Adam": keras.optimizers.Adam,
    "Nadam": keras.optimizers.Nadam,
    "Adafactor": keras.optimizers.Adafactor,
    "Adafactor with a schedule": lambda: keras.optimizers.Adafactor(
        keras.optimizers.schedules.ExponentialDecay(0.5, 9, 0.5)
    ),
    "Adafactor, averaging": lambda: keras.optimizers.Adafactor(use_ema=True),
}
WRAPPERS = {
    "nobody": lambda inner: inner,
    "Keras": keras.optimizers.LossScaleOptimizer,
    "us": LossScaleOptimizer,
}
every_inner = pytest.mark.parametrize("inner", INNER)


@pytest.mark.parametrize("writer", WRAPPERS)
@pytest.mark.parametrize("shapes", SHAPES)
@every_inner
def test_state_layout_of_each_writer_is_recognized(inner, shapes, writer):
    shapes = SHAPES[shapes]
    written = filled(WRAPPERS[writer](INNER[inner]()), shapes)
    ours = LossScaleOptimizer(INNER[inner](), initial_scale=8.0)
    ours.build([keras.Variable(np.ones(shape, "float32")) for shape in shapes])
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        ours.load_own_variables(saved(written))
    assert named_slots(ours) == named_slots(written)
    if writer == "nobody":
        assert number(ours.loss_scale) == 8.0
        assert number(ours.step_counter) == 0
    else:
        assert number(ours.loss_scale) == 4.0
        assert number(ours.step_counter) == 3


@pytest.mark.parametrize("steps", [0, 3, 2000])
def test_nadam_momenta_product_missing_in_keras_state_is_recomputed(steps):
    theirs = filled(keras.optimizers.LossScaleOptimizer(keras.optimizers.Nadam()), [()])
    theirs.inner_optimizer.iterations.assign(steps)
    ours = filled(LossScaleOptimizer(keras.optimizers.Nadam()), [()])
    ours.load_own_variables(saved(theirs))
    momenta = 0.9 * (1 - 0.5 * 0.96 ** np.arange(1.0, steps + 1))
    # It is a product in float32.
    np.testing.assert_allclose(
        number(ours.inner_optimizer._u_product), np.prod(momenta), rtol=1e-6, atol=1e-37
    )


def test_saved_nadam_momenta_product_is_not_recomputed():
    ours = filled(LossScaleOptimizer(keras.optimizers.Nadam()), [()])
    # `beta_1` would make another number of it now.
    ours.inner_optimizer._u_product.assign(0.625)
    again = filled(LossScaleOptimizer(keras.optimizers.Nadam()), [()])
    again.load_own_variables(saved(ours))
    assert number(again.inner_optimizer._u_product) == 0.625


def test_rejected_state_leaves_nadam_momenta_product_unchanged(snapshot):
    theirs = filled(keras.optimizers.LossScaleOptimizer(keras.optimizers.Nadam()), [()])
    ours = filled(LossScaleOptimizer(keras.optimizers.Nadam()), [()])
    before = snapshot(ours.variables)
    store = {**saved(theirs), "7": np.ones(2, "float32")}
    with pytest.raises(ValueError, match="has shape"):
        ours.load_own_variables(store)
    assert snapshot(ours.variables) == before


def test_unbuilt_wrapper_does_not_load_scalar_slots_of_bare_optimizer(snapshot):
    unbuilt = LossScaleOptimizer(keras.optimizers.SGD(0.5, momentum=0.5))
    before = snapshot(unbuilt.variables)
    bare = keras.optimizers.SGD(0.25, momentum=0.5)
    filled(bare, [()] * (len(saved(unbuilt)) - 2))
    with pytest.warns(UserWarning, match="has not been built yet"):
        unbuilt.load_own_variables(saved(bare))
    assert snapshot(unbuilt.variables) == before


def test_state_with_empty_16_bit_weight_is_not_taken_for_one_with_masters():
    runs = []
    for _ in "ab":
        inner = keras.optimizers.SGD(0.1, momentum=0.9)
        variables = [keras.Variable(np.zeros(0), dtype="bfloat16"), keras.Variable(1.0)]
        variables.append(keras.Variable(np.zeros(0, "float32")))
        runs.append(Harness(LossScaleOptimizer(inner, master_weights=False), variables))
    run, other = runs
    run.step()
    other.optimizer.load_own_variables(saved(run.optimizer))
    assert int(other.optimizer.iterations) == 1


# Each with another number or order of slots.
PHASES = {
    "SGD": lambda: keras.optimizers.SGD(0.1),
    "momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    "Adam": keras.optimizers.Adam,
    "amsgrad": lambda: keras.optimizers.Adam(amsgrad=True),
    "Nadam": keras.optimizers.Nadam,
    "Adafactor": keras.optimizers.Adafactor,
}
WRITERS = {
    **WRAPPERS,
    "us, without a scale": GuardedOptimizer,
    "us, with a spike guard": lambda inner: LossScaleOptimizer(
        inner, spike_guard=SpikeGuard(window=16, warmup=8)
    ),
}


@functools.cache
def made(wrap, inner, layers):
    """An optimizer of that many layers, each with a kernel and a bias."""
    optimizer = WRITERS[wrap](PHASES[inner]())
    optimizer.build([keras.Variable(np.ones(s)) for s in [(4, 4), (4,)] * layers])
    return optimizer


@functools.cache
def state_of(wrap, inner, layers):
    return saved(made(wrap, inner, layers))


def outcome(optimizer, store):
    """Whether a state "loads", is "skipped" with a warning, or "fails" to load."""
    before = [v.numpy().tobytes() for v in optimizer.variables]
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "Skipping variable loading")
        try:
            optimizer.load_own_variables(store)
        except UserWarning:
            assert [v.numpy().tobytes() for v in optimizer.variables] == before
            return "skipped"
        except Exception:
            return "fails"
    return "loads"


@functools.cache
def outcome_in_keras(wrap, saved_with, *loaded_into):
    return outcome(made(wrap, *loaded_into), state_of(wrap, *saved_with))


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("reader", ["us", "us, with a spike guard"])
@pytest.mark.parametrize("inner", PHASES)
def test_state_of_other_layers_or_optimizer_is_skipped_as_in_keras(
    inner, reader, writer
):
    both = ("nobody", "Keras")
    references = (writer,) if writer in both else both
    for layers in (1, 2, 3):
        for saved_with in [(name, n) for name in PHASES for n in (1, 2, 3)]:
            expected = {
                outcome_in_keras(wrap, saved_with, inner, layers) for wrap in references
            }
            store = state_of(writer, *saved_with)
            result = outcome(made(reader, inner, layers), store)
            # Keras fails in the middle of a state of the same length.
            assert result in expected or (result, expected) == ("skipped", {"fails"})


def test_masters_of_other_layers_are_not_taken_for_slots_or_more_masters():
    def of_16_bits(inner, layers, **arguments):
        optimizer = LossScaleOptimizer(PHASES[inner](), **arguments)
        weights = [keras.Variable([1.0, 2.0], dtype="bfloat16") for _ in range(layers)]
        optimizer.build(weights)
        return optimizer

    # A slot and a master.
    store = saved(of_16_bits("momentum", 1))
    assert outcome(of_16_bits("momentum", 1), store) == "loads"
    without = of_16_bits("momentum", 2, master_weights=False)
    assert outcome(without, store) == "skipped"
    assert outcome(of_16_bits("SGD", 2), store) == "skipped"
