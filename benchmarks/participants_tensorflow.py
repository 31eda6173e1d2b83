"""Two replicas of a `tf.distribute.MirroredStrategy`, on two logical CPUs.

A step adds up the gradients of both, since Keras's optimizers do that here.
"""

from functools import partial

import tensorflow as tf

from benchmarks.data import check_healthy, make_data
from benchmarks.inner import INNER
from benchmarks.participants import PARTICIPANTS, make_group, optimizers
from benchmarks.rows_tensorflow import Tensors
from benchmarks.timing import Step, time_in_turn, wall_clock


def measure(shapes, inner, rounds):
    """See `participants.measure`."""
    [cpu] = tf.config.list_physical_devices("CPU")
    logical = [tf.config.LogicalDeviceConfiguration() for _ in range(PARTICIPANTS)]
    tf.config.set_logical_device_configuration(cpu, logical)
    strategy = tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(PARTICIPANTS)])
    data = make_data(shapes, "float32")
    tensors = Tensors(data)
    groups = []
    for name in inner:
        roles, clocks = {}, {}
        with strategy.scope():
            rows = optimizers(INNER[name].make)
        for row, (role, optimizer) in rows.items():
            step = _step(strategy, optimizer, tensors, is_scaled=role != "inner")
            step.run()
            check_healthy(f"{name}, {row}", step, data)
            roles[row], clocks[row] = role, partial(wall_clock, step)
        seconds = time_in_turn(clocks, rounds)
        groups.append(make_group("MirroredStrategy", name, shapes, roles, seconds))
    return groups


def _step(strategy, optimizer, tensors, is_scaled):
    with strategy.scope():
        variables = tensors.variables()
        optimizer.build(variables)
    gradients = tensors.gradients[is_scaled]

    @tf.function
    def step():
        strategy.run(lambda: optimizer.apply(gradients, variables))
        return optimizer.iterations + 0

    def state():
        return [v.numpy() for v in variables], []

    return Step(lambda: step().numpy(), state)
