"""What README.md and docs/ say in words or in a table, and what comes of it.

The programs of the pages run in `test_docs.py`. Here the code of a cell is run, or what
the text says of a program is tried.
"""

import ast
import contextlib
import importlib
import inspect
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
from keras_lso.diagnostics import info

pytestmark = pytest.mark.slow


# --- troubleshooting.md: what people see, and what is NaN ---------------------------

OURS, KERAS_OWN = keras_lso.LossScaleOptimizer, keras.optimizers.LossScaleOptimizer
X = np.ones((8, 4), "float32")


def compiled(*layers, optimizer):
    """A model in mixed_float16; `clean` puts the dtype policy back."""
    keras.config.set_dtype_policy("mixed_float16")
    layers = [make() for make in layers or [lambda: keras.layers.Dense(1)]]
    model = keras.Sequential([keras.Input((4,)), *layers])
    model.compile(optimizer, loss="mse")
    return model


def fit(model, x=X, epochs=1, **arguments):
    y = np.ones((len(x), 1), "float32")
    return model.fit(x, y, epochs=epochs, verbose=0, **arguments).history


def is_finite(values):
    return bool(np.all([np.isfinite(value).all() for value in values]))


@pytest.mark.parametrize("wrapper", [OURS, KERAS_OWN], ids=["ours", "Keras's class"])
def test_diagnostic_lines_on_troubleshooting_page_run(wrapper, clean, capsys):
    model = compiled(optimizer=wrapper(keras.optimizers.SGD(0.01)))
    fit(model)
    names = {"keras": keras, "np": np, "timeit": timeit, "model": model}
    names |= {"x": X, "y": X[:, :1]}
    rows = table_of("docs/troubleshooting.md", "what you see")
    lines = [code for row in rows for code in code_in(row[1])]
    assert len(lines) == 9
    for line in lines:
        exec(line, names)
    assert len(capsys.readouterr().out.splitlines()) == 9


@pytest.mark.default_backend("torch")
def test_keras_scale_falls_to_zero_and_makes_all_weights_nan(clean):
    inner = keras.optimizers.SGD(0.01)
    model = compiled(optimizer=KERAS_OWN(inner, initial_scale=2.0**-140))
    fit(model, X * np.inf, epochs=12)
    assert float(model.optimizer.dynamic_scale) == 0.0
    assert is_finite(model.get_weights())
    fit(model, epochs=2)
    assert not any(np.isfinite(w).any() for w in model.get_weights())
    # "A model that has diverged does not come back when its optimizer is exchanged."
    model.compile(OURS(keras.optimizers.SGD(0.01)), loss="mse")
    assert np.isnan(fit(model, epochs=2)["loss"]).all()


@pytest.mark.default_backend("torch")
def test_skipped_step_leaves_nan_in_moving_statistics(clean, capsys):
    model = compiled(
        lambda: keras.layers.Dense(4, kernel_initializer="ones"),
        keras.layers.BatchNormalization,
        lambda: keras.layers.Dense(1, dtype="float32"),
        optimizer=OURS(keras.optimizers.SGD(0.01)),
    )
    fit(model, X * 60000)
    assert int(model.optimizer.skipped_steps) == 1
    assert is_finite(v.numpy() for v in model.trainable_variables)
    history = fit(model, epochs=2, validation_data=(X, X[:, :1]))
    assert is_finite(history["loss"]) and np.isnan(history["val_loss"]).all()

    names = {"keras": keras, "np": np, "model": model}
    [row] = [
        row
        for row in table_of("docs/troubleshooting.md", "what you see")
        if row[0].startswith("the validation loss is NaN")
    ]
    exec(*code_in(row[1]), names)
    shown = capsys.readouterr().out
    assert "moving_mean" in shown and "moving_variance" in shown
    run_block("docs/troubleshooting.md", 'variable.name == "moving_mean"', names)
    assert np.isfinite(model.evaluate(X, X[:, :1], verbose=0))
    assert keras.layers.BatchNormalization().momentum == 0.99


