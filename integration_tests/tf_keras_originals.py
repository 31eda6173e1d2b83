"""The loss-scale optimizers of tf.keras and TF1, and their results of some steps.

TensorFlow contains tf.keras's deprecated class and TF1's, and `tf_keras` contains both
classes of tf.keras 2. Tests import this module where they run the originals.
"""

import types

import numpy as np
import tensorflow as tf
import tf_keras
from tensorflow.python.keras.mixed_precision import loss_scale_optimizer as tf_2_4
from tensorflow.python.keras.optimizer_v2 import (
    adagrad,
    adam,
    adamax,
    gradient_descent,
    rmsprop,
)

from integration_tests.reference_steps import (
    ADAM,
    EXACT,
    INITIAL_SCALE,
    MOMENTUM,
    OPTIMIZERS,
    start,
    tensor_of_tensorflow,
)

TF1 = tf.compat.v1
TF1_OPTIMIZERS = {
    "sgd": ("GradientDescentOptimizer", dict(learning_rate=0.05)),
    "momentum": ("MomentumOptimizer", MOMENTUM[1]),
    "nesterov": ("MomentumOptimizer", {**MOMENTUM[1], "use_nesterov": True}),
    "exact": ("MomentumOptimizer", EXACT),
    "adam": ("AdamOptimizer", {n.replace("a_", "a"): v for n, v in ADAM.items()}),
    # TF1 has no epsilon, where the accumulator does not start at 0.
    "adagrad": ("AdagradOptimizer", dict(learning_rate=0.1)),
}


def arrays(variables):
    return [np.array(v.numpy()) for v in variables]


class TFKeras:
    """`tf_keras.mixed_precision.LossScaleOptimizer` around an optimizer of 2.11."""

    optimizers = tf_keras.optimizers
    by_name = OPTIMIZERS
    slot_names = None

    def __init__(self, name, values, **scale):
        cls, arguments = self.by_name[name]
        self.inner = getattr(self.optimizers, cls)(**arguments)
        self.variables = [tf.Variable(v, name=n) for n, v in values.items()]
        self.optimizer = self.wrap({"initial_scale": INITIAL_SCALE, **scale})

    def wrap(self, scale):
        optimizer = tf_keras.mixed_precision.LossScaleOptimizer(self.inner, **scale)
        # Otherwise it warns at each step that they were not called.
        optimizer.get_scaled_loss(tf.constant(0.0))
        optimizer.get_unscaled_gradients([])
        return optimizer

    def apply(self, grads):
        """Applies unscaled gradients."""
        self.optimizer.apply_gradients(zip(grads, self.variables, strict=True))

    def minimize(self, loss):
        self.optimizer.minimize(loss, self.variables)

    def minimize_by_hand(self, loss):
        with tf.GradientTape() as tape:
            scaled = self.optimizer.get_scaled_loss(loss())
        grads = tape.gradient(scaled, self.variables)
        self.apply(self.optimizer.get_unscaled_gradients(grads))

    def scale(self):
        """Returns the scale, and the number of good steps or None."""
        counter = self.optimizer.dynamic_counter
        counter = None if counter is None else int(counter)
        return float(self.optimizer.loss_scale), counter

    def iterations(self):
        return int(self.optimizer.iterations)

    def uncount(self):
        """Undoes the count of a skipped step."""
        self.optimizer.iterations.assign_sub(1)

    def slots(self):
        iteration, *slots = self.optimizer.variables
        assert iteration is self.optimizer.iterations
        return arrays(slots)


class TFKerasLegacy(TFKeras):
    """The same around an optimizer of tf.keras 2.0 to 2.10."""

    optimizers = tf_keras.optimizers.legacy

    def wrap(self, scale):
        return tf_keras.mixed_precision.LossScaleOptimizer(self.inner, **scale)

    @property
    def slot_names(self):
        return self.optimizer.get_slot_names()

    def slots(self):
        iteration, *slots = self.optimizer.get_weights()
        assert iteration == self.iterations()
        return slots


