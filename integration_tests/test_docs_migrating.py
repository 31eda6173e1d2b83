"""What the pages about migrating say in their tables, and what comes of it.

Their programs run in `test_docs.py`. Here the code in the cells runs, with a number for
each `...`, and the files load that a table says load.
"""

import ast
import importlib
import inspect
import pathlib
import re

import keras
import numpy as np
import pytest

import keras_lso
from integration_tests.docs_blocks import BACKEND, code_in, table_of

pytestmark = pytest.mark.slow


# --- migrating.md: the dtype policy --------------------------------------------------


def names_of_dtype_policies():
    """Returns the cells with old names, and the code to write for each."""
    rows = table_of("docs/migrating.md", "dtype policy of tf.keras and TF1")
    return {old: code_in(new) for old, new in rows}


def test_code_for_dtype_policies_sets_stated_policy(clean):
    for old, pieces in names_of_dtype_policies().items():
        assert pieces
        keras.config.set_dtype_policy("mixed_bfloat16")
        opt, layer = keras.optimizers.SGD(0.1), keras.layers.Dense(1)
        names = {"keras": keras, "keras_lso": keras_lso, "opt": opt, "layer": layer}
        values = [eval(code, names) for code in pieces]
        now = keras.config.dtype_policy().name
        if "set_" in old or "enable_" in old:
            assert now == "mixed_float16"
        elif "disable_" in old:
            assert now == "float32"
        elif "Policy" in old:
            assert values[0] == keras.DTypePolicy("mixed_float16")
        else:
            assert values == [keras.DTypePolicy("mixed_bfloat16")]
    for name, ours in (
        ("set_global_policy", keras.config.set_dtype_policy),
        ("global_policy", keras.config.dtype_policy),
        ("Policy", keras.DTypePolicy),
    ):
        assert getattr(keras.mixed_precision, name) is ours


@pytest.mark.skipif(BACKEND != "tensorflow", reason="the names are TensorFlow's")
def test_guide_maps_every_public_name_of_mixed_precision():
    tf, tf_keras = map(importlib.import_module, ("tensorflow", "tf_keras"))
    classes = [row[0] for row in table_of("docs/migrating.md", "old name")]
    mapped = code_in(" ".join([*classes, *names_of_dtype_policies()]))
    for module, prefix in (
        (tf_keras.mixed_precision, "tf.keras.mixed_precision"),
        (tf.compat.v1.mixed_precision, "tf.compat.v1.mixed_precision"),
    ):
        names = [name for name in dir(module) if not name.startswith("_")]
        for name in set(names) - {"experimental"}:
            assert f"{prefix}.{name}" in mapped


# --- migrating.md: which files Keras 3 takes the weights out of ---------------------


def network(k, seed):
    """A small model, of tf.keras or of Keras 3."""
    layers = [k.layers.Dense(3, activation="relu"), k.layers.BatchNormalization()]
    model = k.Sequential([k.Input((4,)), *layers, k.layers.Dense(1)])
    random = np.random.default_rng(seed)
    model.set_weights([random.uniform(size=w.shape) for w in model.get_weights()])
    return model


def network_of_ones_own(k):
    """Keras 3 looks for one of the layers elsewhere than tf.keras puts it."""

    def init(self):
        k.Model.__init__(self)
        self.second = k.layers.Dense(1)
        self.first = k.layers.Dense(4)

    def call(self, inputs):
        return self.second(self.first(inputs))

    model = type("Network", (k.Model,), {"__init__": init, "call": call})()
    model(np.zeros((1, 4), "float32"))
    return model


def save_the_files_of_the_page():
    """Writes the files that the table in migrating.md names; returns their model."""
    import tensorflow as tf
    import tf_keras

    model = network(tf_keras, seed=1)
    inner = tf_keras.optimizers.Adam(1e-3)
    model.compile(tf_keras.mixed_precision.LossScaleOptimizer(inner), loss="mse")
    model.fit(np.ones((8, 4)), np.ones((8, 1)), verbose=0)
    for path in ("model.h5", "model.keras", "folder"):
        model.save(path)
    model.save_weights("prefix")
    checkpoint = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
    checkpoint.save("checkpoint")
    return model


@pytest.fixture
def theirs(original, clean):
    """`theirs(run)`: what `run()` returns, and in this folder the files it has left."""

    def get(run, pattern="*"):
        def run_here():
            from integration_tests import tf_keras_files

            with tf_keras_files.quiet():
                returned = run()
            return returned, tf_keras_files.files_in(pathlib.Path(), pattern)

        returned, files = original(run_here)
        for path, content in files.items():
            pathlib.Path(path).parent.mkdir(exist_ok=True, parents=True)
            pathlib.Path(path).write_bytes(content)
        return returned

    return get


def assert_same_weights(model, weights):
    for ours, their in zip(model.get_weights(), weights, strict=True):
        np.testing.assert_array_equal(ours, their)


def test_keras_3_reads_exactly_file_formats_listed_in_guide(theirs):
    weights = theirs(lambda: save_the_files_of_the_page().get_weights())
    paths = {
        '`model.save("model.h5")`': "model.h5",
        '`model.save("model.keras")`, of the optimizers of TensorFlow 2.11 and later': (
            "model.keras"
        ),
        '`model.save("folder")`, a SavedModel': "folder",
        '`model.save_weights("prefix")` of a compiled model': "prefix",
        '`tf.train.Checkpoint(...).save("prefix")`': "checkpoint-1",
    }
    rows = table_of("docs/migrating.md", "written by")
    assert [row[0] for row in rows] == list(paths)
    for row in rows:
        model = network(keras, seed=2)
        if row[-1].startswith("yes"):
            model.load_weights(paths[row[0]])
            assert_same_weights(model, weights)
        else:
            assert row[-1].startswith("no")
            with pytest.raises(ValueError, match="File format not supported"):
                model.load_weights(paths[row[0]])