class Diverge(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 2:
            self.model.set_weights([w * np.nan for w in self.model.get_weights()])


@pytest.mark.default_backend("torch")
def test_model_checkpoint_keeps_weights_before_nan_unlike_backup(clean):
    # With a scale that no step overflows at.
    model = compiled(optimizer=OURS(keras.optimizers.SGD(0.01), initial_scale=8))
    source = block_with("docs/troubleshooting.md", "ModelCheckpoint(").source
    names = {"keras": keras}
    exec(source.partition("stop =")[0], names)
    backup = keras.callbacks.BackupAndRestore("backup", delete_checkpoint=False)
    loss = fit(model, epochs=4, callbacks=[Diverge(), names["best"], backup])["loss"]
    assert [np.isnan(value) for value in loss] == [False, False, True, True]
    model.load_weights("best.weights.h5")
    assert is_finite(model.get_weights())
    assert int(model.optimizer.iterations) == 2
    fit(model, epochs=4, callbacks=[backup])
    assert not is_finite(model.get_weights())


# --- custom-loops.md: weights that a loop moves itself, and the last window ---------


def test_move_by_overflowing_gradients_makes_weights_nan(clean):
    """`test_docs.py` runs the step of the page, which leaves finite weights."""
    model = compiled(optimizer=OURS(keras.optimizers.SGD(0.01), initial_scale=8))
    weights, optimizer = model.trainable_variables, model.optimizer
    y = np.ones((8, 1), "float32")

    def loss():
        return ops.mean(ops.square(ops.subtract(model(X * np.inf), y)))

    optimizer.build(weights)
    gradients = optimizer.get_gradients(loss, weights)
    norm = ops.sqrt(sum(ops.sum(g * g) for g in gradients))
    moves = [g * (0.05 / norm) for g in gradients]
    for weight, move in zip(weights, moves, strict=True):
        weight.assign_add(move)
    gradients = optimizer.get_gradients(loss, weights)
    for weight, move in zip(weights, moves, strict=True):
        weight.assign_sub(move)
    optimizer.apply(gradients, weights)
    assert not bool(optimizer.last_step_applied)
    assert all(np.isnan(weight.numpy()).all() for weight in weights)


def test_incomplete_accumulation_window_resumes_after_load(clean):
    def train(model, batches):
        x = np.arange(1.0, 9.0, dtype="float32").reshape(8, 1) / 8
        fit(model, np.repeat(x, 4, axis=1)[batches], batch_size=1, shuffle=False)
        return model.get_weights()

    def new():
        keras.utils.set_random_seed(0)
        inner = keras.optimizers.SGD(0.1, gradient_accumulation_steps=4)
        return compiled(optimizer=OURS(inner, initial_scale=8))

    whole, of_one_window = train(new(), slice(8)), train(new(), slice(4))
    model = new()
    for ended, expected in zip(train(model, slice(6)), of_one_window, strict=True):
        np.testing.assert_array_equal(ended, expected)
    assert int(model.optimizer.iterations) == 1
    model.save("model.keras")
    resumed = keras.saving.load_model("model.keras")
    for ended, expected in zip(train(resumed, slice(6, 8)), whole, strict=True):
        np.testing.assert_array_equal(ended, expected)
    assert int(resumed.optimizer.iterations) == 2


# --- README.md: where Keras's class fails -------------------------------------------


@pytest.mark.skipif(BACKEND != "jax", reason="the sentence is about JAX")
def test_apply_outside_jit_fails_only_with_keras_wrapper():
    def apply(wrapper):
        variable = keras.Variable([1.0])
        optimizer = wrapper(keras.optimizers.SGD(1.0), initial_scale=8)
        optimizer.apply([ops.full((1,), 8.0)], [variable])
        return variable

    assert apply(OURS).numpy().tolist() == [0.0]
    with pytest.raises(Exception, match="Encountered an unexpected tracer"):
        apply(KERAS_OWN)


@pytest.mark.skipif(BACKEND != "torch", reason="the sentence is about PyTorch")
def test_fsdp2_with_slots_fails_only_with_keras_wrapper():
    torch = importlib.import_module("torch")
    dist = importlib.import_module("torch.distributed")
    fsdp = importlib.import_module("torch.distributed.fsdp")
    mesh = importlib.import_module("torch.distributed.device_mesh")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        for wrapper in (OURS, KERAS_OWN):
            module = fsdp.fully_shard(
                torch.nn.Linear(2, 1), mesh=mesh.init_device_mesh("cpu", (1,))
            )
            variables = [keras.Variable(p) for p in module.parameters()]
            optimizer = wrapper(keras.optimizers.Adam(0.5))
            optimizer.build(variables)
            optimizer.scale_loss(module(torch.ones(4, 2)).sum()).backward()
            works = wrapper is OURS
            mixed = pytest.raises(RuntimeError, match="mixed torch.Tensor and DTensor")
            with contextlib.nullcontext() if works else mixed:
                optimizer.apply([v.value.grad for v in variables], variables)
            assert int(optimizer.iterations) == works
    finally:
        dist.destroy_process_group()


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


# --- migrating-grad-scaler.md: the update, the defaults, the groups -----------------


@pytest.mark.skipif(BACKEND != "torch", reason="the page is about PyTorch")
def test_no_grad_around_apply_gives_equal_weights():
    torch = importlib.import_module("torch")

    def train(surroundings):
        module = torch.nn.Linear(2, 1)
        torch.nn.init.ones_(module.weight)
        torch.nn.init.zeros_(module.bias)
        variables = [keras.Variable(p, name=n) for n, p in module.named_parameters()]
        optimizer = OURS(keras.optimizers.AdamW(0.1))
        for _ in range(3):
            module.zero_grad()
            # "Several `backward()`, then one `apply`."
            for part in (torch.ones(1, 2), torch.full((1, 2), 2.0)):
                optimizer.scale_loss(module(part).sum() / 2).backward()
            with surroundings():
                optimizer.apply([v.value.grad for v in variables], variables)
        assert int(optimizer.iterations) == 3
        assert not any(v.value.grad_fn for v in [*variables, *optimizer.variables])
        return [p.detach().numpy() for p in module.parameters()]

    for ours, theirs in zip(
        train(torch.no_grad), train(contextlib.nullcontext), strict=True
    ):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.skipif(BACKEND != "torch", reason="the page is about PyTorch")
def test_defaults_on_grad_scaler_page_match_optimizer_classes():
    torch = importlib.import_module("torch")
    names = {
        "PyTorch": ("lr", "eps", "weight_decay"),
        "Keras": ("learning_rate", "epsilon", "weight_decay"),
    }
    modules = {"PyTorch": torch.optim, "Keras": keras.optimizers}
    rows = table_of("docs/migrating-grad-scaler.md", "class")
    assert len(rows) == 10
    for cls, module, *cells in rows:
        parameters = inspect.signature(
            getattr(modules[module], *code_in(cls))
        ).parameters
        *usual, other = cells
        for name, cell in zip(names[module], usual, strict=True):
            is_there = name in parameters
            assert cell == (str(parameters[name].default) if is_there else "-")
        for name in code_in(other):
            assert other == f"`{name}` {parameters[name].default}"


def steps_of_torch(make):
    """Returns a weight after each of three steps with gradients of 1."""
    torch = importlib.import_module("torch")
    w = torch.nn.Parameter(torch.tensor([2.0]))
    optimizer, values = make([w]), []
    for _ in range(3):
        w.grad = torch.ones(1)
        optimizer.step()
        values.append(w.item())
    return values


def steps_of_keras(optimizer, gradient=lambda w: 1.0):
    w, values = keras.Variable([2.0]), []
    for _ in range(3):
        optimizer.apply([ops.full((1,), gradient(float(w.numpy()[0])))], [w])
        values.append(float(w.numpy()[0]))
    return values


@pytest.mark.skipif(BACKEND != "torch", reason="the page is about PyTorch")
def test_decay_epsilon_and_momentum_compare_to_torch_as_page_says():
    optim, sgd = importlib.import_module("torch").optim, keras.optimizers.SGD
    # "An L2 penalty, which is added to the gradient ... half of PyTorch's."
    with_penalty = steps_of_torch(lambda w: optim.SGD(w, 0.1, weight_decay=0.5))
    penalty = keras.regularizers.L2(0.25)
    l2 = steps_of_keras(sgd(0.1), lambda w: 1.0 + 2 * float(penalty.l2) * w)
    np.testing.assert_allclose(l2, with_penalty, rtol=1e-6)
    # "As PyTorch's `AdamW` does."
    adamw = keras.optimizers.AdamW(0.1, weight_decay=0.5)
    beside = steps_of_torch(lambda w: optim.AdamW(w, 0.1, weight_decay=0.5))
    # Up to the epsilons.
    np.testing.assert_allclose(steps_of_keras(adamw), beside, rtol=1e-5)
    # Epsilon, before the bias correction of the first step and after it.
    after = steps_of_torch(lambda w: optim.Adam(w, 0.1, eps=0.5))[0]
    before = keras.optimizers.Adam(0.1, epsilon=0.5 * (1 - 0.999) ** 0.5)
    assert steps_of_keras(before)[0] == pytest.approx(after, rel=1e-6)
    assert steps_of_keras(keras.optimizers.Adam(0.1, epsilon=0.5))[0] > after + 0.01
    # "They part only when the learning rate changes."
    momentum = steps_of_torch(lambda w: optim.SGD(w, 0.1, momentum=0.9))
    np.testing.assert_allclose(
        steps_of_keras(sgd(0.1, momentum=0.9)), momentum, rtol=1e-6
    )
    falls = keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.5)
    parted = steps_of_keras(sgd(falls, momentum=0.9))
    # The velocity of Keras after two steps, against PyTorch's 0.05 * 1.9.
    assert parted[0] - parted[1] == pytest.approx(0.9 * 0.1 + 0.05, rel=1e-5)


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


