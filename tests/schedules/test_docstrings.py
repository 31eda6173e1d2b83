"""The docstrings of schedules: every argument in its order, with its default."""

import ast
import inspect
import re

import pytest

from testing.schedules import ALL

CLASSES = [type(make()) for make in ALL.values()]
DEFAULT = re.compile(r"Defaults to\s+`(.*?)`", re.DOTALL)


def entries(docstring):
    """Returns what the section on arguments has about each."""
    [section] = re.findall(r"^Args:\n((?:    .*\n)+)", docstring, re.MULTILINE)
    return dict(re.findall(r"^    (\w+): (.*\n(?: {8}.*\n)*)", section, re.MULTILINE))


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__qualname__)
def test_docstring_documents_every_argument_and_default(cls):
    docstring = inspect.getdoc(cls)
    parameters = inspect.signature(cls).parameters
    documented = entries(docstring)
    assert list(documented) == list(parameters)
    for name, text in documented.items():
        default = parameters[name].default
        found = DEFAULT.findall(text)
        if default is inspect.Parameter.empty:
            assert not found, name
        else:
            assert [ast.literal_eval(each) for each in found] == [default], name
    for section in ("Args:", "Example:"):
        assert f"\n{section}\n" in docstring
