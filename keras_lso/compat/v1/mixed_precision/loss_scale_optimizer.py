"""`MixedPrecisionLossScaleOptimizer`: TF1's optimizer with loss scaling."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Self

import keras
from keras import ops

from keras_lso._backend import backend
from keras_lso._backend.tensors import Tensor
from keras_lso._core.checks import check_bool, check_choice, refusal
from keras_lso._core.gradients import check_variables
from keras_lso._core.methods import find_slot, scaled_gradients
from keras_lso._core.wrapper import check_inner_optimizer
from keras_lso._keras_internals.optimizers import variables_of
from keras_lso.loss_scale_optimizer import LossScaleOptimizer
from keras_lso.loss_scales.lookup import read_config
from keras_lso.loss_scales.loss_scale import LossScale
from keras_lso.mixed_precision.experimental import policy_of


@keras.saving.register_keras_serializable(
    "keras_lso", name="compat.v1.MixedPrecisionLossScaleOptimizer"
)
class MixedPrecisionLossScaleOptimizer(LossScaleOptimizer):
    """An optimizer that applies loss scaling, with the methods of TF1.

    No session: a call runs at once, or in the `tf.function` or `jax.jit` around it.

    Args:
        opt: The `keras.optimizers.Optimizer` to wrap.
        loss_scale: A number, `"dynamic"`, or a `keras_lso.loss_scales.LossScale`.
        use_locking: Without effect: Keras 3 has no locks. Defaults to `False`.
        name: A non-empty string. Defaults to `None`: the name of `opt`.

    Raises:
        ValueError, TypeError: If an argument is not valid.

    Example:

    >>> import keras
    >>> from keras_lso.compat.v1.mixed_precision import (
    ...     MixedPrecisionLossScaleOptimizer,
    ... )
    >>> optimizer = MixedPrecisionLossScaleOptimizer(keras.optimizers.SGD(0.5), 1024)
    >>> w = keras.Variable([3.0, 4.0])
    >>> step = keras.Variable(0, trainable=False, dtype="int32")
    >>> pairs = optimizer.compute_gradients(lambda: keras.ops.sum(w * w) / 2, [w])
    >>> # The gradients are unscaled: inspect them, clip them, ...
    >>> _ = optimizer.apply_gradients(pairs, global_step=step)
    >>> print(w.numpy(), int(step.numpy()))
    [1.5 2. ] 1

    Reference:

    - [tf.compat.v1.mixed_precision.MixedPrecisionLossScaleOptimizer](
        https://www.tensorflow.org/api_docs/python/tf/compat/v1/mixed_precision/MixedPrecisionLossScaleOptimizer)
    """

    # How much of a backward pass may run concurrently. Without effect.
    GATE_NONE, GATE_OP, GATE_GRAPH = 0, 1, 2

    use_locking: bool
    _takes_unscaled_pairs = True

    def __init__(
        self,
        opt: keras.optimizers.Optimizer,
        loss_scale: LossScale | float | str | dict[str, Any],
        use_locking: bool = False,
        name: str | None = None,
    ) -> None:
        if not isinstance(opt, keras.optimizers.Optimizer):
            requirement = (
                "be an instance of `keras.optimizers.Optimizer`, such as "
                "`keras.optimizers.SGD(0.1, momentum=0.9)` in place of "
                "`tf.compat.v1.train.MomentumOptimizer(0.1, 0.9)`"
            )
            raise refusal("opt", opt, requirement)
        check_inner_optimizer(opt, "opt")
        name = opt.name if name is None else name
        if not isinstance(name, str) or not name or "/" in name:
            raise refusal("name", name, "be a non-empty string without '/'")
        use_locking = check_bool("use_locking", use_locking)
        super().__init__(opt, loss_scale=policy_of(loss_scale), name=name)
        self.use_locking = use_locking

    def get_name(self) -> str:
        """Returns the name of the optimizer."""
        return self.name

    def get_slot(self, var: keras.Variable, slot_name: str) -> keras.Variable | None:
        """Returns the slot variable of `var`; None if there is none."""
        return find_slot(self, var, slot_name)

    def compute_gradients(
        self,
        loss: Tensor | Callable[[], Tensor],
        var_list: Iterable[keras.Variable] | None = None,
        gate_gradients: int = GATE_OP,
        aggregation_method: Any = None,
        colocate_gradients_with_ops: bool = False,
        grad_loss: Tensor | None = None,
    ) -> list[tuple[Tensor, keras.Variable]]:
        """Returns `(gradient or None, variable)` pairs of the scaled loss, unscaled.

        Args:
            loss: Callable without arguments that returns the loss. Or a tensor: on
                PyTorch, and on TensorFlow inside a `tf.function`.
            var_list: The variables. Defaults to `None`: those of `build`; before it,
                the trainable ones that an additional call of `loss` reads.
            gate_gradients: `GATE_NONE`, `GATE_GRAPH`, or by default `GATE_OP`: unused.
            aggregation_method: Without effect. Defaults to `None`.
            colocate_gradients_with_ops: Without effect. Defaults to `False`.
            grad_loss: Weights of the loss's elements. Defaults to `None`: all are 1.

        Raises:
            ValueError: If an argument is not valid, or `var_list` is needed.
            RuntimeError: If called in a cross-replica context.
        """
        check_choice("gate_gradients", gate_gradients, (0, 1, 2))
        backend.replicas.check_replica_context("compute_gradients")
        if var_list is None and self.built:
            var_list = variables_of(self)
        elif var_list is None:
            if not callable(loss):
                raise ValueError(
                    "`var_list` must be given with a tensor `loss`, or the optimizer "
                    "be built: `optimizer.build(model.trainable_variables)`. Keras 3 "
                    "keeps no list of all variables."
                )
            var_list = backend.host.trained_variables(loss)
        grads, variables = scaled_gradients(self, loss, var_list, grad_loss)
        grads = self.get_unscaled_gradients(grads)
        return list(zip(grads, variables, strict=True))

    def apply_gradients(  # type: ignore[override]
        self,
        grads_and_vars: Iterable[tuple[Tensor | None, keras.Variable]],
        global_step: keras.Variable | None = None,
        name: str | None = None,
        **kwargs: Any,
    ) -> keras.Variable:
        """Steps if all gradients are finite; returns the count of applied steps.

        Args:
            grads_and_vars: The pairs that `compute_gradients` returns.
            global_step: Variable to increment after an update. Defaults to `None`.
            name: Defaults to `None`. Keras 3 does not name operations.
            **kwargs: `scaled`, `update_scale` and `experimental_aggregate_gradients`
                of `keras_lso.LossScaleOptimizer.apply_gradients`.
        """
        if global_step is not None:
            check_variables("global_step", [global_step])
        applied_steps = super().apply_gradients(grads_and_vars, name, **kwargs)
        if global_step is not None:
            global_step.assign_add(ops.cast(self.last_step_applied, global_step.dtype))
        return applied_steps

    def minimize(  # type: ignore[override]
        self,
        loss: Tensor | Callable[[], Tensor],
        global_step: keras.Variable | None = None,
        var_list: Iterable[keras.Variable] | None = None,
        gate_gradients: int = GATE_OP,
        aggregation_method: Any = None,
        colocate_gradients_with_ops: bool = False,
        name: str | None = None,
        grad_loss: Tensor | None = None,
    ) -> keras.Variable:
        """Passes the result of `compute_gradients` to `apply_gradients`."""
        grads_and_vars = self.compute_gradients(
            loss, var_list, gate_gradients, grad_loss=grad_loss
        )
        return self.apply_gradients(grads_and_vars, global_step, name)

    def _called_variables(self) -> list[keras.Variable]:
        """Returns what `variables()` returns."""
        # In TF1 the variables included the loss scale.
        return [*self.weights, *self.loss_scale_policy.variables]

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "use_locking": self.use_locking}

    @classmethod
    def from_config(
        cls, config: dict[str, Any], custom_objects: Mapping[str, Any] | None = None
    ) -> Self:
        inner, arguments = read_config(config, custom_objects)
        use_locking = arguments.pop("use_locking", False)
        optimizer = cls._with_arguments(inner, arguments)
        optimizer.use_locking = use_locking
        return optimizer
