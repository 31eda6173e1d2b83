"""`LossScaleOptimizer`: the guard around an inner optimizer, as users know it.

What it does to gradients is in `_core/loss_scale_optimizer.py`. Here are its
documentation, the arguments and the config of Keras's own class, and what makes it
fast and familiar: the fused steps and the methods of tf.keras's optimizers.
"""

import keras
from keras import ops

from keras_lso._arguments import (
    check_inner_optimizer,
    clear_loss_scale_factor,
    make_policy,
    policy_arguments,
    read_config,
    refuse_unsupported,
)
from keras_lso._core import loss_scale_optimizer as core
from keras_lso._keras_internals.fused_step import Choice
from keras_lso._keras_internals.optimizers import config_of
from keras_lso._tf_keras.loss_scaling_methods import TFKerasLossScaling
from keras_lso.loss_scales.fixed import FixedLossScale
from keras_lso.loss_scales.loss_scale import DEFAULT_MAX_SCALE, DEFAULT_MIN_SCALE

DEFAULT_NAME = "loss_scale_optimizer"


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
            dtype policy `"float16"`; small steps would be rounded away otherwise.
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

    _choose_step = Choice

    def __init__(
        self,
        inner_optimizer,
        dynamic=True,
        initial_scale=None,
        dynamic_growth_steps=None,
        *,
        loss_scale=None,
        min_scale=DEFAULT_MIN_SCALE,
        max_scale=DEFAULT_MAX_SCALE,
        master_weights="auto",
        name=DEFAULT_NAME,
        **kwargs,
    ):
        refuse_unsupported(kwargs)
        check_inner_optimizer(inner_optimizer)
        policy = make_policy(
            dynamic,
            initial_scale,
            dynamic_growth_steps,
            loss_scale,
            min_scale,
            max_scale,
        )
        name = DEFAULT_NAME if name is None else name
        super().__init__(inner_optimizer, policy, master_weights, name)
        clear_loss_scale_factor(inner_optimizer)

    @property
    def initial_scale(self):
        """The loss scale of the first step, a float."""
        return self.loss_scale_policy.initial_loss_scale

    @property
    def dynamic(self):
        """Whether the loss scale adapts itself."""
        return not isinstance(self.loss_scale_policy, FixedLossScale)

    @property
    def dynamic_growth_steps(self):
        """Number of finite steps after which the scale grows; None if fixed."""
        return getattr(self.loss_scale_policy, "increment_period", None)

    @property
    def dynamic_counter(self):
        """Number of finite steps since the scale last moved; None if fixed."""
        return ops.copy(self.step_counter) if self.dynamic else None

    def get_config(self):
        """Returns the config: Keras's four keys, and what is not the default."""
        config = {
            "name": self.name,
            "inner_optimizer": config_of(self.inner_optimizer),
            "initial_scale": self.initial_scale,
            "dynamic_growth_steps": self.dynamic_growth_steps,
            **policy_arguments(self.loss_scale_policy),
        }
        if self.master_weights != "auto":
            config["master_weights"] = self.master_weights
        return config

    @classmethod
    def from_config(cls, config, custom_objects=None):
        """Makes an optimizer from what `get_config` returned.

        Args:
            config: Dict. One of Keras's own `LossScaleOptimizer` will do, and one of
                any version of tf.keras.
            custom_objects: Dict of names to classes that the config refers to.

        Returns:
            A `LossScaleOptimizer`.
        """
        inner, arguments = read_config(config, custom_objects)
        return cls(inner, **arguments)

    @classmethod
    def _with_arguments(cls, inner, arguments):
        """Makes one past the constructor of a subclass, which takes other arguments."""
        optimizer = cls.__new__(cls)
        LossScaleOptimizer.__init__(optimizer, inner, **arguments)
        return optimizer
