"""Steps of all kinds on two replicas, whose gradients differ; prints the results.

Run by `test_tensorflow_replicas.py` in a process of its own: logical devices must be
set up before TensorFlow starts.
"""

import contextlib
import functools
import itertools
import json

import keras
import numpy as np
import tensorflow as tf

import keras_lso
from integration_tests.distributed import tensorflow_cluster

strategy = tensorflow_cluster.join()

SGD, Adam = keras.optimizers.SGD, keras.optimizers.Adam
MODERN = keras_lso.LossScaleOptimizer
EXPERIMENTAL = keras_lso.mixed_precision.experimental.LossScaleOptimizer
TF1 = keras_lso.compat.v1.mixed_precision.MixedPrecisionLossScaleOptimizer
# That AutoGraph can read a step, `tests/_backend/test_many_tensors.py` sees.
function = functools.partial(tf.function, autograph=False)


def make(
    make_optimizer, value=(4.0, 3.0), dtype="float32", cls=keras.Variable, builds=True
):
    with strategy.scope():
        weight = cls(np.array(value), dtype=dtype)
        optimizer = make_optimizer()
        if builds:
            optimizer.build([weight])
    return optimizer, weight


def local(weight):
    value = weight.value if isinstance(weight, keras.Variable) else weight
    replicas = strategy.experimental_local_results(value)
    return [tf.cast(replica, tf.float32).numpy().tolist() for replica in replicas]


def on_replicas(step, *args):
    """Calls `step(replica, *args)` on both replicas, in a `tf.function`."""

    def on_each_replica(*args):
        context = tf.distribute.get_replica_context()
        return step(context.replica_id_in_sync_group, *args)

    function(lambda *args: strategy.run(on_each_replica, args=args))(*args)


def state(optimizer, weight):
    return [v.numpy().tolist() for v in [*optimizer.variables, weight]]


guarded, narrow = make(
    lambda: keras_lso.GuardedOptimizer(SGD(0.5, momentum=0.5)), (1.0, -0.0), "bfloat16"
)


def step_guarded(replica, bad_replica):
    value = tf.where(tf.equal(replica, bad_replica), np.nan, 1.0)
    guarded.apply([value * tf.constant([1.0, 2.0])], [narrow])


for bad_replica in [0, -1, 1]:
    on_replicas(step_guarded, tf.constant(bad_replica))
    skipped, applied = int(guarded.skipped_steps), int(guarded.iterations.numpy())
    print("GUARDED", json.dumps([local(narrow), skipped, applied]))

log_max, weight = make(
    lambda: MODERN(SGD(0.5), loss_scale=keras_lso.loss_scales.LogMaxLossScale())
)


def step_by_magnitude(replica):
    value = tf.gather(tf.constant([2.0, 62.0]), replica)
    log_max.apply([value * tf.constant([1.0, -0.5])], [weight])


on_replicas(step_by_magnitude)
print("AMAX", json.dumps(float(log_max.loss_scale)))


# One a replica.
GRADIENTS = np.array([[1.0, -2.0], [2.0, 6.0]], "float32")
ALONE = {
    "LAMB": lambda: keras_lso.LAMB(0.1, weight_decay_rate=0.01),
    "NovoGrad": lambda: keras_lso.NovoGrad(0.5, weight_decay_rate=0.01),
    "LARS, popular": lambda: keras_lso.LARS(1.0, eeta=0.1, classic_momentum=False),
}
# Keras's own step, which synchronises the replicas in a branch, fails there.
INSIDE = {
    **ALONE,
    "accumulating": lambda: SGD(0.5, momentum=0.5, gradient_accumulation_steps=2),
    "clipped": lambda: Adam(0.5, global_clipnorm=0.5, gradient_accumulation_steps=2),
    "averaged": lambda: SGD(
        *(0.5,), use_ema=True, ema_overwrite_frequency=1, gradient_accumulation_steps=2
    ),
}
TF_KERAS = {
    "modern": lambda: MODERN(Adam(0.1)),
    "experimental": lambda: EXPERIMENTAL(SGD(0.5, momentum=0.5), "dynamic"),
    "TF1": lambda: TF1(SGD(0.5, momentum=0.5), "dynamic"),
    "LARS": lambda: keras_lso.LARS(1.0, eeta=0.1, weight_decay_rate=1.0),
}


class WithoutRule(SGD):
    """An optimizer that makes its own step."""


def compare(name, make_optimizer, step, expected_of, count=2, **of_weight):
    """Prints the distance of both replicas from the result of steps on the sums."""
    optimizer, weight = make(make_optimizer, **of_weight)
    for _ in range(count):
        on_replicas(functools.partial(step, optimizer, weight))
    alone, expected = expected_of(), keras.Variable([4.0, 3.0])
    for _ in range(count):
        alone.apply([tf.constant(GRADIENTS.sum(axis=0))], [expected])
    right = expected.numpy()
    moved = float(np.abs(right - [4.0, 3.0]).max())
    print("SUM", json.dumps([name, moved, float(np.abs(local(weight) - right).max())]))


def narrow_slots():
    """Returns an optimizer whose slots, of other bits, would lead elsewhere."""
    return keras_lso.GuardedOptimizer(Adam(0.5), slot_dtype="bfloat16")


