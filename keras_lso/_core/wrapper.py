"""What an optimizer that wraps another one has from it.

`LossScaleOptimizer` and `LARC` are such wrappers.
"""

import weakref

import keras

from keras_lso._backend import backend
from keras_lso._keras_internals.optimizers import chain_of, variables_of


def passed_on(name, doc):
    """Returns a property over the inner optimizer's attribute of the same name."""

    def get(self):
        return getattr(self.inner_optimizer, name)

    def set_(self, value):
        # Keras's constructor assigns its defaults before there is an inner one.
        if "inner_optimizer" in vars(self):
            setattr(self.inner_optimizer, name, value)

    return property(get, set_, doc=doc)


class Wrapper(keras.optimizers.Optimizer):
    """An optimizer with the hyperparameters of its `inner_optimizer`.

    Those that every Keras optimizer has are properties. Any other public
    attribute (`momentum`, `beta_1`, a user's own) is looked up on access.
    """

    built: bool

    weight_decay = passed_on("weight_decay", "The inner optimizer's weight decay.")
    clipnorm = passed_on("clipnorm", "The inner optimizer's `clipnorm`.")
    clipvalue = passed_on("clipvalue", "The inner optimizer's `clipvalue`.")
    global_clipnorm = passed_on(
        "global_clipnorm", "The inner optimizer's `global_clipnorm`."
    )
    use_ema = passed_on("use_ema", "Whether the inner optimizer averages weights.")
    ema_momentum = passed_on("ema_momentum", "The inner optimizer's EMA momentum.")
    ema_overwrite_frequency = passed_on(
        "ema_overwrite_frequency", "The inner optimizer's EMA overwrite frequency."
    )
    gradient_accumulation_steps = passed_on(
        "gradient_accumulation_steps", "The inner optimizer's accumulation window."
    )
    learning_rate = passed_on("learning_rate", "The inner learning rate.")
    lr = passed_on("learning_rate", "The inner learning rate, as in tf.keras.")

    @property
    def iterations(self):
        """The number of steps that the inner optimizer applied."""
        return self.inner_optimizer.iterations

    def exclude_from_weight_decay(self, var_list=None, var_names=None):
        """Excludes variables from the inner optimizer's weight decay.

        Args:
            var_list: List of variables to exclude.
            var_names: List of strings; a variable is excluded if its name
                contains one of them.
        """
        self.inner_optimizer.exclude_from_weight_decay(var_list, var_names)

    def __getattr__(self, name):
        inner = vars(self).get("inner_optimizer")
        if inner is None or name.startswith("_"):
            raise AttributeError(
                f"'{type(self).__name__}' object has no attribute '{name}'"
            )
        return getattr(inner, name)

    def __setattr__(self, name, value):
        if self._belongs_to_inner(name):
            setattr(self.inner_optimizer, name, value)
        else:
            super().__setattr__(name, value)

    def _belongs_to_inner(self, name):
        inner = vars(self).get("inner_optimizer")
        return (
            inner is not None
            and not name.startswith("_")
            and name not in vars(self)
            and not hasattr(type(self), name)
            and hasattr(inner, name)
        )

    def stateless_apply(
        self, optimizer_variables, grads, trainable_variables, **kwargs
    ):
        """Does what `apply` does, on values that come in and go out.

        Args:
            optimizer_variables: List of tensors, the values of
                `optimizer.variables`.
            grads: List of gradients, one for each trainable variable.
            trainable_variables: List of tensors, the values of the variables that
                the optimizer was built for.
            **kwargs: See `apply`.

        Returns:
            A tuple of the new values of `trainable_variables` and of
            `optimizer_variables`.

        Raises:
            ValueError: If the optimizer is not built, or was built for other
                variables; on TensorFlow, as in Keras.
        """
        backend.check_stateless_is_supported()
        if not self.built:
            raise ValueError(
                f"To call `stateless_apply`, {type(self).__name__} must be built "
                "(i.e. its variables must have been created). You can build it via "
                "`optimizer.build(trainable_variables)`."
            )
        trained, own = variables_of(self), self.variables
        _check_count("optimizer_variables", optimizer_variables, own)
        _check_count("trainable_variables", trainable_variables, trained)
        mapping = [
            *zip(trained, trainable_variables, strict=True),
            *zip(own, optimizer_variables, strict=True),
        ]
        with keras.StatelessScope(state_mapping=mapping) as scope:
            self.apply(grads, **kwargs)
        return (
            [scope.get_current_value(v) for v in trained],
            like(optimizer_variables, [scope.get_current_value(v) for v in own]),
        )


def _check_count(argument, values, variables):
    if len(values) != len(variables):
        raise ValueError(
            f"Argument `{argument}` must be a list of {len(variables)} tensors, "
            "one for each variable that the optimizer was built with. "
            f"Received {len(values)}. If layers were frozen or unfrozen "
            "since, compile the model with a new optimizer."
        )


def like(variables, values):
    """Returns `values` in a list of the type of `variables`.

    The results of a stateless step then have the structure of its arguments, as
    `jax.lax.scan` and `keras.tree` require.
    """
    kind = type(variables)
    return kind(values) if issubclass(kind, list) else list(values)


# The innermost optimizers that a LossScaleOptimizer steps, and its name.
_wrapped: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def check_optimizer(inner, argument="inner_optimizer"):
    """Refuses what is not an optimizer."""
    if isinstance(inner, keras.optimizers.Optimizer):
        return
    hint = "keras.optimizers.Adam()"
    if isinstance(inner, str):
        hint = f'keras.optimizers.get("{inner}")'
    elif isinstance(inner, type) and issubclass(inner, keras.optimizers.Optimizer):
        hint = f"{inner.__name__}(...)"
    raise TypeError(
        f"Argument `{argument}` must be an instance of "
        f"`keras.optimizers.Optimizer`, such as `{hint}`. Received: "
        f"{argument}={inner!r} of type {type(inner).__name__}"
    )


def check_not_wrapped(inner):
    """Refuses an optimizer that another LossScaleOptimizer steps, as tf.keras does.

    The number of skipped steps is the wrapper's count less the inner optimizer's,
    which would include the steps of both.
    """
    innermost = chain_of(inner)[-1]
    if innermost in _wrapped:
        name = type(innermost).__name__
        raise ValueError(
            f"Argument `inner_optimizer` is already wrapped: the LossScaleOptimizer "
            f"{_wrapped[innermost]!r} steps this {name}, and each of the two would "
            "take the other's steps for its own. Use that one, or wrap a new "
            f"optimizer: `{name}.from_config(optimizer.get_config())`. (To go on from "
            "the state of the old wrapper, call `new.build(variables)` and "
            "`new.set_weights(old.get_weights())`.) Received: "
            f"inner_optimizer={inner!r}"
        )


def remember_wrapped(inner, name):
    """Remembers that a LossScaleOptimizer of this name steps the optimizer."""
    _wrapped[chain_of(inner)[-1]] = name
