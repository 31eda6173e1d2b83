"""The loss scales do what TF1's do, which run beside them, step for step.

`test_tf_keras_judges.py` compares the optimizers around them.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import ops

from keras_lso import loss_scales

BACKEND = keras.backend.backend()
TF1 = tf.compat.v1.mixed_precision
STEPS = 300
# Our bounds, wide enough for every step here, but for TF1's floor.
BOUNDS = dict(min_scale=1.0, max_scale=2.0**127)

pytestmark = pytest.mark.slow


def number(value):
    return np.array(ops.convert_to_numpy(value)).item()


def sparse(values, rows):
    """Returns a gradient of a (5, 2) variable, as TF1 takes it and as we do."""
    theirs = tf.IndexedSlices(tf.constant(values), tf.constant(rows), (5, 2))
    if BACKEND == "tensorflow":
        return theirs, theirs
    if BACKEND == "jax":
        from jax.experimental import sparse

        indices = ops.array(rows)[:, None]
        return theirs, sparse.BCOO((ops.array(values), indices), shape=(5, 2))
    dense = np.zeros((5, 2), "float32")
    np.add.at(dense, rows, values)
    return theirs, ops.array(dense)


def make_script(growth):
    """Returns STEPS pairs of nested gradients, TF1's and ours."""
    random = np.random.default_rng(growth)
    steps = []
    for _ in range(STEPS):
        kernel = random.standard_normal((3, 2)).astype("float32")
        rows = random.standard_normal((3, 2)).astype("float32")
        overflows = random.random() < 1 / (growth + 1)
        if overflows:
            poisoned = kernel if random.random() < 0.5 else rows
            poisoned[tuple(random.integers(n) for n in poisoned.shape)] = random.choice(
                [np.inf, -np.inf, np.nan]
            )
        # One row twice.
        slices = sparse(rows, random.permutation(5)[[0, 1, 0]])
        # At times the overflow is where there is no gradient.
        is_none = random.random() < 0.2
        steps.append(
            [
                {"a": [None if is_none else array(kernel), None], "b": (table,)}
                for array, table in zip((tf.constant, ops.array), slices, strict=True)
            ]
        )
    return steps


def make(initial, growth, multiplier, **bounds):
    theirs = TF1.DynamicLossScale(initial, growth, multiplier)
    return theirs, loss_scales.DynamicLossScale(initial, growth, multiplier, **bounds)


def state(policy):
    counter = policy._num_good_steps if isinstance(policy, TF1.LossScale) else None
    return number(policy()), number(policy.step_counter if counter is None else counter)


@pytest.mark.parametrize("growth", [1, 3, 50])
@pytest.mark.parametrize("multiplier", [2.0, 4.0, 3.0, 1.1])
def test_a_dynamic_scale(multiplier, growth):
    theirs, ours = make(multiplier**10, growth, multiplier, **BOUNDS)
    ours.build()
    # Where the multiplier is no power of two, TF1 divides by it, and we multiply by its
    # inverse: half a float32's last digit in the inverse, half a digit in the product.
    share = 0 if multiplier in (2.0, 4.0) else 1.2e-7
    moves = set()
    for step, (their_grads, our_grads) in enumerate(make_script(growth)):
        before = state(ours)[0]
        # From the same scale, so that the difference is that of one step.
        theirs._current_loss_scale.assign(before)
        _, they_would = theirs.update(their_grads)
        update_op, we_would = ours.update(our_grads)
        assert update_op is None
        assert number(we_would) == number(they_would), step
        (expected, their_counter), (scale, our_counter) = state(theirs), state(ours)
        assert our_counter == their_counter, step
        assert abs(scale - expected) <= share * expected, step
        moves.add(np.sign(scale - before))
    assert {-1, 1} <= moves


def test_a_dynamic_scale_with_the_defaults():
    theirs, ours = TF1.DynamicLossScale(), loss_scales.DynamicLossScale()
    assert number(ours()) == number(theirs()) == 2.0**15
    for name in ("initial_loss_scale", "increment_period", "multiplier"):
        assert getattr(ours, name) == getattr(theirs, name)
    ours.build()
    # The last steps before it grows.
    theirs._num_good_steps.assign(1998)
    ours.step_counter.assign(1998)
    for value, expected in (
        (1.0, (2.0**15, 1999)),
        (1.0, (2.0**16, 0)),
        (1.0, (2.0**16, 1)),
        (np.inf, (2.0**15, 0)),
    ):
        theirs.update([tf.constant(value)])
        ours.update([ops.array(value)])
        assert state(ours) == state(theirs) == expected


def test_the_floor_is_lower():
    theirs, ours = make(2.0, 3, 2.0)
    for expected in (1.0, 0.5, 0.25):
        theirs.update([tf.constant(np.inf)])
        ours.update([ops.array(np.inf)])
        assert number(ours()) == expected
        assert number(theirs()) == 1.0


def test_the_top_of_float32():
    """TF1 leaves the scale where it is, we take it to the ceiling."""
    for multiplier, top in ((2.0, 2.0**127), (3.0, 3 * 2.0**126)):
        theirs, ours = make(2.0**126, 1, multiplier, **BOUNDS)
        for _ in range(3):
            theirs.update([tf.constant(1.0)])
            ours.update([ops.array(1.0)])
        assert number(theirs()) == top
        assert number(ours()) == 2.0**127


@pytest.mark.parametrize("value", [1.0, 128, 1000.5])
def test_a_fixed_scale(value):
    theirs, ours = TF1.FixedLossScale(value), loss_scales.FixedLossScale(value)
    for grad in (1.0, np.inf, None):
        _, they_would = theirs.update([grad if grad is None else tf.constant(grad)])
        _, we_would = ours.update([grad if grad is None else ops.array(grad)])
        assert number(ours()) == number(theirs()) == value
        # TF1 applies whatever comes.
        assert they_would is True
        assert number(we_would) == (grad != np.inf)


CONFIGS = {
    "FixedLossScale": [{"loss_scale_value": 128.0}],
    "DynamicLossScale": [
        {},
        {"initial_loss_scale": 1024, "increment_period": 500, "multiplier": 4},
        {"initial_loss_scale": 1e3, "increment_period": 1, "multiplier": 1.1},
        {"initial_loss_scale": 1024, "increment_period": 500.0},
        {"initial_loss_scale": 1024, "increment_period": np.float32(500)},
    ],
}


@pytest.mark.parametrize(
    "name, arguments", [(name, a) for name, several in CONFIGS.items() for a in several]
)
def test_configs_go_both_ways(name, arguments):
    their_class, our_class = getattr(TF1, name), getattr(loss_scales, name)
    config = their_class(**arguments).get_config()
    # The types, too: what stands in a JSON file is the same.
    assert repr(our_class(**arguments).get_config()) == repr(config)
    for ours in (
        our_class.from_config(config),
        # As tf.keras 2.0 to 2.3 wrote it into a model's file.
        loss_scales.get({"class_name": name, "config": config}),
    ):
        assert type(ours) is our_class
        assert repr(their_class.from_config(ours.get_config()).get_config()) == repr(
            config
        )
        assert number(ours()) == number(their_class(**arguments)())
