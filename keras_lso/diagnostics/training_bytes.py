"""The memory of training: weights, gradients, optimizer, and outputs of layers.

The counts come from existing variables, and from the layers' outputs for a batch.
"""

import re
from typing import Any

import keras

from keras_lso._keras_internals.layers import children_of, own_variables_of
from keras_lso._keras_internals.variables import layers_of
from keras_lso.diagnostics.trial_runs import unchanged
from keras_lso.diagnostics.underflow import after_each_call

KINDS = ("weights", "gradients", "optimizer", "outputs")


class TrainingBytes:
    """The bytes of a model's training, for any dtype policies of its layers.

    Args:
        model: A `keras.Model` that is built.
        x: The inputs of a batch, tensors.
    """

    def __init__(self, model: keras.Model, x: Any) -> None:
        self._weights = owners_of(model)
        self._outputs: list[tuple[keras.layers.Layer, int, str]] = _outputs_of(model, x)

    def count(
        self,
        policies: dict[int, str | None],
        optimizer: keras.optimizers.Optimizer | None,
    ) -> dict[str, int]:
        """Returns the bytes as a dict with the keys `KINDS`.

        Args:
            policies: Dict of ids of layers to the names of the dtype policies that they
                get, or None for their own.
            optimizer: The built optimizer; None if there is none.
        """
        weights = [
            (variable, _elements(variable.shape) * size_of(dtype))
            for variable, dtype in self._weights_by(policies)
        ]
        state = optimizer.variables if optimizer is not None else ()
        outputs = [
            elements * size_of(_output_dtype(layer, dtype, policies[id(layer)]))
            for layer, elements, dtype in self._outputs
        ]
        return {
            "weights": sum(size for _, size in weights),
            "gradients": sum(size for v, size in weights if v.trainable),
            "optimizer": sum(map(bytes_of, {id(v): v for v in state}.values())),
            "outputs": sum(outputs),
        }

    def _weights_by(self, policies):
        """Yields each weight and the dtype that it gets."""
        for variable, layer in self._weights:
            yield variable, weight_dtype(variable, layer, policies[id(layer)])


def weight_dtype(
    variable: keras.Variable, layer: keras.layers.Layer, name: str | None
) -> str:
    """Returns the dtype that a layer's variable has under another dtype policy.

    Args:
        variable: The variable.
        layer: The layer that has it.
        name: String, the name of the dtype policy, or None for the layer's own.
    """
    dtype = keras.backend.standardize_dtype(variable.dtype)
    if name is None or dtype != layer.variable_dtype:
        return dtype
    return keras.dtype_policies.get(name).variable_dtype


def bytes_of(variable: keras.Variable) -> int:
    """Returns the size of a variable in bytes."""
    dtype = keras.backend.standardize_dtype(variable.dtype)
    return _elements(variable.shape) * size_of(dtype)


def size_of(dtype: str) -> int:
    """Returns the size of a number of this dtype in bytes."""
    bits = re.search(r"\d+", dtype)
    return int(bits[0]) // 8 if bits else 1  # A bool.


def _elements(shape):
    count = 1
    for length in shape:
        count *= int(length)
    return count


def owners_of(model: keras.Model) -> list[tuple[keras.Variable, keras.layers.Layer]]:
    """Returns a list of tuples of each weight of a model and the layer that has it."""
    weights = {id(v) for v in model.weights}
    found: dict = {}
    for layer in layers_of(model):
        for variable in own_variables_of(layer):
            if id(variable) in weights:
                found.setdefault(id(variable), (variable, layer))
    return list(found.values())


def _outputs_of(model, x):
    """Returns a list of tuples: each output's layer, number of elements, and dtype.

    Only layers without inner layers count. A recurrent layer counts as one layer, since
    its cell returns one step at a time.
    """
    found = []

    def record(layer, value):
        dtype = keras.backend.standardize_dtype(value.dtype)
        found.append((layer, _elements(value.shape), dtype))

    with unchanged(model), after_each_call(_innermost(model), record):
        model(x, training=True)
    return found


def _innermost(model):
    found, ahead, seen = [], children_of(model), set()
    while ahead:
        layer = ahead.pop()
        if id(layer) in seen:
            continue
        seen.add(id(layer))
        inside = children_of(layer)
        if inside and not isinstance(layer, keras.layers.RNN):
            ahead += inside
        else:
            found.append(layer)
    return found


def _output_dtype(layer, dtype, name):
    """Returns the dtype that an output has under another dtype policy."""
    if name is None or dtype != layer.compute_dtype:
        return dtype
    return keras.dtype_policies.get(name).compute_dtype
