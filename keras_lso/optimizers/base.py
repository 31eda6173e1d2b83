"""The bases of LARS, LAMB and NovoGrad: `RuleOptimizer` and `LayerAdaptive`."""

from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from typing import Annotated, Any, Self

import keras
from keras import ops
from keras.optimizers.schedules import LearningRateSchedule

from keras_lso._backend import backend
from keras_lso._backend.rule import Rule, TrustRatio, always, norms_of
from keras_lso._backend.tensors import Tensor, in_float32
from keras_lso._core.checks import (
    check_callable_rate,
    check_config,
    check_rate,
    warn,
    warn_of_idle_patterns,
)
from keras_lso._core.configs import older_configs, read_object
from keras_lso._core.exclusions import check_exclusions, idle_in_names, idle_in_paths
from keras_lso._core.gradients import (
    as_list,
    check_gradients,
    check_trainable,
    list_of_gradients,
    pair_gradients,
)
from keras_lso._core.methods import Methods, VariableList
from keras_lso._core.rule_update import update_by_rule
from keras_lso._core.state_file import checked
from keras_lso._core.wrapper import like
from keras_lso._keras_internals.distribution import remember_layouts, shard_slot
from keras_lso._keras_internals.optimizers import (
    index_of,
    uses_weight_decay,
    variables_of,
)
from keras_lso._keras_internals.rule_optimizer import update_variables, use_weight_decay
from keras_lso._keras_internals.rules import (
    from_attributes,
    rate_given_to,
    slot_lists_of,
    updates_of,
)
from keras_lso._keras_internals.variables import (
    copy_in_scope,
    live_storage_of,
    path_matches,
    path_of,
)


def check_learning_rate(argument: str, value: Any) -> Any:
    """Returns a learning rate that Keras takes; a number as a float."""
    check = check_callable_rate if callable(value) else check_rate
    return check(argument, value)


LearningRate = Annotated[
    float | LearningRateSchedule | Callable[[], Any], check_learning_rate
]


def arguments_of(namespace: dict[str, Any]) -> dict[str, Any]:
    """Returns the arguments of a constructor, given its `locals()` at the beginning."""
    left_out = ("self", "__class__", "kwargs")
    named = {n: value for n, value in namespace.items() if n not in left_out}
    return named | namespace.get("kwargs", {})


