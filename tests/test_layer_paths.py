"""Paths of layers: one for each layer, however models are nested."""

import keras
from keras import layers

from keras_lso.diagnostics.layer_paths import LayerPaths


class Twins(keras.Model):
    """A model with two layers of one name, and one of its own name."""

    def __init__(self, shared):
        super().__init__(name="twins")
        self.pair = [layers.Dropout(0.5, name="dense") for _ in range(2)]
        self.same = layers.Dropout(0.5, name="twins")
        self.first = layers.TimeDistributed(shared, name="first")
        self.second = layers.TimeDistributed(shared, name="second")


def test_layers_of_same_name_have_numbered_paths():
    shared = layers.Dropout(0.5, name="shared")
    model = Twins(shared)
    paths = LayerPaths(model)
    assert set(paths.layers) == {
        "twins",
        "dense#1",
        "dense#2",
        "twins#1",
        "first",
        "first/shared",
        "second",
    }
    assert paths.layers["twins"] is model
    assert {paths.path_of(layer) for layer in model.pair} == {"dense#1", "dense#2"}
    assert paths.aliases == {"second/shared": shared}
    assert paths.parents["first/shared"] == "first"
    assert paths.inside("second") == ["first/shared", "second"]
    assert paths.inside("twins") == list(paths.layers)
    assert paths.path_of(layers.Dropout(0.5)) is None
