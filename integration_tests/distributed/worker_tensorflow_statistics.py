"""Trains a model with moving statistics on two replicas, protected or not.

Prints what the replicas hold after each batch, of `fit` and of a loop of one's own.
"""

import json

import keras
import numpy as np
import tensorflow as tf

import keras_lso
from integration_tests.distributed import tensorflow_cluster

strategy = tensorflow_cluster.join()

BATCH_SIZE, BATCHES = 8, 4
# At which batch which example overflows: one of the last replica, one of the first.
OVERFLOWS = {1: 7, 2: 0}
KEPT = ("moving_mean", "moving_variance", "vector_u")


def make_data():
    x = np.random.default_rng(0).normal(size=(BATCHES * BATCH_SIZE, 4)).astype("f4")
    y = x.sum(axis=1, keepdims=True)
    for batch, row in OVERFLOWS.items():
        x[batch * BATCH_SIZE + row] = np.inf
    return x, y


def make_model(**options):
    """Returns a compiled model, always with the same weights."""
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((4,)),
                keras.layers.BatchNormalization(**options),
                keras.layers.SpectralNormalization(keras.layers.Dense(4)),
                keras.layers.Dense(1),
            ]
        )
        optimizer = keras_lso.LossScaleOptimizer(keras.optimizers.SGD(0.01))
        model.compile(optimizer, loss="mse", jit_compile="auto")
        optimizer.build(model.trainable_variables)
    return model


def held(model):
    """Returns the statistics on each replica."""
    kept = [v.value for v in model.non_trainable_variables if v.name in KEPT]
    local = map(strategy.experimental_local_results, kept)
    return [[r.numpy().tolist() for r in replicas] for replicas in local]


def in_fit(model):
    recorded = [held(model)]
    record = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda *_, **__: recorded.append(held(model))
    )
    options = {"batch_size": BATCH_SIZE, "shuffle": False, "verbose": 0}
    model.fit(*make_data(), callbacks=[record], **options)
    return recorded


def in_a_loop(model):
    """Does what `fit` does, by hand."""
    optimizer = model.optimizer

    def on_each_replica(batch):
        x, y = batch
        with keras_lso.restore_if_skipped(model, optimizer):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((model(x, training=True) - y) ** 2)
                loss = optimizer.scale_loss(loss)
            variables = model.trainable_variables
            optimizer.apply(tape.gradient(loss, variables), variables)

    step = tf.function(lambda batch: strategy.run(on_each_replica, args=(batch,)))
    data = tf.data.Dataset.from_tensor_slices(make_data()).batch(BATCH_SIZE)
    recorded = [held(model)]
    for batch in strategy.experimental_distribute_dataset(data):
        step(batch)
        recorded.append(held(model))
    return recorded


# `synchronized` computes the moments of a batch over all replicas.
for name, recorded in {
    "PROTECTED": in_fit(keras_lso.protect_statistics(make_model())),
    "SYNCHRONIZED": in_fit(keras_lso.protect_statistics(make_model(synchronized=True))),
    "LOOP": in_a_loop(make_model()),
    "UNPROTECTED": in_fit(make_model()),
}.items():
    print(name, json.dumps(recorded))
