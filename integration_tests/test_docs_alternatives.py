"""The table in README.md: Keras's class, `torch.amp.GradScaler` and `keras_lso`.

The row on replicas: `distributed/test_tensorflow_replicas.py` and
`distributed/test_torch_training.py`. The row on statistics: `test_statistics.py`.
"""

import inspect

import keras
import numpy as np
import pytest

import keras_lso
from integration_tests.docs_blocks import PAGES, code_in
from keras_lso import callbacks, loss_scales

INF = float("inf")


def row_of(beginning):
    """Returns the cells of a row of the table."""
    lines = PAGES["README.md"].read_text().splitlines()
    [line] = [line for line in lines if line.startswith(f"| {beginning}")]
    return [cell.strip() for cell in line.strip("|").split(" | ")]


class Keras:
    """Keras's class, around a weight of 1.0 with a learning rate of 0.5."""

    def __init__(self, growth_steps=2000):
        if keras.backend.backend() == "jax":
            pytest.skip("Keras's class fails outside `jit`, as README.md says")
        self.variable = keras.Variable([1.0])
        self.optimizer = keras.optimizers.LossScaleOptimizer(
            keras.optimizers.SGD(0.5), dynamic_growth_steps=growth_steps
        )
        self.optimizer.build([self.variable])

    @property
    def scale(self):
        return float(keras.ops.convert_to_numpy(self.optimizer.dynamic_scale))

    @property
    def weight(self):
        return float(keras.ops.convert_to_numpy(self.variable)[0])

    def step(self, gradient):
        with np.errstate(invalid="ignore"):  # 0 * inf
            scaled = np.float32([gradient]) * np.float32(self.scale)
        gradients = [keras.ops.convert_to_tensor(scaled)]
        self.optimizer.apply(gradients, [self.variable])

    def adapt(self):
        """Is a part of `step`."""

    def assign(self, scale):
        self.optimizer.dynamic_scale.assign(scale)


class GradScaler:
    """PyTorch's, in the same place."""

    def __init__(self, growth_steps=2000):
        torch = pytest.importorskip("torch")
        self.parameter = torch.nn.Parameter(torch.ones(1))
        self.sgd = torch.optim.SGD([self.parameter], 0.5)
        self.scaler = torch.amp.GradScaler("cpu", growth_interval=growth_steps)
        self.as_tensor = torch.tensor

    @property
    def scale(self):
        return self.scaler.get_scale()

    @property
    def weight(self):
        return self.parameter.item()

    def step(self, gradient):
        self.sgd.zero_grad()
        self.scaler.scale(self.parameter.sum() * gradient).backward()
        self.scaler.step(self.sgd)

    def adapt(self):
        self.scaler.update()

    def assign(self, scale):
        self.scaler.update(new_scale=scale)


class GradScalerOfTensors(GradScaler):
    """The same. A scale in a tensor stays on the device."""

    def assign(self, scale):
        super().assign(self.as_tensor(scale))


# What others do cannot become false through a change here.
each_peer = pytest.mark.parametrize("make", [Keras, GradScaler, GradScalerOfTensors])


@pytest.mark.full
@each_peer
def test_scale_of_peer_falls_to_zero_and_next_step_is_nan(make):
    assert all("scale 0.0, then NaN" in cell for cell in row_of("many overflows")[1:3])
    peer = make()
    for _ in range(170):
        peer.step(INF)
        peer.adapt()
    assert (peer.scale, peer.weight) == (0.0, 1.0)
    peer.step(1.0)
    assert np.isnan(peer.weight)


@pytest.mark.full
def test_scale_of_peer_after_long_run_without_overflow():
    """At two steps for a doubling, not 2000."""
    beginning, by_keras, by_grad_scaler, _ = row_of("226,000 steps")
    assert beginning == f"{226 // 2 * 2000:,} steps without an overflow"
    ends = {}
    for make in (Keras, GradScaler):
        peer = make(growth_steps=2)
        for count in range(1, 227):
            assert peer.scale < INF, count
            peer.step(0.0)
            peer.adapt()
        ends[make] = peer
    assert by_keras == "scale inf, every later step skipped"
    assert ends[Keras].scale == INF
    ends[Keras].step(1.0)
    assert (ends[Keras].scale, ends[Keras].weight) == (INF, 1.0)
    assert by_grad_scaler == f"stops at {ends[GradScaler].scale:.2g}".replace("+", "")


@pytest.mark.full
@each_peer
def test_scale_of_peer_is_fixed_by_assigning_after_each_step(make):
    assert row_of("a fixed scale")[2] == "`update(new_scale=...)` after each step"
    peer, seen = make(), []
    peer.step(0.0)  # `GradScaler` makes its scale in the first step.
    for gradient in (0.0, 1.0, INF, 1.0):
        peer.assign(1024.0)
        peer.step(gradient)
        seen.append(peer.weight)
    # The overflow is skipped.
    assert seen == [1.0, 0.5, 0.5, 0.0]
    peer.assign(1024.0)
    assert peer.scale == 1024.0


@pytest.mark.full
@each_peer
def test_peer_takes_bounds_and_policy_by_assigning_after_each_step(make):
    _, by_keras, by_grad_scaler, ours = row_of("bounds, a loss-scale policy")
    assert by_keras == "in a loop: assign to `dynamic_scale` after each step"
    assert by_grad_scaler == "`update(new_scale=...)` after each step"
    peer, seen = make(), []
    peer.step(0.0)
    peer.assign(8.0)
    for gradient in (0.0, 0.0, 0.0, INF, INF, 0.0):
        before = peer.scale
        peer.step(gradient)
        peer.adapt()
        overflowed = peer.scale < before
        peer.assign(max(before / 4 if overflowed else min(before + 1, 10.0), 2.0))
        seen.append(peer.scale)
    assert seen == [9.0, 10.0, 10.0, 2.5, 2.0, 3.0]
    parameters = inspect.signature(keras_lso.LossScaleOptimizer).parameters
    *bounds, policy = code_in(ours)
    assert set(bounds) <= set(parameters) and hasattr(loss_scales, policy)


def test_hysteresis_is_argument_of_keras_lso_only():
    _, by_keras, by_grad_scaler, ours = row_of("hysteresis")
    assert by_keras == by_grad_scaler == "no"
    torch = pytest.importorskip("torch")
    for cls in (keras.optimizers.LossScaleOptimizer, torch.amp.GradScaler):
        assert "hysteresis" not in inspect.signature(cls).parameters
    [code] = code_in(ours)
    assert eval(code, vars(loss_scales)).hysteresis == 2  # noqa: S307


def step_of(optimizer, size):
    """Returns the weight after calm steps from 1.0, and a step of a size."""
    w = keras.Variable([1.0])
    optimizer.build([w])
    for value in (*[1e-3, 1.1e-3] * 40, size):
        optimizer.apply([keras.ops.convert_to_tensor([value])], [w])
    return float(keras.ops.convert_to_numpy(w)[0])


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
