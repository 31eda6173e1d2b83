"""The imports of the package are the dependencies in pyproject.toml."""

import ast
import pathlib
import sys
import tomllib

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from testing.pins import pins_of

ROOT = pathlib.Path(__file__).parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT, GROUPS = PYPROJECT["project"], PYPROJECT["dependency-groups"]

# A user has one of them, or none, and then only loads models.
BACKENDS = {"tensorflow", "jax", "torch"}
# Imported only to draw or write; the error names the extra.
EXTRAS = {"matplotlib", "tensorboard"}


def imported(tree):
    """The modules that a file imports from other projects, by their first name."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module)
    roots = {name.partition(".")[0] for name in names}
    return roots - sys.stdlib_module_names - {"keras_lso"}


def test_imports_of_package_match_declared_dependencies():
    files = sorted((ROOT / "keras_lso").rglob("*.py"))
    found = set().union(*(imported(ast.parse(file.read_text())) for file in files))
    dependencies = {Requirement(each).name for each in PROJECT["dependencies"]}
    assert found - BACKENDS - EXTRAS == dependencies


def members(name):
    """Returns the requirements of a dependency group and of those it includes."""
    found = []
    for entry in GROUPS[name]:
        is_group = isinstance(entry, dict)
        found += members(entry["include-group"]) if is_group else [Requirement(entry)]
    return found


@pytest.mark.parametrize("name", ["dev", "oldest", "originals", "peers", "release"])
def test_requirements_of_dependency_group_match_pins(name):
    pinned, wanted = pins_of(name), members(name)
    # No package is in both a group and one that it includes.
    assert len({canonicalize_name(each.name) for each in wanted}) == len(wanted)
    for each in wanted:
        assert pinned[canonicalize_name(each.name)] in each.specifier, each


def test_oldest_pins_match_declared_lower_bounds():
    # PyTorch's is left out: on Linux PyPI has no old wheel for a CPU.
    pinned = pins_of("oldest")
    extras = PROJECT["optional-dependencies"]
    lowest = {
        "keras": PROJECT["dependencies"][0],
        "tensorflow-cpu": extras["tensorflow"][0],
        "jax": extras["jax"][0],
    }
    for name, requirement in lowest.items():
        specifier = Requirement(requirement).specifier
        bounds = {each.operator: each.version for each in specifier}
        assert pinned[name] == f"{bounds['>=']}.0", name
