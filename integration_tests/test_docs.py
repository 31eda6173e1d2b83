"""The code of README.md and docs/ runs on the backends that it names.

The Python blocks of a page run in order, as one program, in a new folder. The programs
below "Before:" and "After:" end with the same weights. `docs_blocks.py` has the marks.
"""

import contextlib
import importlib.util
import sys
import types

import keras
import numpy as np
import pytest

import keras_lso
from integration_tests.docs_blocks import ALL_BLOCKS, BACKEND, PAGES, blocks_of
from testing import misuse
from testing.keras_versions import fits_torch_processes, import_keras_hub

PROGRAMS = sorted({b.page for b in ALL_BLOCKS if b.language == "python"})

# The pages whose programs `make test` runs.
OFTEN = {"README.md", "docs/custom-loops.md", "docs/which-setup.md", "docs/saving.md"}


def old_tensorflow(find_old_keras):
    """Returns a context in which `import tensorflow` gives another `tf.keras`."""

    @contextlib.contextmanager
    def surroundings(names):
        import tensorflow as tf

        # tf.keras looks for `compat` itself, when its layers run.
        names = ("Variable", "GradientTape", "reduce_sum", "compat")
        there = {n: getattr(tf, n) for n in names}
        old = types.SimpleNamespace(**there, keras=find_old_keras())
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(sys.modules, "tensorflow", old)
            yield

    return surroundings


@contextlib.contextmanager
def tf_keras_of_2_4(names):
    """The dtype policy that a program sets is also that of tf.keras."""
    tf_keras = importlib.import_module("tf_keras")
    with old_tensorflow(lambda: tf_keras)(names):
        yield
    tf_keras.mixed_precision.set_global_policy("float32")


@contextlib.contextmanager
def file_of_tf_keras(names):
    """Writes a file after four steps, and compares the rest of the run."""
    # A program above may have set another dtype policy.
    keras.config.set_dtype_policy("float32")
    theirs, go_on = model_of_tf_keras()
    theirs.save("model.h5")
    yield
    model = names["model"]
    assert int(model.optimizer.iterations) == 4
    go_on(theirs)
    go_on(model)
    weights = zip(model.get_weights(), theirs.get_weights(), strict=True)
    for ours, expected in weights:
        # Twelve steps of 0.001; a slot of zeros would be off by several of them.
        np.testing.assert_allclose(ours, expected, rtol=0, atol=1e-6)


@contextlib.contextmanager
def checkpoint_of_tf_keras(names):
    """Writes a checkpoint, and loads the file that tf.keras writes from it."""
    theirs, _ = model_of_tf_keras()
    theirs.save_weights("prefix")
    yield
    optimizer = keras.optimizers.Adam()
    optimizer.build(names["model"].trainable_variables)
    keras_lso.mixed_precision.load_optimizer_state(optimizer, "model.h5")
    assert int(optimizer.iterations) == 4
    loaded = [
        slots[0].numpy() for slots in (optimizer._momentums, optimizer._velocities)
    ]
    inner = theirs.optimizer.inner_optimizer
    expected = [slots[0].numpy() for slots in (inner._momentums, inner._velocities)]
    np.testing.assert_array_equal(loaded, expected)


def model_of_tf_keras():
    """Returns a model of tf.keras after four steps, and a function for twelve more."""
    import tf_keras

    x = np.random.default_rng(0).normal(size=(32, 4)).astype("float32")
    y = x.sum(axis=1, keepdims=True)
    theirs = tf_keras.Sequential([tf_keras.layers.Dense(1, input_shape=(4,))])
    inner = tf_keras.optimizers.Adam(1e-3)
    theirs.compile(tf_keras.mixed_precision.LossScaleOptimizer(inner), loss="mse")
    fit = {"batch_size": 8, "shuffle": False, "verbose": 0}
    theirs.fit(x, y, **fit)
    return theirs, lambda model: model.fit(x, y, epochs=3, **fit)


