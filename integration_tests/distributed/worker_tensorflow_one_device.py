"""Trains under strategies of one device, and without; prints where the two differ.

    python -m integration_tests.distributed.worker_tensorflow_one_device FOLDER
    python -m integration_tests.distributed.worker_tensorflow_one_device FOLDER all

The second trains all cases under all strategies.

Run by `test_tensorflow_one_device.py` in a process of its own: strategies start threads
and servers, which are there for as long as the process is.
"""

import functools
import json
import os
import sys
import warnings

import keras
import numpy as np
import tensorflow as tf
from keras import ops

import keras_lso
from integration_tests.distributed import (
    tensorflow_fit,
    tensorflow_one_device,
    tensorflow_reads,
)
from integration_tests.distributed.tensorflow_one_device import (
    INNER,
    OVERFLOW,
    runs_of,
)
from keras_lso.compat.open_seq2seq import optimize_loss

# Keras's, of vectors that Muon trains.
warnings.simplefilter("ignore")


@functools.cache
def alone(case, in_function):
    return tensorflow_one_device.train(case, None, in_function)


def bits(arrays):
    return [a.tobytes() for a in arrays]


def difference(arrays, expected):
    """Returns the largest difference; 0.0 is bit for bit."""
    if bits(arrays) == bits(expected):
        return 0.0
    pairs = zip(arrays, expected, strict=True)
    return max(float(np.abs(a.astype("f8") - e).max()) for a, e in pairs)


def look_at(recorded, expected):
    """Returns what a test wants to know of a run."""
    weights = [bits(state[:2]) for state in recorded]
    return {
        "difference": max(map(difference, recorded, expected)),
        "was_skipped": weights[OVERFLOW] == weights[OVERFLOW - 1],
        "has_moved": weights[-1] != weights[OVERFLOW],
    }


def run(names):
    """Trains under strategies of these names; they start when they are asked for."""
    for name, in_function, cases in runs:
        if name not in names:
            continue
        if name not in strategies:
            strategies[name] = tensorflow_one_device.make_strategy(name)
        for case in cases:
            try:
                recorded = tensorflow_one_device.train(
                    case, strategies[name], in_function
                )
                found = look_at(recorded, alone(case, in_function))
            except Exception as error:
                found = f"{type(error).__name__}: {error}"
            print("RUN", json.dumps([name, in_function, case, found]))


folder, *how = sys.argv[1:]
runs = runs_of(is_exhaustive=how == ["all"])
strategies: dict = {}
run(["mirrored", "one device", "default", "processes"])

for who in ("mirrored", None) if how == ["all"] else ():
    strategy = strategies.get(who)
    found = tensorflow_reads.fit_and_read(f"{folder}/{who}", strategy)
    print("READS", json.dumps(found))

FITS = [(n, jit) for n in ("RMSprop", "accumulation") for jit in (False, "auto")]
for name, jit_compile in FITS if how == ["all"] else FITS[1:2]:
    states = []
    for strategy in (strategies["mirrored"], None):
        with tensorflow_one_device.scope_of(strategy):
            model = tensorflow_fit.make_model(
                lambda _, name=name, **ours: keras_lso.LossScaleOptimizer(
                    INNER[name](), **ours
                ),
                jit_compile,
            )
        tensorflow_fit.fit(model)
        optimizer = model.optimizer
        state = [np.array(v.numpy()) for v in [*model.weights, *optimizer.variables]]
        states.append(bits(state))
    skipped = int(optimizer.skipped_steps)
    print("FIT", json.dumps([name, jit_compile, states[0] == states[1], skipped]))


def train_by_op(strategy, in_function):
    """Returns a weight after three calls of a training op, of which one overflows."""
    with tensorflow_one_device.scope_of(strategy):
        weight = keras.Variable(np.array([1.0, 2.0], "float32"))
        train_op = optimize_loss(
            lambda factor: ops.sum(weight * factor),
            "Momentum",
            {"momentum": 0.9},
            lambda step: 0.1,
            dtype="mixed",
            var_list=[weight],
            loss_scaling="Backoff",
        )

    def run(factor):
        if strategy is None:
            train_op(factor)
        else:
            strategy.run(train_op, args=(factor,))

    step = tf.function(run, autograph=False) if in_function else run
    for factor in ([1.0, 2.0], [np.inf, 1.0], [-1.0, 0.5]):
        step(tf.constant(factor))
    return weight.numpy().tolist()


for in_function in (True, False):
    both = [train_by_op(s, in_function) for s in (strategies["mirrored"], None)]
    print("OP", json.dumps(both))

# The last: its cluster starts TensorFlow's devices anew.
run(["parameter server"])
sys.stdout.flush()
os._exit(0)  # The servers never end.
