"""The names of other libraries, for code that is to run by changing its imports."""

from keras_lso.compat import v1, v2

__all__ = ["v1", "v2"]
