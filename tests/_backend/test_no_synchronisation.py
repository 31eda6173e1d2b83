"""On PyTorch a step reads nothing from the device and copies nothing to it.

Shown on the `meta` device, whose tensors have no values: to look at one is an error.
"""

import math
from unittest import mock

import keras
import pytest

import keras_lso
from keras_lso import loss_scales
from keras_lso.loss_scales.searching import SearchingLossScale
from testing.keras_versions import takes_muon
from testing.schedules import ALL

if keras.backend.backend() != "torch":
    pytest.skip("JAX and TensorFlow compile a step", allow_module_level=True)

torch = pytest.importorskip("torch")
from torch.overrides import TorchFunctionMode  # noqa: E402

from benchmarks.accelerators.meta import (  # noqa: E402
    Kernels,
    RefuseNumbers,
    as_accelerator,
)
from keras_lso._backend.torch import no_sync as torch_no_sync  # noqa: E402
from keras_lso._core.step_record import StepRecord  # noqa: E402

FUSED = ["_fused_sgd_", "_fused_adam_"]
SGD, Adam, AdamW = (keras.optimizers.SGD, keras.optimizers.Adam, keras.optimizers.AdamW)
OPTIMIZERS = {
    "SGD": lambda: SGD(0.1),
    "momentum": lambda: SGD(0.1, momentum=0.9),
    "nesterov and decay": lambda: SGD(
        0.1, momentum=0.9, nesterov=True, weight_decay=0.1
    ),
    "Adam": lambda: Adam(0.1),
    "AdamW": lambda: AdamW(0.1),
    "Lion": lambda: keras.optimizers.Lion(0.1, weight_decay=0.1),
    "Nadam": lambda: keras.optimizers.Nadam(0.1, weight_decay=0.1),
    "Adamax": lambda: keras.optimizers.Adamax(0.1, weight_decay=0.1),
    "RMSprop": lambda: keras.optimizers.RMSprop(0.1, weight_decay=0.1),
    "Adagrad": lambda: keras.optimizers.Adagrad(0.1),
    "AdamW, clipped": lambda: AdamW(0.1, global_clipnorm=1.0),
    "AdamW, clipped, of 4": lambda: AdamW(
        0.1, global_clipnorm=1.0, gradient_accumulation_steps=4
    ),
    "AdamW, clipped each": lambda: AdamW(0.1, clipnorm=1.0),
    "momentum, clipped by value": lambda: SGD(0.1, momentum=0.9, clipvalue=1.0),
    "SGD, averaged": lambda: SGD(0.1, use_ema=True),
    "AdamW, averaged, overwritten, clipped, of 4": lambda: AdamW(
        0.1,
        use_ema=True,
        ema_overwrite_frequency=2,
        clipnorm=1.0,
        gradient_accumulation_steps=4,
    ),
    "LARS, of 4": lambda: keras_lso.LARS(0.1, gradient_accumulation_steps=4),
    "LARS": lambda: keras_lso.LARS(0.1, weight_decay_rate=0.1),
    "LARS, popular": lambda: keras_lso.LARS(0.1, classic_momentum=False, momentum=0.0),
    "NovoGrad": lambda: keras_lso.NovoGrad(0.1),
    "LAMB": lambda: keras_lso.LAMB(0.1, weight_decay_rate=0.1),
    "LAMB, excluded": lambda: keras_lso.LAMB(
        0.1, exclude_1d=True, bias_correction=False
    ),
    "LAMB, bounded": lambda: keras_lso.LAMB(0.1, max_trust_ratio=10.0),
    "Lamb": lambda: keras.optimizers.Lamb(0.1, weight_decay=0.1),
}
if takes_muon:
    OPTIMIZERS["Muon"] = lambda: keras.optimizers.Muon(0.1)
POLICIES = {
    "dynamic": loss_scales.DynamicLossScale,
    "hysteresis": lambda: loss_scales.DynamicLossScale(hysteresis=2),
    "fixed": lambda: loss_scales.FixedLossScale(8.0),
    "searching": SearchingLossScale,
    "LogMax": loss_scales.LogMaxLossScale,
}


@pytest.fixture(autouse=True)
def meta_device():
    with as_accelerator():
        yield


def make(optimizer, shapes, gradient_dtype, variable_dtype):
    variables = [keras.Variable(torch.zeros(s), dtype=variable_dtype) for s in shapes]
    optimizer.build(variables)
    return variables, [torch.zeros(s, dtype=gradient_dtype) for s in shapes]


def record_steps(optimizer):
    """Records from the next step on, which is to be the first: none is counted."""
    with mock.patch.object(StepRecord, "_numbers", return_value=(0, 0)):
        optimizer.record_steps()


