"""`LossScaleOptimizer`: scales the loss, and skips steps that overflow."""

import inspect
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Literal, Never, Self

import keras
from keras import ops
from numpy.typing import NDArray

from keras_lso._backend import backend
from keras_lso._backend.codecs import CODECS
from keras_lso._backend.tensors import NARROW, Tensor, shown
from keras_lso._core.checks import check_bool, check_choice, warn
from keras_lso._core.configs import refuse_unsupported
from keras_lso._core.counters import LOOK_FOR, StepCounters
from keras_lso._core.gradients import (
    as_list,
    check_trainable,
    list_of_gradients,
    pair_gradients,
)
from keras_lso._core.inner_update import check_has_moments
from keras_lso._core.master_weights import (
    MasterWeights,
    dtype_of_slot,
)
from keras_lso._core.methods import Methods, VariableList, apply_pairs
from keras_lso._core.spikes import SpikeGuard, SpikeHistory, check_guard
from keras_lso._core.state_file import StateFile
from keras_lso._core.step import Gradients, LossScaling, Step
from keras_lso._core.wrapper import (
    Wrapper,
    check_inner_optimizer,
    check_not_wrapped,
    remember_wrapped,
)
from keras_lso._keras_internals.distribution import (
    remember_layouts,
    sharded_slots,
    spread_state,
)
from keras_lso._keras_internals.optimizers import (
    base_variables_of,
    check_known,
    exclude_masters_with_variables,
    is_known,
    keeps_averages,
    most_accumulation_steps,
    slots_in,
    track_variable,
    variables_of,
    where_variables_are_made,
)
from keras_lso._keras_internals.rules import steps_by_rule
from keras_lso._keras_internals.state import averages_of
from keras_lso._keras_internals.variables import (
    compute_dtypes_of,
    computes_in_policies,
    have_values,
    layer_in_float16,
    path_of,
)
from keras_lso.loss_scales.fixed import FixedLossScale
from keras_lso.loss_scales.lookup import policy_of, read_config, write_config
from keras_lso.loss_scales.loss_scale import LossScale
from keras_lso.schedules._schedule import warn_of_micro_batches

DEFAULT_NAME = "loss_scale_optimizer"


