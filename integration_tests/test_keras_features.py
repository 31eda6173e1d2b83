"""Features of Keras outside of the optimizer's formula work with the wrapper.

Features of the inner optimizer are in `test_inner_optimizers.py`.
"""

import keras
import numpy as np
import pytest
from keras import ops

import keras_lso

INF = float("inf")


def test_constraints_are_enforced_on_applied_steps_only(
    make_model, data, fit, values, bits
):
    x, y = data
    constraint = keras.constraints.MaxNorm(0.25, axis=0)
    model = make_model("float32", kernel_constraint=constraint)
    optimizer = keras_lso.LossScaleOptimizer(keras.optimizers.SGD(0.1))
    model.compile(optimizer, loss="mse")

    # The initial kernel breaks the constraint, which only a step enforces.
    kernel = model.get_layer("hidden").kernel
    norms = np.linalg.norm(values([kernel])[0], axis=0)
    assert norms.max() > 0.3
    before = bits([kernel])
    fit(model, np.full_like(x, INF), y)
    assert bits([kernel]) == before

    fit(model, x, y)
    norms = np.linalg.norm(values([kernel])[0], axis=0)
    # One rounding of the division by the norm and one of the norm itself.
    assert norms.max() <= 0.25 * (1 + 1e-6)


def compile_and_fit(model, optimizer, data, fit):
    model.compile(optimizer, loss="mse")
    fit(model, *data)


@pytest.mark.skipif(
    keras.backend.backend() == "jax",
    reason="Keras's trainer on JAX wants the variables the optimizer was built with.",
)
def test_same_optimizer_continues_with_fewer_layers(make_model, data, fit, bits):
    model = make_model()
    hidden, output = model.layers
    optimizer = keras_lso.LossScaleOptimizer(keras.optimizers.Adam(0.01))
    compile_and_fit(model, optimizer, data, fit)
    hidden.trainable = False
    frozen, trained = bits(hidden.variables), bits(output.variables)
    compile_and_fit(model, optimizer, data, fit)
    assert bits(hidden.variables) == frozen
    assert bits(output.variables) != trained
    assert int(optimizer.iterations) == 8


@pytest.mark.skipif(
    keras.backend.backend() != "jax",
    reason="Elsewhere the same optimizer may go on with fewer layers.",
)
def test_same_optimizer_with_fewer_layers_is_rejected_on_jax(make_model, data, fit):
    model = make_model()
    optimizer = keras_lso.LossScaleOptimizer(keras.optimizers.Adam(0.01))
    compile_and_fit(model, optimizer, data, fit)
    model.layers[0].trainable = False
    with pytest.raises(ValueError, match="compile the model with a new optimizer"):
        compile_and_fit(model, optimizer, data, fit)


@pytest.mark.filterwarnings("ignore:Layer InputLayer does not have")
def test_fit_of_float8_model_matches_keras_wrapper(
    make_model, data, fit, values, assert_close
):
    # Not as with the bare inner optimizer: what the model keeps of the range of its
    # gradients, and learns by overwriting, is rightly that of the scaled ones.
    weights = []
    for wrap in (keras.optimizers.LossScaleOptimizer, keras_lso.LossScaleOptimizer):
        model = make_model("float32")
        model.quantize("float8")
        start = values(model.trainable_variables)
        optimizer = wrap(keras.optimizers.SGD(0.1))
        model.compile(optimizer, loss="mse")
        fit(model, *data)
        assert int(optimizer.iterations) == 4
        weights.append(values(model.trainable_variables))
        assert all((a != b).any() for a, b in zip(start, weights[-1], strict=True))
    overwritten = [v for v in model.trainable_variables if v.overwrite_with_gradient]
    assert len(overwritten) == 12
    assert_close(*weights)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda inner: keras_lso.LossScaleOptimizer(inner, master_weights=False),
        lambda inner: keras_lso.LossScaleOptimizer(
            keras_lso.LARC(inner, eta=1e6), master_weights=False
        ),
        lambda inner: keras_lso.LARC(inner, eta=1e6),
    ],
    ids=["scaled", "scaled, LARC", "LARC"],
)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_gradients_accumulate_in_16_bit_variables_without_masters(wrap, dtype):
    """Keras's accumulators have the dtype of the variable, whatever a gradient has."""
    optimizer = wrap(keras.optimizers.SGD(0.5, gradient_accumulation_steps=2))
    variable = keras.Variable([1.0, 2.0], dtype=dtype)
    for _ in range(2):
        scale = float(getattr(optimizer, "loss_scale", 1.0))
        optimizer.apply([ops.array([1.0, -1.0], dtype=dtype) * scale], [variable])
    np.testing.assert_array_equal(
        ops.convert_to_numpy(ops.cast(variable, "float32")), [0.5, 2.5]
    )


@pytest.mark.skipif(keras.backend.backend() != "torch", reason="PyTorch's modules")
def test_fit_trains_torch_module_in_wrapper(data, values, bits, with_overflows):
    import torch

    ends, (x, y) = [], data
    for wrap in (lambda inner: inner, keras_lso.GuardedOptimizer):
        torch.manual_seed(0)
        layer = keras.layers.TorchModuleWrapper(
            torch.nn.Linear(4, 1), output_shape=(None, 1)
        )
        model = keras.Sequential([keras.Input((4,)), layer])
        model.compile(wrap(keras.optimizers.SGD(0.25)), loss="mse")
        model.fit(x, y, batch_size=8, shuffle=False, verbose=0)
        ends.append(values(model.trainable_variables))
    for bare, guarded in zip(*ends, strict=True):
        np.testing.assert_array_equal(bare, guarded)
    before = bits(model.trainable_variables)
    model.fit(with_overflows(x, [1]), y, batch_size=8, shuffle=False, verbose=0)
    assert int(model.optimizer.skipped_steps) == 1
    assert bits(model.trainable_variables) != before
