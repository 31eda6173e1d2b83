"""Helpers for errors about bad input: words of messages, and an optimizer."""

import keras
import pytest


def sgd():
    return keras.optimizers.SGD(1.0, momentum=0.5)


def refused(exception, *words):
    """Expects one of these exceptions, and all of `words` in its message."""
    return _Refused(exception, words)


class _Refused:
    def __init__(self, exception, words):
        self.raises, self.words = pytest.raises(exception), words
        self.exceptions = exception if isinstance(exception, tuple) else (exception,)

    def __enter__(self):
        self.info = self.raises.__enter__()

    def __exit__(self, *details):
        handled = self.raises.__exit__(*details)
        assert self.info.type in self.exceptions
        message = str(self.info.value)
        for word in self.words:
            assert word in message, f"{word!r} is not in: {message}"
        return handled
