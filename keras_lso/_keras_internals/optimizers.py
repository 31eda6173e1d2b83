"""Keras's optimizers: their classes, their configs and their state."""

import contextlib
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import keras
from packaging.version import Version

from keras_lso._backend.tensors import Tensor, Variables
from keras_lso._keras_internals.variables import as_stepped, path_of

TORCH_OPTIMIZERS = "keras.src.backend.torch.optimizers"


def public_class(cls: type) -> type:
    """Returns the public Keras class of an optimizer's class, or a user's own class."""
    # On PyTorch `keras.optimizers.SGD(...)` is an instance of another, private class.
    if cls.__module__.startswith(TORCH_OPTIMIZERS):
        return getattr(keras.optimizers, cls.__name__, cls)
    return cls


def is_keras_3_16() -> bool:
    """Whether this is Keras 3.16 or newer."""
    return Version(keras.__version__) >= Version("3.16.dev0")


def iteration_variable(optimizer: keras.Optimizer) -> keras.Variable:
    """Returns the variable that counts the optimizer's applied steps."""
    return optimizer._iterations


def accumulators_of(optimizer: keras.Optimizer) -> Variables:
    """Returns the variables in which the optimizer adds up gradients."""
    return optimizer._accumulated_gradients


def moving_averages_of(optimizer: keras.Optimizer) -> list[keras.Variable | None]:
    """Returns the averages of the weights; None for a variable without one."""
    return optimizer._model_variables_moving_average


def base_variables_of(optimizer: keras.Optimizer) -> Variables:
    """Returns `[iteration, learning_rate]`, of an optimizer that has no schedule."""
    return optimizer._variables[:2]


def variables_of(optimizer: keras.Optimizer) -> Variables:
    """Returns the variables that the optimizer was built for."""
    return list(optimizer._trainable_variables)


def remember_trainable_variables(
    optimizer: keras.Optimizer, variables: Variables
) -> None:
    """Does the work of `BaseOptimizer.build` for an optimizer without slots."""
    # That method would also create EMA and accumulation variables, whose
    # hyperparameters belong to the inner optimizer. Set past the tracker, which would
    # count the model's variables among the optimizer's.
    indices = {optimizer._var_key(v): i for i, v in enumerate(variables)}
    vars(optimizer).update(
        _trainable_variables=list(variables), _trainable_variables_indices=indices
    )


def leave_trained_out_of_checkpoints(optimizer: keras.Optimizer) -> None:
    """Hides the trained variables from `tf.train.Checkpoint`, which finds the slots."""
    for inner in optimizers_in(optimizer):
        variables = variables_of(inner)
        # This deletes TensorFlow's reference to the list as well.
        del inner._trainable_variables
        vars(inner)["_trainable_variables"] = variables


def index_of(optimizer: keras.Optimizer, variable: keras.Variable) -> int:
    """Returns the position of a variable among those the optimizer was built for."""
    return optimizer._get_variable_index(variable)


def is_known(optimizer: keras.Optimizer, variable: keras.Variable) -> bool:
    """Whether the optimizer was built for this variable."""
    return optimizer._var_key(variable) in optimizer._trainable_variables_indices


def add_variable(
    optimizer: keras.Optimizer, name: str, **arguments: Any
) -> keras.Variable:
    """Adds a variable to the optimizer's state, with any arguments of a variable."""
    with keras.name_scope(optimizer.name, caller=optimizer):
        variable = keras.Variable(name=name, **arguments)
    track_variable(optimizer, variable)
    return variable


def track_variable(optimizer: keras.Optimizer, variable: keras.Variable) -> None:
    """Lets `tf.train.Checkpoint` find a variable in the optimizer's state."""
    optimizer._track_variable(variable)


def where_variables_are_made(optimizer: keras.Optimizer) -> AbstractContextManager[Any]:
    """Returns the scope of the `tf.distribute.Strategy` of a built optimizer."""
    strategy = getattr(optimizer, "_distribution_strategy", None)
    return contextlib.nullcontext() if strategy is None else strategy.scope()


