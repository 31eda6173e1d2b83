"""The variables that a loss reads, compiled steps, and the modules that have them.

Training ops run them in `tests/compat/open_seq2seq/test_training_op.py`.
"""

import ast
import pathlib

import keras
import numpy as np
import pytest
from keras import ops

from keras_lso.compat import backend
from keras_lso.compat.backend import loading_only

FOLDER = pathlib.Path(backend.__file__).parent
BACKEND = keras.backend.backend()

# Of this backend, and of those under which nothing is compiled.
EACH = pytest.mark.parametrize("module", [backend, loading_only], ids=["own", "plain"])


@EACH
def test_trained_variables_are_trainable_variables_read_by_loss(module, snapshot):
    a, b, unread = keras.Variable(2.0), keras.Variable(3.0), keras.Variable(4.0)
    frozen = keras.Variable(5.0, trainable=False)

    def loss():
        frozen.assign(frozen * a)
        return b * a * b + frozen

    before = snapshot([a, b, unread, frozen])
    found = module.trained_variables(loss)
    assert [id(v) for v in found] == [id(a), id(b)]
    # What it assigned is forgotten.
    assert snapshot([a, b, unread, frozen]) == before


@EACH
def test_trained_variables_include_layers_built_by_loss(module):
    dense = keras.layers.Dense(2, kernel_initializer="ones")
    found = module.trained_variables(lambda: ops.sum(dense(np.ones((1, 3)))))
    assert {id(v) for v in found} == {id(dense.kernel), id(dense.bias)}
    np.testing.assert_array_equal(dense.kernel.numpy(), np.ones((3, 2)))


@EACH
def test_compiled_step_reads_and_assigns_variables(module):
    variable = keras.Variable([1.0, 2.0])

    def step(x, nothing):
        variable.assign(variable + x)
        return variable * 2.0, nothing

    compiled = module.compile_step(step)
    for expected in ([2.0, 3.0], [3.0, 4.0]):
        doubled, nothing = compiled(ops.ones(2), None)
        np.testing.assert_array_equal(ops.convert_to_numpy(variable), expected)
        np.testing.assert_array_equal(
            ops.convert_to_numpy(doubled), 2 * np.float32(expected)
        )
        assert nothing is None


def test_compile_step_traces_once_except_on_torch():
    variable, runs = keras.Variable([1.0]), []

    def step(x):
        runs.append(x)
        variable.assign(variable + x)

    compiled = backend.compile_step(step)
    compiled(ops.ones(1))
    before = len(runs)
    for _ in range(3):
        compiled(ops.ones(1))
    assert len(runs) - before == (3 if BACKEND == "torch" else 0)
    np.testing.assert_array_equal(ops.convert_to_numpy(variable), [5.0])


# --- The modules ------------------------------------------------------------------


@pytest.mark.parametrize("name", ["numpy", "openvino", "of tomorrow"])
def test_backend_that_cannot_train_uses_loading_only_module(name):
    assert backend._module_of(name) is loading_only


def test_backend_that_can_train_uses_its_own_module():
    assert pathlib.Path(backend._module_of(BACKEND).__file__).stem == BACKEND


def test_each_backend_module_defines_exactly_names_in_use():
    # Read, not imported: a test runs beside one framework.
    tree = ast.parse((FOLDER / "__init__.py").read_text())
    asked = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == "_own"
    }
    assert {"AVERAGES_IN_STEP", "HOW_TO_START", "compile_step"} < asked
    for name in ("tensorflow", "jax", "torch", "loading_only"):
        found = public_names(ast.parse((FOLDER / f"{name}.py").read_text()))
        # Where no processes run, nothing is averaged.
        never = {"average_over_processes"} if name == "loading_only" else set()
        assert found == asked - never, name


def public_names(tree):
    """Returns the names that a module defines, without those that it imports."""
    names = set()
    for node in tree.body:
        names |= {target.id for target in getattr(node, "targets", ())}
        if isinstance(node, ast.AnnAssign):
            names.add(node.target.id)
        names.add(getattr(node, "name", "_"))
    return {name for name in names if not name.startswith("_")}
