"""Keras's optimizers: their class, their config, and what they keep."""

import contextlib
import re

import keras
from keras import ops
from keras.src.utils.naming import to_snake_case

from keras_lso._backend import backend
from keras_lso._keras_internals.variables import path_of

_TORCH_OPTIMIZERS = "keras.src.backend.torch.optimizers"


# --- Canonical classes ------------------------------------------------------


def canonical_class(optimizer):
    """Returns the public Keras class that `optimizer` is an instance of."""
    return public_class(type(optimizer))


def public_class(cls):
    """Returns the public class that Keras has an optimizer's class for.

    On PyTorch `keras.optimizers.SGD(...)` is an instance of another, private class. A
    user's own subclass is its own.
    """
    if cls.__module__.startswith(_TORCH_OPTIMIZERS):
        return getattr(keras.optimizers, cls.__name__, cls)
    return cls


def public_config(config):
    """Returns a copy of `config` in which torch-only classes have public names.

    Keras writes the private class that it swaps in on PyTorch into its configs,
    and no other backend can read those.
    """
    if isinstance(config, list | tuple):
        return type(config)(public_config(item) for item in config)
    if not isinstance(config, dict):
        return config
    config = {key: public_config(value) for key, value in config.items()}
    if str(config.get("module", "")).startswith(_TORCH_OPTIMIZERS):
        config["module"] = "keras.optimizers"
        config["registered_name"] = None
    return config


def config_of(inner_optimizer):
    """Returns the config of a wrapped optimizer, alike for optimizers built alike."""
    config = public_config(keras.saving.serialize_keras_object(inner_optimizer))
    arguments = config["config"]
    if "name" in arguments:
        class_name = config["class_name"].split(">")[-1]
        arguments["name"] = _without_number(arguments["name"], class_name)
    return config


def name_of(optimizer):
    """Returns the optimizer's name, alike for optimizers built alike."""
    return _without_number(optimizer.name, canonical_class(optimizer).__name__)


def _without_number(name, class_name):
    """Returns a name without Keras's running number, which says nothing about it.

    Keras counts the optimizers of a class in their default names: `sgd`, `sgd_1`.
    """
    default = to_snake_case(class_name)
    return default if re.fullmatch(rf"{default}_\d+", str(name)) else name


# --- The state of an optimizer ----------------------------------------------


def iteration_variable(optimizer):
    """Returns the variable that counts the optimizer's applied steps."""
    return optimizer._iterations


def base_variables_of(optimizer):
    """Returns `[iteration, learning_rate]`, of an optimizer that has no schedule."""
    return optimizer._variables[:2]


def variables_of(optimizer):
    """Returns the variables that the optimizer was built for."""
    return list(optimizer._trainable_variables)


def remember_trainable_variables(optimizer, variables):
    """Does what `BaseOptimizer.build` does for an optimizer without slots.

    That method would also create EMA and accumulation variables, by hyper-
    parameters that a wrapper only reads through from its inner optimizer.
    """
    # Plain attributes: the tracker would count the model's variables among the
    # optimizer's.
    object.__setattr__(optimizer, "_trainable_variables", list(variables))
    object.__setattr__(
        optimizer,
        "_trainable_variables_indices",
        {optimizer._var_key(v): i for i, v in enumerate(variables)},
    )


def index_of(optimizer, variable):
    """Returns the position of a variable among those the optimizer was built for."""
    return optimizer._get_variable_index(variable)


def is_known(optimizer, variable):
    """Whether the optimizer was built for this variable."""
    return optimizer._var_key(variable) in optimizer._trainable_variables_indices


def add_variable(optimizer, name, **arguments):
    """Adds a variable to the optimizer's state, with any argument that it may have."""
    with keras.name_scope(optimizer.name, caller=optimizer):
        variable = keras.Variable(name=name, **arguments)
    track_variable(optimizer, variable)
    return variable


def track_variable(optimizer, variable):
    """Lets `tf.train.Checkpoint` find a variable in the optimizer's state."""
    optimizer._track_variable(variable)


def where_variables_are_made(optimizer):
    """Returns the context in which variables of a built optimizer are to be made.

    That of the `tf.distribute.Strategy` in whose scope the optimizer was made.
    """
    strategy = getattr(optimizer, "_distribution_strategy", None)
    return contextlib.nullcontext() if strategy is None else strategy.scope()


def chain_of(optimizer):
    """Returns the optimizer, what it wraps, what that wraps, and so on."""
    optimizers = [optimizer]
    while isinstance(vars(optimizers[-1]).get("inner_optimizer"), keras.Optimizer):
        optimizers.append(optimizers[-1].inner_optimizer)
    return optimizers


def schedule_of(optimizer):
    """Returns the optimizer's learning-rate schedule, None if it has none."""
    rate = getattr(chain_of(optimizer)[-1], "_learning_rate", None)
    is_schedule = isinstance(rate, keras.optimizers.schedules.LearningRateSchedule)
    return rate if is_schedule else None


