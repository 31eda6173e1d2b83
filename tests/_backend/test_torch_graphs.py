"""Steps under `torch.compile`: one graph, and the numbers of eager steps."""

import keras
import numpy as np
import pytest

import keras_lso
from testing.harness import Harness, array
from testing.optimizers import OPTIMIZERS

if keras.backend.backend() != "torch":
    pytest.skip("Only PyTorch has these graphs", allow_module_level=True)

import torch
from torch._dynamo.utils import counters

K = keras.optimizers
SCHEDULE = K.schedules.CosineDecay(0.0, 30, warmup_target=0.02, warmup_steps=3)
LOG_MAX = keras.saving.serialize_keras_object(keras_lso.loss_scales.LogMaxLossScale())
SHAPES = [(5,), (3, 2), ()]
# Arguments of the inner optimizer, and of `LossScaleOptimizer`.
OPTIONS = {
    "clipnorm": ({"clipnorm": 0.5}, {}),
    "clipvalue": ({"clipvalue": 0.2}, {}),
    "global_clipnorm": ({"global_clipnorm": 0.7}, {}),
    "accumulation": ({"gradient_accumulation_steps": 2}, {}),
    "averages": ({"use_ema": True, "ema_overwrite_frequency": 2}, {}),
    "schedule": ({"learning_rate": SCHEDULE}, {}),
    "guard": ({}, {"spike_guard": keras_lso.SpikeGuard(max_norm=50.0)}),
    "slots": ({}, {"slot_dtype": "bfloat16"}),
    "int8": ({}, {"slot_dtype": "int8"}),
    "fixed": ({}, {"dynamic": False, "initial_scale": 128.0}),
    "search": ({}, {"initial_scale": "auto"}),
    "log max": ({}, {"loss_scale": LOG_MAX}),
}


def some_of(names, *quick):
    """Returns parameters, all but `quick` for `--full`: each is compiled."""
    return [n if n in quick else pytest.param(n, marks=pytest.mark.full) for n in names]


@pytest.fixture(autouse=True)
def afresh():
    torch._dynamo.reset()
    counters.clear()


def graphs():
    """Returns the number of graphs that were compiled."""
    return counters["stats"]["unique_graphs"]


def scaled(inner, **options):
    return keras_lso.LossScaleOptimizer(inner, **options)


def in_larc(inner):
    return keras_lso.LARC(scaled(inner))


def in_graph(function, variables=None, fullgraph=True):
    # Without Inductor, which takes long and rounds some products and sums at once.
    return torch.compile(function, fullgraph=fullgraph, backend="aot_eager")


def run(optimizer, compiled, dtype="float32", shapes=SHAPES):
    """Returns a harness after six steps, of which the third overflows."""
    harness = Harness(optimizer, shapes, dtype, compiled)
    for i in range(6):
        if i == 2:
            harness.overflow()
        elif i == 3 and isinstance(harness.inner._learning_rate, keras.Variable):
            optimizer.learning_rate = 0.02
        harness.step()
    return harness


def assert_alike(actual, expected, tolerance=2e-5):
    """Compares all variables, in units of the largest element."""
    # In float32 `1 - 0.999` is off by 1.3e-5: a kernel, unlike a formula, has 0.001.
    assert actual.skipped == expected.skipped == 1
    variables = zip(
        [*actual.state, *actual.optimizer.variables],
        [*expected.state, *expected.optimizer.variables],
        strict=True,
    )
    for a, b in variables:
        value, other = (np.float32(array(keras.ops.cast(v, "float32"))) for v in (a, b))
        limit = tolerance * np.abs(other).max(initial=1e-30)
        np.testing.assert_allclose(value, other, rtol=0, atol=limit, err_msg=a.path)


def compare(make, dtype="float32", tolerance=2e-5, shapes=SHAPES):
    """Compares the steps of a graph, which no rate, scale or overflow replaces."""
    actual = run(make(), in_graph, dtype, shapes)
    assert graphs() == 1
    assert_alike(actual, run(make(), None, dtype, shapes), tolerance)


@pytest.mark.parametrize("name", some_of(OPTIMIZERS, "momentum", "nadam", "lars"))
def test_step_in_graph_is_that_of_eager_mode(name):
    compare(lambda: keras_lso.LossScaleOptimizer(OPTIMIZERS[name](0.01)))


