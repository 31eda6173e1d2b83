"""The names of other libraries, so that code runs here after a change of its imports.

`import keras_lso` alone imports only `registration.py` of this folder.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from keras_lso.compat import model_garden, open_seq2seq, v1, v2

__all__ = ["model_garden", "open_seq2seq", "v1", "v2"]


if not TYPE_CHECKING:  # A type checker would accept any name.

    def __getattr__(name: str) -> Any:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return importlib.import_module(f"{__name__}.{name}")


def __dir__() -> list[str]:
    return __all__
