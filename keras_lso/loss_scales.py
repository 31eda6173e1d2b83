"""Loss-scale policies: how the scale evolves from step to step.

A policy is a pure state machine. Its variables move by `ops.where` alone, with
no Python branch on a tensor and no host read, so the same lines run under
`jax.jit`, in a `tf.function`, and in eager PyTorch without a synchronisation.
"""

import math

import keras
from keras import ops

from keras_lso import backend
from keras_lso._checks import (
    check_bounds,
    check_factor,
    check_positive_int,
    check_scale,
    is_number,
)

DEFAULT_INITIAL_SCALE = 2.0**15
DEFAULT_GROWTH_STEPS = 2000
DEFAULT_MIN_SCALE = 2.0**-14
DEFAULT_MAX_SCALE = 2.0**24


class LossScale:
    """Base class of the loss-scale policies.

    A policy holds the current loss scale and says how it moves after each
    step. Subclass it to write your own: override `step`, and `build` if the
    policy needs state besides the scale and one counter.

    A policy belongs to one `LossScaleOptimizer`, which creates, saves and loads
    its variables.

    Args:
        initial_loss_scale: Float. The scale of the first step, positive and
            finite in float32.
        min_scale: Float. The scale never falls below it. Defaults to `2**-14`.
        max_scale: Float. The scale never rises above it. Defaults to `2**24`.

    Example:

    >>> import keras_lso
    >>> class Halving(keras_lso.loss_scales.LossScale):
    ...     "Halves at every overflow and never grows."
    ...     def step(self, finite, amax=None):
    ...         self.assign_scale(ops.where(finite, self.value, self.value / 2))
    >>> policy = Halving(initial_loss_scale=1024)
    >>> policy.build()
    >>> policy.step(finite=False)
    >>> float(policy())
    512.0
    """

    needs_amax = False
    """Whether `step` wants the largest magnitude of the unscaled gradients."""

    def __init__(
        self,
        initial_loss_scale,
        min_scale=DEFAULT_MIN_SCALE,
        max_scale=DEFAULT_MAX_SCALE,
    ):
        self.initial_loss_scale = check_scale("initial_loss_scale", initial_loss_scale)
        self.min_scale = check_scale("min_scale", min_scale)
        self.max_scale = check_scale("max_scale", max_scale)
        check_bounds(
            self.min_scale,
            self.max_scale,
            initial_loss_scale=self.initial_loss_scale,
        )
        self.built = False
        self._owner = None

    def build(self, add_variable=None):
        """Creates the policy's variables: `step_counter` and `scale`.

        Args:
            add_variable: Callable with the arguments of
                `keras.Optimizer.add_variable`. The optimizer that owns the
                policy passes its own; `None`, the default, makes free-standing
                variables.
        """
        if self.built:
            return
        self._add_variable = add_variable or _free_variable
        self._variables, self._initial_values = [], []
        self.step_counter = self.add_variable("step_counter", 0, dtype="int")
        self.scale = self.add_variable("dynamic_scale", self.initial_loss_scale)
        self.built = True

    def add_variable(self, name, value, dtype="float32"):
        """Adds a scalar to the policy's state; to be called in `build`."""
        variable = self._add_variable(
            shape=(),
            dtype=dtype,
            initializer=keras.initializers.Constant(value),
            # One decision for all replicas: see `measure` in `backend/`.
            aggregation="only_first_replica",
            name=name,
        )
        self._variables.append(variable)
        self._initial_values.append(value)
        return variable

    @property
    def variables(self):
        """The state: `[step_counter, dynamic_scale]`, then the policy's own."""
        return list(self._variables) if self.built else []

    @property
    def value(self):
        """The current loss scale, a float32 scalar tensor."""
        if not self.built:
            return _float32(self.initial_loss_scale)
        # A copy: on PyTorch the variable's own tensor changes in place, under the
        # hands of whoever kept it (autograd, say).
        return ops.copy(self.scale)

    def __call__(self):
        """Returns the current loss scale, a float32 scalar tensor."""
        return self.value

    def assign_scale(self, value):
        """Sets the current scale to `value`, kept within the bounds."""
        self.scale.assign(ops.clip(_float32(value), self.min_scale, self.max_scale))

    def step(self, finite, amax=None):
        """Moves the scale and the counters after a step.

        Args:
            finite: Boolean scalar (tensor). Whether every gradient was finite.
            amax: Float32 scalar tensor. The largest magnitude among the
                unscaled gradients; given where `needs_amax` is True.
        """
        raise NotImplementedError(f"{type(self).__name__} must override `step`.")

    def update(self, grads):
        """Moves the scale after a step, by the gradients: TF1's form of `step`.

        For loops that scale the loss themselves, by `policy()`. A
        `LossScaleOptimizer` calls `step` by itself.

        Args:
            grads: Nested structure of unscaled gradients, dense or sparse. None is
                ignored.

        Returns:
            A tuple of None, where TF1 had an operation to run, and a boolean scalar
            tensor: whether the gradients are finite and should be applied. (TF1 said
            True whatever they were if the scale is fixed.)

        Raises:
            RuntimeError: If called in a cross-replica context.

        Example:

        >>> import keras_lso
        >>> policy = keras_lso.loss_scales.DynamicLossScale(1024)
        >>> _, should_apply = policy.update([ops.array([1.0, float("inf")])])
        >>> bool(should_apply), float(policy())
        (False, 512.0)
        """
        backend.check_replica_context("update")
        self.build(None if self._owner is None else self._owner.add_variable)
        grads = [backend.as_tensor(g) for g in keras.tree.flatten(grads)]
        grads = [g for g in grads if g is not None]
        finite, amax = ops.ones((), dtype="bool"), None
        if grads:
            found = backend.measure(grads, amax=self.needs_amax)
            finite, amax = found.finite, found.amax
        self.step(finite, amax)
        return None, finite

    def reset(self):
        """Sets the state back to what it was at the first step."""
        for variable, value in zip(self._variables, self._initial_values, strict=True):
            variable.assign(value)

    def restore(self):
        """Mends a state that was just loaded: NaN and values out of bounds."""
        scale = float(ops.convert_to_numpy(self.scale))
        if math.isnan(scale):
            scale = self.initial_loss_scale
        self.scale.assign(min(max(scale, self.min_scale), self.max_scale))

    def claim(self, owner):
        """Makes `owner` the one optimizer whose policy this is."""
        if self._owner is not None and self._owner is not owner:
            raise ValueError(
                "A loss-scale policy belongs to one optimizer, and this "
                f"{type(self).__name__} already belongs to "
                f"'{self._owner.name}'. Make a new one: "
                f"`{type(self).__name__}.from_config(policy.get_config())`. To "
                "train several losses with one optimizer, call "
                "`optimizer.apply(..., update_scale=False)` for all but the last."
            )
        self._owner = owner

    def get_config(self):
        """Returns the arguments of the constructor, without the defaults."""
        config = {"initial_loss_scale": self.initial_loss_scale}
        if self.min_scale != DEFAULT_MIN_SCALE:
            config["min_scale"] = self.min_scale
        if self.max_scale != DEFAULT_MAX_SCALE:
            config["max_scale"] = self.max_scale
        return config

    @classmethod
    def from_config(cls, config):
        """Makes a policy from what `get_config` returned."""
        return cls(**config)

    def __repr__(self):
        arguments = ", ".join(f"{k}={v!r}" for k, v in self.get_config().items())
        return f"{type(self).__name__}({arguments})"


