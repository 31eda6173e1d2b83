"""`protect_statistics` and the functions for custom loops, on small models.

`integration_tests/test_statistics.py` tests each mode of `fit`, and Keras alone.
"""

import copy
import pickle
import warnings

import keras
import numpy as np
import pytest
from keras import ops

import keras_lso
from testing.harness import bits

BACKEND = keras.backend.backend()
GOOD = np.random.default_rng(0).normal(size=(8, 3)).astype("float32")
BAD = GOOD * np.float32(np.inf)
TARGETS = GOOD[:, :1]
# Eager JAX compiles each operation, and eager TensorFlow nothing.
FASTEST = {"run_eagerly": BACKEND != "jax"}


class Keeper(keras.layers.Layer):
    """Has variables of several dtypes, and writes all of them in training."""

    def build(self, input_shape):
        def keep(name, dtype, initial):
            return self.add_weight(
                name=name,
                shape=(),
                dtype=dtype,
                initializer=lambda shape, dtype: ops.full(shape, initial, dtype),
                trainable=False,
            )

        self.kept = [
            keep("count", "int32", 7),
            keep("zero", "float32", -0.0),
            keep("nan", "float32", np.nan),
            keep("half", "float16", 2.0**-24),
            keep("flag", "bool", True),
        ]

    def call(self, inputs, training=None):
        if training:
            count, zero, nan, half, flag = self.kept
            count.assign(count + 1)
            zero.assign(zero + ops.cast(ops.max(inputs), "float32"))
            nan.assign(ops.cast(count, "float32"))
            half.assign(ops.cast(ops.mean(inputs), "float16"))
            flag.assign(ops.logical_not(flag))
        return inputs


def make_model(*layers):
    return keras.Sequential([keras.Input((3,)), *layers, keras.layers.Dense(1)])


def scaling(rate=0.01, **options):
    """An optimizer of a fixed scale: a skipped step does not change later ones."""
    inner = keras.optimizers.SGD(rate, **options)
    return keras_lso.LossScaleOptimizer(inner, dynamic=False, initial_scale=8.0)


def compile_(model, optimizer=None, **options):
    options = options or FASTEST
    model.compile(optimizer or scaling(), loss="mse", **options)
    return model


def is_finite(variables):
    return all(np.isfinite(ops.convert_to_numpy(v)).all() for v in variables)


def all_that_layers_keep():
    return make_model(
        keras.layers.BatchNormalization(),
        keras.layers.GaussianNoise(0.1),
        keras.layers.SpectralNormalization(keras.layers.Dense(3)),
        # As nested as a model may be.
        keras.Sequential([keras.Sequential([Keeper()])]),
    )


@pytest.mark.parametrize(
    "mode",
    [
        pytest.param("eager", marks=[pytest.mark.full] if BACKEND == "jax" else []),
        "compiled",
    ],
)
def test_skipped_step_leaves_layer_statistics_bitwise_unchanged(mode):
    model = compile_(all_that_layers_keep(), run_eagerly=mode == "eager")
    keras_lso.protect_statistics(model)
    kept = model.non_trainable_weights
    names = {v.name for v in kept}
    assert {"moving_mean", "vector_u", "count", "zero", "nan", "flag"} <= names
    for skipped in range(2):
        start = bits(kept)
        model.train_on_batch(BAD, TARGETS)
        assert bits(kept) == start
        assert int(model.optimizer.skipped_steps) == skipped + 1
        # The kernel is divided by its norm in the forward pass, also of a skipped step.
        assert is_finite(model.trainable_variables)
        model.train_on_batch(GOOD, TARGETS)
        # The applied step wrote each of them.
        assert all(a != b for a, b in zip(bits(kept), start, strict=True))


def test_skipped_step_still_advances_seed_generators_and_metrics():
    model = compile_(all_that_layers_keep())
    keras_lso.protect_statistics(model)
    [seed] = [v for v in model.variables if "seed_generator" in v.path]
    model.train_on_batch(GOOD, TARGETS)
    before, logs = bits([seed]), model.get_metrics_result()
    model.train_on_batch(BAD, TARGETS)
    assert bits([seed]) != before
    assert np.isfinite(logs["loss"])
    assert not np.isfinite(model.get_metrics_result()["loss"])


