"""The formulas of LARS, LAMB and NovoGrad in NumPy float64, and variables for tests.

The integration tests compare with the originals themselves.
"""

import keras
import numpy as np
import pytest
from keras import ops

from keras_lso import LAMB, LARS, NovoGrad

# Float32 rounds by 6e-8; a step is some ten roundings of the largest number in it, and
# some numbers are sums of many steps.
SHARE = 2e-6
PATHS = ["block/conv/kernel", "block/bn/gamma", "block/bn/beta", "dense/bias", "scale"]
SHAPES = [(2, 3, 2), (3,), (3,), (4,), ()]


def variable(path, value, dtype="float32"):
    *scopes, name = path.split("/")
    if scopes:
        with keras.name_scope(scopes[0]):
            return variable("/".join([*scopes[1:], name]), value, dtype)
    return keras.Variable(value, dtype=dtype, name=name)


def make_variables(values, dtype="float32"):
    return [variable(p, v, dtype) for p, v in zip(PATHS, values, strict=False)]


def values_of(variables):
    """Returns values in float64, which holds every narrower number exactly."""
    return [
        np.array(ops.convert_to_numpy(ops.cast(v, _wide(v)))).astype("float64")
        for v in variables
    ]


def _wide(v):
    return "float64" if v.dtype == "float64" else "float32"


def assert_close(actual, expected, share=SHARE):
    for i, (a, e) in enumerate(zip(values_of(actual), expected, strict=True)):
        tolerance = share * np.abs(e).max(initial=0)
        np.testing.assert_allclose(a, e, rtol=0, atol=tolerance, err_msg=str(i))


class InNumPy:
    """A formula in float64; the settings are attributes."""

    weight_decay_rate = 0.0
    not_decayed: tuple | set = ()
    not_adapted: tuple | set = ()

    def __init__(self, weights, **settings):
        self.weights = [np.asarray(w, "float64") for w in weights]
        self.m = [np.zeros_like(w) for w in self.weights]
        self.v = [np.zeros_like(w) for w in self.weights]
        vars(self).update(settings)
        self.t = 0

    def step(self, grads, learning_rate):
        self.t += 1
        for i, g in enumerate(grads):
            g, w = np.asarray(g, "float64"), self.weights[i]
            self.weights[i] = w - self.update(i, g, w, learning_rate)

    def decay(self, i, w):
        return 0.0 if PATHS[i] in self.not_decayed else self.weight_decay_rate * w

    def adapted(self, i, ratio, *norms):
        """Returns the trust ratio, which is 1 where a norm is 0."""
        return ratio() if all(norms) and PATHS[i] not in self.not_adapted else 1.0


class InNumPyLARS(InNumPy):
    momentum, eeta, epsilon = 0.9, 0.001, 0.0
    nesterov, classic_momentum = False, True
    trust_ratio, trust_clip = "model_garden", False

    def slots(self):
        return self.m

    def update(self, i, g, w, learning_rate):
        d = g + self.decay(i, w)
        if self.classic_momentum:
            d = learning_rate * self.rescaling(i, w, d, g) * d
        m = self.m[i] = self.momentum * self.m[i] + d
        u = self.momentum * m + d if self.nesterov else m
        if self.classic_momentum:
            return u
        return learning_rate * self.rescaling(i, w, u, g) * u

    def rescaling(self, i, w, d, g):
        w_norm = np.linalg.norm(w)
        norm, total = np.linalg.norm(d), np.linalg.norm(d)
        if self.trust_ratio == "paper":
            norm = np.linalg.norm(g)
            total = norm + np.linalg.norm(self.decay(i, w))
        ratio = self.adapted(
            i, lambda: self.eeta * w_norm / (total + self.epsilon), w_norm, norm
        )
        return min(ratio, 1.0) if self.trust_clip else ratio


