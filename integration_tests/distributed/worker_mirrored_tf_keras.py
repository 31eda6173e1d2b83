"""Calls tf.keras's methods on two replicas; prints what became of the weights.

Run by `test_tensorflow_replicas.py` in a process of its own: logical devices must be
set up before TensorFlow starts.
"""

import functools
import json

import keras
import numpy as np
import tensorflow as tf

import keras_lso
from integration_tests.distributed.two_replicas import strategy
from testing.tiers import is_full

SGD = keras.optimizers.SGD
MODERN = keras_lso.LossScaleOptimizer
EXPERIMENTAL = keras_lso.mixed_precision.experimental.LossScaleOptimizer
TF1 = keras_lso.compat.v1.mixed_precision.MixedPrecisionLossScaleOptimizer
OPTIMIZERS = {
    "modern": lambda: MODERN(SGD(0.5, momentum=0.5)),
    "modern, clipping": lambda: MODERN(SGD(0.5, global_clipnorm=1.0)),
    "modern, Adam": lambda: MODERN(keras.optimizers.Adam(0.1)),
    "experimental": lambda: EXPERIMENTAL(SGD(0.5, momentum=0.5), "dynamic"),
    "TF1": lambda: TF1(SGD(0.5, momentum=0.5), "dynamic"),
    "LARS": lambda: keras_lso.LARS(1.0, eeta=0.1, weight_decay_rate=1.0),
    "LARC inside": lambda: MODERN(keras_lso.LARC(SGD(0.1), eta=0.12)),
}
if hasattr(keras.optimizers, "MultiOptimizer"):  # Since Keras 3.15.
    OPTIMIZERS["several inside"] = lambda: MODERN(
        keras.optimizers.MultiOptimizer(
            keras.optimizers.OptimizerMap(SGD(0.5, momentum=0.5))
        )
    )
# One a replica.
GRADIENTS = np.array([[1.0, -2.0], [2.0, 6.0]], "float32")
# That AutoGraph can read a step, `tests/_backend/test_many_tensors.py` sees.
function = functools.partial(tf.function, autograph=False)


def make(make_optimizer):
    with strategy.scope():
        weight = keras.Variable(np.array([4.0, 3.0], "float32"))
        optimizer = make_optimizer()
        optimizer.build([weight])
    return optimizer, weight


def is_scaling(optimizer):
    return isinstance(optimizer, MODERN)


def local(weight):
    replicas = strategy.experimental_local_results(weight.value)
    return [replica.numpy().tolist() for replica in replicas]


def alone(make_optimizer, gradient):
    """Returns the weights after three steps without replicas."""
    weight, optimizer = (
        keras.Variable(np.array([4.0, 3.0], "float32")),
        make_optimizer(),
    )
    says = {"scaled": False} if is_scaling(optimizer) else {}
    for _ in range(3):
        optimizer.apply_gradients([(tf.constant(gradient), weight)], **says)
    return weight.numpy().tolist()


KEYWORDS = [
    {"experimental_aggregate_gradients": False},
    {"skip_gradients_aggregation": True},
]
for i, (name, make_optimizer) in enumerate(OPTIMIZERS.items()):
    for keyword in KEYWORDS if is_full() else [KEYWORDS[i % 2]]:
        optimizer, weight = make(make_optimizer)

        def on_each_replica(optimizer=optimizer, weight=weight, keyword=keyword):
            context = tf.distribute.get_replica_context()
            gradient = tf.gather(GRADIENTS, context.replica_id_in_sync_group)
            total = context.all_reduce("sum", gradient)
            says = {"scaled": False} if is_scaling(optimizer) else {}
            optimizer.apply_gradients([(total, weight)], **keyword, **says)

        step = function(lambda run=on_each_replica: strategy.run(run))
        for _ in range(3):
            step()
        expected = alone(make_optimizer, GRADIENTS.sum(axis=0))
        print("REDUCED", json.dumps([name, expected, local(weight)]))

# After a call with gradients that were reduced, one with gradients that were not.
optimizer, weight = make(OPTIMIZERS["modern"])


def reduced_then_not():
    context = tf.distribute.get_replica_context()
    gradient = tf.gather(GRADIENTS, context.replica_id_in_sync_group)
    total = context.all_reduce("sum", gradient)
    optimizer.apply_gradients(
        [(total, weight)], experimental_aggregate_gradients=False, scaled=False
    )
    optimizer.apply_gradients([(gradient, weight)], scaled=False)
    optimizer.apply_gradients([(gradient, weight)], scaled=False)


