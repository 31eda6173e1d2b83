"""Kernels in PyTorch, sound and broken, that replace Triton's in tests."""

import dataclasses
import itertools

import keras
import torch

from keras_lso._backend import formulas, masters
from keras_lso._backend.masters import KINDS
from keras_lso._backend.rule import TrustRatio, always
from keras_lso._backend.torch.masters import pairs_of
from keras_lso._backend.torch.triton.trial import Reference, Variant, sample_of
from keras_lso._keras_internals import rules
from keras_lso.optimizers.lars import LARSRule

REFERENCE = Reference()
CPU, BLOCK = torch.device("cpu"), 1024
DTYPES = torch.float16, torch.bfloat16
RULES = {
    "SGD": rules.SGD(0.1),
    "momentum": rules.Momentum(0.1, 0.9, decay=0.01),
    "nesterov": rules.Momentum(0.1, 0.9, nesterov=True),
    "AdamW": rules.Adam(0.1, 0.9, 0.999, 1e-7, decay=0.01),
    "LARS": LARSRule(0.1, 0.9, 0.01, TrustRatio(0.1)),
    "paper": LARSRule(0.1, 0.9, 0, TrustRatio(0.1, paper=True), nesterov=True),
    "excluded": LARSRule(0.1, 0.9, 0.01, None),
}


def by_the_formula(chunk, rule, grads, inv_scale, found_inf, iterations):
    """A correct kernel."""
    if found_inf == 1.0:
        return True
    for i, (w, *slots) in enumerate(zip(chunk.variables, *chunk.slots, strict=True)):
        narrow = chunk.narrow[i] if chunk.narrow else None
        number = narrow.number(REFERENCE) if narrow else w
        g = grads[i].float() * inv_scale
        norms = REFERENCE.norms_of(rule, g, number, *slots)
        new = rule(formulas, always, g, number, *slots, norms=norms)
        written = list(zip((w, *slots), new, strict=True))
        if narrow:
            written[:1] = narrow.parts(REFERENCE, new[0], iterations)
        for tensor, value in written:
            tensor.copy_(value)
    return True


def keras_name(tensor):
    return keras.backend.standardize_dtype(tensor.dtype)


def another_rate(chunk, rule, *args):
    rate = rule.learning_rate * (1 + 1e-4)
    return by_the_formula(chunk, dataclasses.replace(rule, learning_rate=rate), *args)


def without_decay(chunk, rule, *args):
    return by_the_formula(chunk, dataclasses.replace(rule, decay=None), *args)


def never_skips(chunk, rule, grads, inv_scale, found_inf, iterations):
    applied = torch.tensor(0.0)
    return by_the_formula(chunk, rule, grads, inv_scale, applied, iterations)


def afterwards(change):
    """Returns a correct kernel that then does something else to the chunk."""

    def step(chunk, rule, grads, inv_scale, found_inf, iterations):
        by_the_formula(chunk, rule, grads, inv_scale, found_inf, iterations)
        change(chunk, grads, found_inf == 1.0)
        return True

    return step


@afterwards
def loses_the_sign_of_zero(chunk, grads, is_skipped):
    for slot in chunk.slots[0]:
        slot.add_(0.0)


@afterwards
def quiets_a_nan(chunk, grads, is_skipped):
    if is_skipped:
        for low in chunk.variables if chunk.narrow else ():
            low.copy_(torch.where(low.isnan(), torch.nan, low))


@afterwards
def writes_beside_it(chunk, grads, is_skipped):
    weight = chunk.numbers[1]
    beside = weight.as_strided((1,), (1,), weight.storage_offset() + weight.numel())
    beside.fill_(7.0)


@afterwards
def writes_a_gradient(chunk, grads, is_skipped):
    grads[-1].mul_(0.5)


@afterwards
def leaves_the_variables(chunk, grads, is_skipped):
    if not is_skipped:
        chunk.variables[-1].neg_()


@afterwards
def makes_a_nan(chunk, grads, is_skipped):
    chunk.slots[0][2][-1] = torch.nan


def leaving(part):
    """Returns a kernel that does not step a part of each weight."""

    def step(chunk, *args):
        tensors = [*chunk.variables, *(n.kept for n in chunk.narrow)]
        kept = [t.clone() for t in tensors]
        by_the_formula(chunk, *args)
        for t, old in zip(tensors, kept, strict=True):
            t[part(t)] = old[part(t)]
        return True

    step.__name__ = f"leaving_{part.__name__}"
    return step


