"""The state of an optimizer in a file: all of it fits, or none of it is taken."""

import keras
import numpy as np

from keras_lso._checks import check_state


class LoadsAllOrNothing(keras.optimizers.Optimizer):
    """An optimizer that looks at all of its state before it assigns any.

    Keras's own assign the first variables before they see that the next does not fit.
    """

    def load_own_variables(self, store):
        """Reads the state from `store`."""
        super().load_own_variables(checked(self, store))


def checked(optimizer, store):
    """Returns what Keras's `load_own_variables` may read; it assigns as it goes.

    Keras itself warns of a store with more or fewer entries, and assigns nothing.
    """
    variables = list(optimizer.variables)
    if len(store.keys()) != len(variables):
        return store
    return {str(i): value for i, value in enumerate(read_stored(variables, store))}


def read_stored(variables, store, mended=()):
    """Returns the arrays that a store holds for the variables of an optimizer.

    Args:
        variables: List of variables, as many as the store has entries.
        store: Mapping of `"0"`, `"1"`, ... to arrays, as Keras's stores are.
        mended: Variables in which NaN and numbers that are too large do no harm,
            since they are mended afterwards.

    Returns:
        List of arrays of the variables' shapes and dtypes.

    Raises:
        ValueError, TypeError: If one is missing or does not fit its variable.
    """
    names = set(store.keys())
    missing = [str(i) for i in range(len(variables)) if str(i) not in names]
    if missing:
        raise ValueError(
            "The state of an optimizer is stored under the numbers of its variables, "
            f"'0' to '{len(variables) - 1}'. Not there: {missing}. The file is "
            "damaged. Nothing was assigned."
        )
    mended = {id(v) for v in mended}
    values = []
    for i, variable in enumerate(variables):
        stored = np.asarray(store[str(i)])
        value = check_state(variable, stored)
        if id(variable) not in mended:
            try:
                check_is_sound(variable, stored, value)
            except ValueError as error:
                raise ValueError(
                    f"{error} The model alone is loaded by `load_model(path, "
                    "compile=False)` and `model.load_weights(path, "
                    "skip_mismatch=True)`. Nothing was assigned."
                ) from error
        values.append(value)
    return values


def check_is_sound(variable, stored, value):
    """Refuses NaN, and what is finite in the file but not in the variable's dtype.

    A slot or a learning rate that is NaN makes a weight NaN at the next step, though
    the gradients are finite. A slot may well be inf: Adam's second moment, say.

    Args:
        variable: The variable that the value is for.
        stored: Array, as it is in the file.
        value: Array, the same in the dtype of the variable.
    """
    target = f"The optimizer's variable '{variable.path}'"
    if np.isnan(value).any():
        raise ValueError(
            f"{target} must not be NaN, as the file has it: the run that wrote it had "
            "diverged, or the file is damaged. Load an earlier file."
        )
    infinite = np.isinf(value)
    if infinite.any() and (
        variable.name == "learning_rate" or not np.isinf(stored[infinite]).all()
    ):
        raise ValueError(
            f"{target} must be finite in {value.dtype.name}. The file holds "
            f"{stored[infinite].reshape(-1)[0]!r}."
        )
