"""Helpers for errors about bad input: words of messages, and an optimizer."""

import keras
import pytest


def sgd():
    return keras.optimizers.SGD(1.0, momentum=0.5)


def refused(exception, *words):
    """Expects `exception`, with a message that contains all of `words`."""
    return _Refused(exception, words)


class _Refused:
    def __init__(self, exception, words):
        self.raises = pytest.raises(exception)
        self.exception, self.words = exception, words

    def __enter__(self):
        self.info = self.raises.__enter__()

    def __exit__(self, *details):
        handled = self.raises.__exit__(*details)
        assert self.info.type is self.exception
        message = str(self.info.value)
        for word in self.words:
            assert word in message, f"{word!r} is not in: {message}"
        return handled
