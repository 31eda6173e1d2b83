"""Each override of a backend does what the default does that it replaces.

The list is made from the class of the backend that runs: an override without a
comparison in `testing/comparisons/` fails with its name.
"""

import ast
import pathlib

import pytest

from keras_lso._backend import backend, framework, framework_class, without_kernels
from keras_lso._backend.framework import Framework
from testing.comparisons import COMPARISONS, comparison_of, overrides
from testing.comparisons.inputs import REFERENCE
from testing.comparisons.scalars import assert_counted_alike

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in cast")

FOLDER = pathlib.Path(framework.__file__).parent


@pytest.mark.parametrize("name", overrides(type(backend)))
def test_backend_override_matches_framework_default(name):
    compare = comparison_of(type(backend), name)
    compare(getattr(backend, name), getattr(REFERENCE, name))


def test_reduces_gradients_flag_tells_whether_backend_overrides_reduction():
    called = {"reduce_gradients", "are_shards"} & set(overrides(type(backend)))
    assert backend.REDUCES_GRADIENTS is bool(called)


def test_comparisons_cover_exactly_overrides_of_all_backends():
    # Read, not imported: a test runs with one framework.
    found = set()
    for name in ("tensorflow", "jax", "torch"):
        tree = ast.parse((FOLDER / name / "framework.py").read_text())
        [cls] = [node for node in tree.body if is_framework(node)]
        for node in cls.body:
            names = [getattr(node, "name", None)]
            names += [target.id for target in getattr(node, "targets", ())]
            found |= {name for name in names if hasattr(Framework, str(name))}
    assert found == set(COMPARISONS)


def is_framework(node):
    bases = getattr(node, "bases", ())
    return any(getattr(base, "id", "") == "Framework" for base in bases)


def test_backend_has_only_primitives_of_framework_class():
    own = {name for name in dir(backend) if not name.startswith("_")}
    assert own == set(filter(lambda name: not name.startswith("_"), dir(Framework)))


def test_without_kernels_replaces_kernels_by_reference():
    replaced = without_kernels(type(backend))
    for name in ("scalars", "measure", "update", "takes_update"):
        assert getattr(replaced, name) is getattr(Framework, name)
    assert replaced.run_if is type(backend).run_if


def test_unknown_backend_takes_generic_path_with_warning_that_names_it():
    with pytest.warns(UserWarning, match="not tested with Keras's backend 'mlx'"):
        assert framework_class("mlx") is Framework
    for name in ("numpy", "openvino"):
        assert framework_class(name) is Framework


def test_scalars_count_steps_like_reference(way):
    assert_counted_alike(backend.scalars, REFERENCE.scalars)