@keras.saving.register_keras_serializable("keras_lso", name="FixedLossScale")
class FixedLossScale(LossScale):
    """A loss scale that never changes.

    Steps whose gradients are not finite are skipped all the same, so an
    overflow never reaches a weight. (In tf.keras and TF1 it does.)

    Args:
        loss_scale_value: Float. The loss scale, positive and finite in float32.

    Example:

    >>> import keras_lso
    >>> policy = keras_lso.loss_scales.FixedLossScale(1024)
    >>> float(policy())
    1024.0
    """

    def __init__(self, loss_scale_value):
        value = check_scale("loss_scale_value", loss_scale_value)
        super().__init__(value, min_scale=value, max_scale=value)
        self.loss_scale_value = value

    def step(self, finite, amax=None):
        """Leaves the scale as it is."""

    def get_config(self):
        return {"loss_scale_value": self.loss_scale_value}


@keras.saving.register_keras_serializable("keras_lso", name="DynamicLossScale")
class DynamicLossScale(LossScale):
    """A loss scale that is as high as the gradients allow.

    ```python
    if finite:
        good_steps += 1
        if good_steps == increment_period:
            scale, good_steps = min(scale * growth_factor, max_scale), 0
    else:
        scale, good_steps = max(scale * backoff_factor, min_scale), 0
    ```

    With `hysteresis=n` the scale drops at the n-th overflow and at each one
    after it, until the scale has grown once, which refills the budget
    (`consecutive_hysteresis=True`: every good step refills it). This is what
    DeepSpeed and Megatron-LM do.

    Args:
        initial_loss_scale: Float. The scale of the first step. Defaults to
            `2**15`.
        increment_period: Int. Number of finite steps after which the scale
            grows. Defaults to `2000`.
        multiplier: Float above 1. The factor of growth, and its inverse that of
            backoff. Defaults to `2.0`.
        growth_factor: Float above 1. Defaults to `multiplier`.
        backoff_factor: Float between 0 and 1. Defaults to `1 / multiplier`.
        min_scale: Float. The scale never falls below it. Defaults to `2**-14`.
        max_scale: Float. The scale never rises above it. Defaults to `2**24`.
        hysteresis: Int. The number of overflows at which the scale first drops.
            Defaults to `1`: at once.
        consecutive_hysteresis: Bool. Whether every good step refills the budget
            of overflows. Defaults to `False`: growth does.

    Example:

    >>> import keras_lso
    >>> policy = keras_lso.loss_scales.DynamicLossScale(1024, increment_period=2)
    >>> policy.build()
    >>> scales = []
    >>> for finite in [True, True, True, False]:
    ...     policy.step(finite)
    ...     scales.append(float(policy()))
    >>> scales
    [1024.0, 2048.0, 2048.0, 1024.0]

    Reference:

    - [Micikevicius et al., 2018, Mixed Precision Training](
        https://arxiv.org/abs/1710.03740)
    """

    def __init__(
        self,
        initial_loss_scale=DEFAULT_INITIAL_SCALE,
        increment_period=DEFAULT_GROWTH_STEPS,
        multiplier=2.0,
        growth_factor=None,
        backoff_factor=None,
        min_scale=DEFAULT_MIN_SCALE,
        max_scale=DEFAULT_MAX_SCALE,
        hysteresis=1,
        consecutive_hysteresis=False,
    ):
        super().__init__(initial_loss_scale, min_scale, max_scale)
        self.increment_period = check_positive_int("increment_period", increment_period)
        self.multiplier = check_factor("multiplier", multiplier, above=1.0)
        self.growth_factor = check_factor(
            "growth_factor",
            self.multiplier if growth_factor is None else growth_factor,
            above=1.0,
        )
        self.backoff_factor = check_factor(
            "backoff_factor",
            1.0 / self.multiplier if backoff_factor is None else backoff_factor,
            above=0.0,
            below=1.0,
        )
        self.hysteresis = check_positive_int("hysteresis", hysteresis)
        if not isinstance(consecutive_hysteresis, bool):
            raise TypeError(
                "Argument `consecutive_hysteresis` must be True or False. "
                f"Received: consecutive_hysteresis={consecutive_hysteresis!r}"
            )
        self.consecutive_hysteresis = consecutive_hysteresis

    def build(self, add_variable=None):
        if self.built:
            return
        super().build(add_variable)
        if self.hysteresis > 1:
            self.overflows_left = self.add_variable(
                "overflows_left", self.hysteresis, dtype="int"
            )

    def step(self, finite, amax=None):
        finite = ops.convert_to_tensor(finite, dtype="bool")
        good_steps = ops.convert_to_tensor(self.step_counter) + 1
        # The counter is an int32 on most backends.
        period = min(self.increment_period, 2**31 - 1)
        grows = ops.logical_and(finite, good_steps >= period)
        overflows = ops.logical_not(finite)
        drops = self._spend_overflow(overflows, finite, grows)
        factor = ops.where(
            grows,
            _float32(self.growth_factor),
            ops.where(drops, _float32(self.backoff_factor), _float32(1.0)),
        )
        restarts = ops.logical_or(grows, overflows)
        self.assign_scale(self.value * factor)
        self.step_counter.assign(
            ops.where(restarts, ops.zeros_like(good_steps), good_steps)
        )

    def _spend_overflow(self, overflows, finite, grows):
        """Takes an overflow off the budget; returns whether the scale drops."""
        if self.hysteresis == 1:
            return overflows
        left = ops.convert_to_tensor(self.overflows_left)
        left = ops.maximum(left - ops.cast(overflows, left.dtype), 0)
        drops = ops.logical_and(overflows, left <= 0)
        refills = finite if self.consecutive_hysteresis else grows
        self.overflows_left.assign(ops.where(refills, self.hysteresis, left))
        return drops

    def restore(self):
        super().restore()
        counters = [(self.step_counter, 0, self.increment_period - 1)]
        if self.hysteresis > 1:
            counters.append((self.overflows_left, 0, self.hysteresis))
        for counter, low, high in counters:
            counter.assign(min(max(int(ops.convert_to_numpy(counter)), low), high))

    def get_config(self):
        bounds = super().get_config()
        config = {
            "initial_loss_scale": bounds.pop("initial_loss_scale"),
            "increment_period": self.increment_period,
            "multiplier": self.multiplier,
            **bounds,
        }
        if self.growth_factor != self.multiplier:
            config["growth_factor"] = self.growth_factor
        if self.backoff_factor != 1.0 / self.multiplier:
            config["backoff_factor"] = self.backoff_factor
        if self.hysteresis != 1:
            config["hysteresis"] = self.hysteresis
        if self.consecutive_hysteresis:
            config["consecutive_hysteresis"] = True
        return config