def test_model_built_by_fit_is_protected_from_first_step():
    layers = [keras.layers.BatchNormalization(), keras.layers.Dense(1)]
    model = keras_lso.protect_statistics(keras.Sequential(layers))
    compile_(model, run_eagerly=False)
    model.fit(BAD, TARGETS, verbose=0)
    assert model.layers[0].moving_mean.numpy().tolist() == [0.0, 0.0, 0.0]
    assert model.layers[0].moving_variance.numpy().tolist() == [1.0, 1.0, 1.0]


@pytest.mark.skipif(BACKEND != "torch", reason="PyTorch's modules")
def test_skipped_step_restores_buffers_of_torch_module():
    import torch

    module = torch.nn.BatchNorm1d(3)
    layer = keras.layers.TorchModuleWrapper(module, output_shape=(None, 3))
    model = compile_(keras.Sequential([keras.Input((3,)), layer]))
    keras_lso.protect_statistics(model)
    model.train_on_batch(GOOD, GOOD)
    before = [np.array(buffer) for buffer in module.buffers()]
    model.train_on_batch(BAD, GOOD)
    # The mean, the variance, and how many batches there were: 1.
    assert bits(module.buffers()) == bits(before)
    assert int(module.num_batches_tracked) == 1


@pytest.mark.skipif(BACKEND != "jax", reason="JAX's functions")
def test_skipped_step_restores_state_of_jax_layer():
    def initialised(rng, inputs):
        return {"kernel": ops.ones((3, 1))}, {"mean": ops.zeros(())}

    def called(params, state, inputs, training):
        mean = 0.5 * state["mean"] + 0.5 * ops.mean(inputs)
        return ops.matmul(inputs, params["kernel"]), {"mean": mean}

    layer = keras.layers.JaxLayer(called, initialised)
    model = compile_(keras.Sequential([keras.Input((3,)), layer]))
    keras_lso.protect_statistics(model)
    model.train_on_batch(GOOD, TARGETS)
    before = bits(model.non_trainable_variables)
    model.train_on_batch(BAD, TARGETS)
    assert bits(model.non_trainable_variables) == before
    assert is_finite(model.variables)


