"""`Wrapper`: the base class of `LossScaleOptimizer` and `LARC`."""

import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import keras

from keras_lso._backend import backend
from keras_lso._backend.tensors import Tensor, Variables, shown
from keras_lso._core.checks import (
    Check,
    check_callable_rate,
    check_decay,
    is_loss_scale,
    is_number,
    schedule_hint,
    warn,
    warn_of_idle_patterns,
)
from keras_lso._core.exclusions import check_exclusions, idle_in_inner_names
from keras_lso._core.gradients import as_list, list_of_gradients
from keras_lso._keras_internals.optimizers import (
    bases_of,
    chain_of,
    innermost_of,
    is_multi_optimizer,
    names_excluded_by,
    optimizers_in,
    remember_trainable_variables,
    variables_of,
)
from keras_lso._keras_internals.rules import rate_given_to, schedules_in
from keras_lso._keras_internals.variables import live_storage_of, with_and_without_end


def passed_on(name: str, check: Check | None = None) -> Any:
    """Returns a property over an attribute of the inner optimizer."""

    def get(self: Any) -> Any:
        return getattr(self.inner_optimizer, name)

    def set_(self: Any, value: Any) -> None:
        # Keras's constructor assigns its defaults before there is an inner optimizer.
        if "inner_optimizer" in vars(self):
            value = value if check is None else check(name, value)
            setattr(self.inner_optimizer, name, value)

    return property(get, set_, doc=f"The inner optimizer's `{name}`.")