class Experimental(TFKerasLegacy):
    """`tf.keras.mixed_precision.experimental.LossScaleOptimizer`, of 2.0 to 2.4."""

    optimizers = types.SimpleNamespace(
        SGD=gradient_descent.SGD,
        Adam=adam.Adam,
        RMSprop=rmsprop.RMSprop,
        Adagrad=adagrad.Adagrad,
        Adamax=adamax.Adamax,
    )

    def wrap(self, scale):
        return tf_2_4.LossScaleOptimizerV1(self.inner, make_scale(**scale))


class Version1(TFKeras):
    """`tf.compat.v1.mixed_precision.MixedPrecisionLossScaleOptimizer`."""

    optimizers = TF1.train
    by_name = TF1_OPTIMIZERS

    def wrap(self, scale):
        self.step = tf.Variable(7, dtype="int64")
        return TF1.mixed_precision.MixedPrecisionLossScaleOptimizer(
            self.inner, make_scale(**scale)
        )

    def apply(self, grads):
        pairs = zip(grads, self.variables, strict=True)
        self.optimizer.apply_gradients(pairs, self.step)

    def minimize(self, loss):
        self.optimizer.minimize(loss, self.step, self.variables)

    def minimize_by_hand(self, loss):
        pairs = self.optimizer.compute_gradients(loss, self.variables)
        self.optimizer.apply_gradients(pairs, self.step)

    def scale(self):
        # Its public attributes are only the variables: the counter and the scale.
        policy = self.optimizer._loss_scale
        counter = getattr(policy, "_num_good_steps", None)
        return float(policy()), None if counter is None else int(counter)

    def iterations(self):
        return int(self.step) - 7

    def uncount(self):
        """Does nothing, since TF1 does not count a skipped step."""

    @property
    def slot_names(self):
        # The wrapper says that there are none.
        return self.inner.get_slot_names()

    def slots(self):
        names = self.slot_names
        return arrays(self.inner.get_slot(v, n) for n in names for v in self.variables)


def make_scale(initial_scale, dynamic=True, dynamic_growth_steps=2000):
    if not dynamic:
        return TF1.mixed_precision.FixedLossScale(initial_scale)
    return TF1.mixed_precision.DynamicLossScale(initial_scale, dynamic_growth_steps)


class Diary:
    """Records the scale and the counters at each step, and everything at some."""

    def __init__(self, original):
        self.original = original
        self.at, self.weights, self.slots = [], [], []
        self.scale, self.counter, self.iterations = [], [], []

    def add_step(self, is_whole):
        scale, counter = self.original.scale()
        self.scale.append(scale)
        self.counter.append(counter)
        self.iterations.append(self.original.iterations())
        if is_whole:
            self.at.append(len(self.scale) - 1)
            self.weights.append(arrays(self.original.variables))
            self.slots.append(self.original.slots())

    def tree(self):
        """Returns the tree to record; a weight is an array with an axis of steps."""
        return {
            "scale": self.scale,
            "counter": self.counter,
            "iterations": self.iterations,
            "at": self.at,
            "weights": [np.stack(values) for values in zip(*self.weights, strict=True)],
            "slots": [np.stack(values) for values in zip(*self.slots, strict=True)],
            "slot_names": self.original.slot_names,
        }


def take_steps(family, name, script, every=1, uncount=True, **scale):
    """Returns the diary of an original that takes the steps of a script."""
    original = globals()[family](name, start(), **scale)
    diary = Diary(original)
    for step, (finite, grads) in enumerate(script, 1):
        original.apply([tensor_of_tensorflow(g) for g in grads.values()])
        if uncount and not finite:
            original.uncount()
        diary.add_step(is_whole=step % every == 0 or step == len(script))
    return diary.tree()


def minimize_distances(family, method, targets):
    """Returns the diary of an original with losses whose gradients pass float16."""
    original = globals()[family](
        "exact", {"w": np.zeros(4, "float32")}, dynamic_growth_steps=3
    )
    diary = Diary(original)
    [w] = original.variables
    for target in targets:
        [before] = arrays([w])

        def loss(target=target):
            distance = tf.cast(w, "float16") - tf.constant(target)
            return tf.reduce_sum(tf.cast(distance * distance, "float32"))

        getattr(original, method)(loss)
        if (w.numpy() == before).all():
            original.uncount()
        diary.add_step(is_whole=True)
    return diary.tree()
