"""What README.md and docs/ say in words or in a table, and what comes of it.

The programs of the pages run in `test_docs.py`. Here the code of a cell is run, or what
the text says of a program is tried.
"""

import ast
import importlib
import itertools
import re
import timeit

import keras
import numpy as np
import pytest
from keras import ops

import keras_lso
from integration_tests.docs_blocks import (
    BACKEND,
    PAGES,
    block_with,
    code_in,
    numpy_of,
    run_block,
    table_of,
)
from keras_lso import callbacks, loss_scales
from keras_lso._backend.masters import KINDS
from keras_lso.diagnostics import info

# --- policies.md: weights of 16 bits ------------------------------------------------


def bytes_of(policy, master_weights):
    """Bytes a weight: its own, what is kept with it, its gradient's, its slots'."""
    layer = keras.layers.Dense(8, use_bias=False, dtype=policy)
    layer.build((None, 4))
    optimizer = keras_lso.LossScaleOptimizer(
        keras.optimizers.Adam(), master_weights=master_weights
    )
    gradient = ops.zeros(layer.kernel.shape, layer.kernel.dtype)
    optimizer.apply([gradient], [layer.kernel], scaled=True)
    # What is a scalar is not a weight's. The wrapper's variables have the slots.
    kept = [v for v in optimizer.variables if len(v.shape)]
    slots = [v for v in optimizer.inner_optimizer.variables if len(v.shape)]
    kept = [v for v in kept if all(v is not slot for slot in slots)]
    groups = [layer.kernel], kept, [gradient], slots
    return [
        sum(numpy_of(tensor).nbytes for tensor in group) // (4 * 8) for group in groups
    ]


@pytest.mark.filterwarnings("ignore:.*trains float16 variables without")
def test_bytes_per_weight_on_page_match_real_variables():
    for policies, kind, *columns, total in table_of(
        "docs/policies.md", "dtype policy | `master_weights`"
    ):
        columns = list(map(int, columns))
        assert sum(columns) == int(total)
        kinds = code_in(kind) or ["'auto'", *map(repr, KINDS), "False"]
        for name, kind in itertools.product(code_in(policies), kinds):
            found = bytes_of(ast.literal_eval(name), ast.literal_eval(kind))
            assert found == columns, (name, kind)


# --- troubleshooting.md, long-runs.md: code in tables -------------------------------


def test_diagnostic_lines_on_troubleshooting_page_run(clean, capsys):
    x = np.ones((8, 4), "float32")
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    optimizer = keras_lso.LossScaleOptimizer(keras.optimizers.SGD(0.01))
    model.compile(optimizer, loss="mse")
    model.fit(x, x[:, :1], verbose=0)
    names = {"keras": keras, "np": np, "timeit": timeit, "model": model}
    names |= {"x": x, "y": x[:, :1]}
    rows = table_of("docs/troubleshooting.md", "what you see")
    lines = [code for row in rows for code in code_in(row[1])]
    for line in lines:
        exec(line, names)
    assert len(capsys.readouterr().out.splitlines()) == len(lines) > 5


def test_replacements_for_options_of_other_libraries_run():
    rows = table_of("docs/long-runs.md", "from")
    names = {**vars(keras_lso), **vars(callbacks), **vars(loss_scales)}
    made = [eval(code, dict(names)) for row in rows for code in code_in(row[-1])]
    assert len(made) >= 5


# --- performance.md: which steps are fast -------------------------------------------


@pytest.mark.skipif(BACKEND == "jax", reason="the list is of TensorFlow and PyTorch")
def test_fast_steps_of_performance_page_are_those_of_info():
    fast = {
        name.removeprefix("keras_lso.").removesuffix(", momentum")
        for name, step in info.steps().items()
        if step.startswith("one pass")
    }
    rows = table_of("docs/performance.md", "optimizers")
    named = [name for cell, _ in rows for name in code_in(cell)]
    assert {name.removeprefix("keras_lso.") for name in named} == fast
    assert "LARC" not in fast


