"""A step on a GPU: right, without waiting, and in a CUDA graph on PyTorch.

With GPU_DRY_RUN=1, as in `make bench-gpu-dry`, what needs no card runs on a CPU.
"""

import os

import keras
import numpy as np
import pytest
from keras import ops

import keras_lso

OPTIMIZERS = {
    "SGD": lambda: keras.optimizers.SGD(0.1),
    "momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    "nesterov": lambda: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True),
    "Adam": lambda: keras.optimizers.Adam(0.1),
    "AdamW": lambda: keras.optimizers.AdamW(0.1, weight_decay=0.1),
    "Lion": lambda: keras.optimizers.Lion(0.1),
    "LARS": lambda: keras_lso.LARS(0.1, weight_decay_rate=0.1),
    "LAMB": lambda: keras_lso.LAMB(0.1, weight_decay_rate=0.1),
    "NovoGrad": lambda: keras_lso.NovoGrad(0.1, weight_decay_rate=0.1),
}
# The dtype of weights, and the kind of their masters.
WEIGHTS = [("float32", "auto")]
WEIGHTS += [
    (dtype, kind)
    for dtype in ("float16", "bfloat16")
    for kind in ("float32", "remainder", "remainder8", "stochastic")
]
SCALE = 2.0**10
SHAPES = [(1000, 300), (300,), (), (7, 5)]


def has_gpu():
    if keras.backend.backend() == "torch":
        import torch

        return torch.cuda.is_available()
    if keras.backend.backend() == "jax":
        import jax

        return jax.default_backend() == "gpu"
    return False


pytestmark = pytest.mark.skipif(
    not has_gpu() and "GPU_DRY_RUN" not in os.environ,
    reason="PyTorch or JAX with a GPU: this machine or backend has none",
)


def make(inner, shapes=SHAPES, dtype="float32", kind="auto"):
    random = np.random.default_rng(0)
    variables = [keras.Variable(random.normal(size=s), dtype=dtype) for s in shapes]
    optimizer = keras_lso.LossScaleOptimizer(
        inner, initial_scale=SCALE, master_weights=kind
    )
    optimizer.build(variables)
    return optimizer, variables


def gradients(seed, shapes=SHAPES):
    random = np.random.default_rng(seed)
    return [
        ops.convert_to_tensor(random.normal(size=s) * SCALE, dtype="float32")
        for s in shapes
    ]


def snapshot(variables):
    return [np.array(ops.convert_to_numpy(v)) for v in variables]


