"""Training under a `tf.distribute` strategy of one device, and what it is held against.

The strategy has nothing to share out, so that the run must be the one without it.
"""

import contextlib
import json
import os

import keras
import numpy as np
import tensorflow as tf

import keras_lso
from integration_tests.distributed import launch
from integration_tests.keras_optimizers import keras_optimizers

SGD, Adam = keras.optimizers.SGD, keras.optimizers.Adam

INNER = {
    **keras_optimizers(),
    "clipnorm": lambda: Adam(0.1, clipnorm=0.5),
    "global_clipnorm": lambda: SGD(0.1, momentum=0.9, global_clipnorm=0.5),
    "LARS": lambda: keras_lso.LARS(0.1),
    "LARS, averaging": lambda: keras_lso.LARS(0.1, use_ema=True),
    "LAMB": lambda: keras_lso.LAMB(0.1),
    "NovoGrad": lambda: keras_lso.NovoGrad(0.1),
    "LARC": lambda: keras_lso.LARC(SGD(0.1, momentum=0.9)),
    "averages": lambda: Adam(0.1, use_ema=True, ema_overwrite_frequency=2),
    "accumulation": lambda: SGD(0.1, momentum=0.9, gradient_accumulation_steps=2),
}
if hasattr(keras.optimizers, "MultiOptimizer"):  # Since Keras 3.15.
    INNER["several"] = lambda: keras.optimizers.MultiOptimizer(
        keras.optimizers.OptimizerMap(keras.optimizers.RMSprop(0.1))
    )

# A name: the inner optimizer, the dtype, and the class of the variables.
CASES = {
    **{name: (name, "float32", keras.Variable) for name in INNER},
    **{
        f"{name}, float16": (name, "float16", keras.Variable)
        for name in ("Adam", "RMSprop", "LARC", "averages", "accumulation")
    },
    **{
        f"{name}, tf.Variable": (name, "float32", tf.Variable)
        for name in ("SGD", "RMSprop", "clipnorm", "LARS", "LARC", "accumulation")
    },
    "Adam, float16 tf.Variable": ("Adam", "float16", tf.Variable),
}
# A rule and masters; an optimizer that steps by itself; a wrapper; and what of Keras's
# optimizers branches by itself.
FEW = [
    "Adam, float16 tf.Variable",
    "RMSprop",
    "LARC",
    "accumulation, float16",
    "averages",
]
# A strategy, and whether it runs in a `tf.function`: the first with a few of the cases
# and the next with fewer, or with more of them each with all.
RUNS = [
    ("mirrored", True),
    ("mirrored", False),
    ("one device", True),
    ("parameter server", True),
]
MORE_RUNS = [
    ("one device", False),
    ("default", True),
    ("default", False),
    ("processes", True),
]
STEPS, OVERFLOW = 5, 2


def runs_of(is_exhaustive):
    """Returns tuples of a strategy, whether it runs in a function, and its cases."""
    if is_exhaustive:
        return [(*run, list(CASES)) for run in RUNS + MORE_RUNS]
    first, *others = RUNS
    return [(*first, FEW), *((*run, FEW[::2]) for run in others)]


def make_strategy(name):
    """Returns a strategy of one device."""
    if name == "parameter server":
        return tf.distribute.ParameterServerStrategy(_start_cluster())
    return {
        "mirrored": lambda: tf.distribute.MirroredStrategy(["/cpu:0"]),
        "one device": lambda: tf.distribute.OneDeviceStrategy("/cpu:0"),
        "default": tf.distribute.get_strategy,
        "processes": tf.distribute.MultiWorkerMirroredStrategy,
    }[name]()


def _start_cluster():
    """Starts a worker and a parameter server in this process."""
    ports = launch.free_ports(2)
    addresses = zip(("worker", "ps"), ports, strict=True)
    cluster = {"cluster": {job: [f"localhost:{port}"] for job, port in addresses}}
    spec = tf.train.ClusterSpec(cluster["cluster"])
    for job in ("worker", "ps"):
        _SERVERS.append(tf.distribute.Server(spec, job_name=job, protocol="grpc"))
    os.environ["TF_CONFIG"] = json.dumps(cluster | {"task": {"type": "chief"}})
    return tf.distribute.cluster_resolver.SimpleClusterResolver(spec, rpc_layer="grpc")


_SERVERS: list = []


def scope_of(strategy):
    """Returns the strategy's scope; None is no strategy."""
    return contextlib.nullcontext() if strategy is None else strategy.scope()


def gradients(dtype):
    """Yields the two gradients of each step, of which one overflows."""
    random = np.random.default_rng(0)
    for step in range(STEPS):
        kernel = random.normal(size=(2, 3)).astype(dtype)
        bias = random.normal(size=2).astype(dtype)
        if step == OVERFLOW:
            bias[1] = np.inf
        yield kernel, bias


def train(case, strategy, in_function):
    """Returns what the weights and the optimizer hold after each step, as arrays.

    Args:
        case: Key of `CASES`.
        strategy: A `tf.distribute.Strategy`, or None.
        in_function: Bool. Whether the step is a `tf.function`.
    """
    inner, dtype, variable_class = CASES[case]
    kernel = np.array([[1.0, -0.0, 2.0], [0.5, -1.0, 3.0]], dtype)
    with scope_of(strategy):
        weights = [variable_class(w) for w in (kernel, np.array([0.25, -2.0], dtype))]
        optimizer = keras_lso.LossScaleOptimizer(
            INNER[inner](), initial_scale=4.0, dynamic_growth_steps=2
        )
        optimizer.build(weights)

    def step(*grads):
        optimizer.apply(list(grads), weights)

    def run(*grads):
        if strategy is None:
            step(*grads)
        else:
            strategy.run(step, args=grads)

    if in_function:
        run = tf.function(run, autograph=False)
    call = run
    if isinstance(strategy, tf.distribute.ParameterServerStrategy):
        coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)

        def call(*grads):
            coordinator.schedule(run, args=grads)
            coordinator.join()

    recorded = []
    for grads in gradients(dtype):
        call(*map(tf.constant, grads))
        state = [*weights, *optimizer.variables]
        recorded.append([np.array(v.numpy()) for v in state])
    return recorded