def checked_arguments(cls: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """Takes the declared arguments out of a dict, and returns what checks return."""
    return {n: check(n, arguments.pop(n)) for n, check in cls._checks.items()}


def config_values(values: dict[str, Any]) -> dict[str, Any]:
    """Returns the values of attributes as a config holds them."""
    # Keras wraps a list that is an attribute in a list type of its own.
    return {n: list(v) if isinstance(v, list) else v for n, v in values.items()}


class RuleOptimizer(Methods, keras.optimizers.Optimizer):
    """An optimizer whose step is a rule (`steps_by`), and that checks its arguments."""

    weight_decay: float | None
    weight_decay_rate: float
    _rule: type[Rule]
    _kind_of_decay: str  # The predicate of `weight_decay_rate` in messages.
    _casts_gradients = False  # See `steps_in_dtype_of_variables`.
    _changes_gradients = False  # See `changes_gradients`.
    _update_by_rule = update_by_rule
    # Keras calls these two. They call private methods of Keras.
    _use_weight_decay = use_weight_decay
    _backend_update_step = update_variables

    def __init__(self, **arguments: Any) -> None:
        declared = checked_arguments(type(self), arguments)
        arguments |= {n: declared.pop(n) for n in ("learning_rate", "name")}
        decay = arguments.pop("weight_decay", None)
        super().__init__(**arguments)
        # The argument's name is a method of every Keras optimizer.
        self._no_decay_patterns = declared.pop("exclude_from_weight_decay")
        for name, value in declared.items():
            setattr(self, name, value)
        self._set_weight_decay(decay)
        decay, name = self.weight_decay, type(self).__name__
        if decay:
            # Keras's users know it from every optimizer, and others from the paper.
            warn(
                f"`weight_decay` of {name} is Keras's, which shrinks the weights "
                "separately from the step. What papers, optax and PyTorch call the "
                f"weight decay of {name} {self._kind_of_decay}: write "
                f"`{name}(..., weight_decay_rate={decay})`. If you mean Keras's, set "
                f"`optimizer.weight_decay = {decay}` afterwards."
            )

    def __repr__(self) -> str:
        """Names the class, and the learning rate if no device must be waited for."""
        rate = rate_given_to(self)
        if isinstance(rate, keras.Variable):
            number = backend.value_if_on_host(rate.value)
            rate = None if number is None else f"{number:.6g}"
        shown = "" if rate is None else f"learning_rate={rate}"
        return f"{type(self).__name__}({shown})"

    def _set_weight_decay(self, decay: Any) -> None:
        """Sets Keras's `weight_decay`, which excludes the decay of the rule."""
        if decay is not None:
            decay = self.weight_decay = check_rate("weight_decay", decay)
        if self.weight_decay_rate and decay:
            raise ValueError(
                f"`weight_decay_rate` {self._kind_of_decay}; `weight_decay` shrinks "
                "the weights separately from the step. Give one of them. Received: "
                f"weight_decay_rate={self.weight_decay_rate}, weight_decay={decay}. "
                f"{type(self).__name__} as published has `weight_decay_rate` only."
            )

    @keras.optimizers.Optimizer.learning_rate.setter
    def learning_rate(
        self, value: float | LearningRateSchedule | Callable[[], Any]
    ) -> None:
        """The learning rate of the next step."""
        value = check_callable_rate("learning_rate", value)
        keras.optimizers.Optimizer.learning_rate.fset(self, value)

    @backend.host.outside_of_functions()
    def build(self, variables: Iterable[keras.Variable]) -> None:
        """Creates the slots of each variable, and determines the excluded variables."""
        if self.built:
            return
        trained = check_trainable(variables)
        remember_layouts(trained)
        super().build(trained)
        self._add_slots(trained)
        self._find_excluded(trained)
        self._traced_step = backend.traced_step(self, trained, [self], live_storage_of)
        warn_of_idle_patterns([*self._idle_patterns(), idle_in_names(self)])

    def _add_slots(self, variables: list[keras.Variable]) -> None:
        """Creates the slots of the rule for each variable."""
        slots = self._rule.slots
        lists = self.add_optimizer_variables(variables, list(slots))
        for attribute, of_all in zip(slots.values(), lists, strict=True):
            setattr(self, attribute, of_all)

    def add_variable_from_reference(
        self, reference_variable: keras.Variable, *args: Any, **kwargs: Any
    ) -> keras.Variable:
        slot = super().add_variable_from_reference(reference_variable, *args, **kwargs)
        return shard_slot(slot, reference_variable)

    def exclude_from_weight_decay(
        self,
        var_list: Iterable[keras.Variable] | None = None,
        var_names: list[str] | tuple[str, ...] | None = None,
    ) -> None:
        """Excludes variables from both kinds of weight decay, not from adaptation.

        Variables that the argument of the same name excludes stay excluded.

        Args:
            var_list: The variables to exclude. Defaults to `None`.
            var_names: Regular expressions. A variable is excluded if one of them
                matches in its name, the last part of its path. Defaults to `None`.

        Raises:
            ValueError: From Keras 3.16 on, if the optimizer has been built.
        """
        super().exclude_from_weight_decay(*check_exclusions(self, var_list, var_names))
        if self.built:
            warn_of_idle_patterns([idle_in_names(self)])

    def _idle_patterns(self) -> list[str | None]:
        """Returns remarks on patterns of the constructor that exclude nothing."""
        patterns = self._no_decay_patterns
        return [idle_in_paths(self, "exclude_from_weight_decay", patterns)]

    def _find_excluded(self, variables: list[keras.Variable]) -> None:
        """Remembers which variables the arguments of the constructor exclude."""
        patterns = self._no_decay_patterns
        self._decayable = tuple(not self._is_excluded(v, patterns) for v in variables)

    def _is_excluded(self, variable: keras.Variable, patterns: Any) -> bool:
        """Whether an argument with these patterns excludes a variable."""
        return path_matches(variable, patterns)

    def get_config(self) -> dict[str, Any]:
        values = {n: getattr(self, n) for n in self._checks if n != "learning_rate"}
        values["exclude_from_weight_decay"] = self._no_decay_patterns
        return super().get_config() | config_values(values)

    @classmethod
    def from_config(
        cls, config: dict[str, Any], custom_objects: Mapping[str, Any] | None = None
    ) -> Self:
        """Creates an optimizer from the return value of `get_config`.

        Configs of the Model Garden's optimizer of this name, and of `LAMB` of
        TensorFlow Addons, work too.
        """
        config = check_config(cls.__name__, config)
        rate = config.get("learning_rate")
        if isinstance(rate, dict):
            rate = older_configs().read_schedule_config(rate, custom_objects)
            read = keras.optimizers.schedules.deserialize
            rate = read_object(read, rate, "`learning_rate`", custom_objects)
            config["learning_rate"] = rate
        # Without the warning of the constructor: a config is unambiguous.
        decay = config.pop("weight_decay", None)
        optimizer = super().from_config(config, custom_objects=custom_objects)
        optimizer._set_weight_decay(decay)
        return optimizer

    @backend.in_graphs
    @backend.do_not_convert
    def apply(
        self,
        grads: Iterable[Tensor | None],
        trainable_variables: Iterable[keras.Variable] | None = None,
    ) -> None:
        """Updates the variables.

        Args:
            grads: The gradients, one for each variable; None where a variable has none.
                Integers count as float32.
            trainable_variables: The variables. Defaults to those that the optimizer was
                built for; the first call builds it.

        Raises:
            TypeError, ValueError: As in `keras_lso.LossScaleOptimizer.apply`.
        """
        grads = list_of_gradients(grads)
        grads, variables = check_gradients(self, grads, trainable_variables)
        copy_in_scope([*variables, *self.variables])
        super().apply(backend.prepare_gradients(grads), variables)

    def stateless_apply(
        self,
        optimizer_variables: Iterable[Tensor],
        grads: Iterable[Tensor | None],
        trainable_variables: Iterable[Tensor],
    ) -> tuple[list[Tensor], list[Tensor]]:
        """As `keras_lso.LossScaleOptimizer.stateless_apply`."""
        state = as_list("optimizer_variables", optimizer_variables, "tensors")
        trained = as_list("trainable_variables", trainable_variables, "tensors")
        grads = list_of_gradients(grads)
        backend.check_stateless_arguments([*grads, *state])
        trained, state = super().stateless_apply(state, grads, trained)
        return trained, like(optimizer_variables, state)

    def finalize_variable_values(self, var_list: Iterable[keras.Variable]) -> None:
        super().finalize_variable_values(as_list("var_list", var_list, "variables"))

    # --- The rule of a step -------------------------------------------------------

    def _groups_of(self, indices: Sequence[int]) -> list[Any]:
        """Returns whether each variable decays: see `Rule.groups_of`."""
        variables = variables_of(self)
        return [uses_weight_decay(self, variables[i]) for i in indices]

    def _rule_and_slots_of(
        self, variable: keras.Variable, learning_rate: Tensor
    ) -> tuple[Any, list[keras.Variable]]:
        """Returns the rule of this step for a variable, and its slots."""
        index = index_of(self, variable)
        [group] = self._groups_of([index])
        rule = self._rule.of_groups(self, learning_rate)[group]
        return rule, [slots[index] for slots in slot_lists_of(type(rule), self)]

    def update_step(
        self, gradient: Tensor, variable: keras.Variable, learning_rate: Tensor
    ) -> None:
        """Updates one variable, of any dtype, with a dense or sparse gradient."""
        value = in_float32(variable)
        learning_rate = ops.cast(learning_rate, value.dtype)
        rule, slots = self._rule_and_slots_of(variable, learning_rate)
        tensors = [
            ops.cast(tensor, value.dtype)
            for tensor in (backend.to_dense(gradient), value, *slots)
        ]
        new_values = rule(backend.xp, always, *tensors, norms=backend.norms)
        for v, new in zip((variable, *slots), new_values, strict=True):
            self.assign(v, ops.cast(new, v.dtype))

    # --- State ----------------------------------------------------------------

    @property
    def variables(self) -> VariableList:
        """The variables: a list, as in Keras 3, also callable, as in tf.keras."""
        return VariableList(super().variables, called=lambda: self.weights)

    def load_own_variables(self, store: MutableMapping[str, Any]) -> None:
        """Reads the state from `store`; changes nothing if it does not fit."""
        # Keras's optimizers assign the first variables before they notice that a later
        # one does not fit.
        super().load_own_variables(checked(self, store))


class LayerAdaptive(RuleOptimizer):
    """An optimizer whose rule is a `LayerAdaptiveRule`.

    The group of a variable is a pair of bools: whether it decays, whether it adapts.
    """

    learning_rate: Any
    exclude_from_layer_adaptation: list[str] | None
    exclude_1d: bool
    # Where neither `learning_rate` nor `lr` is given.
    _default_learning_rate: float

    def __init__(self, **arguments: Any) -> None:
        rate = arguments["learning_rate"]
        if "lr" in arguments:
            lr = arguments.pop("lr")
            if rate is not None:
                raise TypeError(
                    "`lr` is another name of `learning_rate`. Give one of them. "
                    f"Received: learning_rate={rate!r}, lr={lr!r}"
                )
            rate = check_learning_rate("lr", lr)
        arguments["learning_rate"] = (
            self._default_learning_rate if rate is None else rate
        )
        decay = check_rate("decay", arguments.pop("decay", 0.0))
        super().__init__(**arguments)
        self.decay = decay

    lr: Any = RuleOptimizer.learning_rate
    """The learning rate, as tf.keras called it."""

    def _find_excluded(self, variables: list[keras.Variable]) -> None:
        super()._find_excluded(variables)
        patterns = self.exclude_from_layer_adaptation
        if patterns is None:
            patterns = self._no_decay_patterns
        self._adapts = [not self._is_excluded(v, patterns) for v in variables]

    def _idle_patterns(self) -> list[str | None]:
        # With `exclude_1d`, a pattern without a match, such as one from a recipe, does
        # no harm.
        if self.exclude_1d:
            return []
        argument = "exclude_from_layer_adaptation"
        remark = idle_in_paths(self, argument, self.exclude_from_layer_adaptation)
        return [*super()._idle_patterns(), remark]

    def _is_excluded(self, variable: keras.Variable, patterns: Any) -> bool:
        is_small = self.exclude_1d and len(variable.shape) < 2
        return is_small or super()._is_excluded(variable, patterns)

    def _rules_of_groups(
        self, trust_ratio: TrustRatio, **computed: Any
    ) -> dict[tuple[bool, bool], Rule]:
        """Returns `Rule.of_groups`, given the coefficients that are computed."""
        return {
            (decays, adapts): from_attributes(
                self._rule,
                self,
                weight_decay=self.weight_decay_rate if decays else 0.0,
                trust_ratio=trust_ratio if adapts else None,
                **computed,
            )
            for decays in (True, False)
            for adapts in (True, False)
        }

    def _groups_of(self, indices: Sequence[int]) -> list[Any]:
        adapts = [self._adapts[i] for i in indices]
        return list(zip(super()._groups_of(indices), adapts, strict=True))

    def decayed(self, learning_rate: Tensor) -> Tensor:
        """Returns the learning rate of this step, a scalar tensor, after `decay`."""
        if not self.decay:
            return learning_rate
        learning_rate = ops.convert_to_tensor(learning_rate)
        steps = ops.cast(updates_of(self), learning_rate.dtype)
        return learning_rate / (1 + self.decay * steps)

    def trust_ratios(
        self,
        grads: Iterable[Tensor | None],
        variables: Iterable[keras.Variable] | None = None,
    ) -> dict[str, Tensor]:
        """Returns the factor by which each variable's step is rescaled.

        Args:
            grads: The unscaled gradients, one for each variable; None where a
                variable has none.
            variables: The variables. Defaults to those that the optimizer was built
                for.

        Returns:
            Dict of the variables' paths to scalar tensors, without the variables that
            are excluded from adaptation.

        Raises:
            ValueError: If the optimizer has not been built yet.

        Example:

        >>> import keras, keras_lso
        >>> optimizer = keras_lso.LARS(1.0, eeta=0.1)
        >>> w = keras.Variable([3.0, 4.0], name="w")
        >>> optimizer.build([w])
        >>> ratios = optimizer.trust_ratios([keras.ops.array([0.0, 2.0])])
        >>> float(ratios["w"])  # 0.1 * |w| / |g|
        0.25
        """
        if not self.built:
            raise ValueError(
                f"To call `trust_ratios`, {type(self).__name__} must be built. Call "
                "`optimizer.build(trainable_variables)` first."
            )
        rate = ops.convert_to_tensor(self.learning_rate)
        grads, ratios = list_of_gradients(grads), {}
        for grad, variable in zip(*pair_gradients(self, grads, variables), strict=True):
            rule, slots = self._rule_and_slots_of(variable, rate)
            if grad is not None and rule.trust_ratio is not None:
                grad = in_float32(backend.to_dense(grad))
                norms = norms_of(backend, rule, grad, variable, *slots)
                ratio = rule.trust_ratio(*norms, rule.weight_decay)
                ratios[path_of(variable)] = ops.stop_gradient(ratio)
        return ratios

    def get_config(self) -> dict[str, Any]:
        return super().get_config() | {"decay": self.decay}
