"""The bases of LARS, LAMB and NovoGrad: `OwnOptimizer` and `LayerAdaptive`."""

from collections.abc import Callable, Iterable, Mapping, MutableMapping
from typing import Any, Self

import keras
from keras import ops
from keras.optimizers.schedules import LearningRateSchedule

from keras_lso._backend import backend
from keras_lso._backend.tensors import in_float32, norms_of
from keras_lso._backend.types import Tensor
from keras_lso._core.checks import (
    check_callable_rate,
    check_config,
    check_learning_rate,
    check_rate,
    warn,
)
from keras_lso._core.configs import SCHEDULE, modernise, read_object
from keras_lso._core.exclusions import (
    check_exclusions,
    idle_in_names,
    idle_in_paths,
    warn_of_idle_patterns,
)
from keras_lso._core.fields import checked_arguments, config_values
from keras_lso._core.gradients import (
    as_list,
    check_gradients,
    check_trainable,
    pair_gradients,
)
from keras_lso._core.methods import Methods
from keras_lso._core.rule_update import update_by_rule
from keras_lso._core.state_file import checked
from keras_lso._core.variable_list import VariableList
from keras_lso._core.wrapper import like
from keras_lso._keras_internals.distribution import remember_layouts
from keras_lso._keras_internals.optimizers import index_of, variables_of
from keras_lso._keras_internals.rates import updates_of
from keras_lso._keras_internals.rule_optimizer import RuleOptimizer
from keras_lso._keras_internals.rules import slot_lists_of
from keras_lso._keras_internals.variables import own_in_scope, path_matches, path_of


