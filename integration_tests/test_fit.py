"""`compile`, `fit` and their relatives on a mixed_float16 model, in every mode.

The modes are those in which Keras runs a training step: compiled by XLA or by
`torch.compile`, as a plain graph, eagerly, and several steps at once.
"""

import functools

import keras
import numpy as np
import pytest

import keras_lso
from testing.keras_versions import compiles_backward_pass, takes_several_steps
from testing.tiers import full_but_for

MODES = {
    "jit_compile=True": {"jit_compile": True},
    "jit_compile=False": {"jit_compile": False},
    "jit_compile=auto": {"jit_compile": "auto"},
    "run_eagerly=True": {"run_eagerly": True},
}

POLICIES = {
    "float32": keras_lso.GuardedOptimizer,
    "mixed_float16": keras_lso.LossScaleOptimizer,
    "float16": keras_lso.LossScaleOptimizer,
    "bfloat16": keras_lso.GuardedOptimizer,
}

# In float16 this scale times any gradient above 65504 / 2**24 = 0.004 is inf.
OVERFLOWING_SCALE = 2.0**24


@pytest.fixture
def compiled(make_model):
    """Builds and compiles the mixed_float16 model with an SGD and its wrapper."""

    def build(initial_scale=None, compile_options=None, **wrapper):
        model = make_model()
        optimizer = keras_lso.LossScaleOptimizer(
            keras.optimizers.SGD(0.1, momentum=0.5),
            initial_scale=initial_scale,
            **wrapper,
        )
        model.compile(optimizer, loss="mse", **(compile_options or {}))
        return model

    return build


