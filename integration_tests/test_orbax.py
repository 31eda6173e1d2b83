"""`keras.callbacks.OrbaxCheckpoint` holds all that a run needs to go on."""

import keras
import pytest

import keras_lso
from integration_tests.saved_models import Interruption
from testing.keras_versions import loads_sequential_of_orbax

pytest.importorskip("orbax.checkpoint")
if not hasattr(keras.callbacks, "OrbaxCheckpoint"):
    pytest.skip("This Keras has no OrbaxCheckpoint.", allow_module_level=True)

# The dtype policy, the kind of masters, and the inner optimizer.
RUNS = {
    "mixed_float16": ("mixed_float16", "auto", {"momentum": 0.5}),
    "averages": ("mixed_float16", "auto", {"use_ema": True}),
    "accumulating": ("mixed_float16", "auto", {"gradient_accumulation_steps": 3}),
    "float16 by float32": ("float16", "float32", {"momentum": 0.5}),
    "bfloat16 by remainder": ("bfloat16", "remainder", {"momentum": 0.5}),
    "bfloat16 by short remainder": ("bfloat16", "remainder8", {"momentum": 0.5}),
    "bfloat16 by chance": ("bfloat16", "stochastic", {"momentum": 0.5}),
    "narrow slots": ("bfloat16", "stochastic", {"momentum": 0.5}),
    "slots in 8 bits": ("bfloat16", "remainder8", {"momentum": 0.5}),
}
SLOTS = {"narrow slots": "bfloat16", "slots in 8 bits": "int8"}


@pytest.fixture(params=RUNS)
def compiled(request, make_model):
    """`compiled()`: a new model of a run."""
    policy, kind, options = RUNS[request.param]

    def build():
        # Variables are found by their paths, in which Keras counts what it makes: as in
        # a new process.
        keras.utils.clear_session()
        # Slots in 8 bits need a kernel of 4,096 elements.
        model = make_model(policy, units=1024 if "8 bits" in request.param else 8)
        optimizer = keras_lso.LossScaleOptimizer(
            keras.optimizers.SGD(0.125, **options),
            dynamic_growth_steps=3,
            master_weights=kind,
            slot_dtype=SLOTS.get(request.param),
        )
        model.compile(optimizer, loss="mse")
        return model

    return build


def checkpoint(folder):
    return keras.callbacks.OrbaxCheckpoint(str(folder), save_on_background=False)


@pytest.mark.parametrize(
    "loads", ["weights", *(["a model"] if loads_sequential_of_orbax else [])]
)
def test_run_resumed_from_orbax_is_bitwise_equal_to_uninterrupted_run(
    loads, compiled, data, fit, with_overflows, bits, tmp_path
):
    x, y = data
    x = with_overflows(x, [1])
    uninterrupted = compiled()
    fit(uninterrupted, x, y, epochs=4)
    with pytest.raises(KeyboardInterrupt):
        callbacks = [checkpoint(tmp_path), Interruption()]
        fit(compiled(), x, y, epochs=4, callbacks=callbacks)
    if loads == "a model":
        keras.utils.clear_session()
        resumed = keras.saving.load_model(str(tmp_path))
    else:
        resumed = compiled()
        resumed.optimizer.build(resumed.trainable_variables)
        resumed.load_weights(str(tmp_path))
    assert type(resumed.optimizer) is keras_lso.LossScaleOptimizer
    assert int(resumed.optimizer.skipped_steps) == 2
    fit(resumed, x, y, epochs=4, initial_epoch=2)
    assert bits(resumed.variables) == bits(uninterrupted.variables)
    assert bits(resumed.optimizer.variables) == bits(uninterrupted.optimizer.variables)
