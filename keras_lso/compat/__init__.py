"""The names of other libraries, for code that is to run by changing its imports.

`import keras_lso` alone imports none of them.
"""

import importlib

__all__ = ["open_seq2seq", "v1", "v2"]


def __getattr__(name):
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module(f"{__name__}.{name}")


def __dir__():
    return __all__
