"""Each override of a backend does what the default does that it replaces.

The list is made from the class of the backend that runs: an override without a
comparison in `testing/comparisons/` fails with its name.
"""

import ast
import operator
import pathlib

import pytest

from keras_lso._backend import backend, framework, framework_class, without_kernels
from keras_lso._backend.framework import Framework
from testing.comparisons import COMPARISONS, comparison_of, overrides
from testing.comparisons.inputs import REFERENCE
from testing.comparisons.registry import PARTS
from testing.comparisons.scalars import counts_steps_alike

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in cast")

FOLDER = pathlib.Path(framework.__file__).parent


@pytest.mark.parametrize("name", overrides(type(backend)))
def test_backend_override_matches_framework_default(name):
    compare = comparison_of(type(backend), name)
    compare(*map(operator.attrgetter(name), (backend, REFERENCE)))


def test_reduces_gradients_flag_tells_whether_backend_overrides_reduction():
    names = {"replicas.reduce_gradients", "replicas.are_shards"}
    called = names & set(overrides(type(backend)))
    assert backend.replicas.REDUCES_GRADIENTS is bool(called)


def test_comparisons_cover_exactly_overrides_of_all_backends():
    # Read, not imported: a test runs with one framework.
    found = set()
    for name in ("tensorflow", "jax", "torch"):
        nodes = [n for path in (FOLDER / name).glob("*.py") for n in classes_in(path)]
        for prefix, cls in PARTS.items():
            [node] = [n for n in nodes if cls.__name__ in bases_of(n)]
            found |= {prefix + name for name in defined_in(node) if hasattr(cls, name)}
    assert found - {"host", "replicas"} == set(COMPARISONS)


def classes_in(path):
    tree = ast.parse(path.read_text())
    return [node for node in tree.body if isinstance(node, ast.ClassDef)]


def bases_of(node):
    return {getattr(base, "id", None) for base in node.bases}


def defined_in(cls):
    for node in cls.body:
        names = [getattr(node, "name", "_")]
        names += [target.id for target in getattr(node, "targets", ())]
        yield from (name for name in names if not name.startswith("_"))


@pytest.mark.parametrize("prefix", PARTS)
def test_backend_has_only_primitives_of_framework_class(prefix):
    own = operator.attrgetter(prefix[:-1])(backend) if prefix else backend
    names = {name for name in dir(own) if not name.startswith("_")}
    assert names == {name for name in dir(PARTS[prefix]) if not name.startswith("_")}


def test_without_kernels_replaces_kernels_by_reference():
    replaced = without_kernels(type(backend))
    for name in ("measure", "update", "takes_update"):
        assert getattr(replaced, name) is getattr(Framework, name)
    assert replaced.run_if is type(backend).run_if


def test_unknown_backend_takes_generic_path_with_warning_that_names_it():
    for name in ("mlx", "paddle"):
        with pytest.warns(
            UserWarning, match=f"not tested with Keras's backend '{name}'"
        ):
            assert framework_class(name) is Framework
    for name in ("numpy", "openvino"):
        assert framework_class(name) is Framework


def test_steps_are_counted_like_reference(way):
    counts_steps_alike(backend.count_step, REFERENCE.count_step)
