"""Names of old programs that are in Keras 3: the error has the line to write."""

import importlib

import keras
import pytest

from testing.refusals import refused

EXPERIMENTAL = [
    "keras_lso.mixed_precision.experimental",
    "keras_lso.compat.v1.keras.mixed_precision.experimental",
    "keras_lso.compat.v2.keras.mixed_precision.experimental",
]
MODERN = [name.removesuffix(".experimental") for name in EXPERIMENTAL]
TF1 = "keras_lso.compat.v1.mixed_precision"
POLICY = 'keras.config.set_dtype_policy("mixed_float16")'
OLD = [
    *((module, "set_policy", POLICY) for module in EXPERIMENTAL),
    *((module, "get_layer_policy", "layer.dtype_policy") for module in EXPERIMENTAL),
    *((module, "set_global_policy", POLICY) for module in MODERN),
    *((m, "global_policy", "keras.config.dtype_policy()") for m in EXPERIMENTAL),
    *((m, "Policy", 'keras.DTypePolicy("mixed_float16")') for m in MODERN),
    (TF1, "enable_mixed_precision_graph_rewrite", POLICY),
    (TF1, "disable_mixed_precision_graph_rewrite", 'set_dtype_policy("float32")'),
    ("keras_lso.compat.v1", "train", "keras.optimizers.SGD(0.1, momentum=0.9)"),
]


@pytest.mark.parametrize("module, name, line", OLD)
def test_old_name_is_an_error_with_the_line_to_write(module, name, line):
    words = f"Keras 3 has no `{name}`. Write", line
    with refused(ImportError, *words):
        getattr(importlib.import_module(module), name)
    with refused(ImportError, *words):
        exec(f"from {module} import {name}")


@pytest.mark.parametrize("module", sorted({module for module, *_ in OLD}))
def test_other_names_are_attribute_errors(module):
    found = importlib.import_module(module)
    assert not hasattr(found, "no_such_name")
    with refused(AttributeError, f"module '{module}' has no attribute 'no_such_name'"):
        _ = found.no_such_name


def test_lines_to_write_run():
    before = keras.config.dtype_policy()
    try:
        exec(POLICY, {"keras": keras})
        assert keras.config.dtype_policy() == keras.DTypePolicy("mixed_float16")
        assert keras.layers.Dense(1).dtype_policy.name == "mixed_float16"
    finally:
        keras.config.set_dtype_policy(before)
