"""Layers: their parts, their dtype policies, seeds, and the compilation of models."""

import contextlib
import inspect
import operator
import random
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import keras
from keras.src import backend as keras_backend
from keras.src import ops as layer_ops
from keras.src.backend.common import AutocastScope, global_state
from keras.src.models.functional import Functional, functional_like_constructor
from keras.src.saving.serialization_lib import SafeModeScope

# Keras's own layers look their ops up in another module than `keras.ops`.
OP_MODULES = (keras.ops, layer_ops)


def _backend_op_modules():
    """Returns the modules that Keras's layers look ops up in from Keras 3.16 on."""
    package = getattr(keras_backend, "ops", None)
    if package is None:
        return ()
    modules = filter(inspect.ismodule, vars(package).values())
    return (package, *(m for m in modules if m.__name__.startswith(package.__name__)))


BACKEND_OP_MODULES = _backend_op_modules()


def children_of(layer):
    """Returns the direct sublayers of a layer or model, without their sublayers."""
    return layer._flatten_layers(include_self=False, recursive=False)


def operations_of(model):
    """Returns the ops between the layers of a functional model, without the layers."""
    if not isinstance(model, Functional):
        return []
    return [o for o in model.operations if not isinstance(o, keras.layers.Layer)]


def layers_before(operation):
    """Returns the layers from which an op between layers gets its inputs."""
    seen: dict = {}
    ahead = [operation]
    while ahead:
        for node in ahead.pop()._inbound_nodes:
            new = [p.operation for p in node.parent_nodes if p.operation not in seen]
            seen |= dict.fromkeys(new)
            ahead += [o for o in new if not isinstance(o, keras.layers.Layer)]
    return [o for o in seen if isinstance(o, keras.layers.Layer)]


def is_graph(model):
    """Whether Keras can clone a model layer by layer, into the same class."""
    if isinstance(model, keras.Sequential):
        return type(model) is keras.Sequential
    return isinstance(model, Functional) and functional_like_constructor(type(model))


def own_variables_of(layer):
    """Returns the variables of a layer, without those of its sublayers."""
    return [*layer._trainable_variables, *layer._non_trainable_variables]


# Whether a layer reads its variable in the layer's compute dtype.
is_cast = operator.attrgetter("_autocast")


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


def dtype_policies_set(policies):
    """Gives layers other dtype policies for a while."""
    # The public setter would write into a `DTypePolicyMap`, and quantize.
    get = keras.dtype_policies.get
    return attributes_set((x, "_dtype_policy", get(name)) for x, name in policies)


# Given a dtype, the context in which layers read their float variables in it.
autocast_to = AutocastScope


# The name that Keras's `global_seed_generator` looks up.
_GLOBAL_SEED_GENERATOR = "global_seed_generator"


@contextlib.contextmanager
def preserve_global_seed():
    """Restores the global `SeedGenerator`, or its absence, and Python's `random`."""
    state = random.getstate()
    generator = global_state.get_global_attribute(_GLOBAL_SEED_GENERATOR)
    seed = None if generator is None else keras.ops.copy(generator.state)
    try:
        yield
    finally:
        random.setstate(state)
        global_state.set_global_attribute(_GLOBAL_SEED_GENERATOR, generator)
        if generator is not None:
            generator.state.assign(seed)


@contextlib.contextmanager
def configs_trusted():
    """Lets objects be made again from configs, whose code is the user's own."""
    with warnings.catch_warnings(), SafeModeScope(safe_mode=False):
        warnings.filterwarnings("ignore", "The object being serialized includes a `la")
        yield


def lambda_like(layer):
    """Returns a new `Lambda` layer. Its function need not fit into a config."""
    config = {**keras.layers.Layer.get_config(layer), "dtype": layer.dtype_policy}
    parts = layer.function, layer._output_shape, layer.mask, layer.arguments
    return type(layer)(*parts, **config)


def compile_arguments(model):
    """Returns the arguments that `compile` was called with, as objects."""
    return dict(model._compile_config.config)