def inner_of(optimizer):
    """Returns a new inner optimizer, or bare optimizer, like this one."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    return type(inner).from_config(inner.get_config())


def says(optimizer):
    return {"scaled": False} if isinstance(optimizer, MODERN) else {}


def apply(optimizer, weight, replica):
    grad = tf.gather(GRADIENTS, replica)
    optimizer.apply([tf.cast(grad, weight.dtype)], [weight], **says(optimizer))


def apply_reduced(optimizer, weight, replica):
    context = tf.distribute.get_replica_context()
    total = context.all_reduce("sum", tf.gather(GRADIENTS, replica))
    options = {"experimental_aggregate_gradients": False, **says(optimizer)}
    optimizer.apply_gradients([(total, weight)], **options)


def minimize(optimizer, weight, replica):
    gradient = tf.cast(tf.gather(GRADIENTS, replica), weight.dtype)
    optimizer.minimize(lambda: tf.reduce_sum(gradient * weight), var_list=[weight])


for name, make_inner in ALONE.items():
    compare(name, make_inner, apply, make_inner)
for name, make_inner in INSIDE.items():
    compare(f"{name}, scaled", lambda m=make_inner: MODERN(m()), apply, make_inner)
compare("bfloat16 slots", narrow_slots, apply, narrow_slots, count=6)
for name, make_optimizer in TF_KERAS.items():
    expected_of = lambda m=make_optimizer: inner_of(m())  # noqa: E731
    compare(f"{name}, reduced", make_optimizer, apply_reduced, expected_of)
    compare(f"{name}, minimize", make_optimizer, minimize, expected_of)
    arguments = make_optimizer, apply, expected_of
    compare(f"{name}, built in a function", *arguments, builds=False)
for aggregation, cls in itertools.product(("mean", "sum"), (SGD, WithoutRule)):
    inner = functools.partial(cls, 0.5, momentum=0.5)
    compare(
        f"aggregation={aggregation}, {cls.__name__}",
        lambda m=inner: MODERN(m(), master_weights="remainder"),
        *(apply, inner),
        cls=functools.partial(keras.Variable, aggregation=aggregation),
        dtype="bfloat16",
    )
# TensorFlow's own variables.
for step in (apply, minimize):
    of_weight = {"cls": tf.Variable}
    compare(
        "tf.Variable", lambda: MODERN(Adam(0.1)), step, lambda: Adam(0.1), **of_weight
    )


def dynamic_update(cls, **of_inner):
    """Returns the values that tf.keras's `testDynamicUpdate` checks, for each step."""
    with strategy.scope():
        weight = cls([1.0, 2.0])
        inner = SGD(1.0, **of_inner)
        optimizer = MODERN(inner, initial_scale=2, dynamic_growth_steps=1)

    def stepped(factor):
        loss = lambda: tf.reduce_sum(weight * factor) / 2  # noqa: E731
        strategy.run(function(lambda: optimizer.minimize(loss, [weight])))
        return [local(weight), float(optimizer.loss_scale)]

    return [stepped(2.0), stepped(np.nan)]


for of_inner in ({}, {"momentum": 1.0}, {"use_ema": True}):
    for cls in (keras.Variable, tf.Variable):
        print("DYNAMIC", json.dumps(dynamic_update(cls, **of_inner)))


def refused(call, *state_of):
    before = state(*state_of)
    try:
        call()
        error = "none"
    except (RuntimeError, ValueError) as caught:
        error = str(caught)
    return [error, before == state(*state_of)]


for name, make_optimizer in TF_KERAS.items():
    optimizer, weight = make(make_optimizer)
    gradient = tf.constant(GRADIENTS[0])
    for call in (
        lambda o=optimizer, w=weight, g=gradient: o.apply_gradients([(g, w)]),
        lambda o=optimizer, w=weight: o.minimize(
            lambda: tf.reduce_sum(w * w), var_list=[w]
        ),
    ):
        with strategy.scope():
            found = refused(call, optimizer, weight)
        print("CROSS", json.dumps([name, *found]))

for part, cls in {
    "weight": keras.Variable,
    "TensorFlow's weight": tf.Variable,
    "optimizer": keras.Variable,
}.items():
    scopes = [strategy.scope, contextlib.nullcontext]
    of_weight, of_optimizer = scopes[:: 1 if part == "optimizer" else -1]
    with of_weight():
        weight = cls([1.0, 2.0], name="mine")
    with of_optimizer():
        # With a slot TensorFlow itself would refuse the weight.
        inner = SGD(0.5, momentum=0.5 if part == "optimizer" else 0.0)
        optimizer = MODERN(inner)
        optimizer.build([weight])
    step = functools.partial(apply, optimizer, weight)
    found = refused(lambda step=step: on_replicas(step), optimizer, weight)
    print("OUTSIDE", json.dumps([part, *found]))

inner = functools.partial(WithoutRule, 0.5, gradient_accumulation_steps=2)
optimizer, weight = make(lambda: MODERN(inner()))
step = functools.partial(apply, optimizer, weight)
found = refused(lambda: on_replicas(step), optimizer, weight)
print("ACCUMULATES", json.dumps(found))
