"""The inner optimizers. The peers have the same hyperparameters, from here.

Keras is imported late: the command line must not choose a backend.
"""

from collections.abc import Callable
from dataclasses import dataclass

SCALE = 2.0**15
MOMENTUM = 0.9
BETA_1, BETA_2, EPSILON = 0.9, 0.999, 1e-7
WEIGHT_DECAY = 1e-4
SGD_RATE, ADAM_RATE, LARS_RATE = 0.01, 1e-3, 1.0
RMSPROP_RHO, ADAGRAD_START, ADADELTA_RHO = 0.9, 0.1, 0.95


@dataclass(frozen=True)
class Inner:
    """An inner optimizer, and what its rule reads and writes.

    Attributes:
        make: Returns a new Keras optimizer. Takes further keyword arguments of it.
        slots: Int. Number of slots with the shape of the variable.
        weight_norms: Bool. Whether the rule takes the norm of each weight before it
            can change it, which is one more read.
    """

    make: Callable
    slots: int
    weight_norms: bool = False


def _sgd(**more):
    import keras

    return keras.optimizers.SGD(SGD_RATE, **more)


def _momentum(**more):
    import keras

    return keras.optimizers.SGD(SGD_RATE, momentum=MOMENTUM, **more)


def _adam(**more):
    import keras

    return keras.optimizers.Adam(ADAM_RATE, BETA_1, BETA_2, EPSILON, **more)


def _adamw(**more):
    import keras

    return keras.optimizers.AdamW(
        ADAM_RATE, WEIGHT_DECAY, BETA_1, BETA_2, EPSILON, **more
    )


def _lion(**more):
    import keras

    return keras.optimizers.Lion(ADAM_RATE, **more)


def _rmsprop(**more):
    import keras

    return keras.optimizers.RMSprop(ADAM_RATE, RMSPROP_RHO, epsilon=EPSILON, **more)


def _nadam(**more):
    import keras

    return keras.optimizers.Nadam(ADAM_RATE, BETA_1, BETA_2, EPSILON, **more)


def _adagrad(**more):
    import keras

    return keras.optimizers.Adagrad(ADAM_RATE, ADAGRAD_START, EPSILON, **more)


def _adadelta(**more):
    import keras

    return keras.optimizers.Adadelta(ADAM_RATE, ADADELTA_RHO, EPSILON, **more)


def _lars(**more):
    import keras_lso

    return keras_lso.LARS(
        LARS_RATE, momentum=MOMENTUM, weight_decay_rate=WEIGHT_DECAY, **more
    )


def _lamb(**more):
    import keras_lso

    return keras_lso.LAMB(
        ADAM_RATE, BETA_1, BETA_2, EPSILON, weight_decay_rate=WEIGHT_DECAY, **more
    )


def _novograd(**more):
    import keras_lso

    # Its second moment is one number for each variable: no slot to speak of.
    return keras_lso.NovoGrad(SGD_RATE, weight_decay_rate=WEIGHT_DECAY, **more)


INNER = {
    "SGD": Inner(_sgd, slots=0),
    "SGD+momentum": Inner(_momentum, slots=1),
    "Adam": Inner(_adam, slots=2),
    "AdamW": Inner(_adamw, slots=2),
    "Lion": Inner(_lion, slots=1),
    "RMSprop": Inner(_rmsprop, slots=1),
    "Nadam": Inner(_nadam, slots=2),
    "Adagrad": Inner(_adagrad, slots=1),
    # Without a rule of ours: it makes its own step.
    "Adadelta": Inner(_adadelta, slots=2),
    "LARS": Inner(_lars, slots=1, weight_norms=True),
    "LAMB": Inner(_lamb, slots=2, weight_norms=True),
    "NovoGrad": Inner(_novograd, slots=1),
}