def module_that_replaces(torch, keep):
    """A module that replaces a buffer by another tensor in each call."""

    class Replaces(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(3, 3)
            self.register_buffer("last", torch.zeros(8, 3))

        def forward(self, inputs):
            self.last = keep(inputs)
            return self.linear(inputs)

    layer = keras.layers.TorchModuleWrapper(Replaces(), output_shape=(None, 3))
    return compile_(keras.Sequential([keras.Input((3,)), layer])), layer.module


@pytest.mark.skipif(BACKEND != "torch", reason="PyTorch's modules")
def test_skipped_step_restores_buffer_replaced_by_module():
    import torch

    model, module = module_that_replaces(torch, lambda inputs: inputs)
    keras_lso.protect_statistics(model)
    good, bad, targets = map(torch.tensor, (GOOD, BAD, GOOD))
    model.train_step((good, targets))
    assert module.last is good
    model.train_step((bad, targets))
    assert bits([module.last, good]) == bits([GOOD, GOOD])
    # The buffer was the caller's tensor, which must not be written to.
    assert bits([bad]) == bits([BAD])


@pytest.mark.skipif(BACKEND != "torch", reason="PyTorch's modules")
def test_error_names_buffer_whose_shape_changes():
    import torch

    model, _ = module_that_replaces(torch, lambda inputs: inputs)
    keras_lso.protect_statistics(model)
    model.train_on_batch(GOOD, GOOD)
    with pytest.raises(ValueError, match=r"another shape.*torch_module_wrapper.*last"):
        model.train_on_batch(GOOD[:4], GOOD[:4])


def test_skipped_micro_batch_does_not_affect_training():
    def train(batches):
        model = make_model(keras.layers.BatchNormalization())
        model.layers[-1].kernel.assign(np.ones((3, 1), "float32"))
        compile_(model, scaling(gradient_accumulation_steps=2))
        keras_lso.protect_statistics(model)
        for batch in batches:
            model.train_on_batch(batch, TARGETS)
        return model

    other = GOOD[::-1] * 2
    model = train([GOOD, BAD, other, GOOD, other, BAD])
    assert int(model.optimizer.skipped_steps) == 2
    assert bits(model.weights) == bits(train([GOOD, other, GOOD, other]).weights)


class Teacher(keras.Model):
    """Its frozen part follows the trained one, as in self-supervised training."""

    def __init__(self):
        super().__init__()
        self.student, self.teacher = keras.layers.Dense(1), keras.layers.Dense(1)
        self.teacher.trainable = False

    def build(self, input_shape):
        self.student.build(input_shape)
        self.teacher.build(input_shape)
        self.built = True

    def call(self, inputs):
        return self.student(inputs) - self.teacher(inputs)

    def train_step(self, *args):
        if BACKEND != "jax":
            logs = super().train_step(*args)
            for v in self.teacher.weights:
                v.assign(v + 1.0)
            return logs
        logs, (trainable, frozen, *others) = super().train_step(*args)
        return logs, (trainable, [v + 1.0 for v in frozen], *others)


def test_skipped_step_restores_frozen_weights_written_by_train_step():
    model = Teacher()
    model.build((None, 3))
    keras_lso.protect_statistics(compile_(model))
    before = bits(model.teacher.weights)
    model.train_on_batch(BAD, TARGETS)
    assert bits(model.teacher.weights) == before
    model.train_on_batch(GOOD, TARGETS)
    assert bits(model.teacher.weights) != before


@pytest.mark.skipif(BACKEND != "jax", reason="Keras's train step on JAX")
def test_optimizer_with_state_outside_train_step_is_rejected():
    model = compile_(make_model(), keras.optimizers.SGD())
    model.second_optimizer = scaling()
    with pytest.raises(ValueError, match=r"model\.optimizer=<keras.*SGD"):
        keras_lso.protect_statistics(model)


@pytest.mark.parametrize("when", ["before compile", "before the next compile", "twice"])
def test_protect_statistics_works_before_compile_and_when_repeated(when):
    model = make_model(keras.layers.BatchNormalization())
    if when != "before compile":
        compile_(model, run_eagerly=False)
    assert keras_lso.protect_statistics(model) is model
    if when == "twice":
        step = model.train_step
        keras_lso.protect_statistics(model)
        assert model.train_step is step
    else:
        compile_(model, scaling(), run_eagerly=False)
    model.train_on_batch(BAD, TARGETS)
    assert is_finite(model.weights)


def test_protect_statistics_rebuilds_existing_train_function():
    model = compile_(make_model(keras.layers.BatchNormalization()), run_eagerly=False)
    model.train_on_batch(GOOD, TARGETS)
    made = model.train_function
    keras_lso.protect_statistics(model)
    assert model.train_function is not made
    before = bits(model.weights)
    model.train_on_batch(BAD, TARGETS)
    assert bits(model.weights) == before


def test_protect_statistics_finds_loss_scale_optimizer_inside_larc():
    optimizer = keras_lso.LARC(scaling())
    model = compile_(make_model(keras.layers.BatchNormalization()), optimizer)
    keras_lso.protect_statistics(model)
    model.train_on_batch(BAD, TARGETS)
    assert is_finite(model.weights)


def test_copy_of_protected_model_is_not_protected():
    model = compile_(make_model(keras.layers.BatchNormalization()))
    keras_lso.protect_statistics(model)
    model.train_on_batch(GOOD, TARGETS)
    for copied in (
        copy.copy(model),
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
    ):
        assert bits(copied.weights) == bits(model.weights)
        with pytest.warns(UserWarning, match="a copy of a model under `protect_stat"):
            copied.train_on_batch(BAD, TARGETS)
        assert not is_finite(copied.weights)
        assert is_finite(model.weights)


@pytest.mark.parametrize("load", [keras_lso.load_model, keras.saving.load_model])
@pytest.mark.parametrize("wrap", [None, keras_lso.GuardedOptimizer])
def test_protected_model_round_trips_through_file(load, wrap, tmp_path):
    optimizer = wrap and wrap(keras.optimizers.SGD(0.1))
    model = compile_(make_model(keras.layers.BatchNormalization()), optimizer)
    model.train_on_batch(GOOD, TARGETS)
    config, weights = model.get_config(), bits(model.variables)
    keras_lso.protect_statistics(model)
    assert model.get_config() == config
    model.save(tmp_path / "model.keras")
    loaded = load(tmp_path / "model.keras")
    assert bits(loaded.variables) == weights
    assert bits(loaded.optimizer.variables) == bits(model.optimizer.variables)
    loaded = keras_lso.protect_statistics(loaded)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loaded.train_on_batch(BAD, TARGETS)
    assert is_finite(loaded.weights)
    loaded.save(tmp_path / "again.keras")
    loaded = load(tmp_path / "again.keras")
    with pytest.warns(UserWarning, match="call `keras_lso.protect_statistics"):
        loaded.fit(GOOD, TARGETS, verbose=0)


def test_custom_loop_restores_values_written_by_skipped_step(compiled):
    model, optimizer = make_model(keras.layers.BatchNormalization()), scaling()
    optimizer.build(model.trainable_variables)

    def step(x):
        with keras_lso.restore_if_skipped(model, optimizer):
            optimizer.minimize(
                lambda: ops.mean(ops.square(model(x, training=True))),
                model.trainable_variables,
            )

    variables = [*model.variables, *optimizer.variables]
    step = compiled(step, variables)
    step(ops.convert_to_tensor(GOOD))
    before = bits(model.variables)
    step(ops.convert_to_tensor(BAD))
    assert int(optimizer.skipped_steps) == 1
    assert bits(model.variables) == before
    step(ops.convert_to_tensor(GOOD))
    assert bits(model.non_trainable_variables) != before[-2:]


def test_custom_loop_accepts_several_models_and_optimizers():
    models = [make_model(keras.layers.BatchNormalization()) for _ in "ab"]
    optimizers = [scaling(), scaling()]
    before = bits([v for model in models for v in model.non_trainable_variables])
    with keras_lso.restore_if_skipped(models, optimizers):
        for model, optimizer, x in zip(models, optimizers, [BAD, GOOD], strict=True):
            optimizer.minimize(
                lambda model=model, x=x: ops.mean(model(x, training=True)),
                model.trainable_variables,
            )
    after = bits([v for model in models for v in model.non_trainable_variables])
    assert after == before


def test_custom_loop_rejects_model_that_creates_variables_inside():
    model = keras.Sequential([keras.layers.BatchNormalization()])
    message = r"has created variables.*call it on a batch.*moving_mean"
    with (
        pytest.raises(ValueError, match=message),
        keras_lso.restore_if_skipped(model, scaling()),
    ):
        model(GOOD)


@pytest.mark.skipif(
    BACKEND == "tensorflow", reason="Keras has no stateless_apply on TensorFlow."
)
@pytest.mark.parametrize("bad", [False, True])
def test_stateless_restore_returns_old_statistics_only_after_skipped_step(bad):
    model = make_model(
        keras.layers.BatchNormalization(), keras.layers.GaussianNoise(0.1)
    )
    optimizer = scaling()
    optimizer.build(model.trainable_variables)
    state = [ops.copy(v.value) for v in optimizer.variables]
    trainable = [ops.copy(v.value) for v in model.trainable_variables]
    old = [ops.copy(v.value) for v in model.non_trainable_variables]
    x = ops.convert_to_tensor(BAD if bad else GOOD)
    _, new = model.stateless_call(trainable, old, x, training=True)
    grads = [ops.full_like(v, np.nan if bad else 1.0) for v in trainable]
    _, new_state = optimizer.stateless_apply(state, grads, trainable)
    selected = keras_lso.stateless_restore_if_skipped(
        model, optimizer, (old, state), (new, new_state)
    )
    names = [v.name for v in model.non_trainable_variables]
    assert len(set(names)) == 3
    for name, one, before, after in zip(names, selected, old, new, strict=True):
        # A seed moves on: the next batch needs another mask.
        is_restored = bad and name.startswith("moving")
        assert bits([one]) == bits([before if is_restored else after])
        assert bits([before]) != bits([after])


@pytest.mark.parametrize(
    "dtype, wrapper",
    [
        ("float32", "Guarded"),
        ("mixed_bfloat16", "Guarded"),
        ("mixed_float16", "LossScale"),
    ],
)
def test_error_names_wrapper_for_dtype_of_model(dtype, wrapper):
    layer = keras.layers.Dense(1, dtype=dtype)
    model = keras.Sequential([keras.Input((2,)), layer])
    model.compile(keras.optimizers.SGD(), loss="mse", auto_scale_loss=False)
    line = rf"Write `model.compile\(keras_lso.{wrapper}Optimizer\(optimizer\), "
    with pytest.raises(ValueError, match=line):
        keras_lso.protect_statistics(model)
    with pytest.raises(ValueError, match=f"LossScaleMonitor needs .*{line}"):
        model.fit(
            np.ones((4, 2)),
            np.ones((4, 1)),
            verbose=0,
            callbacks=[keras_lso.callbacks.LossScaleMonitor()],
        )


@pytest.mark.parametrize(
    "make",
    [
        lambda: "adam",
        keras.optimizers.SGD,
        lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD()),
    ],
    ids=["string", "bare", "Keras's own"],
)
def test_model_without_keras_lso_optimizer_is_rejected(make):
    message = r"Write `model.compile\(keras_lso.GuardedOptimizer\(optimizer\), "
    model = compile_(make_model(), make())
    with pytest.raises(ValueError, match=message):
        keras_lso.protect_statistics(model)
    assert "train_step" not in vars(model)
    later = keras_lso.protect_statistics(make_model())
    compile_(later, make())
    with pytest.raises(ValueError, match=message):
        later.train_on_batch(GOOD, TARGETS)


