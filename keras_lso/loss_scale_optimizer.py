"""`LossScaleOptimizer`: the guard around an inner optimizer."""

import contextlib

import keras
from keras import ops

from keras_lso import adapters, backend, loss_scales
from keras_lso._gradients import match, total
from keras_lso._inner_attributes import InnerAttributes
from keras_lso._legacy.configs import modern_arguments, read_optimizer
from keras_lso._loss_scaling import LossScaling, unscale
from keras_lso._optimizer_arguments import (
    check_inner_optimizer,
    check_not_wrapped,
    clear_loss_scale_factor,
    make_policy,
    policy_arguments,
    refuse_unsupported,
    remember_wrapped,
)
from keras_lso._overflows import Overflows
from keras_lso._stateless import stateless_apply
from keras_lso.loss_scales import DEFAULT_MAX_SCALE, DEFAULT_MIN_SCALE
from keras_lso.master_weights import MasterWeights, check_argument

DEFAULT_NAME = "loss_scale_optimizer"


@keras.saving.register_keras_serializable("keras_lso", name="LossScaleOptimizer")
class LossScaleOptimizer(
    InnerAttributes,
    LossScaling,
    Overflows,
    keras.optimizers.LossScaleOptimizer,
):
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
        master_weights = check_argument(master_weights)
        check_not_wrapped(inner_optimizer)
        # Keras's wrapper sets itself up for a dynamic scale without bounds.
        super(keras.optimizers.LossScaleOptimizer, self).__init__(
            learning_rate=0.0, name=DEFAULT_NAME if name is None else name
        )
        policy.claim(self)
        self.loss_scale_policy = policy
        self.inner_optimizer = inner_optimizer
        self.master_weights = master_weights
        remember_wrapped(inner_optimizer, self.name)
        clear_loss_scale_factor(inner_optimizer)
        # Not in `build`, which the first step calls when its loss has been scaled: a
        # `tf.train.Checkpoint` restores a variable as soon as that exists, and the
        # gradients would be unscaled by another scale than the loss was scaled by.
        policy.build()
        self._make_counters()
        # An inner optimizer that has trained before has skipped nothing. A copy: on
        # JAX two variables must not share a buffer that `fit` donates.
        applied_steps = adapters.iteration_variable(inner_optimizer)
        self._attempted_steps.assign(ops.copy(applied_steps))

    def build(self, variables):
        """Creates the variables of the inner optimizer and of the loss scale.

        Args:
            variables: List of the trainable variables.
        """
        if self.built:
            return
        variables = list(variables)
        inner = self.inner_optimizer
        masters = MasterWeights(variables, self.master_weights)
        if inner.built and masters.variables:
            raise ValueError(
                "The inner optimizer has been built already, for float16 variables, of "
                "which it is to train float32 masters now. Pass an optimizer that has "
                "not been used, or master_weights=False. Received: "
                f"inner_optimizer={inner!r}"
            )
        adapters.exclude_twins_from_weight_decay(inner, variables, masters.trained)
        with adapters.sharded_slots(inner, masters.trained):
            inner.build(masters.trained)
        # Again: the members of a `MultiOptimizer` were not known before.
        adapters.exclude_twins_from_weight_decay(inner, variables, masters.trained)
        # An inner optimizer that was built before keeps the variables it knows.
        adapters.check_known(inner, masters.trained)
        self._masters = masters
        for master in masters.variables:
            adapters.track_variable(self, master)
        adapters.remember_trainable_variables(self, variables)
        self.built = True

    # --- Applying -----------------------------------------------------------

    def apply(
        self,
        grads,
        trainable_variables=None,
        scaled=None,
        update_scale=True,
        axis_name=None,
    ):
        """Updates the variables, or skips the step if a gradient is not finite.

        A skipped step changes no trainable variable and nothing of the inner
        optimizer, bit for bit.

        Args:
            grads: List of gradients, one for each variable; None where a
                variable has none. Integers count as float32.
            trainable_variables: List of variables. Defaults to those that the
                optimizer was built for; the first call builds it.
            scaled: Bool or None. Whether `grads` are of the scaled loss.
                Defaults to `None`: they are, unless `get_unscaled_gradients` was
                called after the last `scale_loss` or `get_scaled_loss`.
            update_scale: Bool. Whether this step moves the loss scale. Defaults
                to `True`. With several losses in one step, set it to `False` for
                all but the last, which then answers for their overflows too.
            axis_name: String or tuple of strings. On JAX, inside of `jax.shard_map`
                or `jax.pmap`: the axis over which the gradients are still to be
                averaged. Defaults to `None`: the caller has done that. Gradients
                and variables that are shards are told by their types, inside of a
                `jax.shard_map` with `check_vma=True`, its default, only.

        Raises:
            TypeError: If one of the two is no list, or if they are swapped.
            ValueError: If the gradients are not those of the variables, by their number
                or shapes, if one is complex, if all are None, or if the optimizer was
                built for others.
            RuntimeError: If called in a cross-replica context.
        """
        backend.check_replica_context("apply")
        backend.check_axis_name(axis_name)
        grads, variables = match(self, grads, trainable_variables)
        if not variables:
            return
        backend.check_on_replicas([*variables, *self.variables])
        grads, are_alike = total(self, grads, variables, axis_name)
        policy = self.loss_scale_policy
        inv_scale = self._inv_scale(scaled)
        fused = self._fused_step(grads, variables)
        present = [g for g in grads if g is not None]
        found = backend.measure(
            present,
            amax=policy.needs_amax,
            inv_scale=inv_scale,
            rules=fused and fused.rules_to_measure,
            state=fused and fused.state,
            are_alike=are_alike,
        )
        if fused:
            adapters.warn_of_missing(self.inner_optimizer, grads, variables)
            backend.fused_step(
                fused.rules,
                fused.variables,
                fused.slots,
                present,
                found.finite,
                inv_scale,
                found.norms,
                fused.narrow,
            )
            iteration = adapters.iteration_variable(self.inner_optimizer)
            iteration.assign_add(ops.cast(found.finite, iteration.dtype))
        else:
            self._step_inner_optimizer(
                grads, variables, found.finite, self._are_scaled(scaled)
            )
        self._record(grads, variables, inv_scale)
        all_finite = self._count_step(found.finite, update_scale)
        amax = None
        if policy.needs_amax:
            amax = _largest_of_the_loss(found, grads, variables)
            amax = self._count_amax(amax * inv_scale, update_scale)
        if update_scale:
            policy.step(all_finite, amax)

    def apply_gradients(
        self,
        grads_and_vars,
        name=None,
        experimental_aggregate_gradients=True,
        skip_gradients_aggregation=False,
        *,
        scaled=None,
        update_scale=True,
        axis_name=None,
    ):
        """Updates the variables, or skips the step if a gradient is not finite.

        Args:
            grads_and_vars: List of `(gradient, variable)` pairs.
            name: String. Defaults to `None`. Keras 3 has no operations to name.
            experimental_aggregate_gradients: Bool. Whether to add up the gradients
                of all replicas of a `tf.distribute.Strategy`. Defaults to `True`.
                If `False`, the caller has done so.
            skip_gradients_aggregation: Bool. The opposite, as later versions of
                tf.keras spelled it. Defaults to `False`.
            scaled: See `apply`. Defaults to `None`.
            update_scale: See `apply`. Defaults to `True`.
            axis_name: See `apply`. Defaults to `None`.

        Returns:
            The variable that counts the applied steps.

        Raises:
            TypeError: If `grads_and_vars` is malformed.
            ValueError: If no variable has a gradient.
            RuntimeError: If called in a cross-replica context.
        """
        if scaled is None and self._takes_unscaled_pairs:
            scaled = self._scaled_as_keras_does
        are_reduced = skip_gradients_aggregation or not experimental_aggregate_gradients
        if are_reduced and axis_name is not None:
            raise ValueError(
                "`axis_name` says that the gradients are still to be averaged, and "
                "`skip_gradients_aggregation=True` that they are not. Give one of "
                f"them. Received: axis_name={axis_name!r}"
            )
        return self._apply_pairs(
            grads_and_vars,
            name,
            are_reduced,
            scaled=scaled,
            update_scale=update_scale,
            axis_name=axis_name,
        )

    # What `apply_gradients` means in code for tf.keras; Keras 3's trainers call it too.
    _takes_unscaled_pairs = False

    def _apply_scaled(self, grads_and_vars, name):
        return self.apply_gradients(grads_and_vars, name=name, scaled=True)

    def stateless_apply(
        self,
        optimizer_variables,
        grads,
        trainable_variables,
        scaled=None,
        update_scale=True,
        axis_name=None,
    ):
        """Does what `apply` does, on values that come in and go out.

        Args:
            optimizer_variables: List of tensors, the values of
                `optimizer.variables`.
            grads: List of gradients, one for each trainable variable.
            trainable_variables: List of tensors, the values of the variables that
                the optimizer was built for.
            scaled: See `apply`. Defaults to `None`.
            update_scale: See `apply`. Defaults to `True`.
            axis_name: See `apply`. Defaults to `None`.

        Returns:
            A tuple of the new values of `trainable_variables` and of
            `optimizer_variables`.
        """
        return stateless_apply(
            self,
            optimizer_variables,
            grads,
            trainable_variables,
            scaled=scaled,
            update_scale=update_scale,
            axis_name=axis_name,
        )

    def _step_inner_optimizer(self, grads, variables, finite, scaled):
        inner, masters = self.inner_optimizer, self._masters
        trained = self._trained(variables)

        def step(grads):
            # Read here: each replica runs this, with its own gradients.
            inv_scale = 1.0 / self.loss_scale
            unscaled = [
                g
                if g is None or not scaled or adapters.is_overwritten(v)
                else unscale(g, inv_scale)
                for g, v in zip(grads, variables, strict=True)
            ]
            unscaled = adapters.as_accumulated(inner, unscaled, trained)
            masters.read()
            # Here, since each replica runs this in a thread of its own.
            with adapters.reduced_gradients(inner):
                inner.apply(unscaled, trained)
            masters.write()

        state = variables + masters.variables + inner.variables
        backend.run_if(finite, step, grads, state)

    def _fused_step(self, grads, variables):
        """Returns the step as `backend.fused_step` does it, None if it does not."""
        if any(g is None for g in grads):
            pairs = zip(grads, variables, strict=True)
            grads, variables = zip(*(p for p in pairs if p[0] is not None), strict=True)
        inner, trained = self.inner_optimizer, self._trained(variables)
        return adapters.fused_step_of(
            adapters.rule_of(inner, trained),
            inner,
            grads,
            trained,
            narrow=self._masters.narrow(trained),
        )

    def _trained(self, variables):
        """Returns what the inner optimizer trains in place of each variable."""
        if not self._masters.variables:
            return list(variables)
        trained = self._masters.trained
        return [trained[adapters.index_of(self, v)] for v in variables]

    def finalize_variable_values(self, var_list):
        """Lets the inner optimizer set the final values (EMA) of `var_list`.

        Args:
            var_list: List of trainable variables.
        """
        if not self.built:
            return
        if not adapters.keeps_averages(self):
            if not self._masters.variables:
                self.inner_optimizer.finalize_variable_values(var_list)
            return
        averages = adapters.averages(self)
        if not averages:
            return
        known = [v for v in var_list if adapters.is_known(self, v)]
        with self.masters_in_step():
            self.inner_optimizer.finalize_variable_values(self._trained(known))
        for variable, _ in averages:
            # On JAX it shares a buffer with its average now, which the next `fit`
            # donates twice.
            variable.assign(ops.copy(variable))

    @contextlib.contextmanager
    def masters_in_step(self):
        """Lets what is assigned to the variables that are trained reach the model's.

        For who changes what the inner optimizer trains, as
        `keras_lso.callbacks.SwapEMAWeights` does: where those are float32 masters,
        they are rounded into the model's variables afterwards.
        """
        if not self.built:
            yield
            return
        self._masters.read()
        yield
        self._masters.write()

    # --- Serialization ------------------------------------------------------

    def get_config(self):
        """Returns the config: Keras's four keys, and what is not the default."""
        config = {
            "name": self.name,
            "inner_optimizer": adapters.config_of(self.inner_optimizer),
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
        inner, arguments = cls._read_config(config, custom_objects)
        return cls(inner, **arguments)

    @classmethod
    def _with_arguments(cls, inner, arguments):
        """Makes one past the constructor of a subclass, which takes other arguments."""
        optimizer = cls.__new__(cls)
        LossScaleOptimizer.__init__(optimizer, inner, **arguments)
        return optimizer

    @staticmethod
    def _read_config(config, custom_objects):
        """Returns the inner optimizer and the constructor's other arguments."""
        config = modern_arguments(config)
        if not isinstance(config.get("inner_optimizer"), dict):
            raise ValueError(
                "The config of a LossScaleOptimizer must hold the config dict of its "
                "inner optimizer as 'inner_optimizer'. Received: "
                f"inner_optimizer={config.get('inner_optimizer')!r}"
            )
        inner = read_optimizer(
            config.pop("inner_optimizer"), custom_objects, "`inner_optimizer`"
        )
        if config.get("loss_scale") is not None:
            # They are there for readers that know Keras's four keys only.
            config.pop("initial_scale", None)
            config.pop("dynamic_growth_steps", None)
            config["loss_scale"] = loss_scales.get(config["loss_scale"], custom_objects)
        return inner, config


def _largest_of_the_loss(found, grads, variables):
    """Returns the largest magnitude among gradients that come from the loss."""
    if not any(map(adapters.is_overwritten, variables)):
        return found.amax
    of_the_loss = [
        g
        for g, v in zip(grads, variables, strict=True)
        if g is not None and not adapters.is_overwritten(v)
    ]
    if not of_the_loss:
        return ops.zeros((), dtype="float32")
    return backend.measure(of_the_loss, amax=True).amax
