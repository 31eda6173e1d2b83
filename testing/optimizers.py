"""The optimizers for tests of steps: at least one for each rule in the registry.

`tests/test_keras_internals.py` fails if a rule has none. Add an optimizer here to add
it to all tests that compare kernels, formulas and steps.
"""

from functools import partial

import keras

import keras_lso
from keras_lso._keras_internals.rules import KerasRule, registered_rule
from testing.keras_versions import takes_muon

_K = keras.optimizers

# Each is called with a learning rate and keywords of every optimizer.
OPTIMIZERS = {
    "sgd": _K.SGD,
    "momentum": partial(_K.SGD, momentum=0.9),
    "nesterov": partial(_K.SGD, momentum=0.9, nesterov=True),
    "adam": _K.Adam,
    "adamw": _K.AdamW,
    "nadam": _K.Nadam,
    "adamax": _K.Adamax,
    "lion": _K.Lion,
    "rmsprop": _K.RMSprop,
    "adagrad": _K.Adagrad,
    "keras lamb": _K.Lamb,
    "lars": partial(keras_lso.LARS, eeta=0.5),
    "lars, popular": partial(
        keras_lso.LARS, eeta=0.5, nesterov=True, classic_momentum=False
    ),
    "lars, paper": partial(
        keras_lso.LARS, eeta=0.5, nesterov=True, trust_ratio="paper"
    ),
    "lamb": keras_lso.LAMB,
    "lamb, uncorrected": partial(
        keras_lso.LAMB, bias_correction=False, max_trust_ratio=2.0
    ),
    "novograd": keras_lso.NovoGrad,
    "novograd, averaged": partial(keras_lso.NovoGrad, grad_averaging=True),
}
if takes_muon:
    OPTIMIZERS["muon"] = _K.Muon
OURS = [name for name in OPTIMIZERS if name.startswith(("lamb", "lars", "novograd"))]
# On JAX no other rule is faster than the optimizer itself.
WITH_NORMS = [*OURS, "keras lamb"]


def rule_of(make):
    """Returns the class of rules of an optimizer in this table."""
    return registered_rule(make(0.5))


def decaying(make):
    """Returns the keywords that make this kind of optimizer use weight decay."""
    is_of_keras = issubclass(rule_of(make), KerasRule)
    return {"weight_decay" if is_of_keras else "weight_decay_rate": 0.1}
