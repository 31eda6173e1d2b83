"""Trains on two replicas of which one at a time overflows; prints the state.

Then lets optimizers that take norms step on gradients that differ by replica, and
prints how far they are from one step on the sum of them.

Run by `test_tensorflow_replicas.py` in a process of its own: logical devices must be
set up before TensorFlow starts.
"""

import contextlib
import functools
import json

import keras
import numpy as np
import tensorflow as tf

import keras_lso
from integration_tests.distributed.two_replicas import strategy

# That AutoGraph can read a step, `tests/_backend/test_many_tensors.py` sees.
function = functools.partial(tf.function, autograph=False)

with strategy.scope():
    weight = keras.Variable(np.array([1.0, -0.0], "float32"))
    optimizer = keras_lso.LossScaleOptimizer(
        keras.optimizers.SGD(0.5, momentum=0.5), initial_scale=8.0
    )
    optimizer.build([weight])


@function
def step(overflowing_replica):
    def on_each_replica(overflowing_replica):
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        value = tf.where(tf.equal(replica, overflowing_replica), np.inf, 2.0)
        optimizer.apply([value * tf.constant([1.0, 2.0])], [weight])

    strategy.run(on_each_replica, args=(overflowing_replica,))


for overflowing_replica in [0, 1, -1, 1]:
    step(tf.constant(overflowing_replica))
    replicas = strategy.experimental_local_results(weight.value)
    state = {
        "weights": [replica.numpy().tolist() for replica in replicas],
        "scale": float(optimizer.loss_scale),
        "skipped": int(optimizer.skipped_steps),
        "applied": int(optimizer.iterations.numpy()),
    }
    print("STATE", json.dumps(state))


def by_keras(overflowing_replica):
    """Returns the weights after a step with Keras's own class."""
    with strategy.scope():
        weight = keras.Variable(np.array([1.0], "float32"))
        own = keras.optimizers.LossScaleOptimizer(
            keras.optimizers.SGD(0.5), initial_scale=8.0
        )
        own.build([weight])

    def on_each_replica():
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        value = tf.where(tf.equal(replica, overflowing_replica), np.inf, 2.0)
        own.apply([value * tf.constant([1.0])], [weight])

    function(lambda: strategy.run(on_each_replica))()
    values = strategy.experimental_local_results(weight.value)
    return [str(value.numpy().item()) for value in values]


print("KERAS", json.dumps([by_keras(replica) for replica in (0, 1)]))


with strategy.scope():
    weight = keras.Variable(np.array([1.0, 2.0], "float32"))
    log_max = keras_lso.LossScaleOptimizer(
        keras.optimizers.SGD(0.5), loss_scale=keras_lso.loss_scales.LogMaxLossScale()
    )
    log_max.build([weight])


@function
def step_by_magnitude():
    def on_each_replica():
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        value = tf.gather(tf.constant([2.0, 62.0]), replica)
        log_max.apply([value * tf.constant([1.0, -0.5])], [weight])

    strategy.run(on_each_replica)


step_by_magnitude()
print("AMAX", json.dumps(float(log_max.loss_scale)))


with strategy.scope():
    narrow = keras.Variable(np.array([1.0, -0.0]), dtype="bfloat16")
    guarded = keras_lso.GuardedOptimizer(keras.optimizers.SGD(0.5, momentum=0.5))
    guarded.build([narrow])


@function
def step_guarded(bad_replica):
    def on_each_replica(bad_replica):
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        value = tf.where(tf.equal(replica, bad_replica), np.nan, 1.0)
        guarded.apply([value * tf.constant([1.0, 2.0])], [narrow])

    strategy.run(on_each_replica, args=(bad_replica,))


for bad_replica in [0, -1, 1]:
    step_guarded(tf.constant(bad_replica))
    replicas = strategy.experimental_local_results(narrow.value)
    state = {
        "weights": [tf.cast(r, tf.float32).numpy().tolist() for r in replicas],
        "skipped": int(guarded.skipped_steps),
        "applied": int(guarded.iterations.numpy()),
    }
    print("GUARDED", json.dumps(state))