def chain_of(optimizer: keras.Optimizer) -> list[keras.Optimizer]:
    """Returns the optimizer and the chain of optimizers inside it, outermost first."""
    optimizers = [optimizer]
    while isinstance(vars(optimizers[-1]).get("inner_optimizer"), keras.Optimizer):
        optimizers.append(optimizers[-1].inner_optimizer)
    return optimizers


def is_multi_optimizer(optimizer: keras.Optimizer) -> bool:
    """Whether an optimizer is a `MultiOptimizer`, a class that Keras 3.12 lacks."""
    return isinstance(optimizer, getattr(keras.optimizers, "MultiOptimizer", ()))


def members_of(optimizer: keras.Optimizer) -> list[keras.Optimizer]:
    """Returns the optimizers among which a `MultiOptimizer` shares the variables."""
    # Before `build` it may not know them.
    return list(optimizer.optimizers) if is_multi_optimizer(optimizer) else []


def is_of_packages(cls: type) -> bool:
    """Whether a class is Keras's or this package's, not a user's."""
    return cls.__module__.partition(".")[0] in ("keras", "keras_lso")


def optimizers_in(optimizer: keras.Optimizer) -> list[keras.Optimizer]:
    """Returns an optimizer, what it wraps, and the members of a `MultiOptimizer`."""
    chain = chain_of(optimizer)
    members = members_of(chain[-1])
    return [*chain, *(o for member in members for o in optimizers_in(member))]


def bases_of(optimizer: keras.Optimizer) -> list[keras.Optimizer]:
    """Returns the base optimizers: those that step, each at its own learning rate."""
    return [
        o
        for o in optimizers_in(optimizer)
        if chain_of(o)[-1] is o and not members_of(o)
    ]


def innermost_of(optimizer: keras.Optimizer) -> list[keras.Optimizer]:
    """Returns the innermost optimizer and, of a `MultiOptimizer`, its members."""
    innermost = chain_of(optimizer)[-1]
    return [innermost, *members_of(innermost)]


def keeps_averages(optimizer: keras.Optimizer) -> bool:
    """Whether the optimizer averages weights, or one of its members does."""
    return any(o.use_ema for o in innermost_of(optimizer))


def steps_in_dtype_of_variables(optimizer: keras.Optimizer) -> bool:
    """Whether an optimizer computes in the dtypes of the variables, not in float32."""
    return getattr(optimizer, "_casts_gradients", True)


def most_accumulation_steps(optimizer: keras.Optimizer) -> int:
    """Returns the largest number of micro-batches that are accumulated; 0 if none."""
    return max(o.gradient_accumulation_steps or 0 for o in bases_of(optimizer))


def changes_gradients(optimizer: keras.Optimizer) -> bool:
    """Whether an optimizer may change gradients before it adds them up: LARC does."""
    has_own_apply = type(optimizer).apply is not keras.optimizers.Optimizer.apply
    return getattr(optimizer, "_changes_gradients", has_own_apply)


def exclude_masters_with_variables(
    optimizer: keras.Optimizer, variables: Variables, masters: Variables
) -> None:
    """Excludes a master from weight decay if its variable is excluded, now or later.

    optimizer.exclude_from_weight_decay([weight])  # Does not know the master,
    optimizer._use_weight_decay(master)            # which is False all the same.
    """
    pairs = [(v, m) for v, m in zip(variables, masters, strict=True) if v is not m]
    if not pairs:
        return
    for decaying in innermost_of(optimizer):
        key, decays = decaying._var_key, decaying._use_weight_decay
        keys = {key(master): key(variable) for variable, master in pairs}
        # A partial, in which a deep copy refers to the copy of the optimizer.
        decaying._use_weight_decay = partial(
            _decays_as_variable, decaying, decays, keys
        )


