"""One word for one thing, in README.md, docs/ and the docstrings: see the glossary."""

import ast
import re

import pytest

from integration_tests.docs_blocks import PAGES, ROOT

pytestmark = pytest.mark.one_backend

# Dtype policies, loss-scale policies, and what Keras calls learning-rate schedules.
POLICY = re.compile(
    r"(?<!\bdtype )(?<!\bloss-scale )(?<!\blearning-rate )\bpolic(?:y|ies)\b",
    re.IGNORECASE,
)
# Code is no prose: comments, fenced blocks, doctests, names of arguments, what stands
# in backticks or follows a keyword; and the targets of links.
CODE = (
    r"<!--.*?-->",
    r"^( *)```.*?^\1```",
    r"^ *>>> .*?(?=\n\s*\n|\Z)",
    r"^ *\w+: ",
    r"`[^`]+`",
    r"\w+=\S+",
    r"\]\([^)]*\)",
)


def prose_of(text):
    """Returns a text without code, in one line."""
    for pattern in CODE:
        text = re.sub(pattern, " # ", text, flags=re.DOTALL | re.MULTILINE)
    return " ".join(text.split())


def docstrings():
    for path in sorted((ROOT / "keras_lso").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                name = getattr(node, "name", "the module")
                yield f"{path.name}: {name}", ast.get_docstring(node) or ""


def policies_alone(text):
    prose = prose_of(text)
    return [prose[max(0, m.start() - 40) : m.end()] for m in POLICY.finditer(prose)]


def test_policy_never_stands_alone():
    pages = {name: path.read_text() for name, path in PAGES.items()}
    pages["CONTRIBUTING.md"] = (ROOT / "CONTRIBUTING.md").read_text()
    texts = {**pages, **dict(docstrings())}
    alone = {name: policies_alone(text) for name, text in texts.items()}
    assert {name: found for name, found in alone.items() if found} == {}


def test_the_check_finds_a_policy_alone_and_leaves_code_be():
    text = """A policy belongs to a loss-scale
policy. Policies are `policy`s, policy=1.

>>> policy = 1
... policy

<!-- a policy -->
```python
policy = 2
```
    policy: A [dtype policy](policy.md)."""
    alone = ["A policy", "A policy belongs to a loss-scale policy. Policies"]
    assert policies_alone(text) == [words[-48:] for words in alone]
