from typing import Any

from keras import callbacks as callbacks
from keras import layers as layers
from keras import optimizers as optimizers
from keras import saving as saving
from keras.layers import Layer as Layer
from keras.optimizers import Optimizer as Optimizer

class Variable:
    def __getattr__(self, name: str) -> Any: ...

class Model(Layer): ...

def __getattr__(name: str) -> Any: ...