def test_protect_statistics_rejects_nnx(monkeypatch):
    monkeypatch.setattr(keras.config, "is_nnx_enabled", lambda: True)
    with pytest.raises(ValueError, match=r"set_nnx_enabled\(True\)"):
        keras_lso.protect_statistics(make_model())


def test_swapped_or_missing_arguments_are_rejected():
    for other in (keras.layers.Dense(1), scaling(), None):
        with pytest.raises(TypeError, match="`model` must be a `keras.Model`"):
            keras_lso.protect_statistics(other)
    model, optimizer, sgd = make_model(), scaling(), keras.optimizers.SGD()
    for arguments, words in (
        ((optimizer, model), "`model` must be"),
        ((model, sgd), "`optimizer` must be a `keras_lso.Loss"),
        ((model, None), "`optimizer` must be a `keras_lso.Loss"),
        ((model, [optimizer, sgd]), "`optimizer` must be a `keras_lso.Loss"),
    ):
        with (
            pytest.raises(TypeError, match=words),
            keras_lso.restore_if_skipped(*arguments),
        ):
            pass
    restore = keras_lso.stateless_restore_if_skipped
    for arguments in (([model], optimizer), (model, [optimizer])):
        with pytest.raises(TypeError, match="must be a `keras"):
            restore(*arguments, ([], []), ([], []))
    model = make_model(keras.layers.BatchNormalization())
    optimizer.build(model.trainable_variables)
    values = model.non_trainable_variables, optimizer.variables
    with pytest.raises(ValueError, match=r"`after` must be .* of the lengths \[2, "):
        restore(model, optimizer, values, ([], []))
