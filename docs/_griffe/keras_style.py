"""Converts docstrings in Keras's style to Markdown that Google's reader understands.

An example begins with `>>>`, without a fence, which Markdown takes for three
quotations; it ends at the next empty line. `Returns` begins without a type, for which
the reader would leave an empty field.
"""

import re
import textwrap

import griffe

EXAMPLE = re.compile(r"^>>> .*(?:\n.+)*", re.MULTILINE)
RETURNS = re.compile(r"^Returns:\n((?:    .*\n?|\n)+)", re.MULTILINE)
TITLE = re.compile(r"^(Example|Reference|References):$", re.MULTILINE)


class KerasStyle(griffe.Extension):
    """Rewrites the docstring of each object."""

    def on_object(self, *, obj, **kwargs):
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)


def as_markdown(text):
    """Returns a docstring with its examples in fences and its headings in bold."""
    text = EXAMPLE.sub(lambda found: f"```pycon\n{found[0]}\n```", text)
    text = RETURNS.sub(
        lambda found: f"**Returns:**\n\n{textwrap.dedent(found[1])}\n", text
    )
    return TITLE.sub(r"**\1:**", text)