class OwnOptimizer(Methods, RuleOptimizer):
    """An optimizer whose step is a rule, and that checks its arguments.

    Attributes:
        _kind_of_decay: String. The predicate of `weight_decay_rate` in a message.
    """

    weight_decay_rate: float
    _kind_of_decay: str

    def __init__(self, **arguments: Any) -> None:
        own = checked_arguments(type(self), arguments)
        arguments["learning_rate"] = own.pop("learning_rate")
        self._check_decays(own["weight_decay_rate"], arguments)
        super().__init__(**arguments)
        # The argument's name is a method of every Keras optimizer.
        self._no_decay_patterns = own.pop("exclude_from_weight_decay")
        for name, value in own.items():
            setattr(self, name, value)

    @RuleOptimizer.learning_rate.setter
    def learning_rate(
        self, value: float | LearningRateSchedule | Callable[[], Any]
    ) -> None:
        """The learning rate of the next step."""
        value = check_callable_rate("learning_rate", value)
        RuleOptimizer.learning_rate.fset(self, value)

    # `build` warns of idle patterns, so a wrapper need not.
    _looks_at_patterns = True

    def build(self, variables: Iterable[keras.Variable]) -> None:
        """Creates the slots of each variable, and determines the excluded variables.

        Args:
            variables: The trainable variables.

        Raises:
            TypeError: If `variables` is not a list of variables.
            ValueError: If a variable is complex, or is listed twice.
        """
        if self.built:
            return
        variables = check_trainable("variables", variables)
        remember_layouts(variables)
        super().build(variables)
        self._add_slots(variables)
        warn_of_idle_patterns([*self._idle_patterns(), idle_in_names(self)])

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

    def _idle_patterns(self):
        """Returns remarks on patterns of the constructor that exclude nothing."""
        raise NotImplementedError

    @classmethod
    def _check_decays(cls, weight_decay_rate, kwargs):
        """Checks `weight_decay` in `kwargs`, and warns of it.

        Keras's users know it from every optimizer, and others from the paper.
        """
        if kwargs.get("weight_decay") is None:
            return
        decay = kwargs["weight_decay"] = check_rate(
            "weight_decay", kwargs["weight_decay"]
        )
        cls._check_not_both(weight_decay_rate, decay)
        if decay:
            name = cls.__name__
            warn(
                f"`weight_decay` of {name} is Keras's, which shrinks the weights "
                "separately from the step. What papers, optax and PyTorch call the "
                f"weight decay of {name} {cls._kind_of_decay}: write "
                f"`{name}(..., weight_decay_rate={decay})`. If you mean Keras's, set "
                f"`optimizer.weight_decay = {decay}` afterwards. Received: "
                f"weight_decay={decay}"
            )

    @classmethod
    def _check_not_both(cls, weight_decay_rate, weight_decay):
        if weight_decay_rate and weight_decay:
            raise ValueError(
                f"`weight_decay_rate` {cls._kind_of_decay}; `weight_decay` shrinks the "
                "weights separately from the step. Give one of them. Received: "
                f"weight_decay_rate={weight_decay_rate}, weight_decay={weight_decay}. "
                f"{cls.__name__} as published has `weight_decay_rate` only."
            )

    @classmethod
    def from_config(
        cls, config: dict[str, Any], custom_objects: Mapping[str, Any] | None = None
    ) -> Self:
        """Creates an optimizer from the return value of `get_config`.

        Args:
            config: The config dict.
            custom_objects: The classes that the config refers to, by their names.

        Returns:
            An optimizer of this class.
        """
        config = check_config(cls.__name__, config)
        # Without the warning of the constructor: a config is unambiguous.
        decay = config.pop("weight_decay", None)
        optimizer = super().from_config(config, custom_objects=custom_objects)
        if decay is not None:
            decay = check_rate("weight_decay", decay)
            cls._check_not_both(optimizer.weight_decay_rate, decay)
            optimizer.weight_decay = decay
        return optimizer

    def _update_by_rule(self, grads, variables, learning_rate):
        return update_by_rule(self, grads, variables, learning_rate)

    def _add_slots(self, variables):
        raise NotImplementedError

    def get_config(self) -> dict[str, Any]:
        values = {n: getattr(self, n) for n in self._checks if n != "learning_rate"}
        values["exclude_from_weight_decay"] = self._no_decay_patterns
        return super().get_config() | config_values(values)

    @backend.as_written
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
            TypeError: If `grads` or `trainable_variables` is not a list, or if the two
                are swapped.
            ValueError: If the gradients do not fit the variables in number or shape,
                or if a gradient is complex.
        """
        grads, variables = check_gradients(self, grads, trainable_variables)
        own_in_scope([*variables, *self.variables])
        super().apply(backend.steppable(grads), variables)

    def stateless_apply(
        self,
        optimizer_variables: Iterable[Tensor],
        grads: Iterable[Tensor | None],
        trainable_variables: Iterable[Tensor],
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Applies gradients as `apply` does, but takes and returns values.

        The arguments are left unchanged.

        Args:
            optimizer_variables: The values of `optimizer.variables`.
            grads: The gradients, one for each trainable variable.
            trainable_variables: The values of the variables that the optimizer was
                built for.

        Returns:
            A tuple of the new values of `trainable_variables` and of
            `optimizer_variables`.

        Raises:
            ValueError: On PyTorch, if autograd tracks a gradient, since it cannot
                track the step; on TensorFlow, as in Keras.
        """
        own = as_list("optimizer_variables", optimizer_variables, "tensors")
        trained = as_list("trainable_variables", trainable_variables, "tensors")
        grads = as_list("grads", grads, "gradients, one for each variable")
        backend.check_not_followed([*grads, *own])
        trained, own = super().stateless_apply(own, grads, trained)
        return trained, like(optimizer_variables, own)

    def finalize_variable_values(self, var_list: Iterable[keras.Variable]) -> None:
        """Sets the final values of the variables: their averages, if there are any.

        Args:
            var_list: The trainable variables.
        """
        super().finalize_variable_values(as_list("var_list", var_list, "variables"))

    # --- State ----------------------------------------------------------------

    @property
    def variables(self) -> VariableList:
        """The variables: a list, as in Keras 3, also callable, as in tf.keras."""
        return VariableList(super().variables, called=lambda: self.weights)

    def load_own_variables(self, store: MutableMapping[str, Any]) -> None:
        """Reads the state from `store`; changes nothing if it does not fit.

        Keras's optimizers assign the first variables before they notice that a later
        one does not fit.
        """
        super().load_own_variables(checked(self, store))

    def __dir__(self) -> list[str]:
        """Hides `get_slot_names`, by which TensorFlow's checkpoints recognise slots.

        The checkpoints refuse to save the same slots twice.
        """
        return [n for n in super().__dir__() if n != "get_slot_names"]

    # --- Called by methods of tf.keras ----------------------------------------

    def _scaled(self, loss):
        return self.scale_loss(loss)

    def _unscaled(self, grads):
        # `apply` divides by `loss_scale_factor`.
        return grads

    def _apply_scaled(self, grads_and_vars, name):
        return self.apply_gradients(grads_and_vars, name=name)

    def _weight_layouts(self):
        """Returns the lists of variables whose values `set_weights` takes."""
        return [self.weights, list(self.variables)]

    def _assign_weights(self, variables, values):
        for variable, value in zip(variables, values, strict=True):
            variable.assign(value)


