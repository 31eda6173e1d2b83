"""A KerasHub backbone, trained by a recipe for fine-tuning, with LoRA and without."""

import keras
import numpy as np
import pytest

import keras_lso
from testing.keras_versions import import_keras_hub

pytestmark = [
    pytest.mark.slow,
    # `test_inner_optimizers.py` trains the parts that depend on the backend.
]


@pytest.fixture(params=["mixed_float16", "bfloat16"])
def policy(request):
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(request.param)
    yield request.param
    keras.config.set_dtype_policy(before)


@pytest.fixture
def backbone(policy):
    keras_hub = import_keras_hub()
    # As in the example: with dropout JAX's attention has a float16 on a CPU.
    return keras_hub.models.BertBackbone(
        vocabulary_size=16,
        num_layers=1,
        num_heads=2,
        hidden_dim=8,
        intermediate_dim=8,
        dropout=0.1,
        max_sequence_length=4,
    )


def make_optimizer():
    # Of micro-batches: a window has a rate that rises.
    warmup = keras_lso.schedules.LinearWarmup(0.02, warmup_steps=2)
    rate = keras_lso.schedules.PerUpdate(warmup, 1)
    inner = keras.optimizers.AdamW(
        rate, weight_decay=0.5, global_clipnorm=1.0, gradient_accumulation_steps=2
    )
    inner.exclude_from_weight_decay(var_names=["bias", "gamma", "beta"])
    if keras.config.dtype_policy().name == "bfloat16":
        return keras_lso.GuardedOptimizer(inner)
    return keras_lso.LossScaleOptimizer(inner, initial_scale=2.0**10)


def fit(backbone, batches):
    head = keras.layers.Dense(2, dtype="float32", name="head")
    model = keras.Model(backbone.input, head(backbone.output["pooled_output"]))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(make_optimizer(), loss)
    tokens = (
        np.random.default_rng(0).integers(16, size=(4 * batches, 4)).astype("int32")
    )
    inputs = {
        "token_ids": tokens,
        "segment_ids": np.zeros_like(tokens),
        "padding_mask": np.ones_like(tokens),
    }
    model.fit(inputs, tokens[:, 0] % 2, batch_size=4, shuffle=False, verbose=0)
    return model


def values_of(variables):
    return {v.path: keras.ops.convert_to_numpy(v) for v in variables}


def moved(before, variables):
    return {
        path
        for path, value in values_of(variables).items()
        if (value != before[path]).any()
    }


def test_lora_trains_only_its_factors(backbone, policy):
    backbone.enable_lora(2)
    factors = values_of(backbone.trainable_weights)
    frozen = values_of(backbone.non_trainable_weights)
    # Of attention's queries and values: two factors each, and the biases.
    assert sorted(path.rpartition("/")[2] for path in factors) == sorted(
        2 * ["bias", "lora_kernel_a", "lora_kernel_b"]
    )
    model = fit(backbone, batches=8)
    optimizer = model.optimizer
    assert moved(factors, backbone.trainable_weights) == set(factors)
    assert moved(frozen, backbone.non_trainable_weights) == set()
    assert int(optimizer.skipped_steps) == 0
    # Two batches an update.
    assert int(optimizer.inner_optimizer.iterations) == 4
    assert float(optimizer.loss_scale) == (1.0 if policy == "bfloat16" else 2.0**10)
    # The factors are float32 since Keras 3.15: what is left are biases.
    masters = [v.name for v in optimizer._masters.variables]
    assert masters == (2 * ["bias"] if policy == "bfloat16" else [])


# Without a loss scale there is none in the file.
@pytest.mark.parametrize("policy", ["mixed_float16"], indirect=True)
@pytest.mark.filterwarnings("ignore:Skipping variable loading")
def test_keras_hub_task_regains_optimizer_state_from_file(backbone, tmp_path):
    """As docs/saving.md says: a task has the default optimizer of its class."""
    import keras_hub

    def compile_(task):
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        task.compile(make_optimizer(), loss=loss)
        task.optimizer.build(task.trainable_variables)
        return task

    task = keras_hub.models.BertTextClassifier(
        backbone, num_classes=2, preprocessor=None
    )
    optimizer = compile_(task).optimizer
    # The second is the learning rate, which is unused.
    steps, _, *others = optimizer.variables[:-1]
    for i, variable in enumerate([steps, *others]):
        variable.assign(np.full(variable.shape, i % 7 + 1))
    path = tmp_path / "task.keras"
    task.save(path)
    for load in (keras.saving.load_model, keras_lso.load_model):
        loaded = load(path)
        assert not isinstance(loaded.optimizer, keras_lso.LossScaleOptimizer)
        compile_(loaded).load_weights(path)
        for new, old in zip(
            loaded.optimizer._state.variables, optimizer._state.variables, strict=True
        ):
            np.testing.assert_array_equal(new.numpy(), old.numpy())
