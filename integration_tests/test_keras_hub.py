"""A KerasHub backbone, trained by a recipe for fine-tuning, with LoRA and without."""

import importlib.util
import math
import re

import keras
import numpy as np
import pytest

import keras_lso
from integration_tests.test_examples import BACKEND, NUMBER, run_example

REASON = "KerasHub is not installed: the one in originals.txt needs Keras 3.15"
# Not by an import: it takes a second, also where all is deselected.
pytestmark = [
    pytest.mark.slow,
    # What of it depends on a backend, `test_keras_features.py` trains on each.
    pytest.mark.default_backend("torch"),
    pytest.mark.skipif(importlib.util.find_spec("keras_hub") is None, reason=REASON),
]


@pytest.fixture
def mixed_float16():
    policy = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_float16")
    yield
    keras.config.set_dtype_policy(policy)


@pytest.fixture
def backbone(mixed_float16):
    import keras_hub

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
    rate = keras_lso.schedules.LinearWarmup(0.02, warmup_steps=2)
    inner = keras.optimizers.AdamW(
        rate, weight_decay=0.5, global_clipnorm=1.0, gradient_accumulation_steps=2
    )
    inner.exclude_from_weight_decay(var_names=["bias", "gamma", "beta"])
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


def test_lora_trains_its_factors_and_nothing_else(backbone):
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
    assert float(optimizer.loss_scale) == 2.0**10


def test_without_lora_all_is_trained_and_exclusions_hold(backbone):
    before = values_of(backbone.trainable_weights)
    model = fit(backbone, batches=4)
    # Keys have no bias that counts: softmax is the same for all of them.
    still = set(before) - moved(before, backbone.trainable_weights)
    assert all("key" in path and "bias" in path for path in still)
    inner = model.optimizer.inner_optimizer
    decays = {v.name for v in model.trainable_variables if inner._use_weight_decay(v)}
    excluded = {v.name for v in model.trainable_variables} - decays
    assert excluded == {"bias", "gamma", "beta"}
    assert decays == {"embeddings", "kernel"}


@pytest.mark.filterwarnings("ignore:Skipping variable loading")
def test_a_task_from_a_file_gets_its_optimizer_back_in_three_lines(backbone, tmp_path):
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
    for i, variable in enumerate(optimizer.variables[:-1]):
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


# The tests above train the same backbone.
@pytest.mark.full
def test_the_example_trains_both(tmp_path):
    steps = 40
    printed = run_example(
        "keras_hub_finetune.py", "--steps", str(steps), folder=tmp_path, backend=BACKEND
    )
    rows = re.findall(
        rf"(all weights|LoRA) +([\d,]+) \((\d+)%\) +{NUMBER} +{NUMBER} +{NUMBER}% +"
        rf"2\^(\d+) +(\d+)",
        printed,
    )
    assert [row[0] for row in rows] == ["all weights", "LoRA"]
    for name, _, share, before, after, accuracy, scale, skipped in rows:
        # A new head guesses.
        assert abs(float(before) - math.log(2)) < 0.2
        assert float(after) < float(before)
        # So few steps may leave it at guessing.
        assert 45.0 < float(accuracy) <= 100.0
        # From 2**15; each skipped step halves it, too few follow to double it.
        assert int(scale) == 15 - int(skipped)
        assert int(share) == (100 if name == "all weights" else 6)
    assert int(rows[1][1].replace(",", "")) < 0.1 * int(rows[0][1].replace(",", ""))
    assert f"{steps // 2} updates each, of 2 batches of 32, on {BACKEND}" in printed
    assert "frozen weights LoRA has changed 0." in printed
