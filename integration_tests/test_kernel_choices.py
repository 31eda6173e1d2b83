"""Each choice of `KERAS_LSO_KERNELS` takes the same steps, in a process of its own.

The variable is read when the package is imported. Without kernels a step uses other
code on every backend: a choice that nobody runs is a choice that fails.
"""

import functools
import json
import os

import numpy as np

from testing import forked

BACKEND = os.environ["KERAS_BACKEND"]

# Trains a few variables by several optimizers, and prints where each of them ends.
PROGRAM = """
import json
import keras
import numpy as np
import keras_lso
from keras import ops
from testing import tiers

KINDS = {
    "momentum": (keras.optimizers.SGD, {"momentum": 0.9}),
    "adamw": (keras.optimizers.AdamW, {"global_clipnorm": 1.0}),
    "amsgrad": (keras.optimizers.Adam, {"amsgrad": True}),
    "accumulation": (keras.optimizers.Adam, {"gradient_accumulation_steps": 2}),
    "averages": (
        keras.optimizers.SGD, {"use_ema": True, "ema_overwrite_frequency": 2}
    ),
    "lars": (keras_lso.LARS, {"weight_decay_rate": 0.01}),
    "lamb": (keras_lso.LAMB, {}),
    "novograd": (keras_lso.NovoGrad, {}),
}
POLICIES = {
    "dynamic": lambda: {"initial_scale": 64.0, "dynamic_growth_steps": 3},
    "auto": lambda: {"initial_scale": "auto"},
    "log max": lambda: {"loss_scale": keras_lso.loss_scales.LogMaxLossScale()},
    "hysteresis": lambda: {
        "loss_scale": keras_lso.loss_scales.DynamicLossScale(64.0, hysteresis=2)
    },
}


def run(make, options, policy, dtype, masters="auto"):
    random = np.random.default_rng(0)
    variables = [
        keras.Variable(random.normal(size=shape), dtype=dtype)
        for shape in [(3,), (2, 4), (40, 500)]
    ]
    optimizer = keras_lso.LossScaleOptimizer(
        make(0.01, **options), master_weights=masters, **policy
    )
    optimizer.build(variables)
    for step in range(9):
        optimizer.scale_loss(ops.ones(()))
        scale = float(optimizer.loss_scale)
        grads = [random.normal(size=v.shape) * scale for v in variables]
        if step == 4:
            grads[1][0, 0] = np.inf
        optimizer.apply([ops.array(g, dtype="float32") for g in grads], variables)
    return {
        "ends": [float(ops.sum(ops.abs(ops.cast(v, "float32")))) for v in variables],
        "scale": float(optimizer.loss_scale),
        "steps": [int(optimizer.iterations), int(optimizer.skipped_steps)],
    }


def some(*values):
    # Each kind has all values if all tests run, and one of them otherwise.
    for i, kind in enumerate(KINDS):
        for value in values if tiers.is_full() else [values[i % len(values)]]:
            yield kind, *KINDS[kind], value


results = {
    f"{kind}, {dtype}": run(make, options, POLICIES["dynamic"](), dtype)
    for kind, make, options, dtype in some("float32", "float16")
}
for kind, make, options, masters in some("stochastic", "remainder"):
    if kind in ("adamw", "amsgrad", "accumulation", "averages", "lars"):
        results[f"{kind}, {masters} of bfloat16"] = run(
            make, options, POLICIES["dynamic"](), "bfloat16", masters
        )
for name, policy in POLICIES.items():
    results[name] = run(keras.optimizers.SGD, {}, policy(), "float32")
print(json.dumps(results))
"""


@functools.cache
def results_of(choice):
    result = forked.run(PROGRAM, BACKEND, KERAS_LSO_KERNELS=choice)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


def assert_alike(results, expected):
    assert results.keys() == expected.keys()
    for name, found in results.items():
        assert found["scale"] == expected[name]["scale"], name
        assert found["steps"] == expected[name]["steps"], name
        # Roundings of a few steps; of float16 variables a unit in the last place.
        rtol = 1e-3 if "float16" in name else 1e-5
        if "stochastic" in name:
            # Without kernels it is not rounded before it is averaged, and on TensorFlow
            # it is a float32 master.
            rtol = 2e-2
        np.testing.assert_allclose(
            found["ends"], expected[name]["ends"], rtol=rtol, err_msg=name
        )


def test_every_choice_of_kernels_takes_same_steps():
    expected = results_of("framework")
    assert expected["momentum, float32"]["steps"] == [8, 1]
    assert_alike(results_of("generic"), expected)
