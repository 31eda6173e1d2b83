"""A compiled step, as JAX needs it."""

import functools

import keras


def jax_jit(function, variables, **options):
    """Compiles a function as Keras's trainer does: values go in, new values come out.

    `variables` are all variables that the function may read and write, or a function
    that returns them. `options` are those of `jax.jit`.
    """
    import jax

    def own():
        return variables() if callable(variables) else variables

    @functools.partial(jax.jit, **options)
    def stateless(values, *arguments):
        scope = keras.StatelessScope(list(zip(own(), values, strict=True)))
        with scope:
            result = function(*arguments)
        return result, [scope.get_current_value(v) for v in own()]

    def call(*arguments):
        result, values = stateless([v.value for v in own()], *arguments)
        for variable, value in zip(own(), values, strict=True):
            variable.assign(value)
        return result

    return call
