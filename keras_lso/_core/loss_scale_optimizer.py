"""`LossScaleOptimizer`: the guard around an inner optimizer.

`keras_lso.LossScaleOptimizer`, which users make and whose docstring says what it does,
adds the arguments and configs of Keras's own class and the methods of tf.keras's.
"""

import contextlib
from typing import Any

import keras
from keras import ops

from keras_lso._backend import backend
from keras_lso._core.counters import StepCounters
from keras_lso._core.gradients import as_list, check_trainable, pair_gradients
from keras_lso._core.master_weights import MasterWeights, check_argument
from keras_lso._core.state_file import StateFile
from keras_lso._core.step import Gradients, LossScaling, Step
from keras_lso._core.wrapper import Wrapper, check_not_wrapped, remember_wrapped
from keras_lso._keras_internals.distribution import sharded_slots
from keras_lso._keras_internals.optimizers import (
    averages_of,
    check_known,
    exclude_masters_with_variables,
    is_known,
    iteration_variable,
    keeps_averages,
    track_variable,
    variables_of,
    where_variables_are_made,
)
from keras_lso._keras_internals.variables import have_values


class LossScaleOptimizer(Wrapper, keras.optimizers.LossScaleOptimizer):
    """Scales the loss, unscales the gradients, and skips steps that overflow.

    It consists of

    - `loss_scale_policy`, the `LossScale` that holds the loss scale and moves it,
    - a `LossScaling`, which knows whether gradients are scaled,
    - `StepCounters`, of attempted and skipped steps,
    - `MasterWeights`, the float32 masters of float16 variables, once it is built,
    - a `Step`, which applies or skips, once it is built,
    - a `StateFile`, the layout in which all of this is saved.

    Args:
        inner_optimizer: The `keras.optimizers.Optimizer` to wrap.
        policy: A `LossScale`.
        master_weights: See `MasterWeights`. Defaults to `"auto"`.
        name: String. Defaults to `"loss_scale_optimizer"`.
    """

    _parts = ("inner_optimizer", "loss_scale_policy", "master_weights")

    _choose_step: Any = None
    """Chooses between a fused step and the inner optimizer's own: see `Step`."""

    def __init__(
        self,
        inner_optimizer,
        policy,
        master_weights="auto",
        name="loss_scale_optimizer",
    ):
        master_weights = check_argument(master_weights)
        check_not_wrapped(inner_optimizer)
        # Keras's wrapper sets itself up for a dynamic scale without bounds.
        super(keras.optimizers.LossScaleOptimizer, self).__init__(
            learning_rate=0.0, name=name
        )
        policy.claim(self)
        self.loss_scale_policy = policy
        self.inner_optimizer = inner_optimizer
        self.master_weights = master_weights
        remember_wrapped(inner_optimizer, self.name)
        # Not in `build`, which the first step calls when its loss has been scaled: a
        # `tf.train.Checkpoint` restores a variable as soon as that exists, and the
        # gradients would be unscaled by another scale than the loss was scaled by.
        policy.build()
        self._scaling = LossScaling(policy)
        self._counters = StepCounters(
            policy, inner_optimizer, iteration_variable(self), self.add_variable
        )
        self._state = StateFile(self)

    def build(self, variables):
        """Creates the variables of the inner optimizer and of the loss scale.

        Args:
            variables: List of the trainable variables.
        """
        if self.built:
            return
        variables = check_trainable("variables", variables)
        inner = self.inner_optimizer
        masters = MasterWeights(variables, self.master_weights)
        if inner.built and masters.variables:
            raise ValueError(
                "The inner optimizer has been built already, for float16 variables, of "
                "which it is to train float32 masters now. Pass an optimizer that has "
                "not been used, or master_weights=False. Received: "
                f"inner_optimizer={inner!r}"
            )
        with sharded_slots(inner, masters.trained):
            inner.build(masters.trained)
        exclude_masters_with_variables(inner, variables, masters.trained)
        # An inner optimizer that was built before keeps the variables it knows.
        check_known(inner, masters.trained)
        self._masters = masters
        self._step = Step(self, masters)
        for master in masters.variables:
            track_variable(self, master)
        self._finish_build(variables)
        masters.warn_of_bfloat16(inner)
        masters.warn_of_epsilons(inner)

    # --- Before gradients are applied ---------------------------------------

    @property
    def loss_scale_factor(self):
        """None: the loss scale of a `LossScaleOptimizer` is its own."""
        return None

    @loss_scale_factor.setter
    def loss_scale_factor(self, value):
        if value is not None:
            raise ValueError(
                "LossScaleOptimizer scales the loss itself and has no "
                "`loss_scale_factor`. For a fixed scale write `LossScaleOptimizer("
                f"inner_optimizer, dynamic=False, initial_scale={value})`."
            )

    def scale_loss(self, loss):
        """Multiplies the loss by the loss scale.

        Args:
            loss: Tensor or number. A float16 loss is promoted to float32, in
                which no loss scale overflows.

        Returns:
            The scaled loss.
        """
        scaled = self._scaling.scale(loss)
        self._scaling.gradients = Gradients.SCALED_BY_KERAS
        return scaled

    def get_scaled_loss(self, loss):
        """Multiplies the loss by the loss scale; also takes a callable.

        Args:
            loss: Tensor, or callable that returns one.

        Returns:
            The scaled loss, or a callable that returns it.
        """
        if callable(loss):
            # Compiled, it runs only while it is traced: what it says is said now.
            scaled = lambda: self.get_scaled_loss(loss())  # noqa: E731
        else:
            scaled = self._scaling.scale(loss)
        self._scaling.gradients = Gradients.SCALED
        return scaled

    def get_unscaled_gradients(self, grads):
        """Divides gradients of a scaled loss by the loss scale.

        `apply` takes the gradients for unscaled from here on, until the next
        loss is scaled. Variables that are overwritten with their gradients (float8
        scales) need the other way: hand `apply` the scaled gradients.

        Args:
            grads: List of tensors, dense or sparse. None passes through.

        Returns:
            A new list. What was narrower than float32 is float32 now: dividing
            in float16 would lose what loss scaling saved.
        """
        unscaled = self._scaling.unscale(as_list("grads", grads, "gradients"))
        self._scaling.gradients = Gradients.UNSCALED
        return unscaled

    # --- Applying -----------------------------------------------------------

    @backend.as_written
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
        if axis_name is not None:
            backend.check_axis_name(axis_name)
        if type(grads) is not list:
            grads = as_list("grads", grads, "gradients, one for each variable")
        if scaled is None:
            scaled = self._scaling.are_scaled(grads)
        plan = self._step.plan_of(grads, trainable_variables) if self.built else None
        if plan is None:
            backend.check_replica_context("apply")
            grads, variables = pair_gradients(self, grads, trainable_variables)
            if not variables:
                return
            backend.check_on_replicas([*variables, *self.variables])
            plan = self._step.plan(grads, variables)
        self._step(plan, grads, scaled, update_scale, axis_name)

    def stateless_apply(  # type: ignore[override]
        self,
        optimizer_variables,
        grads,
        trainable_variables,
        scaled=None,
        update_scale=True,
        axis_name=None,
    ):
        """Does what `apply` does, on values that come in and go out.

        The values that come in stay as they are.

        Args:
            optimizer_variables: List of tensors, the values of `variables`.
            grads: List of gradients, one for each trainable variable.
            trainable_variables: List of tensors, the values of the variables that
                the optimizer was built for.
            scaled: See `apply`. Defaults to `None`.
            update_scale: See `apply`. Defaults to `True`.
            axis_name: See `apply`. Defaults to `None`.

        Returns:
            A tuple of the new values of `trainable_variables` and of
            `optimizer_variables`.

        Raises:
            ValueError: If the optimizer is not built, or was built for other
                variables; on TensorFlow, as in Keras; on PyTorch, if autograd follows
                a gradient, since it cannot follow the step.
        """
        return super().stateless_apply(
            optimizer_variables,
            grads,
            trainable_variables,
            scaled=scaled,
            update_scale=update_scale,
            axis_name=axis_name,
        )

    def finalize_variable_values(self, var_list):
        """Lets the inner optimizer set the final values (EMA) of `var_list`.

        Keras calls this at the end of `fit`, whose compiled steps can warn of nothing:
        it warns if the last steps were skipped for a learning rate that is not finite.

        Args:
            var_list: List of trainable variables.
        """
        var_list = as_list("var_list", var_list, "variables")
        if not self.built:
            return
        # Without values after an error in the first step of Keras's `fit` on JAX, which
        # this is called after, too.
        if have_values(self.variables) and self._counters.skips_in_a_row():
            self._step.warn_of_rates()
        if not keeps_averages(self):
            if not self._masters.variables:
                self.inner_optimizer.finalize_variable_values(var_list)
            return
        averages = averages_of(self)
        if not averages:
            return
        known = [v for v in var_list if is_known(self, v)]
        trained = self._masters.trained_of(self, known)
        with self.masters_in_step():
            self.inner_optimizer.finalize_variable_values(trained)
        for variable, _ in averages:
            # On JAX it shares a buffer with its average now, which the next `fit`
            # donates twice.
            variable.assign(ops.copy(variable))

    def masters_in_step(self):
        """Returns a context, after which the model has what was assigned to masters.

        For code that assigns to what the inner optimizer trains, such as
        `keras_lso.callbacks.SwapEMAWeights`.
        """
        return self._masters.in_step() if self.built else contextlib.nullcontext()

    # --- Readings -----------------------------------------------------------

    @property
    def loss_scale(self):
        """The current loss scale, a float32 scalar tensor."""
        return self.loss_scale_policy.value

    @property
    def dynamic_scale(self):
        """The variable behind `loss_scale`."""
        return self.loss_scale_policy.scale

    @property
    def step_counter(self):
        """The variable behind `dynamic_counter`."""
        return self.loss_scale_policy.step_counter

    @property
    def skipped_steps(self):
        """The number of steps that were skipped, an integer scalar tensor."""
        return self._counters.skipped

    @property
    def last_step_applied(self):
        """Whether the last step was applied, a boolean scalar tensor.

        True before the first one.
        """
        return self._counters.last_was_applied

    def check_stalled(self, patience=50):
        """Raises an error if training has stalled: no loss scale is low enough.

        When every step overflows at the lowest scale, the model itself has
        diverged. This reads one number from the device: do not call it at each step.

        Args:
            patience: Int. Number of consecutive steps, all skipped at the lowest
                scale, after which training counts as stalled. Defaults to `50`.

        Raises:
            FloatingPointError: If that many steps were skipped.
        """
        self._counters.check_stalled(patience)

    def record_overflows(self):
        """Records from now on which gradients are not finite.

        Each gradient is then checked by itself, which reads all of them once more.
        It adds one variable to `variables`, so compiled functions must be made
        again: `model.make_train_function(force=True)`, or `jax.jit` of a new function.

        Raises:
            ValueError: If the optimizer has not been built yet.
        """
        if not self.built:
            raise ValueError(
                "To call `record_overflows`, LossScaleOptimizer must be built. Call "
                "`optimizer.build(trainable_variables)` first."
            )
        with where_variables_are_made(self):
            self._counters.record_overflows(len(variables_of(self)))

    def overflowed_variables(self):
        """Returns which variables' gradients made the last step skip.

        Returns:
            List of variables, empty if the last step was applied. It reads a number
            for each variable from the device.

        Raises:
            ValueError: If nothing was recorded.
        """
        found = self._counters.overflowed()
        variables = variables_of(self)
        return [v for v, is_bad in zip(variables, found, strict=True) if is_bad]

    # --- State --------------------------------------------------

    @property
    def variables(self):
        """All variables of this optimizer and of the inner one.

        The last ones are not saved: `StepCounters.variables`.
        """
        return [*self._state.variables, *self._counters.variables]

    def save_own_variables(self, store):
        """Writes the state into `store`, in the layout of Keras's own class."""
        self._state.save(store)
        self._hides_inner_optimizer = False

    def load_own_variables(self, store):
        """Reads the state from `store`, in any layout that `StateFile` knows."""
        self._hides_inner_optimizer = True
        self._state.load(store)

    def __dir__(self):
        """Hides `inner_optimizer` from Keras while a file is loaded.

        Keras saves and loads each object that `dir()` lists. The inner optimizer is
        saved so for Keras's own class; `load_own_variables` has restored it already.
        """
        hidden = vars(self).get("_hides_inner_optimizer", False)
        return [n for n in super().__dir__() if not (hidden and n == "inner_optimizer")]
