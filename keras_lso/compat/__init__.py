"""The names of other libraries, for code that is to run by changing its imports."""

from keras_lso.compat import open_seq2seq, v1, v2

__all__ = ["open_seq2seq", "v1", "v2"]
