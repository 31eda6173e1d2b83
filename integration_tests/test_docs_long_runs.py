"""What docs/long-runs.md says of long runs, and what comes of it."""

import pytest

import keras_lso
from integration_tests.docs_blocks import code_in, table_of
from keras_lso import callbacks
from keras_lso.loss_scales import DynamicLossScale


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