def get(identifier, custom_objects=None):
    """Returns the policy that `identifier` stands for.

    Args:
        identifier: A number (a fixed scale), `"dynamic"`, a `LossScale` (which
            is returned as it is), or the config dict of one.
        custom_objects: Dict of names to classes that the config may refer to.
            Defaults to `None`.

    Returns:
        A `LossScale`.

    Raises:
        TypeError: If `identifier` is none of these.
        ValueError: If the number, the name or the config is not a valid one.

    Example:

    >>> import keras_lso
    >>> keras_lso.loss_scales.get(128)
    FixedLossScale(loss_scale_value=128.0)
    """
    if isinstance(identifier, LossScale):
        return identifier
    if isinstance(identifier, str):
        if identifier != "dynamic":
            raise ValueError(
                "The only loss-scale policy with a name is 'dynamic'. "
                f"Received: {identifier!r}"
            )
        return DynamicLossScale()
    if isinstance(identifier, dict):
        return _from_config_dict(identifier, custom_objects)
    if is_number(identifier):
        return FixedLossScale(identifier)
    raise TypeError(
        "A loss scale must be a number, 'dynamic', a "
        "`keras_lso.loss_scales.LossScale` or the config dict of one. "
        f"Received: {identifier!r} of type {type(identifier).__name__}"
    )


def _from_config_dict(config, custom_objects):
    name = config.get("class_name")
    if not isinstance(name, str) or "config" not in config:
        raise ValueError(
            "The config dict of a loss-scale policy has the keys 'class_name' and "
            f"'config'. Received: {config!r}"
        )
    # TF1 wrote the bare class name.
    builtin = {cls.__name__: cls for cls in (FixedLossScale, DynamicLossScale)}
    if name in builtin and set(config) == {"class_name", "config"}:
        return builtin[name].from_config(config["config"])
    policy = keras.saving.deserialize_keras_object(config, custom_objects)
    if not isinstance(policy, LossScale):
        raise ValueError(
            "The config dict must describe a `keras_lso.loss_scales.LossScale`. "
            f"Received one of {type(policy).__name__}: {config!r}"
        )
    return policy


def _float32(value):
    """Returns a tensor, in float32 whatever `keras.config.floatx()` is."""
    return ops.convert_to_tensor(value, dtype="float32")


def _free_variable(shape, dtype, initializer, aggregation, name):
    return keras.Variable(
        initializer,
        shape=shape,
        dtype=dtype,
        trainable=False,
        aggregation=aggregation,
        name=name,
    )
