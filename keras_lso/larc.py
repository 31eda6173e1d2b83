"""`LARC`: layer-wise adaptive rate control, in front of any optimizer."""

import keras
from keras import ops

from keras_lso._backend import backend
from keras_lso._checks import check_config
from keras_lso._config_dicts import check_numbers, read_object
from keras_lso._core.arguments import check_optimizer
from keras_lso._core.gradients import pair_gradients, reduce_gradients, split_pairs
from keras_lso._core.lars import LARS
from keras_lso._core.loss_scale_optimizer import LossScaleOptimizer
from keras_lso._core.scaling import Gradients
from keras_lso._core.state_file import checked
from keras_lso._core.wrapper import Wrapper, passed_on
from keras_lso._keras_internals.distribution import reduced_gradients, sharded_slots
from keras_lso._keras_internals.optimizers import (
    as_accumulated,
    chain_of,
    config_of,
    count_by,
    iteration_variable,
    public_config,
    remember_trainable_variables,
)
from keras_lso._keras_internals.rules import rate_of
from keras_lso._keras_internals.variables import is_overwritten, path_matches
from keras_lso._option_checks import check_choice, check_patterns, check_rate

CLIP, SCALE = MODES = ("clip", "scale")


@keras.saving.register_keras_serializable("keras_lso", name="LARC")
class LARC(Wrapper):
    """Optimizer that rescales each layer's gradient before an inner optimizer.

    It holds every layer's step down to a share `eta` of the norm of its weights,
    whatever optimizer takes that step, unless `min_update` is above that.

    ```python
    # mode="clip": the gradient shrinks where the step would be too long
    ratio = eta * |w| / (learning_rate * (|g| + epsilon))
    ratio = min(max(ratio, min_update), 1)

    # mode="scale": as LARS, the learning rate comes on top of it
    ratio = eta * |w| / (|g| + epsilon)
    ratio = max(ratio, min_update)

    inner_optimizer.apply(ratio * g)
    ```

    A layer whose weights are all zero, a new bias for one, moves by `min_update`
    only: leave biases out with `exclude`.

    For float16 write `LossScaleOptimizer(LARC(inner_optimizer))`: ratios are of
    unscaled gradients. The other way round, `LARC(LossScaleOptimizer(...))`, is the
    same in a loop of your own, but not for `compile` under `"mixed_float16"`, which
    would scale the loss a second time.

    With `gradient_accumulation_steps` on the inner optimizer it is the gradient of
    each micro-batch that is rescaled. `clipnorm` and the like come after it.

    Args:
        inner_optimizer: The `keras.optimizers.Optimizer` to wrap. Its
            hyperparameters (`learning_rate`, `momentum`, ...) read and write
            through this one as well.
        eta: Float. The trust coefficient, the share of a layer's norm by which it
            may move. Defaults to `0.002`.
        mode: `"clip"` or `"scale"`. Defaults to `"clip"`.
        min_update: Float. The lowest ratio. Defaults to `1e-7`.
        epsilon: Float. Added to the norm of the gradient. Defaults to `1e-7`.
        exclude: List of regular expressions. The gradient of a variable whose path
            (`"block/bn/gamma"`) holds a match of one of them stays as it is.
            Defaults to `None`: all are rescaled.
        name: String. The name of the optimizer. Defaults to `"LARC"`.

    Raises:
        ValueError, TypeError: If an argument is none of the above.

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

    loss_scale_factor = passed_on(
        "loss_scale_factor", "The inner optimizer's fixed loss scale."
    )

    def __init__(
        self,
        inner_optimizer,
        eta=0.002,
        mode=CLIP,
        min_update=1e-7,
        epsilon=1e-7,
        exclude=None,
        name="LARC",
    ):
        check_optimizer(inner_optimizer)
        if type(inner_optimizer) is keras.optimizers.LossScaleOptimizer:
            raise TypeError(
                "LARC needs unscaled gradients, and Keras's own LossScaleOptimizer "
                "does not hand them over. Write "
                "keras_lso.LossScaleOptimizer(keras_lso.LARC(inner_optimizer))."
            )
        eta = check_rate("eta", eta)
        check_choice("mode", mode, MODES)
        if mode == CLIP and not hasattr(inner_optimizer, "learning_rate"):
            raise ValueError(
                "mode='clip' divides by the learning rate, and a "
                f"{type(inner_optimizer).__name__} has no single one. Wrap each of its "
                "optimizers in a LARC of its own, or write mode='scale'."
            )
        min_update = check_rate("min_update", min_update)
        epsilon = check_rate("epsilon", epsilon)
        exclude = check_patterns("exclude", exclude)
        super().__init__(learning_rate=0.0, name=name)
        self.inner_optimizer = inner_optimizer
        self.eta = eta
        self.mode = mode
        self.min_update = min_update
        self.epsilon = epsilon
        self.exclude = exclude
        count_by(self, inner_optimizer)

    def build(self, variables):
        """Creates the variables of the inner optimizer.

        Args:
            variables: List of the trainable variables.
        """
        if self.built:
            return
        variables = list(variables)
        with sharded_slots(self.inner_optimizer, variables):
            self.inner_optimizer.build(variables)
        remember_trainable_variables(self, variables)
        self.built = True

    def scale_loss(self, loss):
        """Scales the loss as the inner optimizer asks for it.

        Args:
            loss: Tensor or number.

        Returns:
            The scaled loss.
        """
        return self.inner_optimizer.scale_loss(loss)

    def apply(self, grads, trainable_variables=None, axis_name=None, **kwargs):
        """Rescales the gradients, and lets the inner optimizer apply them.

        Args:
            grads: List of gradients, one for each variable; None where a variable
                has none. Integers count as float32.
            trainable_variables: List of variables. Defaults to those that the
                optimizer was built for; the first call builds it.
            axis_name: String or tuple of strings. On JAX, inside of `jax.shard_map`
                or `jax.pmap`: the axis over which the gradients are still to be
                averaged. Defaults to `None`: the caller has done that.
            **kwargs: For the inner optimizer: `scaled` and `update_scale` of a
                `LossScaleOptimizer`.
        """
        # First of all: it may refuse.
        inv_scale = self._inv_scale(kwargs.get("scaled"))
        backend.check_axis_name(axis_name)
        grads, variables = pair_gradients(self, grads, trainable_variables)
        if not variables:
            return
        grads, _ = reduce_gradients(self, grads, variables, axis_name)
        ratios = self.ratios(grads, variables, inv_scale)
        rescaled = [
            g if ratio is None else _multiply(g, ratio)
            for g, ratio in zip(grads, ratios, strict=True)
        ]
        rescaled = as_accumulated(self.inner_optimizer, rescaled, variables)
        with reduced_gradients(self.inner_optimizer):
            self.inner_optimizer.apply(rescaled, variables, **kwargs)

    def ratios(self, grads, variables, inv_scale=1.0):
        """Returns what each gradient is multiplied by.

        Args:
            grads: List of gradients, one for each variable, or None.
            variables: List of variables.
            inv_scale: Float32 scalar (tensor). What unscales the gradients. Defaults
                to `1.0`: they are not scaled.

        Returns:
            List of float32 scalar tensors; None for what stays as it is.
        """
        chosen = [
            i
            for i, (g, v) in enumerate(zip(grads, variables, strict=True))
            if g is not None
            and not is_overwritten(v)
            and not path_matches(v, self.exclude)
        ]
        found: list = [None] * len(grads)
        if not chosen:
            return found
        g_norms = backend.l2_norms([grads[i] for i in chosen])
        w_norms = backend.l2_norms(
            [ops.convert_to_tensor(variables[i]) for i in chosen]
        )
        ratios = self._ratios(_stack(g_norms) * inv_scale, _stack(w_norms))
        for i, ratio in zip(chosen, ops.unstack(ratios, len(chosen)), strict=True):
            found[i] = ratio
        return found

    def _ratios(self, g_norms, w_norms):
        limits = g_norms + self.epsilon
        if self.mode == CLIP:
            limits = limits * ops.cast(self._rate(), "float32")
        ratios = self.eta * w_norms / limits
        # A tensor: Keras may convert numbers to `floatx`, which may be float16.
        lowest = ops.convert_to_tensor(self.min_update, "float32")
        highest = ops.ones_like(ratios)
        # Not finite: nothing moves at all, or a norm is too large for float32.
        ratios = ops.where(ops.isfinite(ratios), ops.maximum(ratios, lowest), highest)
        return ops.minimum(ratios, highest) if self.mode == CLIP else ratios

    def _rate(self):
        """Returns the learning rate that the innermost optimizer steps with."""
        innermost = chain_of(self)[-1]
        rate = rate_of(innermost)
        return innermost.decayed(rate) if isinstance(innermost, LARS) else rate

    def _inv_scale(self, scaled):
        """Returns what the gradients' norms are multiplied by to unscale them."""
        inner = self.inner_optimizer
        if isinstance(inner, LARC):
            return inner._inv_scale(scaled)
        if not isinstance(inner, LossScaleOptimizer):
            factor = inner.loss_scale_factor
            return 1.0 if factor is None else 1.0 / factor
        is_unknown = inner._scaling.gradients is Gradients.UNKNOWN
        if scaled is None and is_unknown:
            raise ValueError(
                "LARC wraps a LossScaleOptimizer that has scaled no loss yet, so it "
                "cannot tell whether the gradients are scaled. Under 'mixed_float16' "
                "`compile` wraps LARC in a second LossScaleOptimizer, which then "
                "scales: write LossScaleOptimizer(LARC(inner_optimizer)) instead. In "
                "a loop of your own call `optimizer.scale_loss(loss)` first, or say "
                "`apply(..., scaled=True)` or `scaled=False`."
            )
        return inner._scaling.inv_scale(scaled)

    def apply_gradients(self, grads_and_vars, **kwargs):
        """Does what `apply` does.

        Args:
            grads_and_vars: List of `(gradient, variable)` pairs.
            **kwargs: See `apply`.

        Returns:
            The variable that counts the applied steps.
        """
        grads, variables = split_pairs(grads_and_vars)
        self.apply(grads, variables, **kwargs)
        return iteration_variable(chain_of(self)[-1])

    def finalize_variable_values(self, var_list):
        """Lets the inner optimizer set the final values (EMA) of `var_list`.

        Args:
            var_list: List of trainable variables.
        """
        self.inner_optimizer.finalize_variable_values(var_list)

    # --- State: the inner optimizer's, and nothing else -----------------------

    @property
    def variables(self):
        """The variables of the inner optimizer."""
        return self.inner_optimizer.variables

    def set_weights(self, weights):
        self.inner_optimizer.set_weights(weights)

    def save_own_variables(self, store):
        """Writes the state of the inner optimizer, as it would itself."""
        self.inner_optimizer.save_own_variables(store)

    def load_own_variables(self, store):
        """Reads the state of the inner optimizer, as it would itself."""
        inner = self.inner_optimizer
        # Those of a user's own class may be stored in a way of its own.
        if (
            type(inner).load_own_variables
            is keras.optimizers.Optimizer.load_own_variables
        ):
            store = checked(inner, store)
        inner.load_own_variables(store)

    def __dir__(self):
        """Keras finds what to save inside an object by its `dir()`.

        The inner optimizer's state is saved as this one's already: a file is the
        same with LARC and without it.
        """
        return [n for n in super().__dir__() if n != "inner_optimizer"]

    def get_config(self):
        return {
            "name": self.name,
            "inner_optimizer": config_of(self.inner_optimizer),
            "eta": self.eta,
            "mode": self.mode,
            "min_update": self.min_update,
            "epsilon": self.epsilon,
            "exclude": None if self.exclude is None else list(self.exclude),
        }

    @classmethod
    def from_config(cls, config, custom_objects=None):
        """Makes an optimizer from what `get_config` returned.

        Args:
            config: Dict.
            custom_objects: Dict of names to classes that the config refers to.

        Returns:
            A `LARC`.
        """
        config = check_config("LARC", config)
        inner = public_config(config.pop("inner_optimizer", None))
        if not isinstance(inner, dict):
            raise ValueError(
                "The config of a LARC must hold the config dict of its inner optimizer "
                f"as 'inner_optimizer'. Received: inner_optimizer={inner!r}"
            )
        check_numbers(inner, "`inner_optimizer`")
        inner = read_object(
            keras.saving.deserialize_keras_object,
            inner,
            "`inner_optimizer`",
            custom_objects,
        )
        return cls(inner, **config)


def _stack(norms):
    return ops.stack([ops.cast(norm, "float32") for norm in norms])


def _multiply(grad, ratio):
    # In float32: in float16 a small ratio would flush the gradient to zero.
    return backend.map_values(lambda v: backend.times(v, ratio), grad)
