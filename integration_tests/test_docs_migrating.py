"""The code in the tables of the pages about migrating gives the original's loss scales.

It runs with a number for each `...`. The programs of the pages run in `test_docs.py`.
"""

import ast
import importlib
import inspect

import keras
import pytest

import keras_lso
from integration_tests.docs_blocks import BACKEND, code_in, table_of

pytestmark = pytest.mark.slow


VALUES = {
    "initial_scale": 64.0,
    "initial_loss_scale": 64.0,
    "dynamic_growth_steps": 3,
    "increment_period": 3,
    "growth_factor": 8.0,
    "backoff_factor": 0.25,
    "multiplier": 4.0,
    "min_scale": 1.0,
    "max_scale": 2.0**24,
    "global_clipnorm": 1.0,
    "weight_decay_rate": 0.01,
}
# Which steps are finite: long enough to grow twice, and to drop twice in a row.
FINITE = [True, True, True, False, True, True, False, False, *[True] * 7]


def filled(code):
    """Returns the code with a number for each `...`, by the name of its argument."""
    tree = ast.parse(code)
    for node in ast.walk(tree):
        if isinstance(node, ast.keyword) and _is_dots(node.value):
            node.value = ast.Constant(VALUES[node.arg])
    return ast.unparse(ast.fix_missing_locations(tree))


def _is_dots(node):
    return isinstance(node, ast.Constant) and node.value is Ellipsis


def optimizer_of(rows, inner):
    """Returns the optimizer with the arguments in the right cells of these rows."""
    names = inspect.signature(keras_lso.LossScaleOptimizer).parameters
    pieces = [code for row in rows for code in code_in(row[1])]
    pieces = [f"{code}=..." if code in names else code for code in pieces]
    arguments = eval(filled(f"dict({', '.join(pieces)})"), {"keras_lso": keras_lso})
    return keras_lso.LossScaleOptimizer(inner, **arguments)


def rows_with(page, heading, wanted, names_of):
    """Returns the row for these arguments of the original, or those that cover it."""
    rows = [(names_of(row[0]), row) for row in table_of(page, heading)]
    exact = [row for names, row in rows if names == wanted]
    return exact or [row for names, row in rows if names and names <= wanted]


def scales_of(optimizer):
    """Returns the scale after each step of `FINITE`."""
    w = keras.Variable([0.0])
    scales = []
    for finite in FINITE:
        grad = keras.ops.full((1,), 1.0 if finite else float("inf"))
        optimizer.apply([grad], [w], scaled=False)
        scales.append(float(optimizer.loss_scale))
    return scales


def scales_of_grad_scaler(**arguments):
    torch = importlib.import_module("torch")
    scaler = torch.amp.GradScaler("cpu", **arguments)
    p = torch.nn.Parameter(torch.zeros(1))
    inner = torch.optim.SGD([p], 0.1)
    scales = []
    for finite in FINITE:
        scaler.scale(torch.zeros(()))
        p.grad = torch.full((1,), 1.0 if finite else float("inf"))
        scaler.step(inner)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales


@pytest.mark.skipif(BACKEND != "torch", reason="GradScaler is PyTorch's")
@pytest.mark.parametrize(
    "factors", [{}, {"growth_factor": 8.0, "backoff_factor": 0.25}]
)
def test_code_for_grad_scaler_arguments_gives_same_scales(factors):
    arguments = {"init_scale": 64.0, "growth_interval": 3, **factors}
    rows = rows_with(
        "docs/migrating-grad-scaler.md",
        "`GradScaler`",
        set(arguments),
        lambda cell: set(code_in(cell)),
    )
    optimizer = optimizer_of(rows, keras.optimizers.SGD(0.1))
    assert scales_of(optimizer) == scales_of_grad_scaler(**arguments)


def scales_of_jmp(**arguments):
    jmp, jnp = map(importlib.import_module, ("jmp", "jax.numpy"))
    scale = jmp.DynamicLossScale(jnp.float32(64.0), **arguments)
    scales = []
    for finite in FINITE:
        scale = scale.adjust(jnp.array(finite))
        scales.append(float(scale.loss_scale))
    return scales


def arguments_of_jmp(cell):
    """Returns the names of the arguments of `jmp.DynamicLossScale` in a cell."""
    calls = [ast.parse(code) for code in code_in(cell) if "DynamicLossScale(" in code]
    nodes = [node for call in calls for node in ast.walk(call)]
    return {node.arg for node in nodes if isinstance(node, ast.keyword)}


@pytest.mark.skipif(BACKEND != "jax", reason="jmp is JAX's")
@pytest.mark.parametrize("factor", [{}, {"factor": 4}])
def test_code_for_jmp_arguments_gives_same_scales(factor):
    arguments = {"period": 3, **factor}
    rows = rows_with(
        "docs/migrating-optax.md", "optax, jmp", set(arguments), arguments_of_jmp
    )
    optimizer = optimizer_of(rows, keras.optimizers.SGD(0.1))
    assert scales_of(optimizer) == scales_of_jmp(**arguments)


MODEL_GARDEN = (
    "`type` | class in [`keras_lso.compat.model_garden`](api/model_garden.md)"
)


def test_configs_of_model_garden_have_classes_of_the_page():
    rows = table_of("docs/migrating.md", MODEL_GARDEN)
    names = [name for row in rows for name in code_in(row[1])]
    assert len(names) == sum(len(code_in(row[0])) for row in rows) - 1  # `warmup`
    assert set(names) == set(keras_lso.compat.model_garden.__all__)


def test_entries_of_base_params_have_arguments_of_the_page():
    optimize_loss = keras_lso.compat.open_seq2seq.optimize_loss
    arguments = inspect.signature(optimize_loss).parameters
    same, *renamed = table_of("docs/migrating-tf1.md", "`base_params` | argument")
    assert arguments.keys() >= set(code_in(same[0]))
    named = [row[1].split("`")[1].partition("=")[0] for row in renamed[:3]]
    assert named == ["clip_gradients", "learning_rate_decay_fn", "on_horovod"]
    assert arguments.keys() >= set(named)
