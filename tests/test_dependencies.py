"""What the package imports is what pyproject.toml says that it needs."""

import ast
import pathlib
import sys
import tomllib

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

pytestmark = pytest.mark.one_backend

ROOT = pathlib.Path(__file__).parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT, GROUPS = PYPROJECT["project"], PYPROJECT["dependency-groups"]

# A person has one of them, or none and only loads models.
BACKENDS = {"tensorflow", "jax", "torch"}
# Imported where something is drawn or written, with an error that names the extra.
EXTRAS = {"matplotlib", "tensorboard"}
# PyTorch's builds for a GPU install the version that they need.
WITH_PYTORCH = {"triton"}


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


def test_every_import_is_a_dependency():
    files = sorted((ROOT / "keras_lso").rglob("*.py"))
    found = set().union(*(imported(ast.parse(file.read_text())) for file in files))
    dependencies = {Requirement(each).name for each in PROJECT["dependencies"]}
    assert found - BACKENDS - EXTRAS - WITH_PYTORCH == dependencies


def test_every_backend_and_extra_can_be_asked_for():
    extras = PROJECT["optional-dependencies"]
    named = {Requirement(each).name for name in extras for each in extras[name]}
    assert named >= BACKENDS | EXTRAS


def pins(name):
    """Returns a dict of packages to versions, of a file in requirements/."""
    lines = (ROOT / "requirements" / f"{name}.txt").read_text().splitlines()
    return {canonicalize_name(n): v for n, v in (line.split("==") for line in lines)}


def members(name):
    """Returns the requirements of a dependency group and of those it includes."""
    found = []
    for entry in GROUPS[name]:
        is_group = isinstance(entry, dict)
        found += members(entry["include-group"]) if is_group else [Requirement(entry)]
    return found


# Of the newest the file is a record: torch is asked for with the backends.
@pytest.mark.parametrize(
    "name", ["dev", "oldest", "newest", "gpu-dry", "accelerators", "originals"]
)
def test_what_a_group_asks_for_is_pinned(name):
    pinned, wanted = pins(name), members(name)
    # None is named twice, by a group and one that it includes.
    assert len({canonicalize_name(each.name) for each in wanted}) == len(wanted)
    for each in wanted:
        assert pinned[canonicalize_name(each.name)] in each.specifier, each


def test_the_oldest_versions_are_those_tested():
    # PyTorch's is left out: on Linux PyPI has no old wheel for a CPU.
    pinned = pins("oldest")
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
