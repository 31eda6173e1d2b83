"""The path of each layer of a model: the names around it, and its own."""

import difflib
from collections import Counter
from collections.abc import Collection
from typing import Any

import keras

from keras_lso._core.checks import refusal
from keras_lso._keras_internals.layers import children_of
from keras_lso._keras_internals.variables import layers_of


def check_model(model: Any) -> None:
    """Raises an error unless `model` is a `keras.Model` without quantized layers."""
    if not isinstance(model, keras.Model):
        raise refusal("model", model, "be a keras.Model", TypeError)
    for layer in layers_of(model):
        if layer.quantization_mode is not None:
            raise ValueError(
                "`model` must not be quantized, since such weights are no floats. Take "
                f"the model from before `quantize`. Received: the layer {layer.name!r}"
            )


class LayerPaths:
    """The layers of a model, by path: each once, the model itself first.

    `aliases` are further paths of layers in several places, and `parents` the paths of
    the enclosing layers. Unlike Keras's `layer.path`, a path belongs to one layer.
    """

    def __init__(self, model: keras.Model) -> None:
        self.layers: dict[str, keras.layers.Layer] = {model.name: model}
        self.aliases: dict[str, keras.layers.Layer] = {}
        self.parents: dict[str, str] = {}
        self._paths = {id(model): model.name}
        self._visit(model, model.name, "")

    def _visit(self, layer, path, prefix):
        children = children_of(layer)
        count = Counter(child.name for child in children)
        number: Counter = Counter()
        for child in children:
            number[child.name] += 1
            name = child.name
            # In a subclassed model, sibling layers may have the same name.
            if count[name] > 1 or prefix + name in self.layers:
                name = f"{name}#{number[child.name]}"
            if id(child) in self._paths:
                self.aliases[prefix + name] = child
                continue
            self._paths[id(child)] = prefix + name
            self.layers[prefix + name] = child
            self.parents[prefix + name] = path
            self._visit(child, prefix + name, f"{prefix}{name}/")

    def path_of(self, layer: keras.layers.Layer) -> str | None:
        """Returns the path of a layer; None if it is not in the model."""
        return self._paths.get(id(layer))

    def inside(self, path: str) -> list[str]:
        """Returns the paths of a layer and of all layers inside it."""
        inside = set(map(id, layers_of(self.layers[path])))
        return [p for p, layer in self.layers.items() if id(layer) in inside]

    def outermost(self, wanted: Collection[str]) -> list[str]:
        """Returns the paths that are inside no other, in the model's order."""
        inside = {p for path in wanted for p in self.inside(path) if p != path}
        return [path for path in self.layers if path in wanted and path not in inside]

    def find(self, item: Any) -> str:
        """Returns the path of a layer, given the layer, its path or its name."""
        if not isinstance(item, str | keras.layers.Layer):
            requirement = "be a list of names, paths or layers"
            raise refusal("layers", item, requirement, TypeError)
        path = self.path_of({**self.aliases, **self.layers}.get(item, item))
        if path is not None:
            return path
        named = [path for path, layer in self.layers.items() if layer.name == item]
        if len(named) == 1:
            return named[0]
        if named:
            raise ValueError(
                f"`layers` must be unambiguous, but several layers are called {item!r}."
                f" Write one of the paths {named}, or pass the layer object."
            )
        name = getattr(item, "name", item)
        near = difflib.get_close_matches(name, self.layers, n=3, cutoff=0.4)
        raise ValueError(
            "`layers` must hold names, paths or layers of the model, which has no "
            f"{item!r}. Similar are: {near or list(self.layers)[:10]}"
        )
