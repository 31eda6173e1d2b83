"""Trains weights of 16 bits on two replicas, with each kind of masters.

Run by `test_tensorflow_masters.py` in a process of its own. Prints lines of a word and
JSON.
"""

import functools
import json

import keras
import numpy as np
import tensorflow as tf

import keras_lso
from integration_tests.distributed.two_replicas import strategy
from testing import tiers

function = functools.partial(tf.function, autograph=False)
K = keras.optimizers
SHAPES = [(3, 5), (3, 5), (7,)]
OPTIMIZERS = {
    "Adam": K.Adam,
    "LARS": keras_lso.LARS,
    "Adadelta": K.Adadelta,
    "accumulation": lambda rate: K.Adam(rate, gradient_accumulation_steps=2),
    "averages": lambda rate: K.Adam(rate, use_ema=True, ema_overwrite_frequency=3),
    "LARC": lambda rate: keras_lso.LARC(K.SGD(rate, momentum=0.9)),
}
CASES = [("Adam", "bfloat16", False), ("Adam", "bfloat16", True)]
if tiers.is_full():
    CASES = [(n, d, False) for n in OPTIMIZERS for d in ("bfloat16", "float16")]
    # Keras's own step of the other two fails on several replicas.
    with_sparse = ("Adam", "LARS", "Adadelta", "LARC")
    CASES += [(n, d, True) for n in with_sparse for d in ("bfloat16", "float16")]


def train(name, dtype, is_sparse, kind):
    """Returns an optimizer and weights after nine steps.

    The fourth overflows on the first replica only, and the eighth on the second.
    """
    random = np.random.default_rng(0)
    with strategy.scope():
        weights = [
            keras.Variable((random.normal(size=s) * 0.5).astype("float32"), dtype=dtype)
            for s in SHAPES
        ]
        optimizer = keras_lso.LossScaleOptimizer(
            OPTIMIZERS[name](0.01), initial_scale=4.0, master_weights=kind
        )
        optimizer.build(weights)

    @function
    def step(grads, overflowing):
        def on_each_replica(grads, overflowing):
            replica = tf.distribute.get_replica_context().replica_id_in_sync_group
            size = 1.0 + tf.cast(replica, tf.float32)
            size = tf.where(tf.equal(replica, overflowing), np.float32(np.inf), size)
            first, *others = [tf.cast(g * size, dtype) for g in grads]
            if is_sparse:
                rows = tf.constant([0, 2])
                first = tf.IndexedSlices(first[:2], rows, tf.constant(SHAPES[0]))
            optimizer.apply([first, *others], weights, scaled=True)

        strategy.run(on_each_replica, args=(grads, overflowing))

    for i in range(9):
        grads = [tf.constant(random.normal(size=s).astype("float32")) for s in SHAPES]
        step(grads, tf.constant({3: 0, 7: 1}.get(i, -1)))
    return optimizer, weights


def numbers_of(optimizer):
    store = {}
    optimizer.save_own_variables(store)
    return [store[str(i)] for i in range(len(store))][-len(SHAPES) :]


def bits_on(replica, variables):
    copies = [strategy.experimental_local_results(v.value)[replica] for v in variables]
    # NumPy takes TensorFlow's bfloat16 as well.
    return [copy.numpy().tobytes() for copy in copies]


for case in CASES:
    found = {}
    for kind in ("float32", "remainder", "stochastic"):
        optimizer, weights = train(*case, kind)
        variables = [*weights, *optimizer.variables]
        found[kind] = {
            "numbers": [n.tolist() for n in numbers_of(optimizer)],
            "are alike": bits_on(0, variables) == bits_on(1, variables),
            "skipped": int(optimizer.skipped_steps),
            "kept": [v.dtype for v in optimizer._masters.variables],
        }
    print("TRAINED", json.dumps([case, found]))