OPTIMIZERS = {
    "LARS": lambda: keras_lso.LARS(
        1.0, eeta=0.1, weight_decay_rate=0.01, exclude_from_weight_decay=["skipped"]
    ),
    "LARS, popular": lambda: keras_lso.LARS(1.0, eeta=0.1, classic_momentum=False),
    "LAMB": lambda: keras_lso.LAMB(
        0.1, weight_decay_rate=0.01, exclude_from_weight_decay=["skipped"]
    ),
    "NovoGrad": lambda: keras_lso.NovoGrad(0.5, weight_decay_rate=0.01),
    "LARC": lambda: keras_lso.LARC(keras.optimizers.SGD(1.0), eta=0.1, mode="scale"),
}
# One a replica, of two variables.
GRADIENTS = np.array([[[1.0, -2.0], [3.0, 0.5]], [[2.0, 6.0], [1.0, 1.0]]], "float32")


def make_weights():
    return [
        keras.Variable(np.array([3.0, 4.0], "float32"), name="adapted"),
        keras.Variable(np.array([1.0, -1.0], "float32"), name="skipped"),
    ]


def on_two_replicas(make_optimizer):
    """Returns the weights of each replica after two steps."""
    with strategy.scope():
        weights, optimizer = make_weights(), make_optimizer()
        optimizer.build(weights)
    scaled = GRADIENTS * float(getattr(optimizer, "loss_scale", 1.0))

    def on_each_replica():
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        optimizer.apply(tf.unstack(tf.gather(scaled, replica), 2), weights)

    step = function(lambda: strategy.run(on_each_replica))
    step()
    step()
    local = [strategy.experimental_local_results(w.value) for w in weights]
    return np.array([[replica.numpy() for replica in values] for values in local])


def alone(optimizer):
    weights = make_weights()
    for _ in range(2):
        optimizer.apply([tf.constant(g) for g in GRADIENTS.sum(axis=0)], weights)
    return np.array([[w.numpy()] for w in weights])


for name, make in OPTIMIZERS.items():
    expected = alone(make())
    for wrap in (lambda inner: inner, keras_lso.LossScaleOptimizer):
        weights = on_two_replicas(lambda make=make, wrap=wrap: wrap(make()))
        moved = float(np.abs(expected - [[w.numpy()] for w in make_weights()]).max())
        difference = float(np.abs(weights - expected).max())
        print("NORMS", json.dumps([name, moved, difference]))


# Keras's own step, which synchronises the replicas in a branch, fails there.
ACCUMULATING = {
    "momentum": lambda: keras.optimizers.SGD(
        0.5, momentum=0.5, gradient_accumulation_steps=2
    ),
    "AdamW, clipped": lambda: keras.optimizers.AdamW(
        0.5, global_clipnorm=0.5, gradient_accumulation_steps=2
    ),
    "SGD, clipped and averaged": lambda: keras.optimizers.SGD(
        0.5,
        clipnorm=0.5,
        use_ema=True,
        ema_momentum=0.5,
        ema_overwrite_frequency=1,
        gradient_accumulation_steps=2,
    ),
}
for name, make in ACCUMULATING.items():
    weights = on_two_replicas(lambda make=make: keras_lso.LossScaleOptimizer(make()))
    expected = alone(make())
    moved = float(np.abs(expected - [[w.numpy()] for w in make_weights()]).max())
    print(
        "ACCUMULATED",
        json.dumps([name, moved, float(np.abs(weights - expected).max())]),
    )


def made(inside, make):
    """Returns what `make` makes, in the strategy's scope or outside of it."""
    with strategy.scope() if inside else contextlib.nullcontext():
        return make()


def step_once(optimizer, weight):
    def on_each_replica():
        optimizer.apply([tf.constant([1.0, 1.0])], [weight])

    function(lambda: strategy.run(on_each_replica))()


for part in ("weight", "TensorFlow's weight", "optimizer"):
    variable_class = tf.Variable if part.startswith("Tensor") else keras.Variable
    is_inside = part == "optimizer"
    weight = made(is_inside, lambda c=variable_class: c([1.0, 2.0], name="mine"))
    # With a slot TensorFlow itself would refuse the weight.
    momentum = 0.5 if part == "optimizer" else 0.0
    optimizer = made(
        part != "optimizer",
        lambda m=momentum: keras_lso.LossScaleOptimizer(
            keras.optimizers.SGD(0.5, momentum=m)
        ),
    )
    made(part != "optimizer", lambda o=optimizer, w=weight: o.build([w]))
    state = [weight, *optimizer.variables]
    before = [v.numpy().tolist() for v in state]
    try:
        step_once(optimizer, weight)
        error = "none"
    except ValueError as caught:
        error = str(caught)
    is_unchanged = before == [v.numpy().tolist() for v in state]
    print("OUTSIDE", json.dumps([part, error, is_unchanged]))
