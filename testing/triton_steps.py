"""Steps by Triton's kernels, and by the formulas on the same tensors.

The references are the formulas of `rules.py` and `masters.py`, which the kernels follow
to the last bit.
"""

import functools
import itertools
from typing import NamedTuple
from unittest import mock

import keras
import numpy as np
import torch

from keras_lso._backend import backend, formulas
from keras_lso._backend.masters import KINDS
from keras_lso._backend.measurement import Measurement
from keras_lso._backend.rule import TrustRatio, always
from keras_lso._backend.torch.triton.trial import Reference
from keras_lso._keras_internals import rules
from keras_lso.optimizers.lars import LARSRule
from testing.masters import targets_of

REFERENCE = Reference()
BLOCK, ITERATIONS = 1024, 41
# The dtype of weights, and the kind of their masters.
WEIGHTS = [(None, None), *itertools.product(["float16", "bfloat16"], KINDS)]
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
# Remainders.
EDGES = [-(2**15), -1, 0, 1, 2**15 - 1]


def tensors(seed, dtype=torch.float32, shapes=SHAPES):
    random = np.random.default_rng(seed)
    return [
        torch.tensor(random.normal(size=s), dtype=torch.float32).to(dtype)
        for s in shapes
    ]


class State(NamedTuple):
    """The tensors that a step writes, the arguments of `testing.masters.targets_of`.

    Attributes:
        kept: List of float32 weights, or of the tensors kept for 16-bit weights.
        slots: List of tuples of tensors.
        weights: List of 16-bit weights. Defaults to `None`.
        kind: String, the kind of their masters.
    """

    kept: list
    slots: list
    weights: list | None = None
    kind: str = "float32"

    @property
    def tensors(self):
        """List of all tensors."""
        kept = [k for k in self.kept if k is not None]
        return [*(self.weights or ()), *kept, *itertools.chain(*self.slots)]

    @property
    def targets(self):
        iterations = keras.Variable(ITERATIONS, dtype="int32", trainable=False)
        return targets_of(*self)._replace(iterations=iterations)

    def clone(self):
        columns = [
            [None if t is None else t.clone() for t in column]
            for column in (self.kept, self.weights or ())
        ]
        slots = [tuple(s.clone() for s in of_one) for of_one in self.slots]
        return State(columns[0], slots, columns[1] or None, self.kind)


def make(rule, low=None, kind=None, shapes=SHAPES):
    """A `State` in which some 16-bit weights were assigned."""
    numbers = tensors(1, shapes=shapes)
    slots = [tensors(2 + i, shapes=shapes) for i in range(len(rule.slots))]
    slots[1:] = [[s.square() for s in row] for row in slots[1:]]
    slots = list(zip(*slots, strict=True)) or [()] * len(numbers)
    if low is None:
        return State(numbers, slots)
    for w in numbers[3:]:
        w.view(-1)[: len(SPECIAL)] = torch.tensor(SPECIAL)
    bits = [torch.zeros_like(w, dtype=torch.int32) for w in numbers]
    pairs = [
        KINDS[kind].parts(REFERENCE, w, low, b)
        for w, b in zip(numbers, bits, strict=True)
    ]
    weights, kept = map(list, zip(*pairs, strict=True))
    for i, (w, k) in enumerate(pairs[3:]):
        w.view(-1)[2::5] = 7.0
        w.view(-1)[-len(SPECIAL) :] = torch.tensor(SPECIAL).to(w.dtype)
        if kind == "remainder":
            # Each tensor has another value next to each of these.
            edges = torch.tensor(EDGES * len(SPECIAL)).roll(i)[: len(SPECIAL)]
            k.view(-1)[-len(SPECIAL) :] = edges
    return State(kept, slots, weights, kind)


def expected_of(rule, state, grads, inv_scale):
    """Takes the step of `rules.py` and `masters.py`, with operations of PyTorch."""
    # PyTorch's square root on a CPU is not rounded as in IEEE 754; the kernels' is.
    root = lambda x: torch.sqrt(x.double()).float()  # noqa: E731
    with mock.patch.object(formulas, "sqrt", root):
        return _expected_of(rule, state, grads, inv_scale, lambda *tensors: None)


def _expected_of(rule, state, grads, inv_scale, norms_of):
    """`norms_of` is a callable of a gradient, a number and slots."""
    state = state.clone()
    targets = state.targets
    numbers = targets.numbers(REFERENCE)
    for i, (g, w, of_one) in enumerate(zip(grads, numbers, state.slots, strict=True)):
        tensors = g.float() * inv_scale, w, *of_one
        new, *slots = rule(formulas, always, *tensors, norms=norms_of(*tensors))
        narrow, written = targets.weights[i], [(state.kept[i], new)]
        if narrow is not None:
            written = narrow.parts(REFERENCE, new, targets.iterations)
        written += zip(of_one, slots, strict=True)
        for tensor, value in written:
            tensor.copy_(value)
    return state


def assert_same_bits(actual, expected):
    for a, e in zip(actual.tensors, expected.tensors, strict=True):
        assert a.dtype == e.dtype
        # One NaN is as good as another.
        assert torch.equal(a.isnan(), e.isnan())
        assert torch.equal(a.nan_to_num().view(-1), e.nan_to_num().view(-1))
        assert torch.equal(a.signbit() & ~a.isnan(), e.signbit() & ~e.isnan())


def raw(tensors):
    """The bytes of tensors, where NaN equals NaN and -0.0 differs from 0.0."""
    return [bytes(t.detach().reshape(-1, 1).view(torch.uint8).numpy()) for t in tensors]


def step(rule, state, grads, finite=True, inv_scale=INV_SCALE, norms=None):
    backend.fused_step(
        [rule] * len(grads),
        state.targets,
        grads,
        Measurement(torch.tensor(finite), rule_norms=norms),
        number(inv_scale),
    )


def exact_norms(rule, g, w, v):
    """The norms of LARS, in float64."""
    if rule.trust_ratio is None:
        return None
    measured = rule.measured(formulas, g.double(), w.double(), v.double())
    return [torch.linalg.vector_norm(m).float() for m in measured]


def expected_of_lars(rule, state, grads):
    norms_of = functools.partial(exact_norms, rule)
    return _expected_of(rule, state, grads, number(INV_SCALE), norms_of)