def _decays_as_variable(
    optimizer: keras.Optimizer,
    decays: Callable[[Any], bool],
    keys: dict[Any, Any],
    variable: keras.Variable,
) -> bool:
    """Whether a variable decays, and if it is a master, its weight too."""
    excluded = getattr(optimizer, "_exclude_from_weight_decay", None) or ()
    return keys.get(optimizer._var_key(variable)) not in excluded and decays(variable)


def names_excluded_by(optimizer: keras.Optimizer) -> re.Pattern[str] | None:
    """Returns the regular expression of the names that do not decay, or None."""
    return getattr(optimizer, "_exclude_from_weight_decay_pattern", None)


def check_known(optimizer: keras.Optimizer, variables: Variables) -> None:
    """Raises a `ValueError` for variables that the optimizer was not built for."""
    for variable in variables:
        if not is_known(optimizer, variable):
            # Keras's own words, without the value: in a `tf.function` there is none.
            raise ValueError(
                f"Unknown variable: {path_of(variable)}. This optimizer can only be "
                "called for the variables it was originally built with. If layers were "
                "frozen or unfrozen since, or if this is another model, make a new "
                "optimizer, and in `fit` call `model.compile` with it. Received: "
                f"optimizer={optimizer.name!r}"
            )


def check_takes_shards(optimizer: keras.Optimizer) -> None:
    """Raises an error for an optimizer that would clip by the norms of shards."""
    for clipping in innermost_of(optimizer):
        if clipping.clipnorm or clipping.global_clipnorm:
            raise ValueError(
                "Inside `jax.shard_map` Keras's `clipnorm` and `global_clipnorm` "
                "see the norms of a device's shards. Clip the gradients before they "
                "are applied, or shard the variables with `keras.distribution`. "
                f"Received: clipnorm={clipping.clipnorm}, "
                f"global_clipnorm={clipping.global_clipnorm}"
            )


def uses_weight_decay(optimizer: keras.Optimizer, variable: keras.Variable) -> bool:
    """Whether the variable decays; False if `exclude_from_weight_decay` excluded it."""
    return optimizer._use_weight_decay(as_stepped(variable))


def warn_of_missing(
    optimizer: keras.Optimizer, grads: list[Tensor | None], variables: Variables
) -> None:
    """Warns of variables without a gradient, as Keras does when it leaves them out."""
    optimizer._filter_empty_gradients(grads, variables)


@contextlib.contextmanager
def attributes_set(values: Iterable[tuple[object, str, Any]]) -> Iterator[None]:
    """Hides attributes of objects and modules behind others for a while."""
    with contextlib.ExitStack() as stack:
        for owner, name, value in values:
            attributes = vars(owner)
            if name in attributes:
                stack.callback(attributes.update, {name: attributes[name]})
            else:
                stack.callback(attributes.pop, name)
            attributes[name] = value
        yield


# What `build` makes like a variable, although it is no slot.
_NO_SLOTS = ("average", "gradient_accumulator")


@contextlib.contextmanager
def slots_in(
    optimizer: keras.Optimizer,
    dtype_of: Callable[[keras.Variable, str | None], str],
) -> Iterator[None]:
    """Returns a context in which `build` makes the slots of a variable in a dtype."""
    add = optimizer.add_variable_from_reference

    def add_narrow(
        reference_variable: keras.Variable,
        name: str | None = None,
        initializer: Any = "zeros",
    ) -> keras.Variable:
        # One by one, since there may be no room for wider slots of all variables.
        narrowed = []
        if name not in _NO_SLOTS:
            dtype = dtype_of(reference_variable, name)
            narrowed.append((reference_variable, "_dtype", dtype))
        with attributes_set(narrowed):
            return add(reference_variable, name=name, initializer=initializer)

    with attributes_set([(optimizer, "add_variable_from_reference", add_narrow)]):
        yield