@keras.saving.register_keras_serializable("keras_lso", name="LossScaleOptimizer")
class LossScaleOptimizer(Methods, Wrapper, keras.optimizers.LossScaleOptimizer):
    """An optimizer that scales the loss, so that float16 gradients survive.

    Loss scaling multiplies the loss by a number, the loss scale, before the
    gradients are computed, and divides the gradients by it afterwards. In exact
    arithmetic this changes nothing. In float16 it keeps small gradients from
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

    It is a `keras.optimizers.LossScaleOptimizer`, so `Model.compile` accepts it
    directly, and `fit` scales the loss and passes the scaled gradients to `apply`.
    In your own loop, either let `apply` unscale:

    ```python
    loss = optimizer.scale_loss(loss)
    gradients = ...                     # of the scaled loss
    optimizer.apply(gradients, variables)
    ```

    or unscale the gradients yourself, for example to inspect or clip them:

    ```python
    loss = optimizer.get_scaled_loss(loss)
    gradients = optimizer.get_unscaled_gradients(...)
    optimizer.apply_gradients(zip(gradients, variables))
    ```

    The method that you called last tells `apply` whether the gradients are scaled.
    Pass `scaled=True` or `scaled=False` to state it explicitly.

    With `gradient_accumulation_steps` on the inner optimizer, a micro-batch that
    overflows is dropped entirely, and the window waits for the next finite one.
    `iterations` then counts updates. A learning-rate schedule counts finite
    micro-batches, as in Keras's optimizers; wrap it in
    `keras_lso.schedules.PerUpdate` to make it count updates as well.

    Args:
        inner_optimizer: The `keras.optimizers.Optimizer` to wrap.
        dynamic: Whether the scale adapts to the gradients. Defaults to `True`. If
            `False`, it stays at `initial_scale`.
        initial_scale: The scale of the first step. Defaults to `2**15`; required if
            `dynamic` is `False`. Too high is better than too low: the scale falls at
            every overflow but rises slowly. With `"auto"` it begins at `2**15`, falls
            by a factor of 16 until a step is finite, and then climbs for some steps.
        dynamic_growth_steps: Number of finite steps after which the scale doubles.
            Defaults to `2000`. Must not be given for a fixed scale.
        loss_scale: A `keras_lso.loss_scales.LossScale`. It replaces the scale that
            the other arguments describe; none of them may be given with it. Also
            accepts everything that `keras_lso.loss_scales.get` does: a number,
            `"dynamic"`, or a config dict.
        min_scale: The lower bound of the dynamic scale. Defaults to `2**-14`.
        max_scale: The upper bound of the dynamic scale. Defaults to `2**24`.
        master_weights: `"auto"`, `"float32"`, `"remainder"`, `"remainder8"`,
            `"stochastic"`, True or False. How float16 or bfloat16 weights keep steps
            that are too small for 16 bits, in a model under the dtype policy
            `"float16"` or `"bfloat16"`. Defaults to `"auto"`, which is `"float32"`; the
            page "Fine-tuning in bfloat16" explains why.

            - `"float32"`, or True: keeps a float32 number for each weight, 4 bytes. The
              inner optimizer trains this number; the weight is its rounded value. In
              `model.summary()` it is one of the optimizer's parameters.
            - `"remainder"`: keeps the rounding error of that number, 2 bytes. The
              number is restored to the bit; in float16, numbers below `2**-14` are
              restored within `2**-39`.
            - `"remainder8"`: keeps 8 bits of the rounding error, 1 byte. A step below
              `2**-17` of a bfloat16 weight, or `2**-19` of a float16 weight, is lost.
            - `"stochastic"`: keeps nothing. The number is rounded at random to one of
              the two nearest weights, which is correct on average and adds noise
              that a smaller learning rate does not remove.
            - False: keeps nothing. The inner optimizer computes in 16 bits, and its
              slots have 16 bits too. In the other modes slots are float32.

            Under `"mixed_float16"` and `"mixed_bfloat16"` weights are float32, and
            nothing is kept.
        spike_guard: A `keras_lso.SpikeGuard`, which decides by the norm of the
            gradients which steps are outliers. An outlier is skipped and leaves the
            loss scale unchanged. Defaults to `None`: no step counts as an outlier.
        slot_dtype: `"bfloat16"` for moments in bfloat16, such as both of Adam's, which
            halves their memory; `"int8"` for 8 bits by blocks of 64, where a tensor is
            large and has blocks, which saves nothing on a TPU. A step computes them in
            float32 and rounds them stochastically, so that they decay as in float32. It
            takes the optimizers of the page "Fine-tuning in bfloat16". Defaults to
            `None`: slots are in float32.
        shard_state: On JAX, whether the devices of a `keras.distribution` share slots,
            masters, averages and accumulated gradients (ZeRO-1): of the state of a
            weight that `n` devices have, each keeps one part of `n`. Steps and files
            are those of whole state; the page "Scaling out" has the exceptions. On one
            device without a distribution it has no effect. Defaults to `False`.
        name: The name of the optimizer. Defaults to `"loss_scale_optimizer"`.

    Attributes:
        inner_optimizer: The wrapped optimizer. Its hyperparameters (`momentum`,
            `beta_1`, `clipnorm`, ...) read and write through this one as well.
        loss_scale: Float32 scalar tensor. The current scale.
        loss_scale_policy: The `keras_lso.loss_scales.LossScale` behind it.
        iterations: The variable that counts the applied steps; with
            `gradient_accumulation_steps`, the updates.
        skipped_steps: Integer scalar tensor. The number of skipped steps.
        skipped_spikes: Integer scalar tensor. The number of steps that were skipped
            as outliers.
        last_step_applied: Boolean scalar tensor. Whether the last step was applied.

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

    # The parts are: `loss_scale_policy`, the `LossScale` that holds the loss scale and
    # moves it; `_scaling`, which knows whether gradients are scaled; `_counters` of
    # applied and skipped steps; `_masters` of 16-bit variables, none before `build`;
    # and, after `build`, `_step`, which applies or skips.

    inner_optimizer: keras.optimizers.Optimizer
    loss_scale_policy: LossScale
    master_weights: str | bool
    spike_guard: SpikeGuard | None
    slot_dtype: str | None
    shard_state: bool

    # Whether `apply_gradients` takes unscaled gradients, as in tf.keras. Keras 3's own
    # trainers pass scaled ones.
    _takes_unscaled_pairs = False

    # The class of `_scaling`, which knows whether gradients are scaled.
    _scaling_class = LossScaling

    # The arguments of the constructor that cannot be replaced afterwards.
    _parts = (
        *("inner_optimizer", "loss_scale_policy"),
        *("master_weights", "spike_guard", "slot_dtype", "shard_state"),
    )

    # In `torch.amp.GradScaler`, in jmp, and in PyTorch's optimizers.
    _elsewhere: Mapping[str, str] = {
        "scale": "`scale_loss(loss)`, or `float(optimizer.loss_scale)` for the number",
        "get_scale": "`float(optimizer.loss_scale)`",
        "unscale": "`get_unscaled_gradients(gradients)`",
        "unscale_": "`get_unscaled_gradients(gradients)`",
        "step": "`apply(gradients, variables)`",
        "update": "nothing: `apply` moves the loss scale",
        "adjust": "nothing: `apply` moves the loss scale",
        "zero_grad": "`model.zero_grad()`",
        "state_dict": "`[v.value for v in optimizer.variables]`",
        "load_state_dict": "`variable.assign(value)` for each of `optimizer.variables`",
    }

    def __init__(
        self,
        inner_optimizer: keras.optimizers.Optimizer,
        dynamic: bool = True,
        initial_scale: float | Literal["auto"] | None = None,
        dynamic_growth_steps: int | None = None,
        *,
        loss_scale: LossScale | float | str | dict[str, Any] | None = None,
        min_scale: float | None = None,
        max_scale: float | None = None,
        master_weights: Literal[
            "auto", "float32", "remainder", "remainder8", "stochastic"
        ]
        | bool = "auto",
        spike_guard: SpikeGuard | dict[str, Any] | None = None,
        slot_dtype: Literal["bfloat16", "int8"] | None = None,
        shard_state: bool = False,
        name: str | None = DEFAULT_NAME,
        **kwargs: Never,
    ) -> None:
        refuse_unsupported(kwargs, LossScaleOptimizer, LossScaleOptimizer)
        check_inner_optimizer(inner_optimizer)
        described = dynamic, initial_scale, dynamic_growth_steps, loss_scale
        policy = policy_of(*described, min_scale, max_scale)
        # Keras's wrapper sets itself up for a dynamic scale without bounds.
        super(keras.optimizers.LossScaleOptimizer, self).__init__(
            learning_rate=0.0, name=DEFAULT_NAME if name is None else name
        )
        kinds = "auto", True, False, *CODECS
        self.master_weights = check_choice("master_weights", master_weights, kinds)
        self.spike_guard = check_guard(spike_guard)
        dtypes = None, "bfloat16", "int8"
        self.slot_dtype = check_choice("slot_dtype", slot_dtype, dtypes)
        self.shard_state = check_bool("shard_state", shard_state)
        if self.shard_state:
            backend.replicas.check_shards_state()
        check_not_wrapped(inner_optimizer)
        policy.claim(self)
        self.loss_scale_policy = policy
        self.inner_optimizer = inner_optimizer
        remember_wrapped(inner_optimizer, self.name)
        # Not in `build`, which the first step calls after its loss has been scaled. A
        # `tf.train.Checkpoint` restores a variable as soon as the variable exists; the
        # gradients would be unscaled by another scale than the loss was scaled by.
        policy.build()
        self._scaling = self._scaling_class(policy)
        self._counters = StepCounters(self)
        self._spikes: SpikeHistory | None = None
        if self.spike_guard is not None:
            self._spikes = SpikeHistory(self, self.spike_guard)
        self._masters = MasterWeights((), False, inner_optimizer)
        self._has_warned = False
        # Whether `protect_statistics` was called for the model that it trains.
        self._protects = False
        _clear_loss_scale_factor(inner_optimizer)

    @backend.host.outside_of_functions()
    def build(self, variables: Iterable[keras.Variable]) -> None:
        """Creates the variables of the inner optimizer and of the loss scale.

        Args:
            variables: The trainable variables.
        """
        self._refuse_to_be_wrapped()
        if self.built:
            return
        variables = check_trainable(variables)
        remember_layouts(variables)
        inner = self.inner_optimizer
        if self._spikes is not None:
            self._spikes.check_accumulation()
        spread = spread_state(inner, variables) if self.shard_state else nullcontext()
        with spread:
            masters = self._build_inner(variables)
        if self._spikes is not None:
            self._spikes.build(variables)
        masters.release(inner)
        exclude_masters_with_variables(inner, variables, masters.trained)
        # An inner optimizer that was built before keeps the variables it knows.
        check_known(inner, masters.trained)
        self._masters = masters
        self._step = Step(self, masters)
        if masters.scales:
            # Keras saves the inner optimizer too, for other classes to read it.
            inner.save_own_variables = self._state.save_inner
            inner.load_own_variables = self._state.load_inner
        for variable in masters.variables:
            track_variable(self, variable)
        self._finish_build(variables)
        masters.warn_of_epsilons(inner)
        if most_accumulation_steps(inner):
            warn_of_micro_batches(inner)
        callers = _callers_of(keras.Model)
        model = next((caller["self"] for caller in callers), None)
        self._warn_of_dtypes(model, _float16_in(variables, model))
        if model is not None:
            self._warn_of_idle_masters()
        self._warn_of_swapped_masters()
        _warn_of_floatx()

    def _refuse_to_be_wrapped(self) -> None:
        """Raises an error if Keras's class builds this optimizer as its inner one."""
        for caller in _callers_of(keras.optimizers.LossScaleOptimizer):
            outer = caller["self"]
            is_inside = vars(outer).get("inner_optimizer") is self
            if is_inside and not self._scaling.scales_by_one:
                raise TypeError(
                    "A `keras.optimizers.LossScaleOptimizer` is around this "
                    f"{type(self).__name__}: both would divide the gradients by a loss "
                    "scale, and the steps would be too small. Pass this optimizer "
                    "itself to `compile`, or call its own `apply`. Received: "
                    f"inner_optimizer={self!r}"
                )

    def _build_inner(self, variables: list[keras.Variable]) -> MasterWeights:
        """Builds the inner optimizer for masters and other variables; returns them."""
        inner = self.inner_optimizer
        masters = MasterWeights(variables, self.master_weights, inner)
        if inner.built and masters.masters:
            raise ValueError(
                "The inner optimizer has been built already, for 16-bit variables, and "
                "cannot train their float32 masters now. Pass an optimizer that has "
                "not been used, or master_weights=False. Received: "
                f"inner_optimizer={inner!r}"
            )
        narrow: AbstractContextManager[None] = nullcontext()
        if self.slot_dtype is not None:
            check_has_moments(inner, masters.trained, self.slot_dtype)
            narrow = slots_in(inner, partial(dtype_of_slot, self.slot_dtype))
        with sharded_slots(inner, masters.trained), narrow:
            inner.build(masters.trained)
        masters.keep_scales(inner.variables)
        return masters

    def _prepare_graphs(self) -> None:
        super()._prepare_graphs()
        if self.built:
            # Their graphs take this step with all of its variables.
            for larc in self._step.around:
                larc._prepare_graphs()

    def _needs_host(self) -> bool:
        if steps_by_rule(self.inner_optimizer):
            return False
        return bool(self._masters.placeholders) or super()._needs_host()

    def _objects_read_by_step(self) -> list[Any]:
        guards = [] if self.spike_guard is None else [self.spike_guard]
        return [*super()._objects_read_by_step(), self.loss_scale_policy, *guards]

    def _warn_of_dtypes(
        self, model: keras.Model | None, in_float16: str | None
    ) -> None:
        """Warns if the model that is trained is known, and nothing is in float16."""
        if model is None or in_float16 is not None:
            return
        policy = keras.config.dtype_policy()
        # Code of others may cast to float16, but then not under this dtype policy.
        if policy.compute_dtype == "float16" or computes_in_policies(model):
            dtypes = ", ".join(dict.fromkeys(compute_dtypes_of(model).values()))
            warn(
                "LossScaleOptimizer scales the loss of a model without float16, which "
                "needs no loss scale. Write `GuardedOptimizer(inner_optimizer)`, or "
                "`keras.config.set_dtype_policy('mixed_float16')` before the layers "
                f"are made. Received: a model whose layers compute in {dtypes}, and "
                f"the dtype policy '{policy.name}'"
            )

    def _warn_of_idle_masters(self) -> None:
        """Warns if smaller masters were asked for, and no weight has 16 bits."""
        kind = self.master_weights
        if kind in ("auto", "float32", True, False) or self._masters.masters:
            return
        warn(
            f"`master_weights={kind!r}` is for weights of 16 bits, and this model has "
            "none, so it changes nothing. Write `keras.config.set_dtype_policy("
            "'bfloat16')` before the layers are made, or leave it out."
        )

    def _warn_of_swapped_masters(self) -> None:
        """Warns once of a callback in `fit` that swaps masters, not weights."""
        if self._has_warned or not (self._masters.masters and keeps_averages(self)):
            return
        keras_own = keras.callbacks.SwapEMAWeights.on_test_begin
        for caller in _callers_of(keras.Model):
            callbacks = caller.get("callbacks")
            callbacks = keras.tree.flatten(getattr(callbacks, "callbacks", callbacks))
            methods = [getattr(type(c), "on_test_begin", None) for c in callbacks]
            if keras_own in methods:
                self._has_warned = True
                warn(
                    "`keras.callbacks.SwapEMAWeights` swaps the averages into the "
                    "masters of 16-bit weights, and the model is evaluated with other "
                    "weights. Write `keras_lso.callbacks.SwapEMAWeights()`."
                )

    def _warn_of_other_variables(self, trained: list[keras.Variable]) -> None:
        """Warns of a `fit` on JAX, where a step takes values, of other variables."""
        others = [path_of(v) for v in trained if not is_known(self, v)]
        # A model may train a part of its variables by another optimizer.
        if others and len(trained) == len(variables_of(self)):
            warn(
                "This `fit` trained variables with the optimizer's state of others: "
                "the optimizer was built for another model, or other layers were "
                "trained then. Compile each with a new optimizer. Received: "
                f"{shown(others)}"
            )

    def _warn_of_lost_protection(self) -> None:
        """Warns at the first step if only the model in a file was protected."""
        if not self._protects:
            return
        steps = (caller["self"].train_step for caller in _callers_of(keras.Model))
        step = next(steps, None)
        if step is not None and not hasattr(step, "protects_statistics"):
            warn(
                "The optimizer is from a file or a copy of a model under "
                "`protect_statistics`, and its own model is not: a skipped step may "
                "change moving statistics. After loading or copying, call "
                "`keras_lso.protect_statistics(model)`."
            )

    # --- Before gradients are applied ---------------------------------------

    @property
    def loss_scale_factor(self) -> None:
        """None: a `LossScaleOptimizer` has its own loss scale."""
        return None

    @loss_scale_factor.setter
    def loss_scale_factor(self, value: float | None) -> None:
        if value is not None:
            raise ValueError(
                "LossScaleOptimizer scales the loss itself and has no "
                "`loss_scale_factor`. For a fixed scale write `LossScaleOptimizer("
                f"inner_optimizer, dynamic=False, initial_scale={value})`."
            )

    def scale_loss(self, loss: float | Tensor) -> Tensor:
        """Multiplies the loss by the loss scale.

        Args:
            loss: The loss. A float16 loss is promoted to float32, where no loss scale
                overflows.
        """
        scaled = self._scaling.scale(loss)
        self._scaling.gradients = Gradients.SCALED_BY_KERAS
        return scaled

    def get_scaled_loss(self, loss: Tensor | Callable[[], Tensor]) -> Any:
        """Multiplies the loss by the loss scale; also takes a callable.

        Args:
            loss: Tensor, or callable that returns one. The result is of the same kind.
        """
        if callable(loss):
            # A compiled function runs only while it is traced, so the state is set
            # below, outside the callable.
            scaled = lambda: self.get_scaled_loss(loss())  # noqa: E731
        else:
            scaled = self._scaling.scale(loss)
        self._scaling.gradients = Gradients.SCALED
        return scaled

    @backend.in_graphs
    def get_unscaled_gradients(self, grads: Iterable[Tensor | None]) -> list[Tensor]:
        """Divides gradients of a scaled loss by the loss scale.

        From this call on, `apply` treats gradients as unscaled, until the next loss
        is scaled. Do not call this method for variables that are overwritten with
        their gradients (float8 scales): pass the scaled gradients to `apply`.

        Args:
            grads: Tensors, dense or sparse. None passes through.

        Returns:
            A new list. Gradients narrower than float32 become float32: dividing in
            float16 would lose the small values that loss scaling saved.
        """
        unscaled = self._scaling.unscale(as_list("grads", grads, "gradients"))
        self._scaling.gradients = Gradients.UNSCALED
        return unscaled

    # --- Applying -----------------------------------------------------------

    @backend.in_graphs
    @backend.do_not_convert
    def apply(
        self,
        grads: Iterable[Tensor | None],
        trainable_variables: Iterable[keras.Variable] | None = None,
        scaled: bool | None = None,
        update_scale: bool = True,
        axis_name: str | tuple[str, ...] | None = None,
    ) -> None:
        """Updates the variables, or skips the step if a gradient is not finite.

        A skipped step leaves the trainable variables and the inner optimizer
        unchanged, bit for bit.

        Args:
            grads: The gradients, one for each variable; None where a variable has none.
                Integers count as float32.
            trainable_variables: The variables. Defaults to those that the optimizer was
                built for; the first call builds it.
            scaled: Whether `grads` are gradients of the scaled loss. Defaults to
                `None`: they are, unless `get_unscaled_gradients` was called after the
                last `scale_loss` or `get_scaled_loss`.
            update_scale: Whether this step moves the loss scale. Defaults to `True`.
                With several losses in one step, set it to `False` for all but the
                last. The last one then also accounts for the overflows of the others.
            axis_name: On JAX, inside `jax.shard_map` or `jax.pmap`: the axis over
                which the gradients are still to be averaged. Defaults to `None`: the
                caller has averaged them. Shards among the gradients and variables are
                recognised by their types. This works only inside `jax.shard_map` with
                `check_vma=True` (the default).

        Raises:
            TypeError: If `grads` or `trainable_variables` is not a list, or if the two
                are swapped.
            ValueError: If the gradients do not fit the variables in number or shape,
                if a gradient is complex, if all gradients are None, or if the
                optimizer was built for other variables.
            RuntimeError: If called in a cross-replica context.
        """
        if axis_name is not None:
            backend.replicas.check_axis_name(axis_name)
        given = list_of_gradients(grads)
        if backend.replicas.REDUCES_GRADIENTS:
            backend.replicas.check_replica_context("apply")
        grads, variables = pair_gradients(self, given, trainable_variables)
        if scaled is None:
            scaled = self._scaling.are_scaled(given)
        if variables:
            self._step(grads, variables, scaled, update_scale, axis_name)

    def apply_gradients(
        self,
        grads_and_vars: Iterable[tuple[Tensor | None, keras.Variable]],
        name: str | None = None,
        experimental_aggregate_gradients: bool = True,
        skip_gradients_aggregation: bool = False,
        *,
        scaled: bool | None = None,
        update_scale: bool = True,
        axis_name: str | tuple[str, ...] | None = None,
    ) -> keras.Variable:
        """Calls `apply` for pairs; returns the variable that counts applied steps.

        Args:
            grads_and_vars: The `(gradient, variable)` pairs.
            name: Defaults to `None`. Keras 3 does not name operations.
            experimental_aggregate_gradients: Whether to add up the gradients of all
                replicas of a `tf.distribute.Strategy`. Defaults to `True`. If `False`,
                the caller has already done so.
            skip_gradients_aggregation: The opposite, from later versions of tf.keras.
                Defaults to `False`.
            scaled: See `apply`. Defaults to `None`.
            update_scale: See `apply`. Defaults to `True`.
            axis_name: See `apply`. Defaults to `None`.

        Raises:
            TypeError: If `grads_and_vars` is malformed.
            ValueError: If no variable has a gradient.
            RuntimeError: If called in a cross-replica context.
        """
        if scaled is None and self._takes_unscaled_pairs:
            nobody_knows = Gradients.UNKNOWN, Gradients.SCALED
            scaled = False if self._scaling.gradients in nobody_knows else None
        are_reduced = skip_gradients_aggregation or not experimental_aggregate_gradients
        if are_reduced and axis_name is not None:
            raise ValueError(
                "`axis_name` says that the gradients are still to be averaged, but "
                "`skip_gradients_aggregation=True` says that they are not. Give one of "
                f"them. Received: axis_name={axis_name!r}"
            )
        options = dict(scaled=scaled, update_scale=update_scale, axis_name=axis_name)
        return apply_pairs(self, grads_and_vars, name, are_reduced, **options)

    def stateless_apply(  # type: ignore[override]
        self,
        optimizer_variables: Iterable[Tensor],
        grads: Iterable[Tensor | None],
        trainable_variables: Iterable[Tensor],
        scaled: bool | None = None,
        update_scale: bool = True,
        axis_name: str | tuple[str, ...] | None = None,
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Applies gradients as `apply` does, but takes and returns values.

        The arguments are left unchanged.

        Args:
            optimizer_variables: The values of `variables`.
            grads: The gradients, one for each trainable variable.
            trainable_variables: The values of the variables that the optimizer was
                built for.
            scaled: See `apply`. Defaults to `None`.
            update_scale: See `apply`. Defaults to `True`.
            axis_name: See `apply`. Defaults to `None`.

        Returns:
            A tuple of the new values of `trainable_variables` and of
            `optimizer_variables`.

        Raises:
            ValueError: If the optimizer is not built, or was built for other
                variables; on TensorFlow, as in Keras; on PyTorch, if autograd tracks
                a gradient, since it cannot track the step.
        """
        options = dict(scaled=scaled, update_scale=update_scale, axis_name=axis_name)
        return super().stateless_apply(
            optimizer_variables, grads, trainable_variables, **options
        )

    def finalize_variable_values(self, var_list: Iterable[keras.Variable]) -> None:
        """Lets the inner optimizer set the final values (EMA) of `var_list`.

        Keras calls this at the end of `fit`. It warns if no step was applied since the
        last call, or if the last steps were skipped because the learning rate is not
        finite: compiled steps cannot warn.

        Args:
            var_list: The trainable variables.
        """
        var_list = as_list("var_list", var_list, "variables")
        if not self.built:
            return
        # After an error in the first step of `fit` on JAX, Keras calls this method
        # although the variables have no values.
        if have_values(self.variables):
            self._step.warn_at_end()
        self._warn_of_swapped_masters()
        self._warn_of_other_variables(var_list)
        if not keeps_averages(self):
            if not self._masters.masters:
                self.inner_optimizer.finalize_variable_values(var_list)
            return
        known = [v for v in var_list if is_known(self, v)]
        trained = set(map(id, self._masters.trained_of(self, known)))
        with self._masters.in_step():
            for variable, average in averages_of(self):
                if id(variable) in trained:
                    # Otherwise the two would share a buffer on JAX, which the next
                    # `fit` would donate twice.
                    variable.assign(ops.copy(average))

    # --- Readings -----------------------------------------------------------

    def _readings(self) -> dict[str, float]:
        """Returns what `repr` can read without waiting: nothing on an accelerator."""
        if "_masters" not in vars(self) or not have_values(self._in_memory):
            return {}
        tensors = {"loss_scale": self.loss_scale, "skipped_steps": self.skipped_steps}
        numbers = {k: backend.value_if_on_host(v) for k, v in tensors.items()}
        return {k: number for k, number in numbers.items() if number is not None}

    @property
    def initial_scale(self) -> float:
        """The loss scale of the first step, a float."""
        return self.loss_scale_policy.initial_loss_scale

    @property
    def min_scale(self) -> float:
        """The lower bound of the loss scale, a float."""
        return self.loss_scale_policy.min_scale

    @property
    def max_scale(self) -> float:
        """The upper bound of the loss scale, a float."""
        return self.loss_scale_policy.max_scale

    @property
    def dynamic(self) -> bool:
        """Whether the loss scale adapts to the gradients."""
        return not isinstance(self.loss_scale_policy, FixedLossScale)

    @property
    def dynamic_growth_steps(self) -> int | None:
        """Number of finite steps after which the scale grows; None if fixed."""
        return getattr(self.loss_scale_policy, "increment_period", None)

    @property
    def dynamic_counter(self) -> Tensor | None:
        """Number of finite steps since the scale last moved; None if fixed."""
        return ops.copy(self.step_counter) if self.dynamic else None

    @property
    def loss_scale(self) -> Tensor:
        """The current loss scale, a float32 scalar tensor."""
        return self.loss_scale_policy.value

    @property
    def dynamic_scale(self) -> keras.Variable:
        """The variable behind `loss_scale`."""
        return self.loss_scale_policy.scale

    @property
    def step_counter(self) -> keras.Variable:
        """The variable behind `dynamic_counter`."""
        return self.loss_scale_policy.step_counter

    @property
    def skipped_steps(self) -> Tensor:
        """The number of steps that were skipped, an integer scalar tensor."""
        return self._counters.skipped

    @property
    def skipped_spikes(self) -> Tensor:
        """The number of steps that were skipped as outliers, an integer scalar tensor.

        0 without a `spike_guard`.
        """
        if self._spikes is None:
            return ops.zeros((), dtype="int32")
        return self._spikes.skipped

    @property
    def last_step_applied(self) -> Tensor:
        """Whether the last step was applied, a boolean scalar tensor.

        True before the first step.
        """
        return self._counters.last_was_applied

    def check_stalled(self, patience: int = 50) -> None:
        """Raises an error if training has stalled: no loss scale is low enough.

        The check reads one number from the device, so do not call it at every step.

        Args:
            patience: Number of consecutive steps, all skipped at the lowest scale,
                after which training counts as stalled. Defaults to `50`.

        Raises:
            FloatingPointError: If that many steps were skipped.
        """
        self._counters.check_stalled(patience)

    def record_overflows(self) -> None:
        """Starts recording which gradients are not finite.

        Each step then checks every gradient separately, which reads all gradients a
        second time. The record adds one variable to `variables`, so compiled functions
        must be created again: `model.make_train_function(force=True)`, or `jax.jit` of
        a new function.

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
            self._prepare_graphs()

    def _stop_recording_overflows(self) -> None:
        """Stops checking single gradients, of which nothing is kept."""
        self._counters.stop_recording_overflows()
        self._prepare_graphs()

    def overflowed_variables(self) -> list[keras.Variable]:
        """Returns the variables whose gradients caused the last step to be skipped.

        There are none if the last step was applied. If there are all of them, as after
        an overflow of the forward pass, a warning says so. The call reads one number
        for each variable from the device.

        Raises:
            ValueError: If `record_overflows` was not called.
        """
        found = self._variables_overflowed()
        if len(found) == len(variables_of(self)) > 1:
            warn(
                "All gradients are inf or NaN, as after an overflow of the forward "
                f"pass: they do not tell the layer. {LOOK_FOR}"
            )
        return found

    def _variables_overflowed(self) -> list[keras.Variable]:
        """Returns what `overflowed_variables` does, without a warning."""
        pairs = zip(variables_of(self), self._counters.overflowed(), strict=True)
        return [v for v, has_overflowed in pairs if has_overflowed]

    def record_steps(self, length: int = 512) -> None:
        """Starts recording each step, for `read_record`.

        A ring buffer on the device holds the last steps; the host reads nothing. The
        norm of the gradients is computed for the record where no option needs it
        already. The record adds two variables to `variables`, so compiled functions
        must be created again, as after `record_overflows`. In `fit`,
        `keras_lso.callbacks.StepRecord` calls this method.

        Args:
            length: The number of steps that the ring buffer holds, at most `2**20`.
                Call `read_record` at least once every `length` steps. Defaults to
                `512`.

        Raises:
            ValueError: If a record of fewer steps exists already.

        Example:

        >>> import keras, keras_lso
        >>> optimizer = keras_lso.LossScaleOptimizer(
        ...     keras.optimizers.SGD(0.5), initial_scale=1024
        ... )
        >>> w = keras.Variable([1.0, 2.0])
        >>> optimizer.record_steps()
        >>> for value in (3.0, float("inf")):
        ...     loss = optimizer.scale_loss(value)
        ...     optimizer.apply([keras.ops.array([value * 1024.0, 0.0])], [w])
        >>> record = optimizer.read_record()
        >>> list(zip(record["step"].tolist(), record["outcome"].tolist()))
        [(1, 'applied'), (2, 'overflow')]
        >>> record["loss_scale"].tolist(), record["gradient_norm"].tolist()
        ([1024.0, 1024.0], [3.0, inf])
        """
        with where_variables_are_made(self):
            self._counters.record_steps(length, self)
            self._prepare_graphs()

    def read_record(self) -> dict[str, NDArray[Any]]:
        """Returns the steps recorded since the last call, at most the ring's length.

        It reads the ring buffer from the device.

        Returns:
            Dict of NumPy arrays, with one element for each step, in order:

            - `"step"`: Integers. The number of the step, from 1, applied or not.
            - `"outcome"`: Strings. `"applied"`; `"accumulated"`, if the gradients were
              added to a window that is not complete; or the reason why the step was
              skipped: `"overflow"`, `"spike"`, or `"rate"`, if the learning rate or
              another coefficient was not finite.
            - `"loss_scale"`: Float32. The loss scale of the step.
            - `"gradient_norm"`: Float32. The norm of all unscaled gradients, before
              clipping; not finite if a gradient is not.
            - `"learning_rate"`: Float32. The learning rate of the step; in a
              `MultiOptimizer`, the rate of its first optimizer.
            - `"largest_gradient"`: Float32. The largest magnitude among the unscaled
              gradients, for a loss scale that uses it, such as
              `keras_lso.loss_scales.LogMaxLossScale`. NaN for other loss scales.

        Raises:
            ValueError: If `record_steps` was not called.
        """
        return self._counters.read_record()

    # --- State --------------------------------------------------

    @property
    def variables(self) -> VariableList:
        """All variables of this optimizer and of the inner optimizer.

        The value is a list, as in Keras 3, and also callable, as in tf.keras. The last
        variables, `StepCounters.variables`, are not saved.
        """
        variables = [*self._in_memory, *self._counters.variables]
        return VariableList(variables, called=lambda: self._called_variables())

    def _called_variables(self) -> list[keras.Variable]:
        return self.weights

    @property
    def _in_memory(self) -> list[keras.Variable]:
        """The variables that are saved, where a master may be less than its number."""
        return self._saved_with(self._masters.variables)

    def _saved_with(self, masters: list[keras.Variable]) -> list[keras.Variable]:
        """Returns the variables that are saved, in their order: see `StateFile`."""
        policy = self.loss_scale_policy.variables
        spikes = [] if self._spikes is None else self._spikes.variables
        first, inner = base_variables_of(self), self.inner_optimizer.variables
        return [*first, *policy[:2], *inner, *policy[2:], *masters, *spikes]

    @property
    def _state(self) -> StateFile:
        """The state as files hold it."""
        return StateFile(self)

    def save_own_variables(self, store: MutableMapping[str, Any]) -> None:
        """Writes the state into `store`, in the layout of Keras's own class."""
        self._state.save(store)
        self._hides_inner_optimizer = False

    def load_own_variables(self, store: MutableMapping[str, Any]) -> None:
        """Reads the state from `store`, in any layout that `StateFile` knows."""
        self._hides_inner_optimizer = True
        self._state.load(store)
        self._counters.mark()

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "loss_scale":
            advice = "make a new `LossScaleOptimizer(inner_optimizer, loss_scale=...)`"
            if self.dynamic:
                advice = f"write `optimizer.dynamic_scale.assign({shown(value)})`"
            raise AttributeError(
                f"`loss_scale` of a {type(self).__name__} has no setter. To go on at "
                f"another scale, {advice}"
            )
        super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        """Hides `inner_optimizer` from Keras while a file is loaded.

        Keras saves and loads each object that `dir()` lists. It saves the inner
        optimizer this way, so that Keras's own class can read the file. When Keras
        loads the file, `load_own_variables` has restored the inner optimizer already.
        """
        hides = vars(self).get("_hides_inner_optimizer", False)
        return [n for n in super().__dir__() if not (hides and n == "inner_optimizer")]

    # --- Called by methods of tf.keras --------------------------------------

    def _scaled(self, loss: Tensor) -> Tensor:
        return self._scaling.scale(loss)

    def _unscaled(self, grads: list[Tensor]) -> list[Tensor]:
        return self.get_unscaled_gradients(grads)

    def _apply_scaled(self, grads_and_vars: Any, name: str | None) -> keras.Variable:
        return self.apply_gradients(grads_and_vars, name=name, scaled=True)

    def _weight_layouts(self) -> list[list[keras.Variable]]:
        # The first layout has no loss scale, and leaves the current scale unchanged.
        return [self.weights, self._in_memory, list(self.variables)]

    def _assign_weights(
        self, variables: list[keras.Variable], values: list[NDArray[Any]]
    ) -> None:
        saved = self._in_memory
        if len(variables) >= len(saved):
            self._state.assign(saved, values[: len(saved)])
        else:
            super()._assign_weights(variables, values)
        self._counters.mark()

    # --- Config -------------------------------------------------------------

    def get_config(self) -> dict[str, Any]:
        """Returns the config: Keras's four keys, and arguments not at their default."""
        return write_config(self)

    @classmethod
    def from_config(
        cls, config: dict[str, Any], custom_objects: Mapping[str, Any] | None = None
    ) -> Self:
        """Creates an optimizer from the return value of `get_config`.

        Configs of Keras's own `LossScaleOptimizer` and of any version of tf.keras work
        too. `custom_objects` are the classes that they refer to, by their names.
        """
        inner, arguments = read_config(config, custom_objects)
        optimizer = cls(inner, **arguments)
        optimizer._protects = config.get("protect_statistics") is True
        return optimizer

    @classmethod
    def _with_arguments(cls, inner: keras.Optimizer, arguments: dict[str, Any]) -> Self:
        """Bypasses the constructor of a subclass, which takes other arguments."""
        optimizer = cls.__new__(cls)
        LossScaleOptimizer.__init__(optimizer, inner, **arguments)
        return optimizer


# --- Warnings and models --------------------------------------------------------------


def _warn_of_floatx() -> None:
    """Warns if the default dtype of Keras has 16 bits."""
    dtype = keras.config.floatx()
    if dtype in NARROW:
        warn(
            f"`keras.config.floatx()` is '{dtype}', which is also the dtype of losses, "
            "metrics and Keras's schedules: the mean loss of `fit` ignores all batches "
            "after the first few hundred. Write `keras.config.set_dtype_policy("
            f"'{dtype}')`, and leave `floatx` at 'float32'."
        )


def _callers_of(kind: type) -> Iterator[dict[str, Any]]:
    """Yields the local variables of the methods of a class that led to this call."""
    for frame, _ in traceback.walk_stack(inspect.currentframe()):
        if isinstance(frame.f_locals.get("self"), kind):
            yield frame.f_locals


def _float16_in(
    variables: list[keras.Variable], model: keras.Model | None
) -> str | None:
    """Returns in words what is in float16, None if nothing is known to be."""
    # Under `mixed_float16` variables are float32. The model is known only if one of its
    # methods builds the optimizer, as `fit` does.
    for variable in variables:
        if keras.backend.standardize_dtype(variable.dtype) == "float16":
            return f"the variable '{path_of(variable)}' in float16"
    if (setting := backend.host.casts_to_float16()) is not None:
        return setting
    if model is not None:
        name = layer_in_float16(model)
        return name and f"the layer '{name}', which computes in float16"
    # The dtype policy of layers that are made from now on.
    policy = keras.config.dtype_policy()
    is_narrow = policy.compute_dtype == "float16"
    return f"the dtype policy '{policy.name}'" if is_narrow else None


def _clear_loss_scale_factor(inner: keras.optimizers.Optimizer) -> None:
    """Clears the inner optimizer's own scaling, with a warning."""
    factor = inner.loss_scale_factor
    if factor is None:
        return
    inner.loss_scale_factor = None
    warn(
        f"The inner optimizer has loss_scale_factor={factor}, which would scale the "
        "loss twice. It has been set to None. For a fixed loss scale, leave it out "
        "and write `LossScaleOptimizer(inner_optimizer, dynamic=False, "
        f"initial_scale={factor})`."
    )
