"""Fits a model on two replicas, some of which overflow; writes their states.

python -m integration_tests.distributed.worker_tensorflow_fit FOLDER
"""

import json
import sys

import keras
import tensorflow as tf

from integration_tests.distributed import tensorflow_cluster, tensorflow_fit

folder = sys.argv[1]
strategy = tensorflow_cluster.join()


def make_model(**arguments):
    with strategy.scope():
        return tensorflow_fit.make_model(**arguments)


def local_values(variable):
    local = strategy.experimental_local_results(variable.value)
    # A file has no bfloat16.
    wide = [tf.cast(v, "float32") if v.dtype == "bfloat16" else v for v in local]
    return [value.numpy() for value in wide]


for way, options in tensorflow_fit.WAYS.items():
    recorder = tensorflow_fit.Recorder(local_values)
    history = tensorflow_fit.fit(make_model(**options), [recorder])
    recorder.save(f"{folder}/{way}")
    print("LOSSES", json.dumps([way, history["loss"]]))

found = tensorflow_fit.fit_and_read(f"{folder}/model.keras", strategy.scope)
print("READS", json.dumps(found))

# Keras's own wrapper, and who compiles all by XLA.
keras_model = make_model(wrapper=keras.optimizers.LossScaleOptimizer)
overflow_on_the_last = {3: tensorflow_fit.OVERFLOWS[3]}
tensorflow_fit.fit(keras_model, overflows=overflow_on_the_last, epochs=1)
print("KERAS", json.dumps([local_values(v)[0].tolist() for v in keras_model.weights]))
model = make_model(jit_compile=True)
try:
    tensorflow_fit.fit(model, epochs=1)
    print("XLA", json.dumps("none"))
except tf.errors.InvalidArgumentError as error:
    print("XLA", json.dumps(str(error)))