@pytest.mark.parametrize("name", some_of(["Adadelta", "Adafactor", "Ftrl"], "Ftrl"))
def test_step_without_rule_in_graph_is_that_of_eager_mode(name):
    compare(lambda: keras_lso.LossScaleOptimizer(getattr(K, name)(0.01)))


@pytest.mark.parametrize("option", OPTIONS)
def test_option_in_graph_is_that_of_eager_mode(option):
    inner, outer = OPTIONS[option]

    def make():
        optimizer = K.AdamW(**{"learning_rate": 0.01} | inner)
        return keras_lso.LossScaleOptimizer(optimizer, **outer)

    if option == "int8":
        # The last digit of a moment may move its code by one of 127 levels.
        compare(make, tolerance=2.0**-6, shapes=[*SHAPES, (64, 64)])
    else:
        compare(make)


def test_inductor_takes_step_of_eager_mode():
    def by_inductor(function, variables):
        return torch.compile(function, fullgraph=True, mode="reduce-overhead")

    def make():
        return keras_lso.LossScaleOptimizer(K.AdamW(0.01, global_clipnorm=0.7))

    actual = run(make(), by_inductor)
    assert graphs() == 1
    assert_alike(actual, run(make(), None))


@pytest.mark.parametrize(
    "codec", ["float32", "remainder", "remainder8", "stochastic", False]
)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_masters_in_graph_are_those_of_eager_mode(dtype, codec):
    def make():
        return keras_lso.GuardedOptimizer(K.SGD(0.01, 0.9), master_weights=codec)

    # A rounding may be to the other neighbour, and a remainder the other's.
    # Without masters, also that of each operation.
    unit = {"float16": 2.0**-10, "bfloat16": 2.0**-7}[dtype]
    tolerances = {
        "float32": 2e-5,
        "remainder": 2.0,
        "remainder8": 2.0,
        "stochastic": unit,
    }
    compare(make, dtype, tolerances.get(codec, 4 * unit))


@pytest.mark.parametrize("wrap", [scaled, in_larc])
def test_record_in_graph_is_that_of_eager_mode(wrap):
    records = []
    for compiled in (in_graph, None):
        inner = K.Adam(0.01)
        optimizer = wrap(inner)
        optimizer.scale_loss(1.0)
        harness = Harness(optimizer, SHAPES, compiled=compiled)
        harness.inner = inner
        harness.step()
        # The graph gets a new variable.
        optimizer.record_steps(8)
        optimizer.record_overflows()
        harness.step()
        harness.overflow()
        assert optimizer.overflowed_variables() == [harness.weights[-1]]
        records.append(optimizer.read_record())
        # Only while it is asked to, the graph reads each gradient by itself.
        guard = optimizer if wrap is scaled else optimizer.inner_optimizer
        checked = guard._counters.overflows
        guard._stop_recording_overflows()
        harness.step()
        assert array(checked).any()
    actual, expected = records
    assert list(actual["outcome"]) == ["applied", "overflow"]
    for key in ("step", "loss_scale", "gradient_norm", "largest_gradient"):
        np.testing.assert_allclose(actual[key], expected[key], rtol=1e-6)


