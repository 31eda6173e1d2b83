"""Layers and models: their parts, their dtype policies, their state, and seeds."""

import contextlib
import dataclasses
import functools
import inspect
import random
import warnings
from collections.abc import Hashable, Iterable, Iterator
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any

import keras
from keras.src import backend as keras_backend
from keras.src import ops as layer_ops
from keras.src.backend.common import AutocastScope, global_state
from keras.src.models.functional import Functional, functional_like_constructor
from keras.src.saving.serialization_lib import SafeModeScope

from keras_lso._backend import backend
from keras_lso._backend.tensors import Tensor
from keras_lso._keras_internals.optimizers import attributes_set
from keras_lso._keras_internals.optimizers import optimizers_in as all_in
from keras_lso._keras_internals.variables import layers_of

# Keras's own layers look their ops up in another module than `keras.ops`.
OP_MODULES = (keras.ops, layer_ops)


def _backend_op_modules() -> tuple[ModuleType, ...]:
    """Returns the modules that Keras's layers look ops up in from Keras 3.16 on."""
    package = getattr(keras_backend, "ops", None)
    if package is None:
        return ()
    modules = filter(inspect.ismodule, vars(package).values())
    return (package, *(m for m in modules if m.__name__.startswith(package.__name__)))


BACKEND_OP_MODULES = _backend_op_modules()


# Layers around a module or a graph that casts neither its inputs nor its weights.
FOREIGN = keras.layers.TorchModuleWrapper, keras.layers.TFSMLayer


def children_of(layer: keras.Layer) -> list[keras.Layer]:
    """Returns the direct sublayers of a layer or model, without their sublayers."""
    return layer._flatten_layers(include_self=False, recursive=False)


def operations_of(model: keras.Model) -> list[keras.Operation]:
    """Returns the ops between the layers of a functional model, without the layers."""
    if not isinstance(model, Functional):
        return []
    return [o for o in model.operations if not isinstance(o, keras.layers.Layer)]


def layers_before(operation: keras.Operation) -> list[keras.Layer]:
    """Returns the layers from which an op between layers gets its inputs."""
    seen: dict = {}
    pending = [operation]
    while pending:
        for node in pending.pop()._inbound_nodes:
            new = [p.operation for p in node.parent_nodes if p.operation not in seen]
            seen |= dict.fromkeys(new)
            pending += [o for o in new if not isinstance(o, keras.layers.Layer)]
    return [o for o in seen if isinstance(o, keras.layers.Layer)]


def is_graph(model: keras.Model) -> bool:
    """Whether Keras can clone a model layer by layer, into the same class."""
    if isinstance(model, keras.Sequential):
        return type(model) is keras.Sequential
    return isinstance(model, Functional) and functional_like_constructor(type(model))


def is_cast(variable: keras.Variable) -> bool:
    """Whether a layer reads its variable in the layer's compute dtype."""
    return variable._autocast


def dtype_policies_set(
    policies: Iterable[tuple[keras.Layer, Any]],
) -> AbstractContextManager[None]:
    """Gives layers other dtype policies for a while."""
    # The public setter would write into a `DTypePolicyMap`, and quantize.
    get = keras.dtype_policies.get
    return attributes_set((x, "_dtype_policy", get(name)) for x, name in policies)


# Given a dtype, the context in which layers read their float variables in it.
autocast_to = AutocastScope


# The name that Keras's `global_seed_generator` looks up.
_GLOBAL_SEED_GENERATOR = "global_seed_generator"


@contextlib.contextmanager
def preserve_global_seed() -> Iterator[None]:
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
def configs_trusted() -> Iterator[None]:
    """Lets objects be made again from configs, whose code is the user's own."""
    with warnings.catch_warnings(), SafeModeScope(safe_mode=False):
        warnings.filterwarnings("ignore", "The object being serialized includes a `la")
        yield


def lambda_like(layer: keras.layers.Lambda) -> keras.layers.Lambda:
    """Returns a new `Lambda` layer. Its function need not fit into a config."""
    config = {**keras.layers.Layer.get_config(layer), "dtype": layer.dtype_policy}
    parts = layer.function, layer._output_shape, layer.mask, layer.arguments
    return type(layer)(*parts, **config)


def compile_arguments(model: keras.Model) -> dict[str, Any]:
    """Returns the arguments that `compile` was called with, as objects."""
    return dict(model._compile_config.config)


# --- Models and the state of their layers ---------------------------------------------


def optimizers_in(model: keras.Model) -> list[keras.Optimizer]:
    """Returns the optimizers that a model may train with, and those they wrap."""
    by_id = {
        id(optimizer): optimizer
        for part in layers_of(model)
        if isinstance(part, keras.Model)
        for value in vars(part).values()
        for item in _items_of(value)
        if isinstance(item, keras.Optimizer)
        for optimizer in all_in(item)
    }
    return list(by_id.values())


def _items_of(value: Any) -> Iterable[Any]:
    """Returns the items of an attribute that may be a dict, a list or one object."""
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list | tuple) else (value,)


@functools.cache
def train_step_is_stateless() -> bool:
    """Whether Keras's train step takes the values of variables and returns new ones."""
    # As on JAX, and on MLX.
    return "state" in inspect.signature(keras.Model.train_step).parameters


def layer_state_of(
    model: keras.Model, includes_frozen: bool
) -> list["keras.Variable | Buffer"]:
    """Returns the variables that layers keep in addition to trained weights."""
    layers = layers_of(model)
    if includes_frozen:
        state = list(model.non_trainable_weights)
    else:
        variables = [v for layer in layers for v in layer._non_trainable_variables]
        # Layers may share a variable.
        state = list({id(v): v for v in variables if not v.trainable}.values())
    return state + unlisted_state_of(layers)


def unlisted_state_of(layers: list[keras.Layer]) -> list["keras.Variable | Buffer"]:
    """Returns the layers' state that is not in `model.variables`."""
    # That of stateful recurrent layers, and on PyTorch the buffers of wrapped modules.
    state = []
    for layer in layers:
        if isinstance(layer, keras.layers.RNN):
            # Nested if cells are stacked; None unless the layer is stateful and built.
            states = keras.tree.flatten(layer.states)
            state += [v for v in states if isinstance(v, keras.Variable)]
        elif isinstance(layer, keras.layers.TorchModuleWrapper):
            state += [
                Buffer(module, name, f"{layer.name}/{name}", tensor)
                for module in layer.module.modules()
                for name, tensor in module.named_buffers(recurse=False)
            ]
    return state


@dataclasses.dataclass(frozen=True)
class Buffer:
    """A buffer of a PyTorch module, which may put another tensor in its place."""

    module: Any
    name: str
    path: str
    tensor: Any

    @property
    def value(self) -> Tensor:
        """The tensor that the module has now."""
        return getattr(self.module, self.name)

    @property
    def _value(self) -> Any:
        """The object to write to: not a newer tensor, which may be shared."""
        return self.tensor if self.value is self.tensor else self

    def assign(self, value: Tensor) -> None:
        """Gives the module another tensor."""
        setattr(self.module, self.name, value)


def identity_of(item: "keras.Variable | Buffer") -> Hashable:
    """Returns a key for an item of `layer_state_of`, since `==` compares numbers."""
    if not isinstance(item, Buffer):
        return id(item)
    # It stays the same as long as `assign` can restore a value.
    return id(item.module), item.name, item.tensor.shape, item.tensor.dtype


def build_by_batch(model: keras.Model, data: Any) -> None:
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
