"""Steps by Triton's kernels, and what the formulas make of the same tensors.

The references are the formulas of `rules.py`, which the kernels follow to the last bit.
"""

import itertools
from unittest import mock

import numpy as np
import torch

from keras_lso._backend import backend, formulas
from keras_lso._backend.framework import Framework
from keras_lso._backend.measurement import Measurement
from keras_lso._backend.rule import TrustRatio, always
from keras_lso._backend.targets import Targets
from keras_lso._keras_internals import rules
from keras_lso.optimizers.lars import LARSRule

REFERENCE = Framework()
BLOCK = 1024
# Nothing, a scalar, less than a block, exactly one, and several with a rest.
SHAPES = [(0,), (), (3, 5), (BLOCK,), (2, BLOCK + 7), (4 * BLOCK,)]
INV_SCALE = 1 / 24


def number(value):
    return torch.tensor(value, dtype=torch.float32)


RULES = {
    "SGD": rules.SGD(number(0.3)),
    "SGD, decay": rules.SGD(number(0.3), decay=number(0.01)),
    "momentum": rules.Momentum(number(0.3), 0.9),
    "momentum 0": rules.Momentum(number(0.3), 0.0),
    "nesterov": rules.Momentum(number(0.3), 0.9, nesterov=True),
    "nesterov, decay": rules.Momentum(
        number(0.3), 0.9, nesterov=True, decay=number(0.01)
    ),
    "Adam": rules.Adam(number(0.3), 0.9, 0.999, 1e-7),
    "AdamW": rules.Adam(number(0.3), 0.9, 0.999, 1e-7, decay=number(0.01)),
}
LARS = {
    "ratio": dict(trust_ratio=TrustRatio(0.1)),
    "no decay": dict(trust_ratio=TrustRatio(0.1), weight_decay=0.0),
    "nesterov": dict(trust_ratio=TrustRatio(0.1, 1e-3, upper=1.0), nesterov=True),
    "paper": dict(trust_ratio=TrustRatio(0.1, 1e-3, paper=True)),
    "no ratio": dict(trust_ratio=None),
}
LARS = {
    name: LARSRule(
        **{"learning_rate": number(0.3), "momentum": 0.9, "weight_decay": 0.02} | given
    )
    for name, given in LARS.items()
}
KERNEL = {rules.SGD: "sgd", rules.Momentum: "momentum", rules.Adam: "adam"}
SPECIAL = [0.0, -0.0, 1e-9, 6e-8, 1e-41, 65504.0, 65519.9, 65520.0, 7e4, 3e38]
SPECIAL += [-7e4, np.inf, -np.inf, np.nan]


def tensors(seed, dtype=torch.float32, shapes=SHAPES):
    random = np.random.default_rng(seed)
    return [
        torch.tensor(random.normal(size=s), dtype=torch.float32).to(dtype)
        for s in shapes
    ]


def make(rule, low=None, shapes=SHAPES):
    """Weights, slots and low-precision variables, some of which were assigned."""
    weights = tensors(1, shapes=shapes)
    slots = [tensors(2 + i, shapes=shapes) for i in range(len(rule.slots))]
    slots[1:] = [[s.square() for s in row] for row in slots[1:]]
    copies = None
    if low is not None:
        for w in weights[3:]:
            w.view(-1)[: len(SPECIAL)] = torch.tensor(SPECIAL)
        copies = [REFERENCE.rounded(w, low) for w in weights]
        for c in copies[3:]:
            c.view(-1)[2::5] = 7.0
        copies[-1].view(-1)[-len(SPECIAL) :] = torch.tensor(SPECIAL).to(
            getattr(torch, low)
        )
    return weights, list(zip(*slots, strict=True)) or [()] * len(weights), copies


def clones(targets):
    weights, slots, copies = targets
    return (
        [w.clone() for w in weights],
        [tuple(s.clone() for s in of_one) for of_one in slots],
        copies and [c.clone() for c in copies],
    )


def flat(targets):
    weights, slots, copies = targets
    return [*weights, *itertools.chain(*slots), *(copies or ())]


def expected_of(rule, targets, grads, inv_scale):
    """What `rules.py` and `Framework` make of them, by operations of PyTorch."""
    # PyTorch's square root on a CPU is not rounded as in IEEE 754; the kernels' is.
    root = lambda x: torch.sqrt(x.double()).float()  # noqa: E731
    with mock.patch.object(formulas, "sqrt", root):
        return _expected_of(rule, *targets, grads, inv_scale)


def _expected_of(rule, weights, slots, copies, grads, inv_scale):
    masters = weights
    if copies:
        masters = list(map(REFERENCE.resynchronised, weights, copies))
    new = [
        rule(formulas, always, g.float() * inv_scale, w, *of_one)
        for g, w, of_one in zip(grads, masters, slots, strict=True)
    ]
    rounded = copies and [REFERENCE.rounded(n[0], copies[0].dtype) for n in new]
    return [n[0] for n in new], [n[1:] for n in new], rounded


def assert_same_bits(actual, expected):
    for a, e in zip(flat(actual), flat(expected), strict=True):
        assert a.dtype == e.dtype
        # One NaN is as good as another.
        assert torch.equal(a.isnan(), e.isnan())
        assert torch.equal(a.nan_to_num().view(-1), e.nan_to_num().view(-1))
        assert torch.equal(a.signbit() & ~a.isnan(), e.signbit() & ~e.isnan())


def raw(tensors):
    """Their bytes, in which a NaN is itself and -0.0 is not 0.0."""
    return [bytes(t.detach().reshape(-1, 1).view(torch.uint8).numpy()) for t in tensors]


def step(rule, targets, grads, finite=True, inv_scale=INV_SCALE):
    backend.fused_step(
        [rule] * len(grads),
        Targets(*targets),
        grads,
        Measurement(torch.tensor(finite)),
        number(inv_scale),
    )


def exact_norms(rule, g, w, v):
    """The norms that LARS takes, of float64."""
    if rule.trust_ratio is None:
        return None
    measured = rule.measured(formulas, g.double(), w.double(), v.double())
    return [torch.linalg.vector_norm(m).float() for m in measured]


def expected_of_lars(rule, weights, slots, copies, grads):
    masters = weights
    if copies:
        masters = list(map(REFERENCE.resynchronised, weights, copies))
    states = zip(grads, masters, (v for (v,) in slots), strict=True)
    states = [(g.float() * number(INV_SCALE), w, v) for g, w, v in states]
    new = [rule(formulas, always, *s, norms=exact_norms(rule, *s)) for s in states]
    rounded = copies and [REFERENCE.rounded(w, copies[0].dtype) for w, _ in new]
    return [w for w, _ in new], [(v,) for _, v in new], rounded
