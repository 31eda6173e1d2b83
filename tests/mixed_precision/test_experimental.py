"""`keras_lso.mixed_precision`: the names of tf.keras, and the deprecated class."""

import copy
import pickle
import warnings

import keras
import pytest
from keras import ops

import keras_lso
from keras_lso import LossScaleOptimizer, loss_scales
from keras_lso.loss_scales import DynamicLossScale, FixedLossScale, LossScale
from keras_lso.mixed_precision import experimental


def sgd():
    return keras.optimizers.SGD(0.5)


def make(loss_scale):
    return experimental.LossScaleOptimizer(sgd(), loss_scale)


class Mine(LossScale):
    def step(self, finite, amax=None):
        pass


def test_experimental_class_is_subclass_of_modern_class():
    assert issubclass(experimental.LossScaleOptimizer, LossScaleOptimizer)
    assert isinstance(make("dynamic"), keras_lso.mixed_precision.LossScaleOptimizer)
    assert isinstance(make("dynamic"), keras.optimizers.LossScaleOptimizer)
    assert not isinstance(LossScaleOptimizer(sgd()), experimental.LossScaleOptimizer)


LOSS_SCALES = {
    "dynamic": lambda: "dynamic",
    "an int": lambda: 123,
    "fixed": lambda: FixedLossScale(7),
    "with arguments": lambda: DynamicLossScale(2048, 500),
    "with a bound": lambda: DynamicLossScale(min_scale=1),
    "with another factor": lambda: DynamicLossScale(growth_factor=4.0, hysteresis=2),
    "a config": lambda: loss_scales.serialize(DynamicLossScale(4.0, 3)),
}
every_loss_scale = pytest.mark.parametrize(
    "loss_scale", LOSS_SCALES.values(), ids=LOSS_SCALES
)


@every_loss_scale
def test_deprecation_warning_prints_equivalent_modern_call(loss_scale):
    with pytest.warns(DeprecationWarning) as caught:
        optimizer = make(loss_scale())
    [warning] = caught
    assert warning.filename == __file__
    before, call = str(warning.message).split("Write instead: ")
    assert "experimental.LossScaleOptimizer is deprecated" in before
    names = {"keras_lso": keras_lso, "optimizer": sgd()}
    modern = eval(call, vars(loss_scales) | names)
    assert type(modern) is LossScaleOptimizer
    assert modern.get_config() == optimizer.get_config()
    assert float(modern.loss_scale) == float(optimizer.loss_scale)
    assert modern.dynamic_growth_steps == optimizer.dynamic_growth_steps


MODERN = r"keras_lso.LossScaleOptimizer\(optimizer, loss"
WRONG = {
    "a multiplier": (lambda: DynamicLossScale(multiplier=4), ValueError, MODERN),
    "a class": (lambda: Mine(8), TypeError, MODERN),
    "none": (lambda: None, ValueError, "must be a number, 'dynamic'"),
    "zero": (lambda: 0, ValueError, "must be positive and finite"),
    "another dict": (lambda: {"scale": 8}, ValueError, "as its 'class_name'"),
    "an unknown class": (
        lambda: {"class_name": "Unknown", "config": {}},
        ValueError,
        "describes no loss scale",
    ),
}


@pytest.mark.parametrize("kind", WRONG)
def test_invalid_loss_scale_is_rejected(kind):
    value, error, words = WRONG[kind]
    inner = sgd()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # no deprecation before the error
        with pytest.raises(error, match=words):
            experimental.LossScaleOptimizer(inner, value())
    experimental.LossScaleOptimizer(inner, 8)


def check_is(others, cls, optimizer):
    for other in others:
        assert type(other) is cls
        assert other.get_config() == optimizer.get_config()
        assert float(other.loss_scale) == float(optimizer.loss_scale)


@every_loss_scale
def test_copies_keep_experimental_class_and_configs_give_modern_one(loss_scale):
    # "Deserializing a LossScaleOptimizer always results in a V2 LossScaleOptimizer,
    # even if serialized with a LossScaleOptimizerV1", say the tests of TensorFlow 2.4.
    optimizer = make(loss_scale())
    config = keras.optimizers.serialize(optimizer)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*LossScaleOptimizer is deprecated")
        modern = [
            keras_lso.deserialize(config),
            keras.optimizers.deserialize(config),
            keras.saving.deserialize_keras_object(config),
        ]
        same = [
            experimental.LossScaleOptimizer.from_config(optimizer.get_config()),
            pickle.loads(pickle.dumps(optimizer)),
            copy.deepcopy(optimizer),
        ]
    check_is(modern, LossScaleOptimizer, optimizer)
    check_is(same, experimental.LossScaleOptimizer, optimizer)
    again = keras.optimizers.serialize(modern[0])
    assert again["registered_name"] == "keras_lso>LossScaleOptimizer"
    for other in same:
        w = keras.Variable([3.0])
        other.apply_gradients([(ops.ones(1), w)])
        assert w.numpy().tolist() == [2.5]  # pairs are unscaled, as in tf.keras


def test_policy_stays_usable_if_deprecation_warning_is_error():
    policy = DynamicLossScale()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(
            DeprecationWarning, match="LossScaleOptimizer is deprecated"
        ):
            make(policy)
    LossScaleOptimizer(sgd(), loss_scale=policy)