def run(optimizer, grads, variables):
    loss = torch.zeros((), device="meta")
    with torch.no_grad(), RefuseNumbers(), Kernels() as kernels:
        optimizer.scale_loss(loss)
        optimizer.apply(grads, variables)
    return kernels


def kernels_of_a_step(
    optimizer, count, gradient_dtype="float32", variable_dtype="float32", records=False
):
    shapes = [(3, 4)] * count
    with torch.device("meta"):
        dtype = getattr(torch, gradient_dtype)
        variables, grads = make(optimizer, shapes, dtype, variable_dtype)
        if records:
            record_steps(optimizer)
    return run(optimizer, grads, variables).calls


@pytest.mark.exhaustive
@pytest.mark.parametrize("variable_dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("gradient_dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
@pytest.mark.parametrize("inner", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_step_neither_reads_from_device_nor_copies_to_device(
    inner, policy, gradient_dtype, variable_dtype
):
    """Float16 and bfloat16 variables have masters here.

    Without, no kernel takes them: Keras's own step is taken or not, by a branch on the
    host.
    """
    optimizer = keras_lso.LossScaleOptimizer(
        inner(), loss_scale=policy(), master_weights=True
    )
    with torch.device("meta"):
        variables, grads = make(
            optimizer,
            [(3, 4), (3, 4), ()],
            getattr(torch, gradient_dtype),
            variable_dtype,
        )
    # The first step compares the masters with their variables, as each does after an
    # assignment. The second one knows that they are in step.
    for _ in range(1 if variable_dtype == "float32" else 2):
        calls = run(optimizer, grads, variables).calls
        assert any(name in calls for name in FUSED)


@pytest.mark.exhaustive
@pytest.mark.parametrize("variable_dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("kind", ["remainder", "remainder8", "stochastic"])
@pytest.mark.parametrize("inner", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_remainder_and_stochastic_masters_never_read_from_device(
    inner, kind, variable_dtype
):
    """Neither in the first step, which sends what random bits depend on, nor later."""
    optimizer = keras_lso.LossScaleOptimizer(inner(), master_weights=kind)
    with torch.device("meta"):
        shapes, dtype = [(3, 4), (3, 4), ()], getattr(torch, variable_dtype)
        variables, grads = make(optimizer, shapes, dtype, variable_dtype)
    for _ in range(2):
        run(optimizer, grads, variables)


def test_recording_steps_of_fifty_tensors_takes_as_many_kernels_as_two():
    few, many = (
        kernels_of_a_step(keras_lso.LossScaleOptimizer(AdamW(0.1)), count, records=True)
        for count in (2, 50)
    )
    assert few == many


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("inner", ["AdamW", "AdamW, clipped", "LARS"])
def test_recording_steps_reads_gradients_once_more_unless_they_are_clipped(
    inner, dtype
):
    """A clip takes the norm. Otherwise the check is of the elements, as without."""
    without, with_record = (
        bytes_a_parameter(inner, dtype, "float32", records=records)
        for records in (False, True)
    )
    read = 0 if "clipped" in inner else 4 if dtype == "float32" else 2
    assert with_record == without + read


# Bytes that a step moves for each parameter, whose gradient is float16. To check that
# it is finite reads 2, to copy it to float32 reads 2 and writes 4, and to unscale that
# reads and writes 4: in all 16. The kernels of SGD and Adam unscale by themselves,
# which saves a read. The kernel reads the gradient, and reads and writes the weight and
# each slot: 12, and 8 for each slot. A decay reads and writes the weights once more: 8.
# LARS and LAMB are formulas on lists of tensors: each operation reads its operands and
# writes its result. The end of that of LARS is the kernel of momentum.
BYTES = {
    "SGD": 12 + 12,
    "momentum": 12 + 20,
    "nesterov and decay": 12 + 20 + 8,
    "Adam": 12 + 28,
    "AdamW": 12 + 28 + 8,
    "LARS": 64,
    "LAMB": 180,
}
# To round a master reads 4 and writes 2, and to clamp that reads and writes 2. To copy
# it to the variable, unless the step is skipped, reads both and writes both.
TO_ROUND, TO_CLAMP = 4 + 2 + 8, 4


@pytest.mark.parametrize("inner", BYTES)
def test_float32_masters_of_float16_variables_move_18_bytes_per_parameter(inner):
    """With SGD, with momentum or not, and with Adam that makes no more than 60 in all.

    GradScaler and a fused SGD with momentum, with
    masters kept by hand, move 44.
    """
    assert bytes_a_parameter(inner, "float16", "float32") == BYTES[inner]
    for dtype, masters in (("float16", TO_ROUND + TO_CLAMP), ("bfloat16", TO_ROUND)):
        moved = bytes_a_parameter(inner, dtype, dtype)
        assert moved == BYTES[inner] + masters
        if inner in ("SGD", "momentum", "Adam"):
            assert moved <= 60


def test_float32_masters_move_50_more_bytes_after_assignment():
    step = bytes_a_parameter("momentum", "float16", "float16")
    other = bytes_a_parameter("momentum", "float16", "float16", is_assigned=True)
    # The masters and the variables are put together (8, 4), the masters clamped (8)
    # and rounded (6), both compared (5), the one or the other taken (11), and that
    # copied to the masters (8).
    assert other - step == 50


def bytes_a_parameter(
    inner,
    gradient_dtype,
    variable_dtype,
    is_assigned=False,
    kind="float32",
    records=False,
):
    optimizer = keras_lso.LossScaleOptimizer(OPTIMIZERS[inner](), master_weights=kind)
    # So many that scalars do not count, in two chunks.
    shapes = [(1000, 1000), (500, 1000)] * 8
    with torch.device("meta"):
        variables, grads = make(
            optimizer, shapes, getattr(torch, gradient_dtype), variable_dtype
        )
        if records:
            record_steps(optimizer)
    run(optimizer, grads, variables)
    if is_assigned:
        for variable in variables:
            variable.assign(torch.zeros_like(variable.value))
    moved = run(optimizer, grads, variables).bytes
    count = sum(math.prod(shape) for shape in shapes)
    return round(moved / count, 2)


@pytest.mark.parametrize(
    "dtypes", [("float32", "float32"), ("float16", "float32"), ("float16", "float16")]
)
@pytest.mark.parametrize(
    "inner",
    [
        *("SGD", "momentum", "nesterov and decay", "Adam", "AdamW", "Lion"),
        *("LARS", "LAMB", "NovoGrad"),
    ],
)
def test_step_of_many_tensors_takes_as_many_kernels_as_of_few(inner, dtypes):
    few, many = (
        kernels_of_a_step(
            keras_lso.LossScaleOptimizer(OPTIMIZERS[inner]()), count, *dtypes
        )
        for count in (2, 50)
    )
    assert few == many


K = keras.optimizers
OWN_STEPS = {
    "Adadelta": K.Adadelta,
    "Adafactor": K.Adafactor,
    "Ftrl": K.Ftrl,
    "LAMB, clipped": lambda rate: keras_lso.LAMB(rate, global_clipnorm=1.0),
    "RMSprop, centered": lambda rate: K.RMSprop(rate, momentum=0.9, centered=True),
    "Adam, amsgrad": lambda rate: Adam(rate, amsgrad=True),
    "SGD of a subclass": lambda rate: Subclass(rate, momentum=0.9, clipvalue=1.0),
    "averaged": lambda rate: K.Ftrl(rate, use_ema=True),
    "user's": lambda rate: Own(rate),
}
# The oldest Keras has not all of them.
if hasattr(K, "OptimizerMap"):
    OWN_STEPS["MultiOptimizer"] = lambda rate: K.MultiOptimizer(
        K.OptimizerMap(K.SGD(rate, momentum=0.9), {"variable.*": K.Ftrl(rate)})
    )


class Subclass(SGD):
    """One that no rule is known of."""


class Own(K.Optimizer):
    """A user's, which changes what it is given in place."""

    def update_step(self, gradient, variable, learning_rate):
        variable.value.sub_(learning_rate * gradient)


@pytest.mark.parametrize("variable_dtype", ["float32", "float16"])
@pytest.mark.parametrize("inner", OWN_STEPS.values(), ids=OWN_STEPS)
def test_step_without_rule_is_undone_on_device(inner, variable_dtype):
    optimizer = keras_lso.LossScaleOptimizer(inner(0.1), master_weights=False)
    kernels_of_a_step(optimizer, count=2, variable_dtype=variable_dtype)


# One pass, of which some take the norm anyway, and steps that are undone.
MEASURED = {
    **{
        name: OPTIMIZERS[name]
        for name in ("momentum", "AdamW, clipped, of 4", "LARS, of 4", "SGD, averaged")
    },
    **{name: lambda name=name: OWN_STEPS[name](0.1) for name in OWN_STEPS},
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("guard", [None, keras_lso.SpikeGuard()], ids=["", "guarded"])
@pytest.mark.parametrize("policy", ["dynamic", "LogMax"])
@pytest.mark.parametrize("inner", MEASURED.values(), ids=MEASURED)
def test_step_record_and_spike_guard_never_read_from_device(inner, policy, guard):
    optimizer = keras_lso.LossScaleOptimizer(
        inner(), loss_scale=POLICIES[policy](), spike_guard=guard
    )
    with torch.device("meta"):
        variables, grads = make(optimizer, [(3, 4), (2, 2)], torch.float32, "float32")
        record_steps(optimizer)
    for _ in range(2):
        run(optimizer, grads, variables)


class Copying(loss_scales.FixedLossScale):
    """A policy that makes a tensor of a number at each step."""

    def step(self, finite, amax=None):
        self.assign_scale(self.value + keras.ops.convert_to_tensor(0.5))


def test_step_of_larc_neither_reads_from_device_nor_copies_to_device():
    optimizer = keras_lso.LARC(keras_lso.LossScaleOptimizer(SGD(0.1, momentum=0.9)))
    with torch.device("meta"):
        variables, grads = make(optimizer, [(3, 4), (2, 2)], torch.float32, "float32")
    run(optimizer, grads, variables)


def test_host_to_device_copy_in_policy_raises_assertion_error():
    optimizer = keras_lso.LossScaleOptimizer(SGD(0.1), loss_scale=Copying(8.0))
    with pytest.raises(AssertionError, match=r"0\.5 is copied"):
        kernels_of_a_step(optimizer, count=1)


def test_layer_state_is_restored_by_constant_number_of_device_kernels():
    """By as many kernels for fifty layers as for two."""
    few, many = (kernels_of_a_protected_step(count) for count in (2, 50))
    assert few["_foreach_copy_"] == 1
    assert few["_fused_sgd_"] == 2  # The step's own, and the copy.
    assert many == few


def kernels_of_a_protected_step(count):
    optimizer = keras_lso.LossScaleOptimizer(SGD(0.1))
    layers = [keras.layers.BatchNormalization() for _ in range(count)]
    with torch.device("meta"):
        for layer in layers:
            layer.build((None, 3))
        variables, grads = make(optimizer, [(3, 4)], torch.float32, "float32")
    optimizer.build(variables)
    guarded = keras_lso.restore_if_skipped(layers, optimizer)
    with torch.no_grad(), RefuseNumbers(), Kernels() as kernels, guarded:
        optimizer.apply(grads, variables)
    return kernels.calls


KERAS = keras.optimizers.schedules
RATES = {
    "float": lambda: 0.1,
    "callable of a number": lambda: lambda: 0.1,
    "callable of a tensor": lambda: lambda: keras.ops.array(0.1),
    "ExponentialDecay": lambda: KERAS.ExponentialDecay(0.1, 10, 0.9),
    "ExponentialDecay, staircase": lambda: KERAS.ExponentialDecay(0.1, 10, 0.9, True),
    "PiecewiseConstantDecay": lambda: KERAS.PiecewiseConstantDecay([2, 5], [3, 2, 1]),
    "PolynomialDecay": lambda: KERAS.PolynomialDecay(0.1, 10),
    "PolynomialDecay, cycle": lambda: KERAS.PolynomialDecay(0.1, 10, cycle=True),
    "InverseTimeDecay": lambda: KERAS.InverseTimeDecay(0.1, 10, 0.9),
    "CosineDecay": lambda: KERAS.CosineDecay(0.1, 10),
    "CosineDecay, warm-up": lambda: KERAS.CosineDecay(
        0.1, 10, warmup_target=1.0, warmup_steps=5
    ),
    "CosineDecayRestarts": lambda: KERAS.CosineDecayRestarts(0.1, 10),
    **ALL,
}


@pytest.mark.parametrize("make_rate", RATES.values(), ids=RATES)
def test_learning_rate_is_computed_on_device(make_rate):
    for make_inner in (SGD, AdamW, keras_lso.LARS):
        kernels_of_a_step(
            keras_lso.LossScaleOptimizer(make_inner(make_rate())), count=2
        )


@pytest.mark.parametrize("make_inner", [SGD, AdamW, keras_lso.LARS])
def test_learning_rate_set_by_callback_is_not_copied_during_step(make_inner):
    optimizer = keras_lso.LossScaleOptimizer(make_inner(0.1))
    with torch.device("meta"):
        variables, grads = make(optimizer, [(3, 4)], torch.float32, "float32")
    optimizer.learning_rate = 0.05
    run(optimizer, grads, variables)


@pytest.mark.parametrize("make_rate", RATES.values(), ids=RATES)
def test_branchless_learning_rate_matches_schedule_on_host(make_rate):
    """The device is the CPU here, which has values: branches go both ways."""
    rate = make_rate()
    if not isinstance(rate, KERAS.LearningRateSchedule):
        rate = lambda step, constant=rate: (  # noqa: E731
            keras.ops.array(constant() if callable(constant) else constant)
        )
    with keras.device("cpu"):
        for step in range(14):
            steps = torch.tensor(step, dtype=torch.int32, device="cpu")
            expected = rate(steps)
            with RefuseToRead():
                found = torch_no_sync._select(lambda: rate(steps), ())  # noqa: B023
            torch.testing.assert_close(found, expected, rtol=0, atol=0)


class RefuseToRead(TorchFunctionMode):
    """Refuses branches by a tensor."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        assert function is not torch.Tensor.__bool__, "A branch reads from the device"
        return function(*args, **(kwargs or {}))