# --- migrating-grad-scaler.md: the groups -------------------------------------------


@pytest.mark.skipif(BACKEND != "torch", reason="the page is about PyTorch")
def test_exclusion_by_name_replaces_parameter_group_without_decay():
    names = {"keras": keras, "keras_lso": keras_lso}
    page = "docs/migrating-grad-scaler.md"
    optimizer = run_block(page, "exclude_from_weight_decay", names)["decays"]
    module = module_of_torch()
    variables = [keras.Variable(p, name=n) for n, p in module.named_parameters()]
    before = {v.path: numpy_of(v).copy() for v in variables}
    optimizer.apply([ops.zeros(v.shape) for v in variables], variables, scaled=False)
    for variable in variables:
        decay = 0.0 if "bias" in variable.path else 1e-3 * 0.01
        expected = before[variable.path] * (1 - decay)
        np.testing.assert_allclose(numpy_of(variable), expected, rtol=5e-7)


# --- custom-loops.md: what schedules count under accumulation -----------------------


def test_warmup_on_page_takes_stated_number_of_updates():
    names = {"keras": keras, "keras_lso": keras_lso}
    run_block("docs/custom-loops.md", "gradient_accumulation_steps=", names)
    optimizer, micro_batches = names["accumulating"], names["micro_batches"]
    w = keras.Variable([0.0])
    one, overflow = ops.ones((1,)), ops.full((1,), float("inf"))
    rates = []
    for update in range(3):
        before = numpy_of(w)[0]
        if update == 1:
            # Dropped, and not counted.
            optimizer.apply([overflow], [w], scaled=False)
        for _ in range(micro_batches):
            optimizer.apply([one], [w], scaled=False)
        rates.append(before - numpy_of(w)[0])
    # Each update takes a hundredth of the warm-up. Float32 rounds the rate, the weight
    # and their difference.
    updates = names["warmup_updates"]
    expected = [0.1 * update / updates for update in range(3)]
    np.testing.assert_allclose(rates, expected, rtol=1e-6)
    schedule, whole = names["schedule"], micro_batches * updates
    assert float(schedule(whole - 1)) < float(schedule(whole)) == np.float32(0.1)
    assert float(names["schedule"](whole)) == pytest.approx(0.1)
    assert (int(optimizer.iterations), int(optimizer.skipped_steps)) == (3, 1)


# --- large-batches.md: patterns, and the names of PyTorch's parameters --------------


def module_of_torch():
    torch = importlib.import_module("torch")
    layers = [torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 1)]
    return torch.nn.Sequential(*layers)


def left_alone(variables, by_method=None, **exclusions):
    """Returns the paths of those that a step of LARS does not decay."""
    optimizer = keras_lso.LARS(1.0, momentum=0.0, weight_decay_rate=0.5, **exclusions)
    if by_method is not None:
        optimizer.exclude_from_weight_decay(var_names=by_method)
    for variable in variables:
        variable.assign(ops.ones(variable.shape))
    # Nothing but decay moves them.
    optimizer.apply([ops.zeros(v.shape) for v in variables], variables)
    return {v.path for v in variables if (numpy_of(v) == 1.0).all()}


def assigned_variables(line, module):
    """Runs a line of a page or an example that makes a module's variables."""
    names = {"keras": keras, "module": module, "model": module, "network": module}
    exec(line, names)
    return names["variables"]


def lines_that_name_parameters():
    paths = [*PAGES.values(), *PAGES["README.md"].parent.glob("examples/*.py")]
    lines = [line.strip(" `|") for p in paths for line in p.read_text().splitlines()]
    # What follows the code in a table, and in a list.
    lines = [re.split("`, as in|`\\. ", line)[0] for line in lines]
    lines = [line.partition("fully_shard(module); ")[2] or line for line in lines]
    found = [line[line.find("variables = [keras.Variable(") :] for line in lines]
    return [line for line in found if line.startswith("variables = [")]


