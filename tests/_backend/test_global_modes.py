"""Steps under the frameworks' global modes, such as `torch.autocast`.

A step computes what it says, whatever the mode around it: the same bits come out. In a
mode that raises at an inf or a NaN, no step overflows.
"""

import contextlib
import functools
import itertools

import keras
import numpy as np
import pytest
from keras import ops

import keras_lso
from keras_lso.compat.open_seq2seq import AutomaticLossScaler
from keras_lso.loss_scales import DynamicLossScale, LogMaxLossScale
from testing import kernels
from testing.harness import bits
from testing.optimizers import OPTIMIZERS

pytestmark = [
    pytest.mark.filterwarnings("ignore:The learning rate is inf"),
    pytest.mark.filterwarnings("ignore:.*CUDA is not available"),
]
BACKEND = keras.backend.backend()


def switch(function, on=True, off=False):
    """Returns a function that makes a context between two calls of `function`."""

    @contextlib.contextmanager
    def switched():
        function(on)
        try:
            yield
        finally:
            function(off)

    return switched


if BACKEND == "torch":
    import torch

    MODES = {
        "autocast to bfloat16": lambda: torch.autocast("cpu", torch.bfloat16),
        "autocast to float16": lambda: torch.autocast("cpu", torch.float16),
        "autocast of a GPU": lambda: torch.autocast("cuda", torch.float16),
        **{
            f"default dtype {d}": switch(torch.set_default_dtype, d, torch.float32)
            for d in (torch.float64, torch.bfloat16, torch.float16)
        },
        "default device": switch(torch.set_default_device, "meta", None),
        "inference": torch.inference_mode,
        "deterministic": switch(torch.use_deterministic_algorithms),
        "no subnormals": switch(torch.set_flush_denormal),
        "anomalies": lambda: torch.autograd.set_detect_anomaly(True),
        "no gradients": torch.no_grad,
    }
    COMPILED = []
elif BACKEND == "jax":
    import jax

    MODES = {
        "NaNs raise": lambda: jax.debug_nans(True),
        "infs raise": lambda: jax.debug_infs(True),
        "x64": switch(functools.partial(jax.config.update, "jax_enable_x64")),
        "products in bfloat16": lambda: jax.default_matmul_precision("bfloat16"),
        "default device": lambda: jax.default_device(jax.devices()[-1]),
        "strict dtypes": lambda: jax.numpy_dtype_promotion("strict"),
        "strict ranks": lambda: jax.numpy_rank_promotion("raise"),
        "no transfers": lambda: jax.transfer_guard("disallow"),
    }
    COMPILED = ["NaNs raise", "strict dtypes", "no transfers"]
else:
    import tensorflow as tf
    from tensorflow.python.framework import config

    def call(on, off):
        return switch(lambda is_on: on() if is_on else off())

    MODES = {
        "infs raise": call(
            tf.debugging.enable_check_numerics, tf.debugging.disable_check_numerics
        ),
        "name scope": lambda: tf.name_scope("outer"),
        "device": lambda: tf.device("/CPU:0"),
        "eager functions": switch(tf.config.run_functions_eagerly),
        "deterministic": call(
            config.enable_op_determinism, config.disable_op_determinism
        ),
        "auto-clustering": switch(tf.config.optimizer.set_jit, "autoclustering"),
        "soft placement": switch(tf.config.set_soft_device_placement),
    }
    COMPILED = ["name scope", "device", "deterministic"]

# Without `jax.jit`, Keras's own optimizers transfer numbers.
EAGER = [mode for mode in MODES if mode != "no transfers"]
MAKES = {
    **OPTIMIZERS,
    "adadelta": keras.optimizers.Adadelta,
    "larc": lambda *rate, **options: keras_lso.LARC(
        keras.optimizers.SGD(*rate, momentum=0.9, **options)
    ),
}
OPTIONS = {
    "plain": {},
    "windows": {"gradient_accumulation_steps": 2, "clipnorm": 0.5},
    "averages": {"use_ema": True, "ema_overwrite_frequency": 2, "global_clipnorm": 0.5},
}
KINDS = ["float32", "remainder", "remainder8", "stochastic"]
WEIGHTS = [
    ("float32", False),
    *((d, k) for d in ("float16", "bfloat16") for k in KINDS),
]