@pytest.mark.parametrize(
    "make",
    [
        lambda: keras_lso.LARS(0.1),
        lambda: keras_lso.LARC(K.SGD(0.1, momentum=0.9)),
        lambda: keras_lso.LARC(keras_lso.LossScaleOptimizer(K.SGD(0.1))),
    ],
)
def test_layer_wise_optimizer_is_in_graph(make):
    actual, expected = (Harness(make(), SHAPES, compiled=c) for c in (in_graph, None))
    grads = actual.gradients()
    for harness in (actual, expected):
        harness.optimizer.scale_loss(1.0)
        for _ in range(3):
            harness.apply([torch.from_numpy(g) for g in grads])
    assert graphs() == 1
    for a, b in zip(actual.values(), expected.values(), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


def test_number_or_schedule_that_is_replaced_counts_in_next_step():
    optimizer = keras_lso.GuardedOptimizer(
        K.SGD(K.schedules.ExponentialDecay(1.0, 1, 1.0), weight_decay=0.25)
    )
    weight = keras.Variable(np.ones(4, "float32"))
    optimizer.build([weight])
    step = in_graph(lambda grad: optimizer.apply([grad], [weight]))
    for rate, decay in [(1.0, 0.25), (1.0, 0.5), (0.5, 0.5)]:
        weight.assign(np.ones(4))
        optimizer.learning_rate = K.schedules.ExponentialDecay(rate, 1, 1.0)
        optimizer.inner_optimizer.weight_decay = decay
        step(torch.zeros(4))
        np.testing.assert_array_equal(weight.numpy(), np.full(4, 1 - rate * decay))


def test_number_of_schedule_and_of_guard_count_in_next_step():
    schedule = K.schedules.ExponentialDecay(1.0, 1, 1.0)
    guard = keras_lso.SpikeGuard(max_norm=100.0)
    optimizer = keras_lso.GuardedOptimizer(K.SGD(schedule), spike_guard=guard)
    weight = keras.Variable(np.zeros(4, "float32"))
    optimizer.build([weight])
    step = in_graph(lambda grad: optimizer.apply([grad], [weight]))
    step(torch.ones(4))
    schedule.initial_learning_rate = 0.5
    step(torch.ones(4))
    np.testing.assert_array_equal(weight.numpy(), np.full(4, -1.5))
    guard.max_norm = 1.0
    step(torch.ones(4))
    assert int(optimizer.skipped_spikes) == 1


def test_number_of_policy_within_larc_counts_in_next_step():
    inner = keras_lso.LossScaleOptimizer(K.SGD(0.1), initial_scale=8.0)
    optimizer = keras_lso.LARC(inner)
    weight = keras.Variable(np.ones(4, "float32"))
    optimizer.build([weight])
    optimizer.scale_loss(1.0)
    step = in_graph(lambda grad: optimizer.apply([grad], [weight]))
    step(torch.ones(4))
    inner.loss_scale_policy.increment_period = 2
    step(torch.ones(4))
    assert float(inner.loss_scale) == 16.0


@pytest.mark.parametrize("cls", ["LossScaleOptimizer", "GuardedOptimizer"])
def test_unscaled_gradients_have_dtype_of_eager_mode(cls):
    optimizer = getattr(keras_lso, cls)(K.SGD(0.1))
    optimizer.build([keras.Variable(np.ones(4, "float32"))])
    grads = [torch.full((4,), 3.0, dtype=torch.float16), None]
    actual, missing = in_graph(optimizer.get_unscaled_gradients)(grads)
    expected, _ = optimizer.get_unscaled_gradients(grads)
    assert missing is None
    assert actual.dtype == expected.dtype
    assert torch.equal(actual, expected)


@pytest.mark.parametrize(
    "way", ["scale_loss", "get_scaled_loss", "apply_gradients", "minimize"]
)
@torch._dynamo.config.patch(trace_autograd_ops=True)
def test_loop_in_graph_scales_and_unscales(way):
    optimizer = keras_lso.LossScaleOptimizer(K.SGD(0.125))
    weight = keras.Variable(np.ones(4, "float32"))
    optimizer.build([weight])

    def step(x):
        loss = torch.sum(torch.square(weight.value * x))
        if way == "minimize":
            optimizer.minimize(lambda: torch.sum(torch.square(weight * x)), [weight])
        elif way == "get_scaled_loss":
            scaled = optimizer.get_scaled_loss(loss)
            grads = torch.autograd.grad(scaled, [weight.value])
            optimizer.apply(optimizer.get_unscaled_gradients(grads), [weight])
        else:
            grads = torch.autograd.grad(optimizer.scale_loss(loss), [weight.value])
            if way == "scale_loss":
                optimizer.apply(grads, [weight])
            else:
                optimizer.apply_gradients(zip(grads, [weight], strict=True))
        return loss.detach()

    compiled = in_graph(step)
    assert [float(compiled(torch.ones(4))) for _ in range(3)] == [4.0, 2.25, 1.265625]
    assert graphs() == 1


def test_variables_without_gradient_or_in_another_order():
    optimizer = keras_lso.LossScaleOptimizer(K.SGD(1.0))
    weights = [keras.Variable(np.zeros(2, "float32")) for _ in range(4)]
    optimizer.build(weights)

    def step(a, b):
        optimizer.apply([a, None, b], [weights[3], weights[0], weights[1]], False)

    in_graph(step)(torch.ones(2), torch.full((2,), 2.0))
    assert [float(w.numpy()[0]) for w in weights] == [0.0, -2.0, 0.0, -1.0]


def test_graph_and_eager_mode_take_turns():
    compiled, eager = (
        Harness(keras_lso.LossScaleOptimizer(K.Adam(0.01)), SHAPES, compiled=c)
        for c in (in_graph, None)
    )
    in_graphs = compiled._apply
    for i in range(6):
        compiled._apply = in_graphs if i % 2 else compiled._take
        compiled.step()
        eager.step()
    for a, b in zip(compiled.values(), eager.values(), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)


@pytest.mark.parametrize(
    "make, dtype",
    [
        (lambda: scaled(K.Adadelta(0.5, gradient_accumulation_steps=2)), "float32"),
        (lambda: scaled(K.Adadelta(SCHEDULE)), "float32"),
        (lambda: scaled(K.Adadelta(0.5), master_weights="remainder"), "bfloat16"),
        (
            lambda: keras_lso.LARC(scaled(K.Adadelta(0.5), master_weights="remainder")),
            "bfloat16",
        ),
    ],
)
def test_step_that_needs_host_is_no_part_of_graph(make, dtype):
    results = []
    for compiled in (lambda f, _: in_graph(f, fullgraph=False), None):
        optimizer = make()
        optimizer.scale_loss(1.0)
        harness = Harness(optimizer, SHAPES, dtype, compiled)
        assert "_traced_step" not in vars(optimizer)
        results.append(harness.steps(4).values())
    for a, b in zip(*results, strict=True):
        np.testing.assert_array_equal(a, b)


def test_sparse_gradient_that_dynamo_rejects_is_applied_outside_of_graph():
    optimizer = scaled(K.Adam(0.5))
    weight = keras.Variable(np.zeros((3, 1), "float32"))
    optimizer.build([weight])
    step = in_graph(lambda g: optimizer.apply([g], [weight], False), fullgraph=False)
    step(torch.sparse_coo_tensor([[1]], [[2.0]], (3, 1)))
    np.testing.assert_allclose(weight.numpy()[:, 0], [0.0, -0.5, 0.0], rtol=1e-4)
    assert graphs() == 0


def test_optimizer_that_is_not_built_steps_outside_of_graph():
    optimizer = keras_lso.LossScaleOptimizer(K.SGD(1.0))
    weight = keras.Variable(np.zeros(2, "float32"))
    step = in_graph(lambda g: optimizer.apply([g], [weight], False), fullgraph=False)
    step(torch.ones(2))
    np.testing.assert_array_equal(weight.numpy(), [-1.0, -1.0])


def test_unknown_variable_is_rejected_with_error_of_eager_mode():
    optimizer = keras_lso.LossScaleOptimizer(K.SGD(1.0))
    optimizer.build([keras.Variable(np.zeros(2, "float32"))])
    other = keras.Variable(np.zeros(2, "float32"))
    step = in_graph(lambda g: optimizer.apply([g], [other]), fullgraph=False)
    with pytest.raises(ValueError, match="Unknown variable"):
        step(torch.ones(2))


def test_variable_that_optimizer_does_not_know_is_not_lost():
    class Counting(keras_lso.loss_scales.DynamicLossScale):
        count = keras.Variable(0.0)

        def step(self, finite, amax=None):
            super().step(finite, amax)
            self.count.assign_add(1.0)

    optimizer = keras_lso.LossScaleOptimizer(K.SGD(1.0), loss_scale=Counting())
    weight = keras.Variable(np.zeros(2, "float32"))
    optimizer.build([weight])
    with pytest.raises(RuntimeError):
        in_graph(lambda g: optimizer.apply([g], [weight]))(torch.ones(2))
    assert float(Counting.count.numpy()) == 0.0
    np.testing.assert_array_equal(weight.numpy(), [0.0, 0.0])