@pytest.mark.skipif(BACKEND != "torch", reason="a PyTorch module's parameters")
def test_code_on_pages_passes_parameter_names_of_torch_modules():
    lines = lines_that_name_parameters()
    # large-batches.md, migrating-grad-scaler.md, scaling.md, fsdp.py, and twice
    # error-messages.md.
    assert len(lines) == 6
    for line in lines:
        module = module_of_torch()
        paths = [v.path for v in assigned_variables(line, module)]
        assert paths == [name for name, _ in module.named_parameters()]


@pytest.mark.skipif(BACKEND != "torch", reason="a PyTorch module's parameters")
def test_exclusion_patterns_on_page_match_biases_of_torch_module():
    names = {"keras": keras, "keras_lso": keras_lso}
    run_block("docs/large-batches.md", "named_parameters", names)
    variables = names["variables"]
    assert [v.path for v in variables] == ["0.weight", "0.bias", "1.weight", "1.bias"]
    biases = {"0.bias", "1.bias"}
    for patterns in exclusions_on_the_page():
        assert left_alone(variables, exclude_from_weight_decay=patterns) == biases
    assert left_alone(variables, exclude_1d=True) == {*biases, "1.weight"}
    attention = importlib.import_module("torch").nn.MultiheadAttention(2, 1)
    of_attention = [keras.Variable(p, name=n) for n, p in attention.named_parameters()]
    biases = {"in_proj_bias", "out_proj.bias"}
    assert left_alone(of_attention, exclude_from_weight_decay=["bias"]) == biases
    assert left_alone(of_attention, exclude_1d=True) == biases
    # "A variable without a name is called `variable_1`, which no pattern finds".
    nameless = [keras.Variable(v.value) for v in variables]
    with pytest.warns(UserWarning, match="'bias' of .* parts: 'variable'"):
        assert left_alone(nameless, exclude_from_weight_decay=["bias"]) == set()


def exclusions_on_the_page():
    """Returns the lists of patterns in large-batches.md that name biases."""
    found = []
    for block in ("keras_lso.LARS(10.0, exclude_1d", "named_parameters", "LARC("):
        source = block_with("docs/large-batches.md", block).source
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.keyword) and isinstance(node.value, ast.List):
                found.append([ast.literal_eval(e) for e in node.value.elts])
    found = [patterns for patterns in found if any("bias" in p for p in patterns)]
    # `exclude_from_weight_decay` twice, its method, and LARC's `exclude`.
    assert len(found) == 4
    return found


def test_exclusion_patterns_on_page_match_biases_of_keras_model():
    layers = [
        keras.layers.Dense(3, name="unbiased", use_bias=False),
        keras.layers.BatchNormalization(name="batch_normalization"),
        keras.layers.Dense(1, name="dense"),
    ]
    model = keras.Sequential([keras.Input((4,)), *layers], name="sequential")
    variables = model.trainable_variables
    [normal] = [p for p in exclusions_on_the_page() if "batch_normalization" in p]
    assert left_alone(variables, exclude_from_weight_decay=normal) == {
        "sequential/batch_normalization/gamma",
        "sequential/batch_normalization/beta",
        "sequential/dense/bias",
    }
    # "The method, which is Keras's, searches the variable's name alone."
    gamma = "sequential/batch_normalization/gamma"
    assert left_alone(variables, by_method=["gamma"]) == {gamma}
    with pytest.warns(
        UserWarning, match="'batch_normalization' of .* in names such as"
    ):
        assert left_alone(variables, by_method=["batch_normalization"]) == set()
    # "A pattern like `"bias:0$"` finds both."
    for patterns in (["bias:0$"], ["(^|/)bias$"]):
        assert left_alone(variables, exclude_from_weight_decay=patterns) == {
            "sequential/dense/bias"
        }
    # "`"bias"` also hits a layer that is called `unbiased`; ... does not."
    loose = left_alone(variables, exclude_from_weight_decay=["bias"])
    assert loose == {"sequential/unbiased/kernel", "sequential/dense/bias"}