def members_of(optimizer):
    """Returns the optimizers among which a `MultiOptimizer` shares the variables."""
    # Keras 3.12 has none.
    cls = getattr(keras.optimizers, "MultiOptimizer", None)
    return list(optimizer.optimizers) if cls and isinstance(optimizer, cls) else []


def stepping(optimizer):
    """Returns the optimizers that have variables for what they train.

    That is the innermost one and, of a `MultiOptimizer`, its members.
    """
    innermost = chain_of(optimizer)[-1]
    return [innermost, *members_of(innermost)]


def keeps_averages(optimizer):
    """Whether the optimizer averages weights, or one of its members does."""
    return any(o.use_ema for o in stepping(optimizer))


def clips_by_the_norm_of_all(optimizer):
    """Whether the optimizer, or one of its members, has a `global_clipnorm`."""
    return any(bool(o.global_clipnorm) for o in stepping(optimizer))


def as_accumulated(optimizer, grads, variables):
    """Returns gradients in the dtypes in which the optimizer adds them up, if it does.

    Keras's accumulators have the dtypes of the variables, and TensorFlow adds nothing
    else to them.
    """
    wrappers = chain_of(optimizer)[:-1]
    # It does so itself, once it has unscaled them.
    if any(isinstance(o, keras.optimizers.LossScaleOptimizer) for o in wrappers):
        return grads
    if not any(o.gradient_accumulation_steps for o in stepping(optimizer)):
        return grads
    return [
        g if g is None else _cast(g, v.dtype)
        for g, v in zip(grads, variables, strict=True)
    ]


def _cast(grad, dtype):
    return backend.map_values(lambda value: ops.cast(value, dtype), grad)


def accumulators_of(optimizer, variables=None):
    """Returns the variables in which an optimizer adds up gradients.

    Args:
        optimizer: The optimizer, not one that wraps another.
        variables: List of those whose gradients they are. Defaults to `None`: of all.
    """
    return _those_of(optimizer, optimizer._accumulated_gradients, variables)


def moving_averages_of(optimizer, variables=None):
    """Returns the variables that hold moving averages of weights.

    For the arguments see `accumulators_of`.
    """
    averages = optimizer._model_variables_moving_average
    return _those_of(optimizer, averages, variables)


def _those_of(optimizer, kept, variables):
    if variables is None:
        return kept
    return [kept[index_of(optimizer, v)] for v in variables]


def averages_of(optimizer):
    """Returns pairs of what is trained and its moving average.

    Before the first step that is applied an average is zero, and left out.
    """
    return [
        pair
        for averaging in stepping(optimizer)
        if averaging.use_ema and averaging.built and _has_stepped(averaging)
        for pair in zip(
            averaging._trainable_variables, moving_averages_of(averaging), strict=True
        )
    ]


def _has_stepped(optimizer):
    # By NumPy: what replicas share does not become an `int` by itself.
    return int(ops.convert_to_numpy(iteration_variable(optimizer))) > 0


def count_by(wrapper, inner):
    """Lets a wrapper without state of its own count its inner optimizer's steps."""
    wrapper._iterations = iteration_variable(inner)


def exclude_masters_from_weight_decay(optimizer, variables, masters):
    """Carries exclusions that name a variable itself over to its master.

    Those of a `MultiOptimizer`'s members are known only once it is built.
    """
    for decaying in stepping(optimizer):
        excluded = getattr(decaying, "_exclude_from_weight_decay", None) or set()
        # Keras 3.16 looks at the exclusions once, when it builds.
        decided = getattr(decaying, "_weight_decay_by_var_key", {})
        for variable, its_master in zip(variables, masters, strict=True):
            if decaying._var_key(variable) in excluded:
                key = decaying._var_key(its_master)
                excluded.add(key)
                if key in decided:
                    decided[key] = False


def check_known(optimizer, variables):
    """Refuses variables that the optimizer was not built for."""
    for variable in variables:
        if not is_known(optimizer, variable):
            # Keras's own words, but for the value: in a `tf.function` there is none.
            raise ValueError(
                f"Unknown variable: {path_of(variable)}. This optimizer can only be "
                "called for the variables it was originally built with. When working "
                "with a new set of variables, you should recreate a new optimizer "
                f"instance. Received: optimizer={optimizer.name!r}"
            )


def check_takes_shards(optimizer):
    """Refuses an optimizer that would take the norm of a shard for a tensor's."""
    for clipping in stepping(optimizer):
        if clipping.clipnorm or clipping.global_clipnorm:
            raise ValueError(
                "Inside of `jax.shard_map` Keras's `clipnorm` and `global_clipnorm` "
                "see the norms of a device's shards. Clip the gradients before they "
                "are applied, or shard the variables with `keras.distribution`. "
                f"Received: clipnorm={clipping.clipnorm}, "
                f"global_clipnorm={clipping.global_clipnorm}"
            )


def uses_weight_decay(optimizer, variable):
    """Whether the variable decays, unless `exclude_from_weight_decay` was called."""
    return optimizer._use_weight_decay(variable)


def warn_of_missing(optimizer, grads, variables):
    """Warns of variables without a gradient, as Keras does when it leaves them out."""
    if any(g is None for g in grads):
        optimizer._filter_empty_gradients(grads, variables)