def rest_of_a_block(tensor):
    return slice(tensor.numel() // BLOCK * BLOCK, None)


def what_lies_askew(tensor):
    return slice(None if tensor.data_ptr() % 16 else tensor.numel(), None)


def ignores_assignments(chunk, *args):
    for master, low in pairs_of(chunk):
        low.copy_(REFERENCE.rounded(master, keras_name(low)))
    return by_the_formula(chunk, *args)


def lets_float16_overflow(chunk, *args):
    by_the_formula(chunk, *args)
    for master, low in pairs_of(chunk):
        low.copy_(torch.where(master.isfinite(), master.to(low.dtype), low))
    return True


# --- Kernels that are wrong for one kind ----------------------------------------------


def drops_the_remainders(chunk, *args):
    for narrow in chunk.narrow:
        narrow.kept.zero_()
    return by_the_formula(chunk, *args)


def leaves_the_remainders(chunk, *args):
    kept = [n.kept.clone() for n in chunk.narrow]
    by_the_formula(chunk, *args)
    for narrow, old in zip(chunk.narrow, kept, strict=True):
        narrow.kept.copy_(old)
    return True


def takes_zeros_for_rounded_numbers(chunk, *args):
    """The weight as NaN, the result of 0 with a negative remainder."""
    are_zero = [n.weight == 0 for n in chunk.narrow]
    by_the_formula(chunk, *args)
    for narrow, is_zero in zip(chunk.narrow, are_zero, strict=True):
        narrow.weight.masked_fill_(is_zero, torch.nan)
    return True


def with_narrow(change):
    """Returns a kernel that takes other `Narrow` weights."""

    def step(chunk, *args):
        narrow = [change(n) for n in chunk.narrow]
        return by_the_formula(chunk._replace(narrow=narrow), *args)

    step.__name__ = change.__name__
    return step


@with_narrow
def draws_the_bits_of_one_weight_for_all(narrow):
    return narrow._replace(position=0)


@with_narrow
def rounds_to_the_nearest(narrow):
    class Nearest(masters.Stochastic):
        def parts(self, framework, number, dtype, bits=None):
            return framework.rounded(number, dtype), None

    return narrow._replace(kind=Nearest())


def draws_the_bits_of_the_next_step(*args):
    *args, iterations = args
    return by_the_formula(*args, iterations + 1)


# --- Others ---------------------------------------------------------------------------


def raises(*args):
    raise ValueError("no such instruction")


def declines(*args):
    return False


BROKEN = {
    another_rate: r"after a step \d+ elements are off by up to .* in the weights",
    without_decay: r"after a step \d+ elements are off by up to .* in the weights",
    never_skips: "a step that is skipped changes the weights",
    loses_the_sign_of_zero: "a step that is skipped changes the momentum",
    quiets_a_nan: "a step that is skipped changes the weights",
    writes_beside_it: "after a step 1 elements are off .* in the masters",
    writes_a_gradient: "after a step .* in the gradients",
    leaves_the_variables: "after a step .* in the weights",
    makes_a_nan: "after a step 1 elements are off by up to nan in the momentum",
    leaving(rest_of_a_block): "after a step .* in the weights",
    leaving(what_lies_askew): "after a step .* in the weights",
    ignores_assignments: "after a step .* in the weights",
    lets_float16_overflow: "after a step .* in the weights",
    raises: "ValueError: no such instruction",
    declines: "it does not take the tensors",
}
# Each with the kind of masters for which it is broken, and the error.
BROKEN_FOR = {
    drops_the_remainders: ("remainder", "after a step .* in the weights"),
    leaves_the_remainders: ("remainder", "after a step .* in the masters"),
    takes_zeros_for_rounded_numbers: ("remainder", "after a step .* in the weights"),
    draws_the_bits_of_one_weight_for_all: ("stochastic", "after a step .* the weights"),
    rounds_to_the_nearest: ("stochastic", "after a step .* in the weights"),
    draws_the_bits_of_the_next_step: ("stochastic", "after a step .* in the weights"),
}
# The dtype of weights, and the kind of their masters.
WEIGHTS = [(torch.float32, None), *itertools.product(DTYPES, KINDS)]
MOMENTUM = Variant(
    sample_of(RULES["momentum"]), torch.float16, torch.float16, "float32"
)
