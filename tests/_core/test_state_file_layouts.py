"""The layouts of saved state: of the inner optimizer, of Keras's class and of ours.

Keras's class builds the inner optimizer with tracking off, and does not save what
that sets as attributes: one scalar of Nadam, two for each vector of Adafactor. With
two vectors its file is as long as that of the bare optimizer.
"""

import warnings

import keras
import numpy as np
import pytest
from keras import ops

from keras_lso import LossScaleOptimizer
from testing.trained_optimizers import number, saved

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


def filled(optimizer, shapes):
    """An optimizer that is built, and has another number in each of its variables."""
    optimizer.build([keras.Variable(np.ones(shape, "float32")) for shape in shapes])
    for i, variable in enumerate(optimizer.variables):
        variable.assign(np.full(variable.shape, i + 1))
    return optimizer


def named_values(optimizer):
    """Those of the innermost variables that were added by name, which all save."""
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)
    return [v.numpy().tobytes() for v in optimizer.variables if "/" in v.path]


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
    assert named_values(ours) == named_values(written)
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
    # Not what `beta_1` would make of it now.
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
    stores = []
    for _ in range(2):
        variables = [keras.Variable(np.zeros(0), dtype="bfloat16"), keras.Variable(1.0)]
        variables.append(keras.Variable(np.zeros(0, "float32")))
        optimizer = LossScaleOptimizer(
            keras.optimizers.SGD(0.1, momentum=0.9), master_weights=False
        )
        optimizer.build(variables)
        if stores:
            optimizer.load_own_variables(stores[0])
        else:
            grads = [ops.ones(v.shape, v.dtype) for v in variables]
            optimizer.apply(grads, scaled=False)
            stores.append({})
            optimizer.save_own_variables(stores[0])
    assert int(optimizer.iterations) == 1