@pytest.mark.skipif(BACKEND != "jax", reason="the page is about JAX")
def test_defaults_of_optax_match_page():
    optax = importlib.import_module("optax")
    text = " ".join(PAGES["docs/migrating-optax.md"].read_text().split())

    def default(function, name):
        return inspect.signature(function).parameters[name].default

    for name in ("adam", "adamw"):
        assert default(getattr(optax, name), "eps") == 1e-8
    for cls in (keras.optimizers.Adam, keras.optimizers.AdamW):
        assert default(cls, "epsilon") == 1e-7
    assert default(optax.adamw, "weight_decay") == 1e-4
    assert default(keras.optimizers.AdamW, "weight_decay") == 0.004
    assert "`optax.adamw` is 1e-8, in Keras 1e-7" in text
    assert "`optax.adamw` is 1e-4, in Keras 0.004" in text


# --- large-batches.md: what Keras's schedules do when they are compiled -------------


@pytest.mark.skipif(BACKEND != "jax", reason="JAX compiles by XLA")
def test_keras_decay_schedules_have_faults_named_on_page():
    """Once this fails, the page and docstrings of warm-ups have to say since when."""
    jit = importlib.import_module("jax").jit
    ours, theirs = keras_lso.schedules, keras.optimizers.schedules

    def at(schedule, step):
        return float(jit(schedule)(ops.convert_to_tensor(step, dtype="int32")))

    for steps in (3, 1000):
        root = {"initial_learning_rate": 0.7, "decay_steps": steps, "power": 0.5}
        assert np.isnan(at(theirs.PolynomialDecay(**root), steps))
        last = at(ours.PolynomialDecayWithOffset(**root), steps)
        assert last == np.float32(1e-4)
    assert at(theirs.PolynomialDecay(0.7, 1000, 0.01, cycle=True), 3000) > 0.1
    stairs = {"decay_steps": 41, "decay_rate": 0.5, "staircase": True}
    assert at(theirs.ExponentialDecay(0.7, **stairs), 41) == np.float32(0.7)
    assert at(theirs.InverseTimeDecay(0.7, **stairs), 41) == np.float32(0.7)
    assert at(theirs.CosineDecayRestarts(0.7, 41, t_mul=1.0), 41) < 1e-6


