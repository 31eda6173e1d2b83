"""The loss scales do what TF1's do, step for step.

`test_tf_keras_references.py` compares the optimizers around them.
"""

import numpy as np
import pytest
from keras import ops

from integration_tests.reference_steps import Rows, number, tensor, tensor_of_tensorflow
from keras_lso import loss_scales

STEPS = 300
# Our bounds: TF1's minimum, and a maximum that no step here reaches.
BOUNDS = dict(min_scale=1.0, max_scale=2.0**126)

pytestmark = pytest.mark.slow


def tf1():
    import tensorflow as tf

    return tf.compat.v1.mixed_precision


class Theirs:
    """TF1's dynamic scale, and its state after each update."""

    def __init__(self, *arguments):
        self.policy = tf1().DynamicLossScale(*arguments)

    def state(self):
        return float(self.policy()), int(self.policy._num_good_steps)

    def update(self, grads):
        """Returns whether to apply the gradients, and the state afterwards."""
        _, would_apply = self.policy.update(of_each(tensor_of_tensorflow, grads))
        return bool(would_apply), *self.state()


def of_each(function, grads):
    """Applies a function to each item of nested gradients."""
    if isinstance(grads, dict):
        return {key: of_each(function, item) for key, item in grads.items()}
    if isinstance(grads, list | tuple):
        return type(grads)(of_each(function, item) for item in grads)
    return function(grads)


def state(policy):
    return number(policy()), number(policy.step_counter)


def make_script(growth):
    """Returns the nested gradients of STEPS steps."""
    random = np.random.default_rng(growth)
    steps = []
    for step in range(STEPS):
        kernel = random.standard_normal((3, 2)).astype("float32")
        rows = random.standard_normal((3, 2)).astype("float32")
        overflows = random.random() < 1 / (growth + 1)
        if overflows:
            poisoned = kernel if random.random() < 0.5 else rows
            poisoned[tuple(random.integers(n) for n in poisoned.shape)] = random.choice(
                [np.inf, -np.inf, np.nan]
            )
        # One row twice; JAX takes long over their sum, so not at each step.
        slices = Rows(rows, random.permutation(5)[[0, 1, 0]], (5, 2))
        table = slices if step % 3 == 0 else slices.dense()
        # Sometimes the gradient with the overflow is missing.
        is_none = random.random() < 0.2
        steps.append({"a": [None if is_none else kernel, None], "b": (table,)})
    return steps


@pytest.mark.exhaustive
@pytest.mark.parametrize("growth", [1, 3, 50])
@pytest.mark.parametrize("multiplier", [2.0, 1.1])
def test_dynamic_scale_matches_tf1(multiplier, growth, original):
    arguments = multiplier**10, growth, multiplier
    script = make_script(growth)

    def run():
        theirs = Theirs(*arguments)
        return [(theirs.state()[0], *theirs.update(grads)) for grads in script]

    ours = loss_scales.DynamicLossScale(*arguments, **BOUNDS)
    ours.build()
    # TF1 divides by the multiplier, and we multiply by its inverse. Unless it is a
    # power of two, inverse and product are each off by half a unit in the last place.
    share = 0 if multiplier in (2.0, 4.0) else 1.2e-7
    moves = set()
    for step, (theirs, grads) in enumerate(zip(original(run), script, strict=True)):
        before, they_would, expected, their_counter = theirs
        # From the same scale, so that the difference is that of one step.
        if share:
            ours.scale.assign(before)
        assert state(ours)[0] == before, step
        update_op, we_would = ours.update(of_each(tensor, grads))
        assert update_op is None
        assert number(we_would) == they_would, step
        scale, our_counter = state(ours)
        assert our_counter == their_counter, step
        assert abs(scale - expected) <= share * expected, step
        moves.add(np.sign(scale - before))
    assert {-1, 1} <= moves


def test_dynamic_scale_with_defaults_matches_tf1(original):
    names = ("initial_loss_scale", "increment_period", "multiplier")
    values = 1.0, 1.0, 1.0, np.inf

    def run():
        theirs = Theirs()
        begin = theirs.state()
        theirs.policy._num_good_steps.assign(1998)
        return {
            "defaults": {name: getattr(theirs.policy, name) for name in names},
            "states": [begin, *(theirs.update([value])[1:] for value in values)],
        }

    theirs, ours = original(run), loss_scales.DynamicLossScale()
    assert {name: getattr(ours, name) for name in names} == theirs["defaults"]
    ours.build()
    states = [state(ours)]
    # The last steps before it grows.
    ours.step_counter.assign(1998)
    for value in values:
        ours.update([ops.array(value)])
        states.append(state(ours))
    assert states == theirs["states"]
    assert states[2] == (2.0**16, 0)


@pytest.mark.parametrize("value", [128, 1000.5])
def test_fixed_scale_matches_tf1_but_skips_overflow(value, original):
    grads = 1.0, np.inf, None

    def run():
        policy = tf1().FixedLossScale(value)
        found = []
        for grad in grads:
            _, would_apply = policy.update([tensor_of_tensorflow(grad)])
            found.append((float(policy()), would_apply))
        return found

    ours = loss_scales.FixedLossScale(value)
    for grad, (scale, they_would) in zip(grads, original(run), strict=True):
        _, we_would = ours.update([tensor(grad)])
        assert number(ours()) == scale == value
        # TF1 applies any gradients.
        assert they_would is True
        assert number(we_would) == (grad != np.inf)


CONFIGS = {
    "FixedLossScale": [{"loss_scale_value": 128.0}],
    "DynamicLossScale": [
        {},
        {"initial_loss_scale": 1024, "increment_period": 500, "multiplier": 4},
        {"initial_loss_scale": 1024, "increment_period": np.float32(500)},
    ],
}


@pytest.mark.parametrize(
    "name, arguments", [(name, a) for name, several in CONFIGS.items() for a in several]
)
def test_loss_scale_configs_round_trip_with_tf1(name, arguments, original):
    def run():
        cls = getattr(tf1(), name)
        config = cls(**arguments).get_config()
        return config, cls.from_config(config).get_config(), float(cls(**arguments)())

    config, read_again, scale = original(run)
    cls = getattr(loss_scales, name)
    # With the types, so that the JSON is the same, and TF1 reads ours.
    assert repr(cls(**arguments).get_config()) == repr(config) == repr(read_again)
    for ours in (
        cls.from_config(config),
        # As tf.keras 2.0 to 2.3 wrote it into a model's file.
        loss_scales.get({"class_name": name, "config": config}),
    ):
        assert type(ours) is cls
        assert repr(ours.get_config()) == repr(config)
        assert number(ours()) == scale
