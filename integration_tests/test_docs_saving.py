"""What saving.md says of files, and what loads."""

import warnings

import keras
import numpy as np
import pytest
from keras import ops

import keras_lso
from integration_tests.docs_blocks import code_in, table_of
from keras_lso.compat import open_seq2seq

pytestmark = pytest.mark.slow


def compiled(optimizer):
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile(optimizer, loss="mse")
    return model


# --- saving.md: the state of another optimizer ------------------

KERAS, OURS = keras.optimizers.LossScaleOptimizer, keras_lso.LossScaleOptimizer


def bare(adam):
    return adam


def by_saving(holds):
    """Returns the code that a row of saving.md gives for what a file holds."""
    rows = dict(table_of("docs/saving.md", "the file holds"))
    return [code for code in code_in(rows[holds]) if code.startswith("model.")]


@pytest.mark.parametrize("path", ["model.keras", "model.weights.h5"])
@pytest.mark.parametrize(
    "writer, reader, holds",
    [
        (bare, OURS, "the bare inner optimizer (a float32 run)"),
        (OURS, KERAS, "our default loss-scale policy, to be read by Keras's class"),
        (KERAS, OURS, "`keras.optimizers.LossScaleOptimizer`"),
    ],
)
def test_code_on_page_loads_state_of_another_optimizer(
    writer, reader, holds, path, clean
):
    model = compiled(writer(keras.optimizers.Adam()))
    model.fit(np.ones((8, 4)), np.ones((8, 1)), batch_size=2, verbose=0)
    (model.save if path == "model.keras" else model.save_weights)(path)
    loaded = compiled(reader(keras.optimizers.Adam()))
    for code in by_saving(holds):
        with warnings.catch_warnings():
            warnings.filterwarnings("error", "Skipping variable loading")
            exec(code, {"model": loaded, "path": path})
    ours, theirs = (
        getattr(m.optimizer, "inner_optimizer", m.optimizer) for m in (loaded, model)
    )
    assert int(ours.iterations) == 4
    # Steps, rate, and two slots of each of two variables.
    assert len(ours.variables) == 6
    for our, their in zip(ours.variables, theirs.variables, strict=True):
        np.testing.assert_array_equal(
            ops.convert_to_numpy(our), ops.convert_to_numpy(their)
        )


@pytest.mark.parametrize("path", ["model.keras", "model.weights.h5"])
@pytest.mark.parametrize("to_schedule", [True, False])
def test_code_on_page_loads_state_under_other_kind_of_rate(to_schedule, path, clean):
    rates = [0.25, open_seq2seq.FixedLR(0.125)][:: 1 if to_schedule else -1]
    model, loaded = (compiled(OURS(keras.optimizers.Adam(rate))) for rate in rates)
    model.fit(np.ones((8, 4)), np.ones((8, 1)), batch_size=2, verbose=0)
    (model.save if path == "model.keras" else model.save_weights)(path)
    holds = (
        "a run at a constant learning rate, to go on under a schedule, or the reverse"
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "Skipping variable loading")
        for code in by_saving(holds):
            exec(code, {"model": loaded, "path": path})
    assert int(loaded.optimizer.iterations) == 4
    rate = float(ops.convert_to_numpy(loaded.optimizer.learning_rate))
    assert rate == (0.125 if to_schedule else 0.25)