def steps(make, options, dtype, kind, overflows, mode=None, compiled=None):
    """Returns the bits of the state and of the scaled losses after some steps."""
    random, shapes = np.random.default_rng(0), [(8,), (6, 5), (5,)]
    weights = [keras.Variable(random.normal(size=s), dtype=dtype) for s in shapes]
    optimizer = MAKES[make](0.125, **OPTIONS[options])
    if kind is not None:
        optimizer = keras_lso.LossScaleOptimizer(
            optimizer,
            loss_scale=DynamicLossScale(8.0, 2),
            master_weights=kind,
            spike_guard=keras_lso.SpikeGuard(window=4, warmup=2),
        )
        optimizer.record_steps(8)
    optimizer.build(weights)
    optimizer.scale_loss(1.0)
    state = [*weights, *optimizer.variables]

    def step(grads, loss):
        optimizer.apply(grads, weights)
        return optimizer.scale_loss(loss)

    step = compiled(step, state) if compiled else step
    losses = []
    for number in range(5):
        arrays = [random.normal(size=s).astype("float32") for s in shapes]
        arrays[0] *= number != 1
        arrays[1][2, 1] = np.inf if overflows and number == 2 else 0.5
        optimizer.learning_rate = np.inf if overflows and number == 3 else 0.125
        grads = [ops.cast(ops.convert_to_tensor(g), dtype) for g in arrays]
        loss = ops.convert_to_tensor(np.float32(1.5))
        with contextlib.nullcontext() if mode is None else MODES[mode]():
            losses.append(step(grads, loss))
    return bits([*state, *losses])


expected_steps = functools.cache(steps)


def check(mode, make, options="plain", dtype="float16", kind="remainder"):
    takes_root = make == "muon" and mode.startswith("default dtype")
    if takes_root or (options, mode) == ("averages", "strict dtypes"):
        pytest.skip("Keras's own steps depend on this mode")
    overflows = kind is not None and not mode.endswith("raise")
    arguments = make, options, dtype, kind, overflows
    assert steps(*arguments, mode) == expected_steps(*arguments)


def in_turn(values, rows):
    """Puts the values before the rows in turn: JAX compiles anew in each mode."""
    return [(v, *row) for v, row in zip(itertools.cycle(values), rows, strict=False)]


@pytest.mark.parametrize("mode", EAGER)
def test_step_is_bitwise_equal_in_each_mode(mode):
    check(mode, "momentum")


@pytest.mark.parametrize("make, dtype, kind", in_turn(["adam", "lars"], WEIGHTS))
@pytest.mark.parametrize("mode", EAGER)
@pytest.mark.exhaustive
def test_step_of_each_kind_is_bitwise_equal_in_each_mode(mode, make, dtype, kind):
    check(mode, make, dtype=dtype, kind=kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", EAGER)
@pytest.mark.full
def test_generic_step_is_bitwise_equal_in_each_mode(mode, kind):
    with kernels.off():
        found = steps("lars", "windows", "float16", kind, False, mode)
        assert found == steps("lars", "windows", "float16", kind, False)


@pytest.mark.parametrize("options, make", in_turn(OPTIONS, [(m,) for m in MAKES]))
@pytest.mark.parametrize("mode", EAGER)
@pytest.mark.full
def test_step_of_each_optimizer_is_bitwise_equal_in_each_mode(mode, make, options):
    check(mode, make, options)


@pytest.mark.parametrize("make", ["lars", "lamb", "novograd", "larc"])
@pytest.mark.parametrize("mode", [mode for mode in EAGER if mode != "strict dtypes"])
@pytest.mark.exhaustive
def test_step_without_guard_is_bitwise_equal_in_each_mode(mode, make):
    check(mode, make, "averages", kind=None)


@pytest.mark.skipif(BACKEND == "torch", reason="nothing is compiled")
@pytest.mark.parametrize("mode", COMPILED)
def test_compiled_step_is_bitwise_equal_in_each_mode(mode, compiled_once):
    arguments = "lamb", "plain", "float16", "remainder", True
    found = steps(*arguments, mode, compiled_once)
    assert found == steps(*arguments, None, compiled_once)


@pytest.mark.parametrize("mode", EAGER)
@pytest.mark.full
def test_gradients_are_read_alike_in_each_mode(mode):
    def read(dtype):
        variable = keras.Variable([3.0, 4.0], dtype=dtype)
        optimizer = keras_lso.LossScaleOptimizer(keras.optimizers.SGD(0.5), False, 8)
        grads = [ops.cast([0.1, 0.2], dtype), ops.cast([0.3], dtype)]
        if mode != "inference":  # In which PyTorch differentiates nothing.
            optimizer.minimize(lambda: ops.sum(ops.square(variable)), [variable])
        return bits(
            [
                variable,
                optimizer.get_scaled_loss(grads[0]),
                *optimizer.get_unscaled_gradients(grads),
                LogMaxLossScale().update(grads)[1],
                *AutomaticLossScaler.check_grads([(g, variable) for g in grads]),
            ]
        )

    # TensorFlow's own check of numerics cannot read eager sums in bfloat16.
    dtypes = ["float16", "float32" if BACKEND == "tensorflow" else "bfloat16"]
    expected = list(map(read, dtypes))
    with MODES[mode]():
        assert list(map(read, dtypes)) == expected
