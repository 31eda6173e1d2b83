"""The names and the examples on TensorFlow's pages.

The programs of docs/migrating.md run in `test_docs.py`. The page of the experimental
class is the docstring of the original, which TensorFlow still contains.
"""

import doctest

import keras
import numpy as np
import pytest

import keras_lso

MODERN = keras_lso.mixed_precision.LossScaleOptimizer
EXPERIMENTAL = keras_lso.mixed_precision.experimental.LossScaleOptimizer
TF1 = keras_lso.compat.v1.mixed_precision.MixedPrecisionLossScaleOptimizer

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.*LossScaleOptimizer is deprecated"),
]


def original_class():
    from tensorflow.python.keras.mixed_precision import loss_scale_optimizer

    return loss_scale_optimizer.LossScaleOptimizerV1


def run_doctest(source, **names):
    """Runs the examples in `source`; returns how many there were."""
    test = doctest.DocTestParser().get_doctest(source, names, "page", None, 0)
    report = []
    result = doctest.DocTestRunner(verbose=False).run(test, out=report.append)
    assert not result.failed, "".join(report)
    return result.attempted


def test_examples_on_page_of_experimental_class_run():
    page = original_class().__doc__
    for old, new in (
        ("tf.keras.mixed_precision", "keras_lso.mixed_precision"),
        ("tf.keras.optimizers", "keras.optimizers"),
        ("tf.compat.v1", "keras_lso.compat.v1"),
    ):
        assert old in page
        page = page.replace(old, new)
    assert run_doctest(page, keras=keras, keras_lso=keras_lso) == 14


# `get_weights` and `set_weights` on the page, but for the optimizer, the output of
# `fit`, and the shape of the labels, which Keras 3 no longer broadcasts.
RMSPROP = """
>>> m = keras.models.Sequential([keras.layers.Dense(10)])
>>> m.compile(opt, loss='mse')
>>> data = np.arange(100).reshape(5, 20)
>>> labels = np.zeros((5, 1))
>>> results = m.fit(data, labels, verbose=0)
>>> len(opt.get_weights())
3
>>> new_weights = [np.array(10), np.ones([20, 10]), np.zeros([10])]
>>> opt.set_weights(new_weights)
>>> int(opt.iterations)
10
"""


@pytest.mark.parametrize(
    "make",
    [
        lambda: MODERN(keras.optimizers.RMSprop()),
        lambda: EXPERIMENTAL(keras.optimizers.RMSprop(), "dynamic"),
        lambda: keras_lso.LARS(),
    ],
    ids=["modern", "experimental", "LARS"],
)
def test_examples_of_get_weights_and_set_weights_run(make):
    optimizer = make()
    assert run_doctest(RMSPROP, keras=keras, np=np, opt=optimizer) == 9
    iterations, kernel, bias = optimizer.get_weights()
    assert iterations == 10
    np.testing.assert_array_equal(kernel, np.ones([20, 10]))
    np.testing.assert_array_equal(bias, np.zeros([10]))


# ruff: noqa: SIM905

# TensorFlow 2.0 and 2.4.
OF_TF_KERAS = set(
    "__init__ optimizer loss_scale iterations learning_rate lr weights add_slot "
    "add_weight apply_gradients from_config get_config get_gradients get_scaled_loss "
    "get_slot get_slot_names get_unscaled_gradients get_updates get_weights minimize "
    "set_weights variables clipnorm clipvalue dynamic dynamic_counter "
    "dynamic_growth_steps global_clipnorm initial_scale inner_optimizer".split()
)
OF_TF1 = set(
    "opt loss_scale use_locking name apply_gradients compute_gradients minimize "
    "variables get_name get_slot get_slot_names".split()
)
OF_LOSS_SCALES = set(
    "__call__ update initial_loss_scale increment_period multiplier get_config "
    "from_config repr".split()
)
# The Model Garden's page.
OF_LARS = set(
    "learning_rate momentum weight_decay_rate eeta nesterov classic_momentum "
    "exclude_from_weight_decay exclude_from_layer_adaptation name clipnorm clipvalue "
    "global_clipnorm iterations weights add_slot add_weight apply_gradients "
    "from_config get_config get_gradients get_slot get_slot_names get_updates "
    "get_weights minimize set_weights variables".split()
)


@pytest.mark.parametrize(
    "make, names",
    [
        (lambda: MODERN(keras.optimizers.SGD()), OF_TF_KERAS),
        (lambda: EXPERIMENTAL(keras.optimizers.SGD(), "dynamic"), OF_TF_KERAS),
        (lambda: TF1(keras.optimizers.SGD(), "dynamic"), OF_TF1),
        (lambda: keras_lso.loss_scales.DynamicLossScale(), OF_LOSS_SCALES),
        (lambda: keras_lso.LARS(), OF_LARS),
    ],
    ids=["modern", "experimental", "TF1", "DynamicLossScale", "LARS"],
)
def test_classes_have_every_name_on_tensorflow_pages(make, names):
    made = make()
    # Arguments of the constructor; the rest are attributes and methods.
    for name in names - {"optimizer", "opt", "repr"}:
        assert hasattr(made, name), name
