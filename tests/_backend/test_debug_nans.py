"""Steps under `jax_debug_nans` and `jax_debug_infs`.

They raise where an operation by itself makes a NaN or an inf. Zero weights, such as a
new bias, and zero gradients, such as those of a dead unit, are nothing unusual. A
`where` after a division by 0 comes too late there.
"""

import keras
import numpy as np
import pytest
from keras import ops

import keras_lso
from keras_lso.loss_scales import LogMaxLossScale

pytestmark = [
    pytest.mark.skipif(keras.backend.backend() != "jax", reason="an option of JAX"),
]


def lamb(**arguments):
    return keras_lso.LAMB(0.5, weight_decay_rate=0.1, **arguments)


OPTIMIZERS = {
    "LARS": lambda: keras_lso.LARS(0.5, weight_decay_rate=0.1),
    "LARS, no decay": lambda: keras_lso.LARS(0.5, trust_clip=True),
    "LARS, popular momentum": lambda: keras_lso.LARS(0.5, classic_momentum=False),
    "LARS, paper": lambda: keras_lso.LARS(0.5, trust_ratio="paper"),
    "LAMB": lamb,
    "LAMB, bounds": lambda: lamb(min_trust_ratio=0.1, max_trust_ratio=10.0),
    "NovoGrad": lambda: keras_lso.NovoGrad(0.5),
    "NovoGrad, epsilon 0": lambda: keras_lso.NovoGrad(0.5, epsilon=0.0),
    "LARC": lambda: keras_lso.LARC(keras.optimizers.SGD(0.5)),
    "LARC, epsilon 0": lambda: keras_lso.LARC(keras.optimizers.SGD(0.5), epsilon=0.0),
    "LARC, rate 0": lambda: keras_lso.LARC(keras.optimizers.SGD(0.0)),
    "LARC, scale": lambda: keras_lso.LARC(
        keras.optimizers.SGD(0.5), mode="scale", epsilon=0.0
    ),
}
# Steps that are ours only in a `LossScaleOptimizer`.
KERASS = {
    "Lamb": lambda: keras.optimizers.Lamb(0.5),
    "clipnorm": lambda: keras.optimizers.SGD(0.5, clipnorm=1.0),
    "global_clipnorm": lambda: keras.optimizers.SGD(0.5, global_clipnorm=1.0),
    "AdamW": lambda: keras.optimizers.AdamW(0.5),
    "Nadam": lambda: keras.optimizers.Nadam(0.5),
    "accumulation": lambda: keras.optimizers.SGD(0.5, gradient_accumulation_steps=2),
}


@pytest.fixture
def nans_and_infs_raise():
    import jax

    with jax.debug_nans(True), jax.debug_infs(True):
        yield


def steps(optimizer, dtype="float32"):
    """Takes two steps of zero and other weights with zero and other gradients."""
    kinds = [(w, g) for w in (0.0, 3.0) for g in (0.0, 4.0)]
    variables = [keras.Variable(np.full(2, w, dtype), dtype=dtype) for w, _ in kinds]
    for _ in range(2):
        optimizer.scale_loss(1.0)
        grads = [ops.full((2,), g, "float32") for _, g in kinds]
        optimizer.apply(grads, variables)
    assert int(optimizer.iterations) == 2 // (
        getattr(optimizer, "gradient_accumulation_steps", None) or 1
    )
    assert all(np.isfinite(ops.convert_to_numpy(v)).all() for v in variables)


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_step_divides_by_no_zero(make, nans_and_infs_raise):
    steps(make())


WRAPPED = {**OPTIMIZERS, **KERASS}


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("make", WRAPPED.values(), ids=WRAPPED)
@pytest.mark.exhaustive
def test_loss_scaled_step_divides_by_no_zero(make, dtype, nans_and_infs_raise):
    policy = LogMaxLossScale() if dtype == "float16" else 8.0
    steps(keras_lso.LossScaleOptimizer(make(), loss_scale=policy), dtype)


def test_lars_trust_ratio_of_zero_weight_and_zero_gradient_is_one(nans_and_infs_raise):
    optimizer = keras_lso.LARS(0.5)
    variable = keras.Variable(np.zeros(2, "float32"), name="w")
    optimizer.build([variable])
    ratios = optimizer.trust_ratios([ops.zeros(2)])
    assert float(ratios["w"]) == 1.0