function(lambda: strategy.run(reduced_then_not))()
expected = alone(OPTIMIZERS["modern"], GRADIENTS.sum(axis=0))
print("REDUCED", json.dumps(["mixed", expected, local(weight)]))

# Each replica has a loss of its own; their gradients add up.
optimizer, weight = make(OPTIMIZERS["modern"])


def minimize():
    context = tf.distribute.get_replica_context()
    gradient = tf.gather(GRADIENTS, context.replica_id_in_sync_group)
    optimizer.minimize(lambda: tf.reduce_sum(gradient * weight), [weight])


step = function(lambda: strategy.run(minimize))
for _ in range(3):
    step()
print("REDUCED", json.dumps(["minimize", expected, local(weight)]))

# TensorFlow's own variables, beside what Keras's bare optimizer makes of them.
BARE = {
    "SGD": lambda: SGD(0.5),
    "momentum": lambda: SGD(0.5, momentum=0.5),
    "Adam": lambda: keras.optimizers.Adam(0.1),
    "RMSprop": lambda: keras.optimizers.RMSprop(0.1),
    "float16": lambda: keras.optimizers.RMSprop(0.1),
    "float16, Adam": lambda: keras.optimizers.Adam(0.1),
    "LARC": lambda: keras_lso.LARC(SGD(0.1), eta=0.12),
}


def train_bare(make_optimizer, how, steps, dtype):
    """Returns what each replica's weights are after each step; -1 overflows on one."""
    with strategy.scope():
        weight = tf.Variable(np.array([4.0, 3.0], dtype))
        optimizer = make_optimizer()
        optimizer.build([weight])

    @function
    def step(kind):
        def on_each_replica(kind):
            replica = tf.distribute.get_replica_context().replica_id_in_sync_group
            gradient = tf.cast(tf.gather(GRADIENTS, replica), dtype)
            is_bad = tf.equal(kind, -1) & tf.equal(replica, 1)
            gradient = tf.where(is_bad, tf.constant(np.inf, dtype), gradient)
            if how == "minimize":
                optimizer.minimize(lambda: tf.reduce_sum(gradient * weight), [weight])
            else:
                says = {"scaled": False} if is_scaling(optimizer) else {}
                optimizer.apply([gradient], [weight], **says)

        strategy.run(on_each_replica, args=(kind,))

    recorded = []
    for kind in steps:
        step(tf.constant(kind))
        replicas = strategy.experimental_local_results(weight)
        recorded.append([replica.numpy().tolist() for replica in replicas])
    return recorded


def guarded(make_inner):
    # A scale with which no gradient overflows float16.
    return lambda: MODERN(make_inner(), initial_scale=8.0)


WAYS = ["apply", "minimize"]
for i, (name, make_inner) in enumerate(BARE.items()):
    dtype = "float16" if "float16" in name else "float32"
    [*_, expected] = train_bare(make_inner, "apply", [1, 1], "float32")
    for how in WAYS if is_full() else [WAYS[i % 2]]:
        recorded = train_bare(guarded(make_inner), how, [1, -1, 1], dtype)
        was_skipped = recorded[0] == recorded[1]
        found = [name, how, expected[0], recorded[-1], was_skipped]
        print("BARE", json.dumps(found))

# Where no replica is.
for name, make_optimizer in OPTIMIZERS.items():
    optimizer, weight = make(make_optimizer)
    before = [v.numpy().tolist() for v in [*optimizer.variables, weight]]
    gradient = tf.constant(GRADIENTS[0])
    calls = [
        lambda o=optimizer, w=weight, g=gradient: o.apply_gradients([(g, w)]),
        lambda o=optimizer, w=weight: o.minimize(
            lambda: tf.reduce_sum(w * w), var_list=[w]
        ),
    ]
    if is_scaling(optimizer):
        calls.append(lambda o=optimizer: o.loss_scale_policy.update([]))
    for call in calls:
        with strategy.scope():
            try:
                call()
                error = "none"
            except RuntimeError as caught:
                error = str(caught)
        after = [v.numpy().tolist() for v in [*optimizer.variables, weight]]
        print("CROSS", json.dumps([name, error, before == after]))
