"""Converts docstrings in Keras's style to Markdown that Google's reader understands.

An example begins with `>>>`, without a fence, which Markdown takes for three
quotations; it ends at the next empty line. `Returns` begins without a type, for which
the reader would leave an empty field. The types of declared arguments, such as `Rate`,
become those that a caller sees.
"""

import pathlib
import re
import textwrap

import griffe

EXAMPLE = re.compile(r"^>>> .*(?:\n.+)*", re.MULTILINE)
RETURNS = re.compile(r"^Returns:\n((?:    .*\n?|\n)+)", re.MULTILINE)
TITLE = re.compile(r"^(Example|Reference|References):$", re.MULTILINE)
CHECKED = re.compile(r"^(\w+) = Annotated\[\s*([\w |]+),", re.MULTILINE)
PACKAGE = pathlib.Path(__file__).parents[2] / "keras_lso"
TYPES = dict(
    found
    for file in PACKAGE.rglob("*.py")
    for found in CHECKED.findall(file.read_text())
)
NAME = re.compile(rf"\b({'|'.join(TYPES)})\b")


class KerasStyle(griffe.Extension):
    """Rewrites the docstring of each object, and the types of fields."""

    def on_object(self, *, obj, **kwargs):
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)

    def on_attribute_instance(self, *, attr, **kwargs):
        annotation = str(attr.annotation)
        if attr.parent.is_class and NAME.search(annotation):
            attr.annotation = NAME.sub(lambda n: TYPES[n[0]], annotation)


def as_markdown(text):
    """Returns a docstring with its examples in fences and its headings in bold."""
    text = EXAMPLE.sub(lambda found: f"```pycon\n{found[0]}\n```", text)
    text = RETURNS.sub(
        lambda found: f"**Returns:**\n\n{textwrap.dedent(found[1])}\n", text
    )
    return TITLE.sub(r"**\1:**", text)
