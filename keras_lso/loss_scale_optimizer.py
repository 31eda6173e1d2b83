"""`LossScaleOptimizer`: the guard around an inner optimizer, as users know it.

What it does is in `_core/loss_scale_optimizer.py`; here are its documentation and the
methods that code for tf.keras calls.
"""

import keras

from keras_lso._core import loss_scale_optimizer as core
from keras_lso._tf_keras.loss_scaling_methods import TFKerasLossScaling


@keras.saving.register_keras_serializable("keras_lso", name="LossScaleOptimizer")
class LossScaleOptimizer(TFKerasLossScaling, core.LossScaleOptimizer):
    """An optimizer that scales the loss, so that float16 gradients survive.

    Loss scaling multiplies the loss by a number, the loss scale, before the
    gradients are computed, and divides the gradients by it afterwards. In exact
    arithmetic that changes nothing. In float16 it keeps small gradients from
    being flushed to zero.

    ```python
    gradients = gradients_of(loss * scale)
    if all_finite(gradients):
        inner_optimizer.apply(gradients / scale)
        scale *= 2 after every dynamic_growth_steps such steps, up to max_scale
    else:
        # The scale was too high. The step is skipped: nothing changes.
        scale /= 2, down to min_scale
    ```

    It is a `keras.optimizers.LossScaleOptimizer`, so `Model.compile` takes it as
    it is and `fit` scales the loss and hands the scaled gradients to `apply`. In
    a loop of your own, either let `apply` unscale:

    ```python
    loss = optimizer.scale_loss(loss)
    gradients = ...                     # of the scaled loss
    optimizer.apply(gradients, variables)
    ```

    or unscale yourself, say to look at the gradients or to clip them:

    ```python
    loss = optimizer.get_scaled_loss(loss)
    gradients = optimizer.get_unscaled_gradients(...)
    optimizer.apply_gradients(zip(gradients, variables))
    ```

    Whether the gradients are scaled is told from which of these you called
    last; `scaled=True` or `scaled=False` says it outright.

    With `gradient_accumulation_steps` on the inner optimizer, a micro-batch that
    overflows is dropped whole, and the window waits for the next finite one.
    A learning-rate schedule counts finite micro-batches there, as Keras's
    optimizers have it, while `iterations` counts updates.

    Args:
        inner_optimizer: The `keras.optimizers.Optimizer` to wrap.
        dynamic: Bool. Whether the scale adapts itself. Defaults to `True`. If
            `False`, it stays at `initial_scale`.
        initial_scale: Float. The scale of the first step. Defaults to `2**15`;
            required if `dynamic` is `False`. Too high is better than too low:
            the scale falls at every overflow but rises slowly. `"auto"`: it begins
            at `2**15` and falls by a factor of 16 until a step is finite, as
            `keras_lso.loss_scales.SearchingLossScale` has it.
        dynamic_growth_steps: Int. Number of finite steps after which the scale
            doubles. Defaults to `2000`. Not for a fixed scale.
        loss_scale: A `keras_lso.loss_scales.LossScale` to use in place of the
            scale that the other arguments describe, none of which may then be
            given. Also what `keras_lso.loss_scales.get` takes: a number,
            `"dynamic"`, a config dict.
        min_scale: Float. The dynamic scale never falls below it. Defaults to
            `2**-14`.
        max_scale: Float. The dynamic scale never rises above it. Defaults to
            `2**24`.
        master_weights: `"auto"`, True or False. Whether the inner optimizer trains
            float32 copies of variables that are narrower, as in a model under the
            `"float16"` policy; small steps would be rounded away otherwise.
            Defaults to `"auto"`: of float16 ones. `True`: of bfloat16 ones too.
            Under `"mixed_float16"` the variables are float32, and nothing is
            copied.
        name: String. The name of the optimizer. Defaults to
            `"loss_scale_optimizer"`.

    Attributes:
        inner_optimizer: The wrapped optimizer. Its hyperparameters (`momentum`,
            `beta_1`, `clipnorm`, ...) read and write through this one as well.
        loss_scale: Float32 scalar tensor. The current scale.
        loss_scale_policy: The `keras_lso.loss_scales.LossScale` behind it.
        iterations: The variable that counts the steps that were applied; with
            `gradient_accumulation_steps`, the updates.
        skipped_steps: Integer scalar tensor. The number that were not.
        last_step_applied: Boolean scalar tensor. Whether the last one was.

    Example:

    >>> import keras, keras_lso
    >>> optimizer = keras_lso.LossScaleOptimizer(
    ...     keras.optimizers.SGD(0.5), initial_scale=1024
    ... )
    >>> w = keras.Variable([1.0, 2.0])
    >>> loss = optimizer.scale_loss(3.0)
    >>> float(loss)
    3072.0
    >>> optimizer.apply([keras.ops.array([1024.0, 0.0])], [w])
    >>> print(w.numpy())
    [0.5 2. ]
    >>> optimizer.apply([keras.ops.array([float("inf"), 0.0])], [w])
    >>> print(w.numpy())
    [0.5 2. ]
    >>> float(optimizer.loss_scale), int(optimizer.skipped_steps)
    (512.0, 1)

    Reference:

    - [Micikevicius et al., 2018, Mixed Precision Training](
        https://arxiv.org/abs/1710.03740)
    """
