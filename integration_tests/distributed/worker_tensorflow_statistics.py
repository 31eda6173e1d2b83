"""Trains a model with moving statistics on two replicas, protected or not.

Prints what the replicas hold after each batch, of `fit` and of a loop of one's own.
"""

import json

import tensorflow as tf

import keras_lso
from integration_tests.distributed import statistics_fit
from integration_tests.distributed.two_replicas import strategy


def local_values(variable):
    local = strategy.experimental_local_results(variable.value)
    return [value.numpy() for value in local]


def make_model(**options):
    with strategy.scope():
        return statistics_fit.make_model(**options)


def in_a_loop(model):
    """Does what `fit` does, by hand."""
    optimizer = model.optimizer
    with strategy.scope():
        optimizer.build(model.trainable_variables)

    def on_each_replica(batch):
        x, y = batch
        with keras_lso.restore_if_skipped(model, optimizer):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((model(x, training=True) - y) ** 2)
                loss = optimizer.scale_loss(loss)
            variables = model.trainable_variables
            optimizer.apply(tape.gradient(loss, variables), variables)

    step = tf.function(lambda batch: strategy.run(on_each_replica, args=(batch,)))
    data = tf.data.Dataset.from_tensor_slices(
        statistics_fit.make_data(statistics_fit.OVERFLOWS)
    ).batch(statistics_fit.BATCH_SIZE)
    recorder = statistics_fit.Recorder(local_values)
    recorder.set_model(model)
    recorder.record()
    for batch in strategy.experimental_distribute_dataset(data):
        step(batch)
        recorder.record()
    return recorder.recorded


for name, model in {
    "PROTECTED": keras_lso.protect_statistics(make_model()),
    "SYNCHRONIZED": keras_lso.protect_statistics(make_model(synchronized=True)),
    "UNPROTECTED": make_model(),
}.items():
    print(name, json.dumps(statistics_fit.record(model, local_values)))
print("LOOP", json.dumps(in_a_loop(make_model())))