class Wrapper(keras.optimizers.Optimizer):
    """An optimizer with the hyperparameters of its `inner_optimizer`.

    The hyperparameters of every Keras optimizer are properties. Any other public
    attribute (`momentum`, `beta_1`, a user's own) is looked up on access, and assigned
    to the inner optimizer if that has it and `_declares` does not find it in a class
    of the wrapper: a name with a value, or with an annotation alone.
    """

    built: bool

    weight_decay: float | None = passed_on("weight_decay", check_decay)
    clipnorm: float | None = passed_on("clipnorm")
    clipvalue: float | None = passed_on("clipvalue")
    global_clipnorm: float | None = passed_on("global_clipnorm")
    use_ema: bool = passed_on("use_ema")
    ema_momentum: float = passed_on("ema_momentum")
    ema_overwrite_frequency: int | None = passed_on("ema_overwrite_frequency")
    gradient_accumulation_steps: int | None = passed_on("gradient_accumulation_steps")
    learning_rate: Any = passed_on("learning_rate", check_callable_rate)
    lr: Any = learning_rate

    # The arguments of the constructor that cannot be replaced afterwards.
    _parts: tuple[str, ...] = ("inner_optimizer",)

    # What to write instead of attributes that other libraries have.
    _elsewhere: Mapping[str, str] = {}

    @property
    def iterations(self) -> keras.Variable:
        """The number of steps that the inner optimizer applied."""
        return self.inner_optimizer.iterations

    def exclude_from_weight_decay(
        self,
        var_list: Iterable[keras.Variable] | None = None,
        var_names: list[str] | tuple[str, ...] | None = None,
    ) -> None:
        """Excludes variables from the inner optimizer's weight decay.

        Args:
            var_list: The variables to exclude. Defaults to `None`.
            var_names: Regular expressions, which may contain the `:0` at the end of
                TensorFlow's names. A variable is excluded if one of them matches in its
                name. Keras's optimizers search the last part of the path, and on
                TensorFlow the whole path. Defaults to `None`.

        Raises:
            ValueError: From Keras 3.16 on, if the optimizer has been built.
        """
        variables, names = check_exclusions(self, var_list, var_names)
        if names is not None:
            names = with_and_without_end(names)
        inner = self.inner_optimizer
        if is_multi_optimizer(inner):
            warn(
                "A MultiOptimizer has no weight decay of its own to exclude variables "
                "from, so nothing is excluded. Call `exclude_from_weight_decay` of its "
                "optimizers that use weight decay."
            )
        inner.exclude_from_weight_decay(variables, names)
        if self.built:
            warn_of_idle_patterns(idle_in_inner_names(self))

    def _finish_build(self, variables: Variables) -> None:
        """Remembers the variables, and warns of patterns that exclude no variable."""
        remember_trainable_variables(self, variables)
        self.built = True
        self._prepare_graphs()
        warn_of_idle_patterns(self._idle_patterns())

    def _prepare_graphs(self) -> None:
        """Makes the step of graphs, again once the optimizer has another variable."""
        if self.built and not self._needs_host():
            owners = self._objects_read_by_step()
            self._traced_step = backend.traced_step(
                self, variables_of(self), owners, live_storage_of
            )

    def _needs_host(self) -> bool:
        """Whether a step cannot be traced: Keras's code branches by values in it."""
        inner = self.inner_optimizer
        if isinstance(inner, Wrapper):
            return inner._needs_host()
        return any(
            o.gradient_accumulation_steps
            or o.ema_overwrite_frequency
            or not isinstance(rate_given_to(o), keras.Variable)
            for o in bases_of(inner)
        )

    def _objects_read_by_step(self) -> list[Any]:
        """Returns the objects whose attributes a step reads."""
        inner = self.inner_optimizer
        if isinstance(inner, Wrapper):
            return [self, *inner._objects_read_by_step()]
        rates = [rate_given_to(o) for o in bases_of(inner)]
        return [self, *optimizers_in(inner), *schedules_in(rates)]

    def _idle_patterns(self) -> list[str | None]:
        """Returns remarks on patterns that exclude nothing, a list with None."""
        if not any(map(names_excluded_by, innermost_of(self.inner_optimizer))):
            return []
        return idle_in_inner_names(self)

    def __getattr__(self, name: str) -> Any:
        inner = vars(self).get("inner_optimizer")
        if inner is not None and not name.startswith("_"):
            try:
                return getattr(inner, name)
            except AttributeError:
                # A property says itself what it lacks.
                if hasattr(type(inner), name):
                    raise
        advice = self._elsewhere.get(name)
        raise AttributeError(
            f"'{type(self).__name__}' object has no attribute '{name}'"
            + (f". Write {advice}" if advice else "")
        )

    def __repr__(self) -> str:
        """Names the class of the inner optimizer, and what `_readings` returns."""
        inner = vars(self).get("inner_optimizer")
        name = repr(inner) if isinstance(inner, Wrapper) else type(inner).__name__
        numbers = [f"{key}={number}" for key, number in self._readings().items()]
        return f"{type(self).__name__}({', '.join([name, *numbers])})"

    def _readings(self) -> dict[str, float]:
        """Returns numbers of the state by their names."""
        return {}

    def __setattr__(self, name: str, value: Any) -> None:
        attributes = vars(self)
        if name in self._parts:
            self._check_stays(name, value)
        inner = attributes.get("inner_optimizer")
        is_own = name.startswith("_") or name in attributes or self._declares(name)
        if is_own or not hasattr(inner, name):
            super().__setattr__(name, value)
        else:
            setattr(inner, name, value)

    @classmethod
    def _declares(cls, name: str) -> bool:
        """Whether the class has or annotates an attribute, which is then its own."""
        annotated = (vars(c).get("__annotations__", ()) for c in cls.__mro__)
        return hasattr(cls, name) or any(name in names for names in annotated)

    def _check_stays(self, name: str, value: Any) -> None:
        """Raises an `AttributeError` if a part would be replaced by another."""
        old = vars(self).get(name, value)
        if old is not value and not (isinstance(old, str | bool) and old == value):
            raise AttributeError(
                f"`{name}` of a {type(self).__name__} cannot be replaced: the state "
                "and the next step depend on the old one. Make a new one with a new "
                "inner optimizer, such as `inner_optimizer.from_config("
                f"inner_optimizer.get_config())`. Received: {name}={value!r}"
            )

    def stateless_apply(
        self,
        optimizer_variables: Iterable[Tensor],
        grads: Iterable[Tensor | None],
        trainable_variables: Iterable[Tensor],
        **kwargs: Any,
    ) -> tuple[list[Tensor], list[Tensor]]:
        """As `keras_lso.LossScaleOptimizer.stateless_apply`."""
        if not self.built:
            raise ValueError(
                f"To call `stateless_apply`, {type(self).__name__} must be built "
                "(i.e. its variables must have been created). You can build it via "
                "`optimizer.build(trainable_variables)`."
            )
        trained, variables = variables_of(self), self.variables
        state = _values_of("optimizer_variables", variables, optimizer_variables)
        values = _values_of("trainable_variables", trained, trainable_variables)
        grads = list_of_gradients(grads)
        # Masters are trainable, like their variables.
        fixed = [x for x, v in zip(state, variables, strict=True) if not v.trainable]
        backend.check_stateless_arguments([*grads, *fixed])
        mapping = zip([*trained, *variables], [*values, *state], strict=True)
        with keras.StatelessScope(state_mapping=mapping) as scope:
            self.apply(grads, **kwargs)
        current = scope.get_current_value
        new_state = [current(v) for v in variables]
        return [current(v) for v in trained], like(optimizer_variables, new_state)


