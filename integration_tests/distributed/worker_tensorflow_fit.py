"""Fits a model on two replicas of which some overflow; writes their states.

    python -m integration_tests.distributed.worker_tensorflow_fit FOLDER
    python -m integration_tests.distributed.worker_tensorflow_fit FOLDER EPOCH BATCH
    python -m integration_tests.distributed.worker_tensorflow_fit FOLDER continue

The second keeps a backup in FOLDER and kills itself; the third goes on from there.
"""

import json
import os
import signal
import sys

import keras
import tensorflow as tf

from integration_tests.distributed import tensorflow_fit, tensorflow_reads
from integration_tests.distributed.two_replicas import strategy

folder, *how = sys.argv[1:]


def make_model(**arguments):
    with strategy.scope():
        return tensorflow_fit.make_model(**arguments)


def local_values(variable):
    local = strategy.experimental_local_results(variable.value)
    return [value.numpy() for value in local]


class Kill(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        if [str(self.epoch), str(batch)] == how:
            os.kill(os.getpid(), signal.SIGKILL)


if how:
    callbacks = [
        keras.callbacks.BackupAndRestore(f"{folder}/backup"),
        recorder := tensorflow_fit.Recorder(local_values),
        Kill(),
    ]
    tensorflow_fit.fit(make_model(), callbacks)
    recorder.save(f"{folder}/continued")
    sys.exit()

for jit_compile in (False, "auto"):
    recorder = tensorflow_fit.Recorder(local_values)
    losses = tensorflow_fit.fit(make_model(jit_compile=jit_compile), [recorder])
    recorder.save(f"{folder}/{jit_compile}")
    print("LOSSES", json.dumps(losses))

found = tensorflow_reads.fit_and_read(f"{folder}/reads", strategy)
print("READS", json.dumps(found))

# Keras's own wrapper, and who compiles all by XLA.
keras_model = make_model(wrapper=keras.optimizers.LossScaleOptimizer)
overflow_on_the_last = {3: tensorflow_fit.OVERFLOWS[3]}
tensorflow_fit.fit(keras_model, overflows=overflow_on_the_last, epochs=1)
print("KERAS", json.dumps([local_values(v)[0].tolist() for v in keras_model.weights]))
for optimizer in ("sgd", make_model().optimizer):
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile(optimizer, loss="mse", jit_compile=True)
    try:
        tensorflow_fit.fit(model, epochs=1)
        print("XLA", json.dumps("none"))
    except tf.errors.InvalidArgumentError as error:
        print("XLA", json.dumps(str(error)))