@pytest.mark.parametrize("inner", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_wrapped_steps_match_inner_optimizer(inner):
    optimizer, variables = make(inner())
    alone, twins = inner(), make(inner())[1]
    alone.build(twins)
    for step in range(5):
        grads = gradients(step)
        if step == 2:
            before = snapshot([*variables, *optimizer.inner_optimizer.variables])
            overflow = [*grads[:-1], grads[-1] * np.inf]
            optimizer.apply(overflow, variables)
            after = snapshot([*variables, *optimizer.inner_optimizer.variables])
            assert [a.tobytes() for a in after] == [b.tobytes() for b in before]
            continue
        scale = float(ops.convert_to_numpy(optimizer.loss_scale))
        optimizer.apply([g * (scale / SCALE) for g in grads], variables)
        alone.apply([g / SCALE for g in grads], twins)
    assert int(ops.convert_to_numpy(optimizer.skipped_steps)) == 1
    # CUDA's fused Adam subtracts beta_2 from 1 in float32: its second moment is 1.3e-5
    # smaller, and each of four steps of at most 0.1 longer by half of that.
    longer = 4 * 0.1 * 6.5e-6 if hasattr(alone, "beta_2") else 0.0
    for actual, expected in zip(snapshot(variables), snapshot(twins), strict=True):
        # A few roundings of 6e-8 a step; sums of squares in another order.
        atol = 2e-6 * max(np.abs(expected).max(), 0.1) + longer
        np.testing.assert_allclose(actual, expected, rtol=0, atol=atol)


needs_cuda = pytest.mark.skipif(
    keras.backend.backend() != "torch" or not has_gpu(),
    reason="PyTorch with a GPU; JAX compiles a step as one program",
)


@needs_cuda
@pytest.mark.parametrize("dtype, kind", WEIGHTS)
@pytest.mark.parametrize("inner", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_step_never_synchronizes_with_gpu(inner, dtype, kind):
    import torch

    optimizer, variables = make(inner(), dtype=dtype, kind=kind)
    grads = gradients(0)
    loss = ops.ones(())
    torch.cuda.set_sync_debug_mode("error")
    try:
        # With masters the first step compares, and others may know.
        with torch.no_grad():
            for _ in range(3):
                optimizer.scale_loss(loss)
                optimizer.apply(grads, variables)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@needs_cuda
def test_masters_are_not_compared_again_after_applied_step(monkeypatch):
    import torch

    from keras_lso._backend.torch import masters as torch_masters

    calls = []
    compare = torch_masters._resynchronise_all
    monkeypatch.setattr(
        torch_masters,
        "_resynchronise_all",
        lambda *args: (calls.append(1), compare(*args)),
    )
    optimizer, variables = make(keras.optimizers.SGD(0.1), dtype="float16")
    for finite, compared in ((True, 1), (True, 1), (False, 1), (True, 1)):
        grads = gradients(0) if finite else [g * np.inf for g in gradients(0)]
        optimizer.apply(grads, variables)
        torch.cuda.synchronize()
        assert len(calls) == compared
    variables[2].assign(5.0)
    before = snapshot(variables)[2]
    optimizer.apply([g * 0 for g in gradients(0)], variables)
    assert len(calls) == 2
    np.testing.assert_array_equal(snapshot(variables)[2], before)


@needs_cuda
@pytest.mark.parametrize("dtype, kind", WEIGHTS)
@pytest.mark.parametrize("inner", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_step_captured_in_cuda_graph_replays_like_eager_steps(inner, dtype, kind):
    import torch

    captured, variables = make(inner(), dtype=dtype, kind=kind)
    eager, twins = make(inner(), dtype=dtype, kind=kind)
    static = gradients(0)
    state = [*variables, *captured.variables]
    initial = [v.value.detach().clone() for v in state]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.no_grad(), torch.cuda.stream(stream):
        captured.apply(static, variables)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        captured.apply(static, variables)
    with torch.no_grad():
        for variable, value in zip(state, initial, strict=True):
            variable.value.copy_(value)
    for step in range(4):
        grads = gradients(step)
        if step == 1:
            grads = [g * np.inf for g in grads]
        with torch.no_grad():
            for target, value in zip(static, grads, strict=True):
                target.copy_(value)
            graph.replay()
            eager.apply(grads, twins)
    assert int(captured.skipped_steps) == int(eager.skipped_steps) == 1
    for actual, expected in zip(
        snapshot(state), snapshot([*twins, *eager.variables]), strict=True
    ):
        np.testing.assert_array_equal(actual, expected)


def count_replays(monkeypatch):
    """Turns the capturing of steps on; returns a list that grows with each replay."""
    import torch

    from keras_lso._backend.torch import captured

    replays = []

    class Graph(torch.cuda.CUDAGraph):
        def replay(self):
            replays.append(self)
            super().replay()

    monkeypatch.setattr(captured, "IS_ON", True)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    return replays


@needs_cuda
@pytest.mark.parametrize("in_place", [True, False], ids=["in place", "copied"])
@pytest.mark.parametrize("dtype, kind", WEIGHTS)
@pytest.mark.parametrize("inner", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_steps_captured_by_package_replay_like_eager_steps(
    inner, dtype, kind, in_place, monkeypatch
):
    import torch

    eager, twins = make(inner(), dtype=dtype, kind=kind)
    replays = count_replays(monkeypatch)
    replayed, variables = make(inner(), dtype=dtype, kind=kind)
    given = gradients(0)
    # What is alive is in other memory.
    alive = []
    for step in range(10):
        grads = gradients(step)
        if step in (4, 6):
            grads = [g * np.inf for g in grads]
        if step == 7:
            replayed.learning_rate = eager.learning_rate = 0.05
        with torch.no_grad():
            eager.apply(grads, twins)
            if in_place:
                torch._foreach_copy_(given, grads)
                grads = given
            replayed.apply(grads, variables)
        alive.append(grads)
    assert len(replays) == 7
    assert int(replayed.skipped_steps) == int(eager.skipped_steps) == 2
    for actual, expected in zip(
        snapshot([*variables, *replayed.variables]),
        snapshot([*twins, *eager.variables]),
        strict=True,
    ):
        np.testing.assert_array_equal(actual, expected)


@needs_cuda
def test_fit_replays_beside_thread_that_pins_memory(monkeypatch):
    import torch

    def train():
        keras.utils.set_random_seed(0)
        model = keras.Sequential(
            [keras.layers.Dense(64, "relu"), keras.layers.Dense(1, dtype="float32")]
        )
        optimizer = keras_lso.LossScaleOptimizer(keras.optimizers.Adam(0.01))
        model.compile(optimizer, "mse")
        x = torch.randn(256, 16, generator=torch.Generator().manual_seed(0))
        data = torch.utils.data.TensorDataset(x, x[:, :1])
        loader = torch.utils.data.DataLoader(
            data, batch_size=24, num_workers=1, pin_memory=True
        )
        model.fit(loader, epochs=4, verbose=0)
        return snapshot([*model.variables, *optimizer.variables])

    expected = train()
    replays = count_replays(monkeypatch)
    actual = train()
    # Four epochs of eleven batches.
    assert len(replays) >= 44 - 2 * 3
    for a, e in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(a, e)
