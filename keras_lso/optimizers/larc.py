"""`LARC`: layer-wise adaptive rate control, in front of any optimizer."""

from collections.abc import Iterable, Mapping, MutableMapping
from typing import Any, Literal, Self

import keras
from keras import ops
from numpy.typing import ArrayLike

from keras_lso._backend import backend
from keras_lso._backend.rule import TrustRatio
from keras_lso._backend.tensors import Tensor, times
from keras_lso._core.checks import check_config
from keras_lso._core.configs import read_inner_optimizer
from keras_lso._core.exclusions import Patterns, idle_in_paths
from keras_lso._core.fields import Rate, registered
from keras_lso._core.gradients import (
    as_list,
    check_trainable,
    list_of_gradients,
    pair_gradients,
    reduce_gradients,
    split_pairs,
)
from keras_lso._core.methods import VariableList
from keras_lso._core.state_file import checked
from keras_lso._core.step import Gradients
from keras_lso._core.wrapper import Wrapper, check_optimizer, passed_on
from keras_lso._keras_internals.distribution import (
    reduced_gradients,
    remember_layouts,
    sharded_slots,
)
from keras_lso._keras_internals.optimizers import chain_of, iteration_variable
from keras_lso._keras_internals.rules import rate_of
from keras_lso._keras_internals.state import as_accumulated, config_of, count_by
from keras_lso._keras_internals.variables import (
    copy_in_scope,
    is_overwritten,
    path_matches,
)
from keras_lso.loss_scale_optimizer import LossScaleOptimizer
from keras_lso.optimizers.base import LayerAdaptive, checked_arguments, config_values


