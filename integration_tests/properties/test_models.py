"""The invariants in `train_on_batch`: random models, saved and loaded on the way."""

import dataclasses

import hypothesis
import keras
import numpy as np
from hypothesis import strategies as st

import keras_lso
from integration_tests.properties import execution, optimizers, policies
from integration_tests.properties.budget import cases as tried_on

# In a step that XLA or AutoGraph makes of the whole model these have no part that the
# others have not, and each takes seconds to compile.
INNER = ["SGD", "Nesterov", "Adam", "AdamW", "RMSprop", "Lion", "LARS", "NovoGrad"]
BATCH_SIZE, INPUTS = 4, 3


@dataclasses.dataclass
class Training:
    """A model, what trains it, and which of its batches overflow.

    Args:
        dtype_policy: String.
        widths: List of ints, of the hidden layers.
        normalizes: Bool. Whether there is a BatchNormalization.
        inner: `optimizers.Inner`.
        policy: `policies.Policy`.
        overflows: List of bools, one for each batch.
        saved: Int. The number of batches after which it is saved.
    """

    dtype_policy: str
    widths: list
    normalizes: bool
    inner: optimizers.Inner
    policy: policies.Policy
    overflows: list
    saved: int

    def make_model(self):
        before = keras.config.dtype_policy()
        keras.config.set_dtype_policy(self.dtype_policy)
        try:
            layers = [keras.layers.Dense(w, activation="tanh") for w in self.widths]
            if self.normalizes:
                layers.insert(1, keras.layers.BatchNormalization())
            model = keras.Sequential(
                [keras.Input((INPUTS,)), *layers, keras.layers.Dense(1)]
            )
        finally:
            keras.config.set_dtype_policy(before)
        optimizer = keras_lso.LossScaleOptimizer(
            self.inner.make(), loss_scale=self.policy.make()
        )
        model.compile(optimizer, loss="mse")
        return model


@st.composite
def trainings(draw):
    overflows = draw(st.lists(st.booleans(), min_size=3, max_size=5))
    return Training(
        draw(
            st.sampled_from(
                ["float32", "mixed_float16", "float16", "mixed_bfloat16", "bfloat16"]
            )
        ),
        draw(st.lists(st.sampled_from([1, 2, 5]), min_size=1, max_size=2)),
        draw(st.booleans()),
        draw(optimizers.inners(INNER)),
        draw(policies.ANY),
        overflows,
        draw(st.integers(1, len(overflows) - 1)),
    )


def owned(model):
    """What a skipped step leaves as it is: not the statistics of the forward pass."""
    optimizer = model.optimizer
    return execution.bits(
        [
            *model.trainable_variables,
            *optimizer.inner_optimizer.variables,
            *optimizer._masters.variables,
        ]
    )


@hypothesis.given(training=trainings())
@tried_on(nightly=60, torch=3, tensorflow=1, jax=1)
def test_model_survives_overflows_and_resumes_from_file(training, tmp_path_factory):
    path = tmp_path_factory.mktemp("files") / "model.keras"
    random = np.random.default_rng(0)
    models = [training.make_model()]
    for number, overflows in enumerate(training.overflows):
        if number == training.saved:
            models[0].save(path)
            models.append(keras.saving.load_model(path))
        x = random.normal(size=(BATCH_SIZE, INPUTS)).astype("float32")
        y = random.normal(size=(BATCH_SIZE, 1)).astype("float32")
        if overflows:
            # Whatever the layers make of the inputs, the loss is not finite.
            y[0, 0] = random.choice([np.inf, -np.inf, np.nan])
        for model in models:
            step(model, x, y, overflows)
        for model in models[1:]:
            assert owned(model) == owned(models[0])


def step(model, x, y, overflows):
    optimizer = model.optimizer
    before = (owned(model), int(optimizer.skipped_steps)) if optimizer.built else None
    model.train_on_batch(x, y)
    skipped = not bool(optimizer.last_step_applied)
    # The scale may be so high that other steps overflow as well.
    assert skipped or not overflows
    if before is not None:
        assert int(optimizer.skipped_steps) == before[1] + skipped
        if skipped:
            assert owned(model) == before[0]
    scale = float(optimizer.loss_scale)
    policy = optimizer.loss_scale_policy
    assert np.float32(policy.min_scale) <= scale <= np.float32(policy.max_scale)
    for weight in model.trainable_variables:
        assert np.isfinite(execution.array(weight)).all()
