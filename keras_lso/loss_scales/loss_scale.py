"""`LossScale`: the base class of every loss-scale policy.

Steps have no Python branch on a tensor and no host read, so the same lines run under
`jax.jit`, in a `tf.function`, and in eager PyTorch without a synchronisation.
"""

import copy
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar, Self

import keras
from keras import ops

from keras_lso._backend import backend
from keras_lso._backend.framework import MeasureOptions
from keras_lso._backend.tensors import Tensor
from keras_lso._core.checks import check_bounds, check_config, check_scale, warn
from keras_lso._core.fields import check_fields
from keras_lso._keras_internals.optimizers import track_variable
from keras_lso._keras_internals.variables import assign, is_frozen, read


class LossScale:
    """Base class of the loss-scale policies, which move the loss scale after each step.

    To write your own, override `step`, and register the class. Override `build` if
    there is more state than the scale and one counter, and `get_config` if `__init__`
    has further arguments. Move the scale with `assign_scale`, and do not override
    `value`.

    A loss-scale policy belongs to one `LossScaleOptimizer`, which creates, saves and
    loads its variables.

    Args:
        initial_loss_scale: The scale of the first step, positive and finite in float32.
        min_scale: The lower bound of the scale. Defaults to `2**-14`.
        max_scale: The upper bound of the scale. Defaults to `2**24`.

    Example:

    >>> import keras, keras_lso
    >>> @keras.saving.register_keras_serializable("my_project")
    ... class Halving(keras_lso.loss_scales.LossScale):
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
    """Whether `step` needs the largest magnitude of the unscaled gradients."""

    initial_loss_scale: float
    min_scale: float = 2.0**-14
    max_scale: float = 2.0**24
    built: bool = False
    _owner: keras.optimizers.Optimizer | None = None
    # Pairs of a variable and its initial value.
    _state: Sequence[tuple[keras.Variable, float]] = ()
    _checks: ClassVar[dict[str, Any]] = dict.fromkeys(
        ("initial_loss_scale", "min_scale", "max_scale"), check_scale
    )
    # The arguments that a config leaves out at their defaults.
    _omitted: ClassVar[tuple[str, ...]] = ("min_scale", "max_scale")

    def __init__(
        self,
        initial_loss_scale: float,
        min_scale: float = min_scale,
        max_scale: float = max_scale,
    ) -> None:
        self.initial_loss_scale = initial_loss_scale
        self.min_scale = min_scale
        self.max_scale = max_scale
        self.__post_init__()

    def __post_init__(self) -> None:
        """Checks the arguments, which are fields in subclasses that are dataclasses."""
        check_fields(self)
        initial = self.initial_loss_scale
        check_bounds(self.min_scale, self.max_scale, initial_loss_scale=initial)

    def build(self, add_variable: Callable[..., keras.Variable] | None = None) -> None:
        """Creates the variables: `step_counter` and `scale`.

        Args:
            add_variable: Callable with the arguments of `Optimizer.add_variable`.
                Defaults to `None`: the method of the owning optimizer, if there is one.
        """
        if self.built:
            return
        if add_variable is None:
            owner = self._owner
            add_variable = _free_variable if owner is None else owner.add_variable
        self._add_variable = add_variable
        self._state = []
        self.step_counter: keras.Variable = self.add_variable("step_counter", 0, "int")
        self.scale: keras.Variable = self.add_variable(
            "dynamic_scale", self.initial_loss_scale
        )
        self.built = True

    def add_variable(
        self, name: str, value: float, dtype: str = "float32"
    ) -> keras.Variable:
        """Adds a scalar to the state. Call it in `build`."""
        variable = self._add_variable(
            shape=(),
            dtype=dtype,
            initializer=keras.initializers.Constant(value),
            # One decision for all replicas: see `measure` in `_backend/`.
            aggregation="only_first_replica",
            name=name,
        )
        self._state = [*self._state, (variable, value)]
        return variable

    @property
    def variables(self) -> list[keras.Variable]:
        """The state: `[step_counter, dynamic_scale]`, then variables of `build`."""
        return [variable for variable, _ in self._state]

    @property
    def value(self) -> Tensor:
        """The current loss scale, a float32 scalar tensor."""
        if not self.built:
            return float32(self.initial_loss_scale)
        # A copy: on PyTorch the variable's own tensor changes in place, even while
        # other code, such as autograd, holds a reference to it.
        return self._computed(backend.xp.copy)

    def _computed(self, function: Callable[[Tensor], Tensor]) -> Tensor:
        """Returns a function of the current scale; warns if a trace freezes it."""
        result = function(read(self.scale))
        if self.min_scale < self.max_scale and is_frozen(self.scale, result):
            warn(
                "A function that is being compiled reads the loss scale outside of a "
                "`keras.StatelessScope` with the optimizer's variables. It is compiled "
                "in as a constant: once the scale has moved, steps would be too "
                "large or too small by a factor. In a compiled function, write:"
                f"\n\n{backend.host.HOW_TO_SCALE}\n\n"
                "A fixed scale, `dynamic=False`, may be a constant."
            )
        return result

    def __call__(self) -> Tensor:
        """Returns the current loss scale, a float32 scalar tensor."""
        return self.value

    def assign_scale(self, value: float | Tensor) -> None:
        """Sets the current scale to `value`, kept within the bounds."""
        bounds = self.min_scale, self.max_scale
        assign(self.scale, backend.xp.clip(float32(value), *bounds))

    def step(self, finite: bool | Tensor, amax: float | Tensor | None = None) -> None:
        """Moves the scale and the counters after a step.

        Args:
            finite: Boolean scalar (tensor). Whether every gradient was finite.
            amax: Float32 scalar tensor. The largest magnitude among the unscaled
                gradients, which counts only if all are finite. Given if `needs_amax`.
        """
        raise NotImplementedError(f"{type(self).__name__} must override `step`.")

    def _passes_over(self, keeps: Tensor) -> bool:
        """Lets the next `step`, of finite gradients, change nothing where `keeps`.

        Returns False if it cannot, and the caller has to undo the step.
        """
        return False

    @backend.do_not_convert
    def update(self, grads: Any) -> tuple[None, Tensor]:
        """Moves the scale after a step, given the gradients: TF1's form of `step`.

        It is for loops that scale the loss themselves, by `policy()`.

        Args:
            grads: Nested structure of unscaled gradients, dense, sparse or None.

        Returns:
            A tuple of None, where TF1 had an operation to run, and a boolean scalar
            tensor: whether the gradients are finite and should be applied.

        Raises:
            RuntimeError: If called in a cross-replica context.
        """
        backend.replicas.check_replica_context("update")
        self.build()
        grads = backend.as_gradients(keras.tree.flatten(grads))
        grads = [g for g in grads if g is not None]
        finite, amax = ops.ones((), dtype="bool"), None
        if grads:
            stats = backend.measure(grads, MeasureOptions(amax=self.needs_amax))
            finite, amax = stats.finite, stats.amax
        self.step(finite, amax)
        return None, finite

    def reset(self) -> None:
        """Resets the state to its initial values."""
        for variable, value in self._state:
            variable.assign(value)

    def restore(self) -> None:
        """Repairs a state that was just loaded: NaN and values out of bounds."""
        scale = float(ops.convert_to_numpy(self.scale))
        if math.isnan(scale):
            scale = self.initial_loss_scale
        self.scale.assign(min(max(scale, self.min_scale), self.max_scale))

    def claim(self, owner: keras.optimizers.Optimizer) -> None:
        """Makes `owner` the only optimizer that may use this loss scale."""
        if self._owner is not None and self._owner is not owner:
            name = type(self).__name__
            raise ValueError(
                "A loss-scale policy belongs to one optimizer, and this "
                f"{name} already belongs to '{self._owner.name}'. Make a new one: "
                f"`{name}.from_config(policy.get_config())`."
            )
        if self._owner is None:
            # `tf.train.Checkpoint` finds only variables that `owner` tracks.
            for variable in self.variables:
                track_variable(owner, variable)
        self._owner = owner

    def __getstate__(self) -> dict[str, Any]:
        """Returns the state of a copy: everything except the owner."""
        return {**vars(self), "_owner": None, "_add_variable": _free_variable}

    def __copy__(self) -> Self:
        # Two optimizers must not move one scale.
        return copy.deepcopy(self)

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments of the constructor, without those at their default."""
        config = {name: getattr(self, name) for name in self._checks}
        for name in config.keys() & set(self._omitted):
            if config[name] == getattr(type(self), name):
                del config[name]
        return config

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Self:
        """Creates a loss-scale policy from the return value of `get_config`."""
        return cls(**check_config(cls.__name__, config))

    def __repr__(self) -> str:
        arguments = ", ".join(f"{k}={v!r}" for k, v in self.get_config().items())
        return f"{type(self).__name__}({arguments})"


def float32(value: Any) -> Tensor:
    """Returns a float32 tensor, whatever `keras.config.floatx()` is."""
    return backend.scalar(value, "float32")


def clip_counter(counter: keras.Variable, low: int, high: int) -> None:
    """Brings a counter that was just loaded within its range."""
    counter.assign(min(max(int(ops.convert_to_numpy(counter)), low), high))


# A variable that belongs to no optimizer.
_free_variable = partial(keras.Variable, trainable=False)
