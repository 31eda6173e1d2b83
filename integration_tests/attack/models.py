"""Random models in `train_on_batch`, saved and loaded on the way."""

import tempfile
from pathlib import Path

import keras
import numpy as np

import keras_lso
from integration_tests.attack import optimizers, policies
from integration_tests.attack.execution import array, bits
from integration_tests.attack.gradients import NOT_FINITE
from integration_tests.attack.optimizers import one_of
from integration_tests.attack.reference import Fault

POLICIES = ["float32", "mixed_float16", "float16", "mixed_bfloat16", "bfloat16"]
# In a step that is compiled as a whole, others have no part that these have not.
INNER = ["SGD", "Adam", "AdamW", "RMSprop", "Lion", "LARS", "NovoGrad"]
BATCH_SIZE, INPUTS = 4, 3


def make_model(random, words):
    dtype_policy, inner = one_of(*POLICIES)(random), optimizers.single(random, INNER)
    policy, widths = policies.policy(random), random.choice([1, 2, 5], 2)
    normalizes = random.random() < 0.5
    words.append(f"{dtype_policy}, {widths}, {normalizes}, {inner}, {policy}")
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(dtype_policy)
    try:
        layers = [keras.layers.Dense(int(w), activation="tanh") for w in widths]
        layers += [keras.layers.BatchNormalization()] * normalizes
        layers = [keras.Input((INPUTS,)), *layers, keras.layers.Dense(1)]
        model = keras.Sequential(layers)
    finally:
        keras.config.set_dtype_policy(before)
    optimizer = keras_lso.LossScaleOptimizer(inner.make(), loss_scale=policy.make())
    model.compile(optimizer, loss="mse")
    return model


def owned(model):
    """What a skipped step leaves as it is: not the statistics of the forward pass."""
    optimizer = model.optimizer
    inner, masters = optimizer.inner_optimizer, optimizer._masters
    return bits([*model.trainable_variables, *inner.variables, *masters.variables])


def attack(mode, random, tally, words):
    """Trains a model: see `integration_tests.attack.run.attack`."""
    models = [make_model(random, words)]
    batches = int(random.integers(3, 6))
    saved = random.integers(1, batches)
    for number in range(batches):
        if number == saved:
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder, "model.keras")
                models[0].save(path)
                models.append(keras.saving.load_model(path))
        x = random.normal(size=(BATCH_SIZE, INPUTS)).astype("float32")
        y = random.normal(size=(BATCH_SIZE, 1)).astype("float32")
        overflows = bool(random.random() < 0.4)
        if overflows:
            # Whatever the layers make of the inputs, the loss is not finite.
            y[0, 0] = random.choice(NOT_FINITE)
        for model in models:
            step(model, x, y, overflows)
            tally["steps"] += 1
        if any(owned(model) != owned(models[0]) for model in models[1:]):
            raise Fault("A loaded model goes on in another way than the original")
        tally["batches as of the original"] += len(models) - 1


def step(model, x, y, overflows):
    optimizer = model.optimizer
    before = (owned(model), int(optimizer.skipped_steps)) if optimizer.built else None
    model.train_on_batch(x, y)
    skipped = not bool(optimizer.last_step_applied)
    # The scale may be so high that other steps overflow as well.
    if overflows and not skipped:
        raise Fault("A step that overflows was applied")
    if before is not None and int(optimizer.skipped_steps) != before[1] + skipped:
        raise Fault("A skipped step was not counted")
    if before is not None and skipped and owned(model) != before[0]:
        raise Fault("A skipped step changed something")
    policy, scale = optimizer.loss_scale_policy, float(array(optimizer.loss_scale))
    if not np.float32(policy.min_scale) <= scale <= np.float32(policy.max_scale):
        raise Fault(f"The scale is {scale}")
    if not all(np.isfinite(array(w)).all() for w in model.trainable_variables):
        raise Fault("A weight is not finite")
