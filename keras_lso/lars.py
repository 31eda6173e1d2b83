"""`LARS`: layer-wise adaptive rate scaling, for large batches.

It is apart from `_core/lars.py`, which has the behaviour: this file holds the
documentation, and adds the methods that code for tf.keras and the Model Garden calls.
"""

import keras

from keras_lso._backend import layer_rules
from keras_lso._core import lars as core
from keras_lso._keras_internals.rule_optimizer import steps_by
from keras_lso._tf_keras.methods import TFKerasMethods


@steps_by(layer_rules.LARS, slots=("momentums",))
@keras.saving.register_keras_serializable("keras_lso", name="LARS")
class LARS(TFKerasMethods, core.LARS):
    """Optimizer that gives each layer a learning rate of its own.

    LARS moves each layer in proportion to its weights: by a share `eeta` of their
    norm, whatever the norm of its gradient. No layer then diverges at a learning rate
    that is high enough for large batches.

    ```python
    d = g + weight_decay_rate * w
    trust_ratio = eeta * |w| / |d|                          # 1 where a norm is 0

    v = momentum * v + learning_rate * trust_ratio * d
    w = w - v                                               # nesterov=False
    w = w - (momentum * v + learning_rate * trust_ratio * d)    # nesterov=True
    ```

    With `classic_momentum=False` the learning rate does not enter the momentum, and
    the trust ratio is that of the update:

    ```python
    v = momentum * v + d
    u = v                                                   # nesterov=False
    u = momentum * v + d                                    # nesterov=True
    trust_ratio = eeta * |w| / |u|                          # 1 where a norm is 0
    w = w - learning_rate * trust_ratio * u
    ```

    Norms are those of whole variables, accumulated in float32 at least: a norm above
    1.8e19 counts as infinite (the layer does not move), one below 1e-22 as 0. Trust
    ratios are of unscaled gradients: for float16 write
    `keras_lso.LossScaleOptimizer(LARS(...))`. `build` determines which variables are
    excluded.

    Args:
        learning_rate: A float, a `keras.optimizers.schedules.LearningRateSchedule`,
            or a callable without arguments that returns the value to use. It is
            multiplied by a layer's trust ratio, and thus far higher than that of SGD:
            10 for a ResNet-50 at batch size 4,096. Defaults to `0.01`.
        momentum: Float between 0 and 1. Defaults to `0.9`.
        weight_decay_rate: Float. The factor of the L2 penalty's gradient, which
            takes part in the trust ratio. Defaults to `0.0`.
        eeta: Float. The share of a layer's norm by which it moves at a learning
            rate of 1; the paper's trust coefficient. Defaults to `0.001`.
        nesterov: Bool. Whether to use Nesterov momentum. Defaults to `False`.
        classic_momentum: Bool. Whether the learning rate enters the momentum.
            Defaults to `True`.
        exclude_from_weight_decay: List of regular expressions. A variable whose
            path (`"block/bn/gamma"`) holds a match of one of them is not decayed.
            Defaults to `None`: all are. A variable that Keras's method of the same
            name excludes is not decayed either. The `:0` at the end of TensorFlow's
            names may be in a pattern. `build` warns of a pattern that matches nothing:
            if none of the list matches, or if what is near to it is not excluded.
        exclude_from_layer_adaptation: List of regular expressions. A variable whose
            path holds a match has a trust ratio of 1. Defaults to `None`: the same
            as `exclude_from_weight_decay`. An empty list excludes none.
        name: String. The name of the optimizer. Defaults to `"LARS"`.
        trust_ratio: `"model_garden"`, as above, or `"paper"`, as in the paper and
            in MLPerf's reference, for classic momentum only:
            `eeta * |w| / (|g| + weight_decay_rate * |w| + epsilon)`. Defaults to
            `"model_garden"`.
        epsilon: Float. Added to the denominator of the trust ratio. Defaults to `0.0`.
        trust_clip: Bool. Whether trust ratios above 1 become 1. Defaults to `False`.
        exclude_1d: Bool. Whether to exclude every variable of less than two
            dimensions, such as biases and the weights of normalization, from both
            decay and adaptation, as MLPerf and MoCo do. Defaults to `False`.
        **kwargs: The keywords of every Keras optimizer (`clipnorm`,
            `global_clipnorm`, `clipvalue`, `use_ema`, `ema_momentum`,
            `ema_overwrite_frequency`, `gradient_accumulation_steps`,
            `weight_decay`, ...), and two of tf.keras: `lr`, another name of
            `learning_rate`, and `decay`, which divides the learning rate by
            `1 + decay * iterations`.

    Raises:
        ValueError, TypeError: If an argument is none of the above.

    Example:

    >>> import keras, keras_lso
    >>> optimizer = keras_lso.LARS(learning_rate=10.0, momentum=0.9)
    >>> w = keras.Variable([3.0, 4.0])
    >>> optimizer.apply([keras.ops.array([0.0, 100.0])], [w])
    >>> print(w.numpy())  # |w| is 5: a step of 10 * 0.001 * 5
    [3.   3.95]

    Only matrices and kernels adapt and decay, without a list of names:

    >>> optimizer = keras_lso.LARS(10.0, weight_decay_rate=2e-4, exclude_1d=True)

    References:

    - [You, Gitman, Ginsburg, 2017, Large Batch Training of Convolutional Networks](
        https://arxiv.org/abs/1708.03888)
    - [TensorFlow Model Garden, `tfm.optimization.lars.LARS`](
        https://www.tensorflow.org/api_docs/python/tfm/optimization/lars/LARS)
    """
