"""Keras's models: their train step, their optimizers, and what their layers keep."""

import contextlib
import dataclasses
from typing import Any

import keras

from keras_lso._backend import backend
from keras_lso._keras_internals.optimizers import optimizers_in as all_in
from keras_lso._keras_internals.variables import layers_of


def optimizers_in(model):
    """Returns a list of the optimizers that a model may train with.

    The model, or a model inside it, has them as attributes, or in a list or dict that
    is an attribute. The list includes the optimizers that they wrap.
    """
    found: dict[int, keras.Optimizer] = {}
    for part in layers_of(model):
        if not isinstance(part, keras.Model):
            continue
        for value in map(_items_of, vars(part).values()):
            for item in value:
                if isinstance(item, keras.Optimizer):
                    found |= {id(o): o for o in all_in(item)}
    return list(found.values())


def _items_of(value):
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list | tuple) else (value,)


def kept_by_layers(model, includes_frozen):
    """Returns the variables that layers keep in addition to trained weights, a list.

    Neither metrics nor the states of seed generators are among them. What
    `kept_outside_of_lists` returns comes last.

    Args:
        model: The model.
        includes_frozen: Bool. Whether to include weights that would be trained if their
            layer's `trainable` were not False.
    """
    layers = layers_of(model)
    if includes_frozen:
        kept = list(model.non_trainable_weights)
    else:
        variables = [v for layer in layers for v in layer._non_trainable_variables]
        # Layers may share one.
        kept = list({id(v): v for v in variables if not v.trainable}.values())
    return kept + kept_outside_of_lists(layers)


def kept_outside_of_lists(layers):
    """Returns what layers keep that `model.variables` does not have, a list.

    The states of stateful recurrent layers, and on PyTorch the buffers of wrapped
    modules, each a `Buffer`.
    """
    kept = []
    for layer in layers:
        if isinstance(layer, keras.layers.RNN):
            # Nested where the cells are stacked; None unless it is stateful, and built.
            states = keras.tree.flatten(layer.states)
            kept += [v for v in states if isinstance(v, keras.Variable)]
        elif isinstance(layer, keras.layers.TorchModuleWrapper):
            kept += _buffers_of(layer)
    return kept


@dataclasses.dataclass(frozen=True)
class Buffer:
    """A buffer of a PyTorch module, which may put another tensor in its place."""

    module: Any
    name: str
    path: str
    tensor: Any

    @property
    def identity(self):
        """What it has as long as `assign` can write to it what it held."""
        return id(self.module), self.name, self.tensor.shape, self.tensor.dtype

    @property
    def value(self):
        """The tensor that the module has now."""
        return getattr(self.module, self.name)

    @property
    def _value(self):
        """What may be written to: not a tensor that came since, which may be shared."""
        return self.tensor if self.value is self.tensor else self

    def assign(self, value):
        """Gives the module another tensor."""
        setattr(self.module, self.name, value)


def _buffers_of(layer):
    return [
        Buffer(module, name, f"{layer.name}/{name}", tensor)
        for module in layer.module.modules()
        for name, tensor in module.named_buffers(recurse=False)
    ]


def identity_of(kept):
    """Returns by what one of `kept_by_layers` is known, since `==` compares numbers."""
    return kept.identity if isinstance(kept, Buffer) else id(kept)


def is_keras_own(train_step):
    """Whether a bound `train_step` is the one that Keras's models have."""
    return getattr(train_step, "__func__", None) is keras.Model.train_step


def own_attribute(model, name):
    """Returns an attribute of this very model, not of its class; None without."""
    return vars(model).get(name)


def remake_train_function(model):
    """Makes the model's train function again, if `fit` has made one."""
    if model.train_function is not None:
        model.make_train_function(force=True)


def build_by_batch(model, data):
    """Builds what is not built yet, as `fit` does on JAX and PyTorch.

    On TensorFlow `fit` leaves it to the first step. A model that cannot be built so is
    left as it is.

    Args:
        model: A compiled model.
        data: What `train_step` is called with, a batch.
    """
    if all(layer.built for layer in layers_of(model)):
        return
    # What is wrong, if anything is, the step itself will say.
    for build in (_build_in_a_symbolic_pass, _build_by_shapes):
        with contextlib.suppress(Exception), backend.outside_of_functions():
            build(model, data)
            return


def _build_in_a_symbolic_pass(model, data):
    model._symbolic_build(data_batch=data)


def _build_by_shapes(model, data):
    # Such a pass makes no variables of its own, as the states of recurrent layers are.
    x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
    model.build(keras.tree.map_structure(lambda value: tuple(value.shape), x))
