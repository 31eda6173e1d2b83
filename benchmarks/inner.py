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


@dataclass(frozen=True)
class Inner:
    """An inner optimizer, and what its rule reads and writes.

    Attributes:
        make: Returns a new Keras optimizer.
        slots: Int. Number of slots with the shape of the variable.
        weight_norms: Bool. Whether the rule takes the norm of each weight before it
            can change it, which is one more read.
    """

    make: Callable
    slots: int
    weight_norms: bool = False


def _sgd():
    import keras

    return keras.optimizers.SGD(SGD_RATE)


def _momentum():
    import keras

    return keras.optimizers.SGD(SGD_RATE, momentum=MOMENTUM)


def _adam():
    import keras

    return keras.optimizers.Adam(ADAM_RATE, BETA_1, BETA_2, EPSILON)


def _adamw():
    import keras

    return keras.optimizers.AdamW(ADAM_RATE, WEIGHT_DECAY, BETA_1, BETA_2, EPSILON)


def _lars():
    import keras_lso

    return keras_lso.LARS(LARS_RATE, momentum=MOMENTUM, weight_decay_rate=WEIGHT_DECAY)


def _novograd():
    import keras_lso

    # Its second moment is one number for each variable: no slot to speak of.
    return keras_lso.NovoGrad(SGD_RATE, weight_decay_rate=WEIGHT_DECAY)


INNER = {
    "SGD": Inner(_sgd, slots=0),
    "SGD+momentum": Inner(_momentum, slots=1),
    "Adam": Inner(_adam, slots=2),
    "AdamW": Inner(_adamw, slots=2),
    "LARS": Inner(_lars, slots=1, weight_norms=True),
    "NovoGrad": Inner(_novograd, slots=1),
}
