"""The path of each layer of a model: the names of its enclosing layers, and its own.

Keras's `layer.path` is the path of the scope in which a layer was built, which two
layers of nested models may share. The paths here belong to one model and are unique.
"""

from collections import Counter

import keras

from keras_lso._keras_internals.layers import children_of


class LayerPaths:
    """The layers of a model, by path.

    Attributes:
        layers: Dict of paths to layers, each layer once, the model itself first.
        aliases: Dict of further paths to layers that are in several places.
        parents: Dict of paths to the paths of the enclosing layers.
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
        layer = self.layers[path]
        found, ahead = {}, [layer]
        while ahead:
            layer = ahead.pop()
            if id(layer) not in found:
                found[id(layer)] = self._paths[id(layer)]
                ahead += children_of(layer)
        return [p for p in self.layers if p in set(found.values())]
