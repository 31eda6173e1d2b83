"""The formula of `LARS` in NumPy float64, and variables for its tests.

The integration tests compare with the Model Garden's and optax's own code.
"""

import keras
import numpy as np
import pytest
from keras import ops

# Float32 rounds by 6e-8; a step is some ten roundings of the largest number in it.
SHARE = 1e-6
PATHS = ["block/conv/kernel", "block/bn/gamma", "block/bn/beta", "dense/bias", "scale"]
SHAPES = [(2, 3, 2), (3,), (3,), (4,), ()]


def variable(path, value, dtype="float32"):
    *scopes, name = path.split("/")
    if scopes:
        with keras.name_scope(scopes[0]):
            return variable("/".join([*scopes[1:], name]), value, dtype)
    return keras.Variable(value, dtype=dtype, name=name)


def values_of(variables):
    """Returns values in float64, which holds every narrower number exactly."""
    return [
        np.array(ops.convert_to_numpy(ops.cast(v, _wide(v)))).astype("float64")
        for v in variables
    ]


def _wide(v):
    return "float64" if v.dtype == "float64" else "float32"


class InNumPy:
    """`LARS` in float64, with the formula in the docstring of the class."""

    def __init__(
        self,
        weights,
        momentum=0.9,
        weight_decay_rate=0.0,
        eeta=0.001,
        nesterov=False,
        classic_momentum=True,
    ):
        self.weights = [np.asarray(w, "float64") for w in weights]
        self.momentums = [np.zeros_like(w) for w in self.weights]
        self.momentum, self.eeta = momentum, eeta
        self.weight_decay_rate, self.nesterov = weight_decay_rate, nesterov
        self.classic_momentum = classic_momentum

    def step(self, grads, learning_rate):
        for i, g in enumerate(grads):
            self._step(i, np.asarray(g, "float64"), learning_rate)

    def _step(self, i, g, learning_rate):
        w, v = self.weights[i], self.momentums[i]
        d = g + self.weight_decay_rate * w
        if self.classic_momentum:
            d = learning_rate * self.trust_ratio(w, d) * d
        v = self.momentum * v + d
        u = self.momentum * v + d if self.nesterov else v
        if not self.classic_momentum:
            u = learning_rate * self.trust_ratio(w, u) * u
        self.weights[i], self.momentums[i] = w - u, v

    def trust_ratio(self, w, d):
        w_norm, d_norm = np.linalg.norm(w), np.linalg.norm(d)
        return self.eeta * w_norm / d_norm if w_norm > 0 and d_norm > 0 else 1.0


def assert_close(actual, expected, share=SHARE):
    for i, (a, e) in enumerate(zip(actual, expected, strict=True)):
        tolerance = share * np.abs(e).max(initial=0)
        np.testing.assert_allclose(a, e, rtol=0, atol=tolerance, err_msg=str(i))


# --- Arguments ----------------------------------------------------------------

MODEL_GARDEN_ARGUMENTS = {
    "learning_rate": 0.01,
    "momentum": 0.9,
    "weight_decay_rate": 0.0,
    "eeta": 0.001,
    "nesterov": False,
    "classic_momentum": True,
    "exclude_from_weight_decay": None,
    "exclude_from_layer_adaptation": None,
    "name": "LARS",
}
OWN_ARGUMENTS = {
    "trust_ratio": "model_garden",
    "epsilon": 0.0,
    "trust_clip": False,
    "exclude_1d": False,
}


# --- The formula --------------------------------------------------------------

FORMS = {
    f"{'classic' if classic else 'popular'}{', nesterov' if nesterov else ''}": dict(
        classic_momentum=classic, nesterov=nesterov
    )
    for classic in (True, False)
    for nesterov in (False, True)
}
forms = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