@registered("LARC")
class LARC(Wrapper):
    """Optimizer that rescales each layer's gradient before an inner optimizer.

    With plain SGD as the inner optimizer, LARC limits every layer's step to a share
    `eta` of the norm of its weights. Only a layer whose ratio is raised to `min_update`
    may move further.

    ```python
    # mode="clip": the gradient shrinks where the step would be too long
    ratio = eta * |w| / (learning_rate * (|g| + epsilon))
    ratio = min(max(ratio, min_update), 1)

    # mode="scale": as in LARS, the learning rate multiplies the step as well
    ratio = eta * |w| / (|g| + epsilon)
    ratio = max(ratio, min_update)

    inner_optimizer.apply(ratio * g)
    ```

    A layer whose weights are all zero, such as a new bias, has the ratio `min_update`
    and hardly moves: exclude biases with `exclude`.

    Ratios are computed from unscaled gradients: for float16 write
    `LossScaleOptimizer(LARC(inner_optimizer))`. `LARC(LossScaleOptimizer(...))` does
    the same in a custom loop, but `compile` under `"mixed_float16"` would scale the
    loss a second time.

    With `gradient_accumulation_steps` on the inner optimizer the gradient of each
    micro-batch is rescaled. So with `mode="clip"` a `LossScaleOptimizer` inside or
    around LARC skips every micro-batch whose learning rate is not finite, not only the
    last of a window. `clipnorm` and the like clip the rescaled gradients.

    Args:
        inner_optimizer: The `keras.optimizers.Optimizer` to wrap. Its
            hyperparameters (`learning_rate`, `momentum`, ...) read and write through
            this one as well.
        eta: The trust coefficient: the share of its norm by which a layer may move.
            Defaults to `0.002`.
        mode: `"clip"` or `"scale"`. Defaults to `"clip"`.
        min_update: The lowest ratio. Defaults to `1e-7`.
        epsilon: Added to the norm of the gradient. Defaults to `1e-7`.
        exclude: Regular expressions. The gradient of a variable is not rescaled if one
            of them matches in the variable's path (`"block/bn/gamma"`). Defaults to
            `None`: all gradients are rescaled. `build` warns of a pattern that matches
            nothing.
        name: The name of the optimizer. Defaults to `"LARC"`.

    Example:

    >>> import keras, keras_lso
    >>> optimizer = keras_lso.LARC(keras.optimizers.SGD(1.0), eta=0.01)
    >>> w = keras.Variable([3.0, 4.0])
    >>> optimizer.apply([keras.ops.array([0.0, 100.0])], [w])
    >>> print(w.numpy())  # |w| is 5: a step of 0.01 * 5
    [3.   3.95]

    References:

    - [OpenSeq2Seq, `optimize_loss`](
        https://nvidia.github.io/OpenSeq2Seq/html/optimizers.html)
    - [You, Gitman, Ginsburg, 2017, Large Batch Training of Convolutional Networks](
        https://arxiv.org/abs/1708.03888)
    """

    eta: float
    mode: Literal["clip", "scale"]
    min_update: float
    epsilon: float
    exclude: list[str] | None
    loss_scale_factor: float | None = passed_on("loss_scale_factor")

    def __init__(
        self,
        inner_optimizer: keras.optimizers.Optimizer,
        eta: Rate = 0.002,
        mode: Literal["clip", "scale"] = "clip",
        min_update: Rate = 1e-7,
        epsilon: Rate = 1e-7,
        exclude: Patterns = None,
        name: str = "LARC",
    ) -> None:
        arguments = locals()
        check_optimizer(inner_optimizer)
        if type(inner_optimizer) is keras.optimizers.LossScaleOptimizer:
            raise TypeError(
                "LARC needs unscaled gradients, which Keras's own LossScaleOptimizer "
                "does not pass on. Write "
                "keras_lso.LossScaleOptimizer(keras_lso.LARC(inner_optimizer))."
            )
        declared = checked_arguments(type(self), arguments)
        if mode == "clip" and not hasattr(inner_optimizer, "learning_rate"):
            raise ValueError(
                "mode='clip' divides by the learning rate, and a "
                f"{type(inner_optimizer).__name__} has no single one. Wrap each of its "
                "optimizers in its own LARC, or write mode='scale'."
            )
        super().__init__(learning_rate=0.0, name=declared.pop("name"))
        self.inner_optimizer = inner_optimizer
        for argument, value in declared.items():
            setattr(self, argument, value)
        count_by(self, inner_optimizer)

    @backend.host.outside_of_functions()
    def build(self, variables: Iterable[keras.Variable]) -> None:
        """Creates the variables of the inner optimizer."""
        if self.built:
            return
        variables = check_trainable(variables)
        remember_layouts(variables)
        with sharded_slots(self.inner_optimizer, variables):
            self.inner_optimizer.build(variables)
        if self._guard is not None:
            self._guard._step.surround(self)
        self._finish_build(variables)

    @property
    def _guard(self) -> LossScaleOptimizer | None:
        """The `LossScaleOptimizer` inside, if there is one."""
        guards = (o for o in chain_of(self) if isinstance(o, LossScaleOptimizer))
        return next(guards, None)

    @property
    def _rescales_by_rate(self) -> bool:
        """Whether the ratios depend on the learning rate."""
        return self.mode == "clip"

    def _idle_patterns(self) -> list[str | None]:
        remark = idle_in_paths(self, "exclude", self.exclude)
        return [remark, *super()._idle_patterns()]

    def scale_loss(self, loss: float | Tensor) -> Tensor:
        return self.inner_optimizer.scale_loss(loss)

    @backend.in_graphs
    @backend.do_not_convert
    def apply(
        self,
        grads: Iterable[Tensor | None],
        trainable_variables: Iterable[keras.Variable] | None = None,
        axis_name: str | tuple[str, ...] | None = None,
        **kwargs: Any,
    ) -> None:
        """Rescales the gradients, and lets the inner optimizer apply them.

        Args:
            grads: The gradients, one for each variable; None where a variable has none.
                Integers count as float32.
            trainable_variables: The variables. Defaults to those that the optimizer was
                built for; the first call builds it.
            axis_name: See `LossScaleOptimizer.apply`. Defaults to `None`.
            **kwargs: Arguments of the inner optimizer's `apply`, such as `scaled` and
                `update_scale` of a `LossScaleOptimizer`.
        """
        grads = list_of_gradients(grads)
        # This may raise an error, so it comes before anything is built.
        inv_scale = self._inv_scale(grads, kwargs)
        backend.replicas.check_axis_name(axis_name)
        grads, variables = pair_gradients(self, grads, trainable_variables)
        if not variables:
            return
        dense = backend.prepare_gradients(grads)
        grads, _ = reduce_gradients(self, dense, variables, axis_name)
        ratios = self.ratios(grads, variables, inv_scale)
        rescaled = [
            g if ratio is None else _rescaled(g, ratio)
            for g, ratio in zip(grads, ratios, strict=True)
        ]
        rescaled = as_accumulated(self.inner_optimizer, rescaled, variables)
        copy_in_scope([*variables, *self.variables])
        with reduced_gradients(self.inner_optimizer):
            self.inner_optimizer.apply(rescaled, variables, **kwargs)

    def ratios(
        self,
        grads: Iterable[Tensor | None],
        variables: Iterable[keras.Variable],
        inv_scale: float | Tensor = 1.0,
    ) -> list[Tensor | None]:
        """Returns the factor of each gradient; None where it is not rescaled.

        Args:
            grads: The gradients, one for each variable, or None.
            variables: The variables.
            inv_scale: Float32 scalar (tensor), the factor that unscales the gradients.
                Defaults to `1.0`: they are not scaled.
        """
        grads = list_of_gradients(grads)
        variables = as_list("variables", variables, "variables")
        ratios: list[Tensor | None] = [None] * len(grads)
        rescaled = [
            i
            for i, (g, v) in enumerate(zip(grads, variables, strict=True))
            if not (g is None or is_overwritten(v) or path_matches(v, self.exclude))
        ]
        if rescaled:
            g_norms = _norms([grads[i] for i in rescaled]) * inv_scale
            w_norms = _norms([ops.convert_to_tensor(variables[i]) for i in rescaled])
            of_rescaled = ops.unstack(self._ratios(g_norms, w_norms), len(rescaled))
            for i, ratio in zip(rescaled, of_rescaled, strict=True):
                ratios[i] = ratio
        return ratios

    def _ratios(self, g_norms: Tensor, w_norms: Tensor) -> Tensor:
        """Returns the ratios of layers with these norms."""
        trust_ratio = TrustRatio(self.eta, self.epsilon)
        numerators, denominators = trust_ratio.fraction(g_norms, w_norms)
        if self._rescales_by_rate:
            innermost = chain_of(self)[-1]
            rate = rate_of(innermost)
            if isinstance(innermost, LayerAdaptive):
                rate = innermost.decayed(rate)
            denominators = denominators * ops.cast(rate, "float32")
        xp = backend.xp
        highest = xp.ones_like(numerators)
        is_zero = denominators == 0
        ratios = numerators / xp.where(is_zero, highest, denominators)
        lowest = highest * self.min_update
        # The ratio is not finite if a norm overflows float32.
        usable = ops.isfinite(ratios) & ~is_zero
        ratios = xp.where(usable, xp.maximum(ratios, lowest), highest)
        return ops.minimum(ratios, highest) if self.mode == "clip" else ratios

    def _inv_scale(self, grads: list, kwargs: dict[str, Any]) -> float | Tensor:
        """Returns the factor that unscales the norms; sets `scaled` in `kwargs`."""
        # Rescaled gradients are new tensors, so the optimizer inside, for which
        # `kwargs` are, cannot tell whether they are scaled.
        if self._guard is None:
            factor = self.loss_scale_factor
            return 1.0 if factor is None else 1.0 / factor
        scaling = self._guard._scaling
        if kwargs.get("scaled") is None:
            if scaling.gradients is Gradients.UNKNOWN:
                raise ValueError(
                    "LARC wraps a LossScaleOptimizer that has scaled no loss yet, so "
                    "it cannot tell whether the gradients are scaled. In `fit` write "
                    "LossScaleOptimizer(LARC(inner_optimizer)) instead. In a custom "
                    "loop call `optimizer.scale_loss(loss)` first, or write "
                    "`apply(..., scaled=True)` or `scaled=False`."
                )
            kwargs["scaled"] = scaling.are_scaled(grads)
        return scaling.inv_scale(kwargs["scaled"])

    def apply_gradients(
        self,
        grads_and_vars: Iterable[tuple[Tensor | None, keras.Variable]],
        **kwargs: Any,
    ) -> keras.Variable:
        """Calls `apply` for pairs; returns the variable that counts applied steps.

        Args:
            grads_and_vars: The `(gradient, variable)` pairs.
            **kwargs: See `apply`.
        """
        grads, variables = split_pairs(grads_and_vars)
        self.apply(grads, variables, **kwargs)
        return iteration_variable(chain_of(self)[-1])

    def finalize_variable_values(self, var_list: Iterable[keras.Variable]) -> None:
        var_list = as_list("var_list", var_list, "variables")
        self.inner_optimizer.finalize_variable_values(var_list)

    # --- State: only the state of the inner optimizer, in its layout ---------------

    @property
    def variables(self) -> VariableList:
        """The variables of the inner optimizer."""
        return self.inner_optimizer.variables

    def set_weights(self, weights: Iterable[ArrayLike]) -> None:
        self.inner_optimizer.set_weights(as_list("weights", weights, "arrays"))

    def save_own_variables(self, store: MutableMapping[str, Any]) -> None:
        self.inner_optimizer.save_own_variables(store)

    def load_own_variables(self, store: MutableMapping[str, Any]) -> None:
        inner = self.inner_optimizer
        load = type(inner).load_own_variables
        # A user's class that overrides the method may have its own layout.
        if load is keras.optimizers.Optimizer.load_own_variables:
            store = checked(inner, store)
        inner.load_own_variables(store)

    def __dir__(self) -> list[str]:
        # Keras saves every attribute listed by `dir()`, but `save_own_variables` saves
        # the inner optimizer already: a file is the same without LARC.
        return [n for n in super().__dir__() if n != "inner_optimizer"]

    def get_config(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "inner_optimizer": config_of(self.inner_optimizer),
            **config_values({n: getattr(self, n) for n in self._checks}),
        }

    @classmethod
    def from_config(
        cls, config: dict[str, Any], custom_objects: Mapping[str, Any] | None = None
    ) -> Self:
        config = check_config("LARC", config)
        return cls(read_inner_optimizer("LARC", config, custom_objects), **config)


def _rescaled(grad: Tensor, ratio: Tensor) -> Tensor:
    """Returns a dense or sparse gradient times a ratio."""
    # In float32: in float16 a small ratio would flush the gradient to zero.
    return backend.map_values(lambda values: times(values, ratio), grad)


def _norms(tensors: list[Tensor]) -> Tensor:
    """Returns the L2 norms of tensors, a float32 vector."""
    return ops.stack([ops.cast(n, "float32") for n in backend.l2_norms(tensors)])
