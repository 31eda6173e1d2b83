"""What README.md and docs/long-runs.md say of long runs, and what comes of it."""

import keras
import numpy as np
import pytest

import keras_lso
from integration_tests.docs_blocks import PAGES, code_in, table_of
from keras_lso import callbacks
from keras_lso.loss_scales import DynamicLossScale

BACKEND = keras.backend.backend()


def row_of(beginning):
    """Returns the cells of a row of README's table."""
    lines = PAGES["README.md"].read_text().splitlines()
    [line] = [line for line in lines if line.startswith(f"| {beginning}")]
    return [cell.strip() for cell in line.strip("|").split(" | ")]


def step_of(optimizer, size):
    """Returns the weight after calm steps from 1.0, and a step of a size."""
    w = keras.Variable([1.0])
    optimizer.build([w])
    for value in (*[1e-3, 1.1e-3] * 40, size):
        optimizer.apply([keras.ops.convert_to_tensor([value])], [w])
    return float(keras.ops.convert_to_numpy(w)[0])


@pytest.mark.default_backend("torch")
def test_only_spike_guard_skips_step_that_is_far_too_large():
    _, by_keras, by_grad_scaler, ours = row_of("a step whose gradients are finite")
    assert (by_keras, by_grad_scaler) == ("applied", "applied")
    assert ours == "skipped, with a `SpikeGuard`"
    keras_own = keras.optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(1.0), initial_scale=1.0
    )
    assert step_of(keras_own, 1e4) < -9e3
    guarded = keras_lso.GuardedOptimizer(
        keras.optimizers.SGD(1.0), spike_guard=keras_lso.SpikeGuard()
    )
    assert step_of(guarded, 1e4) > 0.9
    torch = pytest.importorskip("torch")
    weight = torch.nn.Parameter(torch.ones(1))
    sgd, scaler = torch.optim.SGD([weight], 1.0), torch.amp.GradScaler("cpu")
    scaler.scale(weight.sum() * 1e4).backward()
    scaler.step(sgd)
    assert weight.item() < -9e3


@pytest.mark.default_backend("torch")
def test_only_keras_lso_records_steps_and_restores_stalled_runs():
    for beginning, name in {
        "why each step was skipped": "StepRecord",
        "a run in which every step overflows goes back": "LossScaleMonitor",
    }.items():
        _, by_keras, by_grad_scaler, ours = row_of(beginning)
        assert by_keras == by_grad_scaler == "no"
        assert f"`{name}" in ours and hasattr(callbacks, name)
        assert not hasattr(keras.callbacks, name)
    monitor = callbacks.LossScaleMonitor(on_stall="restore")
    # "at a lower rate"
    assert monitor.learning_rate_factor < 1
    names = ["loss_scale", "gradient_norm", "learning_rate"]
    optimizer = keras_lso.GuardedOptimizer(keras.optimizers.SGD(0.1))
    optimizer.record_steps()
    step_of(optimizer, np.inf)
    record = optimizer.read_record()
    assert set(names) < set(record) and record["outcome"][-1] == "overflow"


@pytest.mark.default_backend("torch")
def test_replacements_for_options_of_other_libraries_run():
    names = {
        "DynamicLossScale": DynamicLossScale,
        "LossScaleMonitor": callbacks.LossScaleMonitor,
        "SpikeGuard": keras_lso.SpikeGuard,
        "StepRecord": callbacks.StepRecord,
    }
    rows = table_of("docs/long-runs.md", "from")
    made = [
        eval(code, dict(names))  # noqa: S307
        for row in rows
        for code in code_in(row[-1])
    ]
    assert len(made) >= 8
    of_deepspeed = [
        scale.get_config() for scale in made if isinstance(scale, DynamicLossScale)
    ][1]
    # The defaults of its `DynamicLossScaler`.
    assert of_deepspeed["initial_loss_scale"] == 2**16
    assert of_deepspeed["increment_period"] == 1000
    assert (of_deepspeed["min_scale"], of_deepspeed["hysteresis"]) == (1.0, 2)
