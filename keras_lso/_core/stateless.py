"""A step from values to new values, written once for the optimizers that wrap one."""

import keras

from keras_lso._backend import backend
from keras_lso._keras_internals.optimizers import variables_of


def stateless_apply(
    optimizer, optimizer_variables, grads, trainable_variables, **arguments
):
    """Runs an optimizer's `apply` on values that come in and go out.

    Args:
        optimizer: A `keras.optimizers.Optimizer`.
        optimizer_variables: List of tensors, the values of `optimizer.variables`.
        grads: List of gradients, one for each trainable variable.
        trainable_variables: List of tensors, the values of the variables that the
            optimizer was built for.
        **arguments: For `apply`.

    Returns:
        A tuple of the new values of `trainable_variables` and of
        `optimizer_variables`.

    Raises:
        ValueError: If the optimizer is not built, or was built for other variables;
            on TensorFlow, as in Keras.
    """
    backend.check_stateless_is_supported()
    if not optimizer.built:
        raise ValueError(
            f"To call `stateless_apply`, {type(optimizer).__name__} must be built "
            "(i.e. its variables must have been created). You can build it via "
            "`optimizer.build(trainable_variables)`."
        )
    trained = variables_of(optimizer)
    own = optimizer.variables
    for name, values, expected in (
        ("optimizer_variables", optimizer_variables, own),
        ("trainable_variables", trainable_variables, trained),
    ):
        if len(values) != len(expected):
            raise ValueError(
                f"Argument `{name}` must be a list of {len(expected)} tensors, "
                "one for each variable that the optimizer was built with. "
                f"Received {len(values)}. If layers were frozen or unfrozen "
                "since, compile the model with a new optimizer."
            )
    mapping = [
        *zip(trained, trainable_variables, strict=True),
        *zip(own, optimizer_variables, strict=True),
    ]
    with keras.StatelessScope(state_mapping=mapping) as scope:
        optimizer.apply(grads, **arguments)
    return (
        [scope.get_current_value(v) for v in trained],
        like(optimizer_variables, [scope.get_current_value(v) for v in own]),
    )


def like(variables, values):
    """Returns `values` in a list of the kind that `variables` is.

    What comes out of a stateless step then has the structure of what went in, as
    `jax.lax.scan` and `keras.tree` ask of it.
    """
    kind = type(variables)
    return kind(values) if issubclass(kind, list) else list(values)
