"""Keras's models: their train step, their optimizers and the state of their layers."""

import contextlib
import dataclasses
import functools
import inspect
import traceback
from typing import Any

import keras

from keras_lso._backend import backend
from keras_lso._keras_internals.optimizers import optimizers_in as all_in
from keras_lso._keras_internals.variables import layers_of


def optimizers_in(model):
    """Returns the optimizers that a model may train with, and those they wrap."""
    found = {
        id(optimizer): optimizer
        for part in layers_of(model)
        if isinstance(part, keras.Model)
        for value in vars(part).values()
        for item in _items_of(value)
        if isinstance(item, keras.Optimizer)
        for optimizer in all_in(item)
    }
    return list(found.values())


def _items_of(value):
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list | tuple) else (value,)


def model_that_calls():
    """Returns the model one of whose methods led to this call, None without one."""
    for frame, _ in traceback.walk_stack(inspect.currentframe()):
        caller = frame.f_locals.get("self")
        if isinstance(caller, keras.Model):
            return caller
    return None


@functools.cache
def train_step_is_stateless():
    """Whether Keras's train step takes the values of variables and returns new ones."""
    # As on JAX, and on MLX.
    return "state" in inspect.signature(keras.Model.train_step).parameters


def layer_in_float16(model):
    """Returns the name of a layer that computes in float16; None if none does."""
    names = (x.name for x in layers_of(model) if x.compute_dtype == "float16")
    return next(names, None)


def layer_state_of(model, includes_frozen):
    """Returns the variables that layers keep in addition to trained weights."""
    layers = layers_of(model)
    if includes_frozen:
        kept = list(model.non_trainable_weights)
    else:
        variables = [v for layer in layers for v in layer._non_trainable_variables]
        # Layers may share a variable.
        kept = list({id(v): v for v in variables if not v.trainable}.values())
    return kept + unlisted_state_of(layers)


def unlisted_state_of(layers):
    """Returns the layers' state that is not in `model.variables`."""
    # That of stateful recurrent layers, and on PyTorch the buffers of wrapped modules.
    kept = []
    for layer in layers:
        if isinstance(layer, keras.layers.RNN):
            # Nested if cells are stacked; None unless the layer is stateful and built.
            states = keras.tree.flatten(layer.states)
            kept += [v for v in states if isinstance(v, keras.Variable)]
        elif isinstance(layer, keras.layers.TorchModuleWrapper):
            kept += [
                Buffer(module, name, f"{layer.name}/{name}", tensor)
                for module in layer.module.modules()
                for name, tensor in module.named_buffers(recurse=False)
            ]
    return kept


@dataclasses.dataclass(frozen=True)
class Buffer:
    """A buffer of a PyTorch module, which may put another tensor in its place."""

    module: Any
    name: str
    path: str
    tensor: Any

    @property
    def value(self):
        """The tensor that the module has now."""
        return getattr(self.module, self.name)

    @property
    def _value(self):
        """The object to write to: not a newer tensor, which may be shared."""
        return self.tensor if self.value is self.tensor else self

    def assign(self, value):
        """Gives the module another tensor."""
        setattr(self.module, self.name, value)


def identity_of(kept):
    """Returns a key for an item of `layer_state_of`, since `==` compares numbers."""
    if not isinstance(kept, Buffer):
        return id(kept)
    # It stays the same as long as `assign` can restore a value.
    return id(kept.module), kept.name, kept.tensor.shape, kept.tensor.dtype


def build_by_batch(model, data):
    """Builds the layers that are not yet built, as `fit` does on JAX and PyTorch."""
    if all(layer.built for layer in layers_of(model)):
        return
    # If something is wrong, the step itself raises the error.
    with contextlib.suppress(Exception), backend.host.outside_of_functions():
        try:
            model._symbolic_build(data_batch=data)
        except Exception:
            # A symbolic pass makes no variables such as states of recurrent layers.
            x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
            model.build(keras.tree.map_structure(lambda value: tuple(value.shape), x))