class LayerAdaptive(OwnOptimizer):
    """An optimizer whose rule is a `LayerAdaptiveRule`.

    The group of a variable is a pair of bools: whether it decays, whether it adapts.

    Attributes:
        _default_learning_rate: Float. `lr` may be given with a `learning_rate` of
            this value.
    """

    learning_rate: Any
    _default_learning_rate: float

    exclude_from_layer_adaptation: list[str] | None
    exclude_1d: bool

    def __init__(self, **arguments: Any) -> None:
        if "lr" in arguments:
            rate, lr = arguments["learning_rate"], arguments.pop("lr")
            if rate != self._default_learning_rate:
                raise TypeError(
                    "`lr` is another name of `learning_rate`. Give one of them. "
                    f"Received: learning_rate={rate!r}, lr={lr!r}"
                )
            arguments["learning_rate"] = check_learning_rate("lr", lr)
        decay = check_rate("decay", arguments.pop("decay", 0.0))
        super().__init__(**arguments)
        self.decay = decay

    @property
    def lr(self) -> Tensor:
        """The learning rate, as tf.keras called it."""
        return self.learning_rate

    @lr.setter
    def lr(self, value: float | LearningRateSchedule | Callable[[], Any]) -> None:
        self.learning_rate = value

    def build(self, variables: Iterable[keras.Variable]) -> None:
        if self.built:
            return
        super().build(variables)
        patterns = self.exclude_from_layer_adaptation
        if patterns is None:
            patterns = self._no_decay_patterns
        self._adapts = tuple(
            not self._is_excluded(patterns, v) for v in variables_of(self)
        )

    def _may_decay(self, variable):
        return not self._is_excluded(self._no_decay_patterns, variable)

    def _idle_patterns(self):
        # With `exclude_1d`, a pattern without a match, such as one from a recipe, does
        # no harm.
        if self.exclude_1d:
            return []
        lists = {
            "exclude_from_weight_decay": self._no_decay_patterns,
            "exclude_from_layer_adaptation": self.exclude_from_layer_adaptation,
        }
        return [idle_in_paths(self, *item) for item in lists.items()]

    def _is_excluded(self, patterns, variable):
        if self.exclude_1d and len(variable.shape) < 2:
            return True
        return path_matches(variable, patterns)

    def decayed(self, learning_rate: Tensor) -> Tensor:
        """Returns the learning rate of this step, after `decay`.

        Args:
            learning_rate: Scalar tensor.

        Returns:
            A scalar tensor.
        """
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
        grads, variables = pair_gradients(self, grads, variables)
        indices = [index_of(self, v) for v in variables]
        rate = ops.convert_to_tensor(self.learning_rate)
        made = self._rule.of_groups(self, rate)
        groups = self._groups_of(indices)
        ratios = {}
        for index, grad, variable, group in zip(
            indices, grads, variables, groups, strict=True
        ):
            rule = made[group]
            if grad is None or rule.trust_ratio is None:
                continue
            grad = in_float32(backend.to_dense(grad))
            slots = [slots[index] for slots in slot_lists_of(type(rule), self)]
            norms = norms_of(backend, rule, grad, variable, *slots)
            ratio = rule.trust_ratio(*norms, rule.weight_decay)
            ratios[path_of(variable)] = ops.stop_gradient(ratio)
        return ratios

    def _groups_of(self, indices):
        """Returns whether each of the variables at `indices` decays and adapts."""
        decaying = self._decaying(indices)
        return [(d, self._adapts[i]) for d, i in zip(decaying, indices, strict=True)]

    def get_config(self) -> dict[str, Any]:
        return super().get_config() | {"decay": self.decay}

    @classmethod
    def from_config(
        cls, config: dict[str, Any], custom_objects: Mapping[str, Any] | None = None
    ) -> Self:
        """Creates an optimizer from the return value of `get_config`.

        Args:
            config: The config dict. A config of the Model Garden's optimizer of this
                name works too.
            custom_objects: The classes that the config refers to, by their names.

        Returns:
            An optimizer of this class.
        """
        config = check_config(cls.__name__, config)
        learning_rate = config.get("learning_rate")
        if isinstance(learning_rate, dict):
            config["learning_rate"] = read_object(
                keras.optimizers.schedules.deserialize,
                modernise(SCHEDULE, learning_rate, custom_objects),
                "`learning_rate`",
                custom_objects,
            )
        return super().from_config(config, custom_objects=custom_objects)
