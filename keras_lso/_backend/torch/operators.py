"""Primitives of a step under `torch.compile` that Inductor would take long to compile.

Each is an operator of PyTorch, of which the compiler knows only the results' shapes.
"""

import copy
from typing import Any

import torch
from torch import Tensor

from keras_lso._backend.framework import (
    CHECK_ONLY,
    Framework,
    GradientStats,
    MeasureOptions,
)
from keras_lso._backend.leaves import Leaves
from keras_lso._backend.rule import Rule, RuleNorms
from keras_lso._backend.torch import measure as torch_measure


def _measure(
    grads: list[Tensor], inv_scale: Tensor, headroom: float, asked: list[bool]
) -> list[Tensor]:
    """Returns whether gradients are finite, then `amax` and `norm` if asked for."""
    amax, norm, clips = asked
    options = MeasureOptions(inv_scale, headroom, amax=amax, norm=norm, clips=clips)
    stats = torch_measure.measure(grads, options)
    # The results of an operator share no memory.
    return [s.clone() for s in (stats.finite, stats.amax, stats.norm) if s is not None]


def _like_measure(
    grads: list[Tensor], inv_scale: Tensor, headroom: float, asked: list[bool]
) -> list[Tensor]:
    """Returns tensors like those of `_measure`."""
    amax, norm, clips = asked
    dtypes = [torch.bool] + [torch.float32] * (amax + (norm or clips))
    return [grads[0].new_empty((), dtype=dtype) for dtype in dtypes]


def _computed(scalars: list[Tensor]) -> list[Tensor]:
    """Returns copies, so that each kernel reads the scalars, and computes none."""
    return [s.clone() for s in scalars]


# Not by `torch.library.custom_op`, whose checks take as long as the operators.
for _name, _schema, _function, _like in [
    (
        "keras_lso::measure",
        "(Tensor[] grads, Tensor inv_scale, float headroom, bool[] asked) -> Tensor[]",
        _measure,
        _like_measure,
    ),
    ("keras_lso::computed", "(Tensor[] scalars) -> Tensor[]", _computed, _computed),
]:
    torch.library.define(_name, _schema)
    torch.library.impl(_name, "CompositeExplicitAutograd", _function)
    torch.library.register_fake(_name, _like)


def measure(
    framework: Framework, grads: list[Tensor], options: MeasureOptions = CHECK_ONLY
) -> GradientStats:
    """See `Framework.measure`. It runs as in an eager step."""
    # Dynamo takes no sparse gradient, and steps take dense ones.
    inv_scale = torch.as_tensor(options.inv_scale, device=grads[0].device)
    asked = options.amax, options.norm, options.clips
    stats = torch.ops.keras_lso.measure(grads, inv_scale, options.headroom, asked)
    finite, *more = stats
    amax = more.pop(0) if options.amax else None
    return GradientStats(finite, amax=amax, norm=more[0] if more else None)


def update(
    framework: Framework,
    rules: list[Rule],
    leaves: Leaves,
    grads: list[Tensor],
    factor: Tensor = None,
    flag: Tensor = None,
    norms: RuleNorms | None = None,
) -> None:
    """See `Framework.update`. Inductor makes its kernels, which read the scalars."""
    copies = {id(rule): copy.copy(rule) for rule in rules}
    places = [(rule, name) for rule in copies.values() for name in vars(rule)]
    values = [vars(rule)[name] for rule, name in places]
    *values, factor, flag = _computed_once([*values, factor, flag])
    for (rule, name), value in zip(places, values, strict=True):
        vars(rule)[name] = value
    if factor is not None:
        grads = framework.unscaled(grads, factor)
    rules = [copies[id(rule)] for rule in rules]
    Framework.update(framework, rules, leaves, grads, None, flag, norms)


def _computed_once(values: list[Any]) -> list[Any]:
    """Returns values, the scalar tensors among them by the operator."""
    are_scalars = [torch.is_tensor(v) and not v.dim() for v in values]
    pairs = list(zip(values, are_scalars, strict=True))
    new = iter(torch.ops.keras_lso.computed([v for v, is_one in pairs if is_one]))
    return [next(new) if is_one else v for v, is_one in pairs]