class InNumPyLAMB(InNumPy):
    beta_1, beta_2, epsilon, bias_correction = 0.9, 0.999, 1e-6, True
    min_trust_ratio, max_trust_ratio = 0.0, np.inf
    # 1 - 0.999 in float32 is off by 5e-5, and so are the velocities.
    rounded = np.float32

    def slots(self):
        return [*self.m, *self.v]

    def update(self, i, g, w, learning_rate):
        beta_1, beta_2 = float(self.rounded(self.beta_1)), self.rounded(self.beta_2)
        beta_2 = float(beta_2)
        m = self.m[i] = beta_1 * self.m[i] + (1 - beta_1) * g
        v = self.v[i] = beta_2 * self.v[i] + (1 - beta_2) * g**2
        if self.bias_correction:
            m, v = m / (1 - beta_1**self.t), v / (1 - beta_2**self.t)
        d = m / (np.sqrt(v) + self.epsilon) + self.decay(i, w)
        w_norm, norm = np.linalg.norm(w), np.linalg.norm(d)
        bounds = self.min_trust_ratio, self.max_trust_ratio
        ratio = self.adapted(i, lambda: np.clip(w_norm / norm, *bounds), w_norm, norm)
        return learning_rate * ratio * d


class InNumPyNovoGrad(InNumPy):
    beta_1, beta_2, epsilon, grad_averaging = 0.95, 0.98, 1e-8, False

    def __init__(self, weights, **settings):
        super().__init__(weights, **settings)
        self.v = [np.zeros(()) for _ in weights]

    def slots(self):
        return [*self.m, *self.v]

    def update(self, i, g, w, learning_rate):
        square = np.sum(g**2)
        moved = self.beta_2 * self.v[i] + (1 - self.beta_2) * square
        self.v[i] = square if self.v[i] == 0 else moved
        root = np.sqrt(self.v[i] + self.epsilon)
        d = (g / root if root else g) + self.decay(i, w)
        share = 1 - self.beta_1 if self.grad_averaging else 1.0
        self.m[i] = self.beta_1 * self.m[i] + share * d
        return learning_rate * self.m[i]


FORMULAS = {LARS: InNumPyLARS, LAMB: InNumPyLAMB, NovoGrad: InNumPyNovoGrad}
SLOTS = {
    LARS: ["momentums"],
    LAMB: ["momentums", "velocities"],
    NovoGrad: ["momentums", "second_moments"],
}


def slots_of(optimizer):
    names = next(SLOTS[cls] for cls in type(optimizer).__mro__ if cls in SLOTS)
    return [v for name in names for v in getattr(optimizer, name)]


def assert_as(optimizer, variables, reference, share=SHARE):
    assert_close(variables, reference.weights, share)
    assert_close(slots_of(optimizer), reference.slots(), share)


DECAYED = dict(eeta=0.1, weight_decay_rate=0.1)
PAPER = dict(weight_decay_rate=0.2, trust_ratio="paper")
FORMS = {
    "LARS": (LARS, DECAYED),
    "LARS, nesterov": (LARS, dict(**DECAYED, nesterov=True)),
    "LARS, popular": (LARS, dict(**DECAYED, classic_momentum=False)),
    "LARS, popular, nesterov": (
        LARS,
        dict(**DECAYED, classic_momentum=False, nesterov=True),
    ),
    "LARS, plain": (LARS, dict(eeta=0.1, momentum=0.0)),
    "LARS, paper": (LARS, dict(**PAPER, eeta=0.1, epsilon=0.5)),
    "LARS, paper, clipped": (
        LARS,
        dict(**PAPER, eeta=2.0, trust_clip=True, nesterov=True),
    ),
    "LAMB": (LAMB, dict(weight_decay_rate=0.1)),
    "LAMB, plain": (LAMB, {}),
    "LAMB, uncorrected": (LAMB, dict(weight_decay_rate=0.1, bias_correction=False)),
    "LAMB, betas of zero": (LAMB, dict(beta_1=0.0, beta_2=0.0, epsilon=0.5)),
    "LAMB, bounded": (LAMB, dict(min_trust_ratio=0.5, max_trust_ratio=0.75)),
    "NovoGrad": (NovoGrad, dict(weight_decay_rate=0.1)),
    "NovoGrad, plain": (NovoGrad, {}),
    "NovoGrad, averaged": (
        NovoGrad,
        dict(weight_decay_rate=0.1, grad_averaging=True, epsilon=0.5),
    ),
    "NovoGrad, betas of zero": (
        NovoGrad,
        dict(weight_decay_rate=0.1, beta_1=0.0, beta_2=0.0),
    ),
}
forms = pytest.mark.parametrize("cls, settings", FORMS.values(), ids=FORMS)
OF_EACH = {name: FORMS[name] for name in ("LARS", "LAMB", "NovoGrad")}
each = pytest.mark.parametrize("cls, settings", OF_EACH.values(), ids=OF_EACH)