@contextlib.contextmanager
def process_group(names):
    """A group of this process alone."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        # PyTorch may hang at the end if a network outlives its group.
        names.pop("network", None)
        dist.destroy_process_group()


@contextlib.contextmanager
def fit_in_processes(names):
    """A group of this process alone, for Keras."""
    try:
        with process_group(names):
            yield
            # As in `process_group`.
            names["model"].ddp_model = None
    finally:
        keras.distribution.set_distribution(None)


@contextlib.contextmanager
def distribution(names):
    """All devices of JAX, until the end of the block."""
    yield
    keras.distribution.set_distribution(None)


@contextlib.contextmanager
def shard_map(names):
    import jax

    if not hasattr(jax, "shard_map"):
        pytest.skip(f"jax.shard_map is not in JAX {jax.__version__}")
    yield


@contextlib.contextmanager
def keras_hub(names):
    import_keras_hub()
    yield


SURROUNDINGS = {
    "tf.keras 2.4": tf_keras_of_2_4,
    "a file of tf.keras 2": file_of_tf_keras,
    "a checkpoint of tf.keras 2": checkpoint_of_tf_keras,
    "TF1": contextlib.nullcontext,
    "a process group": process_group,
    "a distribution": distribution,
    "jax.shard_map": shard_map,
    "KerasHub": keras_hub,
}


# The blocks that an older Keras cannot run. The rest of their pages runs there.
IS_THERE = {
    "Orbax": hasattr(keras.callbacks, "OrbaxCheckpoint")
    and importlib.util.find_spec("orbax") is not None,
    "a fit in processes": fits_torch_processes,
}
SURROUNDINGS |= {
    "Orbax": contextlib.nullcontext,
    "a fit in processes": fit_in_processes,
}


def check_start(names):
    model, optimizer = names["model"], names["optimizer"]
    assert model.optimizer is optimizer
    assert model.dtype_policy.name == "mixed_float16"
    # The program's comments. The weights are other ones in each run.
    losses = model.history.history["loss"]
    assert losses == sorted(losses, reverse=True)
    assert 0.5 < losses[0] < 1.0 and 0.1 < losses[-1] < 0.4
    expected = "LossScaleOptimizer(Adam, loss_scale=32768.0, skipped_steps=0)"
    assert repr(optimizer) == expected
    assert int(optimizer.iterations) == 5 * 4096 // 32


def check_custom_loops(names):
    optimizer = names["optimizer"]
    # 100 steps of the backend's own loop, 5 by `minimize`, and the finite one of the
    # two that move weights; three more on PyTorch, and one on TensorFlow.
    more = {"torch": 3, "tensorflow": 1}.get(BACKEND, 0)
    assert int(optimizer.iterations) == 106 + more
    assert int(optimizer.skipped_steps) == 1
    weights = names["model"].trainable_variables
    assert all(np.isfinite(keras.ops.convert_to_numpy(w)).all() for w in weights)
    # Six micro-batches and two of zeros.
    assert int(names["accumulating"].iterations) == 2
    assert float(keras.ops.convert_to_numpy(names["loss"])) < 1e-3


def check_twenty_steps(names):
    # The bias goes from 0 to 1, and a little beyond by momentum.
    assert 0.5 < float(np.array(names["weights"][1])[0]) < 1.5


def check_grad_scaler(names):
    check_twenty_steps(names)
    weights = zip(names["weights_of_module"], names["weights"], strict=True)
    for of_module, of_model in weights:
        np.testing.assert_allclose(of_module, of_model, **OF_FLOAT16)
    assert float(names["by_schedule"].learning_rate) == pytest.approx(0.1)
    assert float(names["by_hand"].learning_rate) == pytest.approx(0.01)
    # The scale and the number of the twenty steps.
    assert float(names["resumed"].loss_scale) == 2.0**10
    assert int(names["resumed"].dynamic_counter) == 20


def check_open_seq2seq(names):
    assert float(names["value"]) < 0.01
    optimizer = names["train_op"].optimizer
    assert int(optimizer.iterations.numpy()) + int(optimizer.skipped_steps) == 100


def check_saving(names):
    assert int(names["resumed"].optimizer.iterations) == 2
    if IS_THERE["Orbax"]:
        assert int(names["again"].optimizer.iterations) == 4
    copied, original = names["copied"], names["optimizer"]
    assert copied is not original
    assert int(copied.iterations) == int(original.iterations) == 1
    states = zip(copied.variables, original.variables, strict=True)
    for state, expected in states:
        np.testing.assert_array_equal(state.numpy(), expected.numpy())


CHECKS = {
    "README.md": check_start,
    "docs/custom-loops.md": check_custom_loops,
    "docs/migrating-grad-scaler.md": check_grad_scaler,
    "docs/migrating-optax.md": check_twenty_steps,
    "docs/migrating-tf1.md": check_open_seq2seq,
    "docs/saving.md": check_saving,
}
# The largest difference between "Before:" and "After:", of the weights. Five steps of
# float32 arithmetic on numbers near 3; elsewhere twenty with float16 in between.
TOLERANCE = dict.fromkeys(
    ("docs/migrating.md", "docs/migrating-tf1.md"), {"rtol": 2e-6, "atol": 0}
)
OF_FLOAT16 = {"rtol": 0, "atol": 2e-3}


@pytest.fixture
def clean(clean):
    """A folder to write to, and all settings as they were."""
    if BACKEND == "jax":
        # Compiling is most of the work, and these programs are too small to gain.
        jax = importlib.import_module("jax")
        jax.config.update("jax_disable_most_optimizations", True)
    yield
    if BACKEND == "jax":
        jax.config.update("jax_disable_most_optimizations", False)
    importlib.import_module("matplotlib.pyplot").close("all")


def run(block, names):
    """Runs a block as a part of its page, with the page's own line numbers."""
    source = "\n" * block.line + block.source
    nothing = contextlib.nullcontext
    surroundings = SURROUNDINGS.get(block.directives.get("with"), nothing)
    with surroundings(names):
        exec(compile(source, str(PAGES[block.page]), "exec"), names)