def _values_of(argument: str, variables: Variables, values: Any) -> list[Tensor]:
    """Returns the values in an argument as a list, one for each variable."""
    values = as_list(argument, values, "tensors")
    if len(values) != len(variables):
        raise ValueError(
            f"Argument `{argument}` must be a list of {len(variables)} tensors, "
            "one for each variable that the optimizer was built with. "
            f"Received {len(values)}. If layers were frozen or unfrozen "
            "since, compile the model with a new optimizer."
        )
    return values


def like(variables: Iterable[Any], values: Iterable[Tensor]) -> list[Tensor]:
    """Returns `values` in a list of the type of `variables`."""
    # `jax.lax.scan` and `keras.tree` want the results structured like the arguments.
    kind = type(variables)
    return kind(values) if issubclass(kind, list) else list(values)


# The innermost optimizers inside a LossScaleOptimizer, with the name of the latter.
_wrapped: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def check_optimizer(inner: Any, argument: str = "inner_optimizer") -> None:
    """Raises a `TypeError` for an object that is not an optimizer."""
    if isinstance(inner, keras.optimizers.Optimizer):
        return
    hint = "`keras.optimizers.Adam()`"
    if isinstance(inner, str):
        hint = f'`keras.optimizers.get("{inner}")`'
    elif isinstance(inner, type) and issubclass(inner, keras.optimizers.Optimizer):
        hint = f"`{inner.__name__}(...)`"
    elif isinstance(inner, keras.optimizers.schedules.LearningRateSchedule):
        hint = "`keras.optimizers.Adam(schedule)`"
    elif isinstance(inner, dict):
        hint += ". For a config write `.from_config(config)` instead of `(**config)`"
    elif is_number(inner):
        hint = f"`keras.optimizers.Adam({inner})`"
    elif is_loss_scale(inner):
        hint += f". {schedule_hint(inner)}"
    raise TypeError(
        f"Argument `{argument}` must be an instance of "
        f"`keras.optimizers.Optimizer`, such as {hint}. Received: "
        f"{argument}={shown(inner)} of type {type(inner).__name__}"
    )


def check_inner_optimizer(inner: Any, argument: str = "inner_optimizer") -> None:
    """Rejects objects that are not optimizers or that scale the loss already."""
    check_optimizer(inner, argument)
    for base in bases_of(inner):
        check_callable_rate("learning_rate", rate_given_to(base))
        check_decay("weight_decay", base.weight_decay)
    scaler = keras.optimizers.LossScaleOptimizer
    if any(isinstance(optimizer, scaler) for optimizer in chain_of(inner)):
        raise TypeError(
            f"Argument `{argument}` must not be a LossScaleOptimizer or a Guarded"
            "Optimizer, nor wrap one: the loss would be scaled twice, or steps counted "
            "twice. Pass its `inner_optimizer` instead. "
            f"Received: {argument}={inner!r}"
        )


def check_not_wrapped(inner: keras.optimizers.Optimizer) -> None:
    """Raises a `ValueError` if another LossScaleOptimizer steps the optimizer."""
    # tf.keras does the same. The number of skipped steps is the wrapper's count less
    # the inner optimizer's, which would include the steps of both wrappers.
    innermost = chain_of(inner)[-1]
    if innermost in _wrapped:
        name = type(innermost).__name__
        raise ValueError(
            "Argument `inner_optimizer` is already wrapped by the LossScaleOptimizer "
            f"{_wrapped[innermost]!r}. Use that one, or wrap a new optimizer: "
            f"`{name}.from_config(optimizer.get_config())`. (To go on from the state "
            "of the old wrapper, call `new.build(variables)` and `new.set_weights("
            f"old.get_weights())`.) Received: inner_optimizer={inner!r}"
        )


def remember_wrapped(inner: keras.optimizers.Optimizer, name: str) -> None:
    """Remembers that a LossScaleOptimizer with this name wraps the optimizer."""
    _wrapped[chain_of(inner)[-1]] = name