def test_loss_that_a_model_scales_itself_is_rejected():
    class Model(keras.Sequential):
        def compute_loss(self, *args, **kwargs):
            return self.optimizer.scale_loss(super().compute_loss(*args, **kwargs))

    model = Model([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(keras_lso.LossScaleOptimizer(keras.optimizers.SGD(0.1)), loss="mse")
    with pytest.raises(ValueError, match="`fit`.* as it is"):
        model.fit(np.ones((4, 2)), np.ones((4, 1)), verbose=0)


def test_compile_does_not_wrap_loss_scale_optimizer_again(make_model):
    model = make_model()
    optimizer = keras_lso.LossScaleOptimizer(keras.optimizers.SGD(0.1))
    model.compile(optimizer, loss="mse")
    assert model.optimizer is optimizer

    # The same model would have wrapped another optimizer.
    model.compile(keras.optimizers.SGD(0.1), loss="mse")
    assert type(model.optimizer) is keras.optimizers.LossScaleOptimizer


# `torch.compile` takes ten seconds.
TAKES_LONG = {"torch": "jit_compile=True"}.get(keras.backend.backend())
IS_TORCH = keras.backend.backend() == "torch"
on_torch = pytest.mark.skipif(not IS_TORCH, reason="It is PyTorch's own.")


@pytest.mark.parametrize("mode", full_but_for(MODES.keys() - {TAKES_LONG}, MODES))
def test_fit_settles_on_scale_that_float16_can_hold(
    mode, compiled, data, make_recorder
):
    model = compiled(OVERFLOWING_SCALE, MODES[mode])
    recorder = make_recorder()
    # Here Keras builds the optimizer, within the step. Our fixture `fit` would do so.
    options = {"batch_size": 8, "shuffle": False, "verbose": 0}
    history = model.fit(*data, epochs=6, callbacks=[recorder], **options)

    steps, optimizer = recorder.steps, model.optimizer
    assert len(steps) == 24
    skipped = steps[-1].skipped
    # From 2**24 it takes some halvings, one a skipped step, and then the scale holds.
    assert steps[0].skipped == 1
    assert 2 <= skipped <= 15
    assert steps[16].skipped == skipped
    assert recorder.column("scale") == [
        OVERFLOWING_SCALE * 0.5**step.skipped for step in steps
    ]
    assert int(optimizer.skipped_steps) == skipped
    assert int(optimizer.iterations) == 24 - skipped
    assert bool(optimizer.last_step_applied)
    assert recorder.weights_are_finite
    assert history.history["loss"][-1] < 0.5 * history.history["loss"][0]


@on_torch
# The first traces as the second does, and runs the graph without a C++ compiler.
@pytest.mark.parametrize(
    "compiler", ["aot_eager", pytest.param("inductor", marks=pytest.mark.full)]
)
def test_step_under_torch_compile_applies_or_skips(compiler, values):
    import torch

    optimizer = keras_lso.LossScaleOptimizer(
        keras.optimizers.SGD(0.5), initial_scale=1024.0
    )
    variable = keras.Variable([1.0, -0.0])
    optimizer.build([variable])
    step = torch.compile(
        lambda gradient: optimizer.apply([gradient], [variable]), backend=compiler
    )
    with torch.no_grad():
        step(torch.tensor([1024.0, 2048.0]))
        np.testing.assert_array_equal(values([variable])[0], [0.5, -1.0])
        step(torch.tensor([np.inf, 2048.0]))
        np.testing.assert_array_equal(values([variable])[0], [0.5, -1.0])
    assert (int(optimizer.iterations), int(optimizer.skipped_steps)) == (1, 1)
    assert float(optimizer.loss_scale) == 512.0


@on_torch
@pytest.mark.parametrize("policy", full_but_for({"mixed_float16"}, POLICIES))
def test_compiled_step_has_no_more_graphs_than_bare_optimizer(
    policy, make_model, data, fit, monkeypatch
):
    import torch
    from torch._dynamo.utils import counters

    # Without Inductor: the graphs are the same.
    compile_ = functools.partial(torch.compile, backend="eager")
    monkeypatch.setattr(torch, "compile", compile_)
    counts = []
    for wrap in (POLICIES[policy], lambda inner: inner):
        torch._dynamo.reset()
        counters.clear()
        model = make_model(policy)
        optimizer = wrap(keras.optimizers.Adam(0.01))
        model.compile(optimizer, loss="mse", jit_compile=True, auto_scale_loss=False)
        fit(model, *data, epochs=2)
        graphs = counters["stats"]["unique_graphs"]
        counts.append((graphs, sum(counters["graph_break"].values())))
    assert counts[0] <= counts[1]
    assert counts[0] == (1, 0) or not compiles_backward_pass


def test_compiled_fit_and_eager_fit_continue_each_other(
    compiled, data, fit, with_overflows, values, assert_close, tmp_path
):
    x, y = data
    x = with_overflows(x, [1])
    results = []
    for second in ("jit_compile=True", "run_eagerly=True"):
        model = compiled(compile_options=MODES["run_eagerly=True"])
        fit(model, x, y)
        for options in (MODES[second], MODES["run_eagerly=True"]):
            model.save(tmp_path / "model.keras")
            model = keras.saving.load_model(tmp_path / "model.keras")
            model.compile(model.optimizer, loss="mse", **options)
            fit(model, x, y)
        assert int(model.optimizer.skipped_steps) == 3
        found = values([*model.trainable_variables, *model.optimizer.variables])
        results.append([np.concatenate([v.ravel() for v in found])])
    assert_close(*results, share=2.0**-11)


@pytest.mark.parametrize(
    # On a CPU they are the same but on JAX, and compiled by PyTorch.
    "mode",
    full_but_for({"jit_compile=auto", TAKES_LONG}, MODES.keys() - {"run_eagerly=True"}),
)
def test_fit_gives_same_weights_in_each_mode(
    mode, compiled, data, fit, with_overflows, values, assert_close
):
    x, y = data
    x = with_overflows(x, [1])
    weights = []
    for compile_options in (MODES[mode], MODES["run_eagerly=True"]):
        model = compiled(compile_options=compile_options)
        fit(model, x, y, epochs=2)
        assert int(model.optimizer.skipped_steps) == 2
        found = values(model.trainable_variables)
        weights.append([np.concatenate([v.ravel() for v in found])])
    # A compiler may leave out a rounding to float16 (2**-11) within the model. Sums
    # over a batch cancel: errors are relative to the largest weight, not to each bias.
    assert_close(*weights, share=2.0**-11)


def test_keras_methods_report_unscaled_losses(compiled, data):
    x, y = (array[:8] for array in data)
    model = compiled()
    prediction = model.predict(x, verbose=0)
    assert prediction.dtype == "float16"
    expected = np.mean((prediction.astype("float32") - y) ** 2)
    # The loss of float16 outputs is computed in float16 or in float32.
    tolerance = 4 * 2.0**-11
    assert model.evaluate(x, y, verbose=0) == pytest.approx(expected, rel=tolerance)
    assert model.test_on_batch(x, y) == pytest.approx(expected, rel=tolerance)
    assert model.train_on_batch(x, y) == pytest.approx(expected, rel=tolerance)


@pytest.mark.skipif(
    not takes_several_steps,
    reason="Keras refuses steps_per_execution above 1 on PyTorch before 3.16.",
)
@pytest.mark.parametrize(
    "mode",
    ["jit_compile=False", pytest.param("jit_compile=True", marks=pytest.mark.full)],
)
def test_several_steps_per_execution_match_single_steps(
    mode, compiled, data, fit, with_overflows, values, assert_close
):
    x, y = data
    x = with_overflows(x, [2])
    state = []
    for steps in (1, 3):
        options = {"steps_per_execution": steps, **MODES[mode]}
        model = compiled(dynamic_growth_steps=2, compile_options=options)
        fit(model, x, y, epochs=2)
        optimizer = model.optimizer
        assert (int(optimizer.iterations), int(optimizer.skipped_steps)) == (6, 2)
        state.append(values(optimizer.variables + model.trainable_variables))
    # Two programs: the compiler may leave out another rounding to float16.
    assert_close(*state, share=4 * 2.0**-11)