def outcome_of(block, names):
    """Runs a program, and returns its weights and its count of steps."""
    for name in ("w", "weights", "step"):
        names.pop(name, None)
    run(block, names)
    if "weights" in names:
        return [np.array(w) for w in names["weights"]], None
    steps = int(names["step"].numpy()) if "step" in names else None
    return [np.array(names["w"].numpy())], steps


@pytest.mark.filterwarnings(
    "ignore:.*LossScaleOptimizer is deprecated",
    "ignore:The file holds no loss scale",
    *misuse.AS_ERRORS,
)
@pytest.mark.parametrize(
    "page",
    [pytest.param(p, marks=[pytest.mark.full] * (p not in OFTEN)) for p in PROGRAMS],
)
def test_programs_on_pages_run_and_match_before_and_after(page, clean):
    names = {"__name__": "page"}
    before = None
    ran = []
    for block in blocks_of(page):
        is_there = IS_THERE.get(block.directives.get("with"), True)
        if block.language != "python" or not block.runs_here or not is_there:
            continue
        ran.append(block)
        if block.paragraph == "Before:":
            before = outcome_of(block, names)
        elif block.paragraph == "After:" and before is not None:
            weights, steps = outcome_of(block, names)
            tolerance = TOLERANCE.get(page, OF_FLOAT16)
            for ours, theirs in zip(weights, before[0], strict=True):
                np.testing.assert_allclose(ours, theirs, **tolerance)
            assert steps == before[1]
            before = None
        else:
            run(block, names)
    assert before is None, "There is a program before, and none after"
    if not ran:
        pytest.skip("Its programs are for other backends")
    CHECKS.get(page, dict)(names)
