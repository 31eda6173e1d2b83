"""Converts docstrings in Keras's style to Markdown that Google's reader understands.

An example begins with `>>>`, without a fence, which Markdown takes for three
quotations; it ends at the next empty line. `Returns` begins without a type, for which
the reader would leave an empty field. The types of declared arguments, such as `Rate`,
become those that a caller sees, and a constant that is a default becomes its value.
"""

import ast
import pathlib
import re
import textwrap

import griffe

EXAMPLE = re.compile(r"^>>> .*(?:\n.+)*", re.MULTILINE)
RETURNS = re.compile(r"^Returns:\n((?:    .*\n?|\n)+)", re.MULTILINE)
TITLE = re.compile(r"^(Example|Reference|References):$", re.MULTILINE)
PACKAGE = pathlib.Path(__file__).parents[2] / "keras_lso"


def checked_types():
    """Yields each `Name = Annotated[kind, check]` of the package, as two strings."""
    for file in PACKAGE.rglob("*.py"):
        for node in ast.parse(file.read_text()).body:
            value = getattr(node, "value", None)
            if (
                isinstance(value, ast.Subscript)
                and ast.unparse(value.value) == "Annotated"
            ):
                yield node.targets[0].id, ast.unparse(value.slice.elts[0])


def constants():
    """Yields the names that defaults have, by file and class, and their values."""
    for file in PACKAGE.rglob("*.py"):
        tree = ast.parse(file.read_text())
        classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
        for owner in (tree, *classes):
            for node in owner.body:
                if not isinstance(node, ast.Assign | ast.AnnAssign) or not node.value:
                    continue
                name = ast.unparse(getattr(node, "target", None) or node.targets[0])
                key = (str(file), name) if owner is tree else f"{owner.name}.{name}"
                yield key, ast.unparse(node.value)


CONSTANTS = dict(constants())
TYPES = dict(checked_types())
NAME = re.compile(rf"\b({'|'.join(TYPES)})\b")


class KerasStyle(griffe.Extension):
    """Rewrites the docstring of each object, and the types of arguments."""

    def on_object(self, *, obj, **kwargs):
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)

    def on_attribute_instance(self, *, attr, **kwargs):
        if attr.parent.is_class:
            show_type(attr)
            # The parameters of a dataclass are its attributes.
            attr.value = value_of(attr.value, attr.filepath)

    def on_function_instance(self, *, func, **kwargs):
        for parameter in func.parameters:
            show_type(parameter)
            parameter.default = value_of(parameter.default, func.filepath)


def show_type(argument):
    """Replaces the declared type of a field or a parameter by the one to pass."""
    annotation = str(argument.annotation)
    if NAME.search(annotation):
        argument.annotation = NAME.sub(lambda n: TYPES[n[0]], annotation)


def value_of(default, file):
    """Returns the value of a constant of the file or of a class; others unchanged."""
    name = str(default)
    return CONSTANTS.get(name) or CONSTANTS.get((str(file), name), default)


def as_markdown(text):
    """Returns a docstring with its examples in fences and its headings in bold."""
    text = EXAMPLE.sub(lambda found: f"```pycon\n{found[0]}\n```", text)
    text = RETURNS.sub(
        lambda found: f"**Returns:**\n\n{textwrap.dedent(found[1])}\n", text
    )
    return TITLE.sub(r"**\1:**", text)
