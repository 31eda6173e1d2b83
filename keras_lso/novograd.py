"""`NovoGrad`: momentum of gradients that are normalized layer by layer.

It is apart from `_core/novograd.py`, which has the behaviour: this file holds the
documentation, and adds the methods that code for tf.keras calls.
"""

import keras

from keras_lso._backend import layer_rules
from keras_lso._core import novograd as core
from keras_lso._keras_internals.rule_optimizer import steps_by
from keras_lso._tf_keras.methods import TFKerasMethods


@steps_by(layer_rules.NovoGrad, slots=("momentums", "second_moments"))
@keras.saving.register_keras_serializable("keras_lso", name="NovoGrad")
class NovoGrad(TFKerasMethods, core.NovoGrad):
    """Optimizer that divides the gradient of each layer by its average norm.

    Adam divides each element of a gradient by the root of its second moment.
    NovoGrad has one second moment for a whole layer: an average of the squared norm
    of its gradient. So its state is half as large as Adam's, and a step does not grow
    with the norm of the gradient.

    ```python
    v = |g|**2 if v == 0 else beta_2 * v + (1 - beta_2) * |g|**2
    d = g / sqrt(v + epsilon) + weight_decay_rate * w
    d = (1 - beta_1) * d                                # grad_averaging=True

    m = beta_1 * m + d
    w = w - learning_rate * m
    ```

    A layer is one variable. Its first gradient that is not zero sets `v`, so that
    there is no bias to correct. Norms are accumulated in float32 at least, and `v` has
    that dtype, whatever the dtype of the weights. A norm below 1e-19 may count as 0;
    one above 1.8e19 counts as infinite, and that gradient enters neither `m` nor `v`.
    Norms are of unscaled gradients: for float16 write
    `keras_lso.LossScaleOptimizer(NovoGrad(...))`.

    This is the formula of OpenSeq2Seq, with `epsilon` under the root. (Its code
    computes the average but never stores it, so it trained with `beta_2=0`.) With
    `epsilon=0` it equals `optax.novograd` with `eps=0`, unless the first gradient of a
    layer is zero.

    Args:
        learning_rate: A float, a `keras.optimizers.schedules.LearningRateSchedule`,
            or a callable without arguments that returns the value to use. Normalized
            gradients have a norm of about 1 whatever the loss is, so it is lower than
            that of SGD: OpenSeq2Seq's recipe for Jasper starts at 0.02. Defaults to
            `0.01`.
        beta_1: Float between 0 and 1. The decay of the momentum. Defaults to `0.95`.
        beta_2: Float between 0 and 1. The decay of the second moment. With 0 each
            gradient is divided by its own norm. Defaults to `0.98`.
        epsilon: Float. Added to the second moment, under the root. If 0, a gradient
            of zeros stays zero. Defaults to `1e-8`.
        weight_decay_rate: Float. The factor of the weights that are added to the
            normalized gradient. Other versions of NovoGrad call it `weight_decay`,
            which means decoupled decay in Keras. Defaults to `0.0`.
        grad_averaging: Bool. Whether the momentum is an average, as in Adam, which
            multiplies the steps by `1 - beta_1`. Defaults to `False`.
        exclude_from_weight_decay: List of regular expressions. A variable whose
            path (`"block/bn/gamma"`) holds a match of one of them is not decayed.
            Defaults to `None`: all are. A variable that Keras's method of the same
            name excludes is not decayed either. The `:0` at the end of TensorFlow's
            names may be in a pattern. `build` warns of a pattern that matches nothing:
            if none of the list matches, or if what is near to it is not excluded.
        name: String. The name of the optimizer. Defaults to `"NovoGrad"`.
        **kwargs: The keywords of every Keras optimizer (`clipnorm`,
            `global_clipnorm`, `clipvalue`, `use_ema`, `ema_momentum`,
            `ema_overwrite_frequency`, `gradient_accumulation_steps`,
            `weight_decay`, ...).

    Attributes:
        momentums: List of variables, the `m` of each trainable variable.
        second_moments: List of scalar variables, the `v` of each.

    Raises:
        ValueError, TypeError: If an argument is none of the above.

    Example:

    >>> import keras, keras_lso
    >>> optimizer = keras_lso.NovoGrad(learning_rate=0.5, beta_1=0.9)
    >>> w = keras.Variable([3.0, 4.0])
    >>> optimizer.apply([keras.ops.array([0.0, 100.0])], [w])
    >>> print(w.numpy())  # the direction of the gradient is 0, 1
    [3.  3.5]
    >>> optimizer.apply([keras.ops.array([0.0, 0.0])], [w])
    >>> print(w.numpy())  # the momentum is 0, 0.9
    [3.   3.05]

    References:

    - [Ginsburg et al., 2019, Stochastic Gradient Methods with Layer-wise Adaptive
        Moments for Training of Deep Networks](https://arxiv.org/abs/1905.11286)
    - [OpenSeq2Seq, `NovoGrad`](
        https://github.com/NVIDIA/OpenSeq2Seq/blob/master/open_seq2seq/optimizers/novograd.py)
    """
