"""`LAMB`: Adam with layer-wise adaptive rates, for large batches.

It is apart from `_core/lamb.py`, which has the behaviour: this file holds the
documentation, and adds the methods that code for tf.keras and the Model Garden calls.
"""

import keras

from keras_lso._backend import layer_rules
from keras_lso._core import lamb as core
from keras_lso._keras_internals.rule_optimizer import steps_by
from keras_lso._tf_keras.methods import TFKerasMethods


@steps_by(layer_rules.LAMB, slots=("momentums", "velocities"))
@keras.saving.register_keras_serializable("keras_lso", name="LAMB")
class LAMB(TFKerasMethods, core.LAMB):
    """Optimizer that gives each layer a learning rate of its own, on top of Adam.

    LAMB moves each layer in the direction of Adam with weight decay, and as far as a
    share of the norm of its weights: `learning_rate` is that share. Transformers train
    with it at batch sizes at which one rate for all layers is too high for some.

    ```python
    m = beta_1 * m + (1 - beta_1) * g
    v = beta_2 * v + (1 - beta_2) * g**2
    m_hat = m / (1 - beta_1**t)             # bias_correction=False: m_hat = m
    v_hat = v / (1 - beta_2**t)             # bias_correction=False: v_hat = v
    d = m_hat / (sqrt(v_hat) + epsilon) + weight_decay_rate * w

    trust_ratio = min(max(|w| / |d|, min_trust_ratio), max_trust_ratio)
    trust_ratio = 1 where |w| or |d| is 0
    w = w - learning_rate * trust_ratio * d
    ```

    `t` is the number of this update, from 1. This is Algorithm 2 of the paper, which
    bounds `|w|` where this class bounds the ratio, if it is asked to.

    Norms are those of whole variables, accumulated in float32 at least. Trust ratios
    are of unscaled gradients: for float16 write
    `keras_lso.LossScaleOptimizer(LAMB(...))`. `build` determines which variables are
    excluded.

    Args:
        learning_rate: A float, a `keras.optimizers.schedules.LearningRateSchedule`,
            or a callable without arguments that returns the value to use. Defaults to
            `0.001`.
        beta_1: Float of at least 0 and below 1. How much of the mean of the gradients
            is kept in a step. Defaults to `0.9`.
        beta_2: Float of at least 0 and below 1. How much of the mean of their squares
            is kept in a step. Defaults to `0.999`.
        epsilon: Float. Added to the root of that mean. 0 stands for
            `keras.config.epsilon()`, as in the Model Garden. Defaults to `1e-6`.
        weight_decay_rate: Float. The factor of the weights in the direction, which
            takes part in the trust ratio. Defaults to `0.0`.
        exclude_from_weight_decay: List of regular expressions. A variable whose
            path (`"block/layer_norm/gamma"`) holds a match of one of them is not
            decayed. Defaults to `None`: all are. A variable that Keras's method of the
            same name excludes is not decayed either. The `:0` at the end of
            TensorFlow's names may be in a pattern. `build` warns of a pattern that
            matches nothing: if none of the list matches, or if what is near to it, as
            `layer_norm` is to `LayerNorm`, is not excluded.
        exclude_from_layer_adaptation: List of regular expressions. A variable whose
            path holds a match has a trust ratio of 1. Defaults to `None`: the same
            as `exclude_from_weight_decay`. An empty list excludes none.
        name: String. The name of the optimizer. Defaults to `"LAMB"`.
        bias_correction: Bool. Whether the moments, which begin with 0, are divided by
            what they have forgotten. Defaults to `True`.
        min_trust_ratio: Float. The lower bound of the trust ratio. Defaults to `None`:
            there is none.
        max_trust_ratio: Float. The upper bound of the trust ratio. Defaults to `None`:
            there is none.
        exclude_1d: Bool. Whether to exclude every variable of less than two
            dimensions, such as biases and the weights of normalization, from both
            decay and adaptation. The biases of `keras.layers.MultiHeadAttention` have
            two: exclude those by `"bias"`. Defaults to `False`.
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
    >>> optimizer = keras_lso.LAMB(learning_rate=0.1)
    >>> w = keras.Variable([3.0, 4.0])
    >>> optimizer.apply([keras.ops.array([0.0, 100.0])], [w])
    >>> print(w.numpy())  # |w| is 5: a step of 0.1 * 5
    [3.  3.5]

    What BERT is trained with, but for the schedule:

    >>> optimizer = keras_lso.LAMB(
    ...     2e-3,
    ...     weight_decay_rate=0.01,
    ...     exclude_from_weight_decay=["(?i)layer_?norm", "bias"],
    ...     global_clipnorm=1.0,
    ... )

    References:

    - [You et al., 2020, Large Batch Optimization for Deep Learning: Training BERT in
        76 minutes](https://arxiv.org/abs/1904.00962), Algorithm 2
    - [TensorFlow Model Garden, `tfm.optimization.lamb.LAMB`](
        https://www.tensorflow.org/api_docs/python/tfm/optimization/lamb/LAMB)
    """