# --- custom-loops.md: what schedules count under accumulation -----------------------


class CountsItsCalls(keras.optimizers.schedules.LearningRateSchedule):
    """A rate that says at which step it was asked for: one above it."""

    def __call__(self, step):
        return ops.cast(step, "float32") + 1.0


@pytest.mark.filterwarnings("ignore:.*counts micro-batches:UserWarning")
@pytest.mark.parametrize(
    "wrap",
    [lambda o: o, keras.optimizers.LossScaleOptimizer, keras_lso.LossScaleOptimizer],
    ids=["the bare optimizer", "Keras's class", "ours"],
)
def test_schedule_counts_micro_batches_and_iterations_count_updates(wrap):
    dense = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
    model = keras.Sequential([keras.Input((1,)), dense])
    inner = keras.optimizers.SGD(CountsItsCalls(), gradient_accumulation_steps=4)
    # The gradient is 1.
    model.compile(wrap(inner), loss=lambda y, predicted: ops.mean(predicted))
    model.fit(np.ones((12, 1)), np.ones((12, 1)), batch_size=1, verbose=0)
    assert int(model.optimizer.iterations) == 3
    # The rates of the fourth, the eighth and the twelfth micro-batch. If schedules
    # counted updates, -(1 + 2 + 3).
    assert model.get_weights()[0] == -(4 + 8 + 12)


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
