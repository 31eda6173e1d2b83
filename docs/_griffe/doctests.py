"""Shows the examples in docstrings as code: what begins with `>>>`, to the next gap.

Keras's style sets them without a fence, and Markdown takes `>>>` for three quotations.
"""

import re

import griffe

EXAMPLE = re.compile(r"^>>> .*(?:\n.+)*", re.MULTILINE)


class Doctests(griffe.Extension):
    """Puts a fence around each example."""

    def on_object(self, *, obj, **kwargs):
        if obj.docstring is not None:
            obj.docstring.value = fenced(obj.docstring.value)


def fenced(text):
    """Returns a docstring with its examples in fences."""
    return EXAMPLE.sub(lambda found: f"```pycon\n{found[0]}\n```", text)