def test_weights_of_other_file_formats_migrate_through_tf_keras(theirs):
    rows = table_of("docs/migrating.md", "the weights are in")
    assert len(rows) == 3
    pieces = [code_in(cell) for _, cell in rows]
    codes = [code.replace("prefix-1", "checkpoint-1") for [code] in pieces]

    def run():
        tf, tf_keras = map(importlib.import_module, ("tensorflow", "tf_keras"))
        model = save_the_files_of_the_page()
        for i, code in enumerate(codes):
            old = network(tf_keras, seed=3)
            exec(code, {"old": old, "tf": tf})
            old.save_weights(f"weights_alone_{i}.h5")
        return codes, model.get_weights()

    recorded_codes, weights = theirs(run, "weights_alone_*")
    assert recorded_codes == codes, "`make golden` runs what the page says now"
    for i in range(len(codes)):
        model = network(keras, seed=2)
        model.load_weights(f"weights_alone_{i}.h5")
        assert_same_weights(model, weights)


def test_model_of_custom_class_migrates_through_tf_keras(theirs):
    def run():
        import tf_keras

        model = network_of_ones_own(tf_keras)
        random = np.random.default_rng(1)
        model.set_weights([random.uniform(size=w.shape) for w in model.get_weights()])
        model.save("model.keras")
        old = network_of_ones_own(tf_keras)
        old.load_weights("model.keras")
        old.save_weights("weights_alone.h5")
        return model.get_weights()

    weights = theirs(run)
    model = network_of_ones_own(keras)
    with pytest.raises(ValueError, match="could not be loaded"):
        model.load_weights("model.keras")
    model.load_weights("weights_alone.h5")
    assert_same_weights(model, weights)


# --- migrating-keras.md: who unscales the gradients --------------------------------


def test_each_way_to_unscale_takes_same_step(clean):
    rows = table_of("docs/migrating-keras.md", "the loop has")
    calls = [code_in(cell) for _, cell in rows]
    calls[0] = code_in(rows[0][0])[1:]
    assert [len(pieces) for pieces in calls] == [1, 1, 2]
    for i, pieces in enumerate(calls):
        w = keras.Variable([1.0])
        optimizer = keras_lso.LossScaleOptimizer(keras.optimizers.SGD(0.5))
        optimizer.build([w])
        # Of a loss whose gradient is 1.
        grads = [optimizer.scale_loss(keras.ops.ones((1,)))]
        if i == 1:
            grads = [grads[0] / optimizer.dynamic_scale]
        names = {"optimizer": optimizer, "grads": grads, "variables": [w]}
        exec("\n".join(pieces), names)
        assert w.numpy()[0] == 0.5


# --- migrating-grad-scaler.md, migrating-optax.md: the arguments --------------------

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


# --- The other cells ----------------------------------------------------------------


def everything():
    """Returns what the code in the right cells talks about, by name."""
    inner = keras.optimizers.SGD(0.1, gradient_accumulation_steps=2)
    optimizer = keras_lso.LossScaleOptimizer(inner)
    variables = [keras.Variable([1.0])]
    optimizer.build(variables)
    own = ("apply", "stateless_apply", "skipped_steps", "check_stalled", "iterations")
    names = {name: getattr(optimizer, name) for name in own}
    through = ("gradient_accumulation_steps", "global_clipnorm")
    names |= {name: getattr(optimizer, name) for name in through}
    names |= {"keras": keras, "keras_lso": keras_lso, "inner": inner}
    names |= {name: getattr(keras.optimizers, name) for name in ("Adam", "AdamW")}
    names["Lion"] = keras.optimizers.Lion
    if BACKEND == "torch":
        names["module"] = importlib.import_module("torch").nn.Linear(2, 1)
    if BACKEND == "jax":
        names["jax"] = importlib.import_module("jax")
    one = keras.ops.ones((1,))
    return names | {
        "optimizer": optimizer,
        "variables": variables,
        "gradients": [one],
        "loss": one[0],
    }


def check_arguments(code):
    """Builds the wrapper or, if they are the inner optimizer's, that one."""
    given = eval(filled(f"dict({code})"), {"keras_lso": keras_lso})
    ours = inspect.signature(keras_lso.LossScaleOptimizer).parameters
    if set(given) <= set(ours):
        keras_lso.LossScaleOptimizer(keras.optimizers.SGD(0.1), **given)
    else:
        keras.optimizers.SGD(0.1, **given)


def check_code(code, names):
    """Runs the code of a cell; of a call with `(...,` the names of its arguments."""
    if code == "dtype=":
        keras.layers.Dense(1, dtype="float16")
    elif "(..., " in code:
        call = ast.parse(code, mode="eval").body
        parameters = inspect.signature(eval(ast.unparse(call.func), names)).parameters
        assert {keyword.arg for keyword in call.keywords} <= set(parameters)
    elif re.match(r"\w+=", code):
        check_arguments(code)
    else:
        exec(filled(code), names)


@pytest.mark.parametrize(
    "page, heading, on",
    [
        ("docs/migrating-grad-scaler.md", "`GradScaler`", "torch"),
        ("docs/migrating-optax.md", "optax, jmp", "jax"),
    ],
)
def test_code_in_right_column_of_migration_table_runs(page, heading, on, clean):
    if on != BACKEND:
        pytest.skip(f"the page is about {on}")
    pieces = [code for row in table_of(page, heading) for code in code_in(row[1])]
    assert len(pieces) > 10
    names = everything()
    for code in pieces:
        check_code(code, names)
