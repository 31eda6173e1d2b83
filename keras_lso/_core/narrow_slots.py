"""Slots in bfloat16, which a step rounds stochastically: the argument `slot_dtype`."""

from typing import Any

import keras
from keras import ops

from keras_lso._backend import backend
from keras_lso._backend.rule import Rule
from keras_lso._backend.targets import SLOT_DTYPE
from keras_lso._core.checks import refusal
from keras_lso._keras_internals.rules import classes_with_moments, fitting_rule


def check_slot_dtype(slot_dtype: Any) -> str | None:
    """Returns `slot_dtype`; raises a `ValueError` if it is not one."""
    if slot_dtype is None or isinstance(slot_dtype, str) and slot_dtype == SLOT_DTYPE:
        return slot_dtype
    raise refusal("slot_dtype", slot_dtype, f"be None (float32) or {SLOT_DTYPE!r}")


def check_has_moments(inner: Any, trained: list) -> None:
    """Raises a `ValueError` for an optimizer whose slots a step cannot round."""
    if inner.built:
        raise ValueError(
            "The inner optimizer has been built already, with slots of its own dtype. "
            "With `slot_dtype`, pass an optimizer that has not been used. Received: "
            f"inner_optimizer={inner!r}"
        )
    _rule_with_moments(inner, trained)
    dtypes = {keras.backend.standardize_dtype(v.dtype) for v in trained} - {"float32"}
    if dtypes:
        raise ValueError(
            f"`slot_dtype={SLOT_DTYPE!r}` needs weights that are trained in float32: "
            "float32 weights, or 16-bit weights with masters, such as "
            "`master_weights='stochastic'`. Received: weights that are trained in "
            f"{', '.join(sorted(dtypes))}"
        )


def _rule_with_moments(inner: Any, trained: list) -> type[Rule]:
    """Returns the rule whose slots are rounded; raises a `ValueError` without one."""
    rule = fitting_rule(inner, trained)
    if rule is not None and rule.has_moments:
        return rule
    raise ValueError(
        f"`slot_dtype={SLOT_DTYPE!r}` rounds the moments of an optimizer by its own "
        f"formula, which exists for {', '.join(classes_with_moments())}, without "
        "`amsgrad`, `centered` and RMSprop's `momentum`, with one kind of clipping, "
        "and for variables without a constraint. Leave `slot_dtype` out, or set a "
        f"changed attribute back. Received: inner_optimizer={inner!r}"
    )


def as_rules_take(grads: list) -> list:
    """Returns gradients as every rule takes them: dense, in at most 32 bits."""
    return [g if g is None else _in_32_bits(backend.to_dense(g)) for g in grads]


def _in_32_bits(grad: Any) -> Any:
    is_double = keras.backend.standardize_dtype(grad.dtype) == "float64"
    return ops.cast(grad, "float32") if is_double else grad


def check_own_step(inner: Any, trained: list) -> None:
    """Raises a `ValueError` if the optimizer's own step would round slots itself."""
    if not _rule_with_moments(inner, trained).slots:
        return
    raise ValueError(
        f"With `slot_dtype={SLOT_DTYPE!r}` each step is by a formula of this package, "
        "which cannot make this step. It needs a gradient for each variable if the "
        "optimizer has `use_ema` or `gradient_accumulation_steps`; on PyTorch, "
        "contiguous weights (no `channels_last`) on a CPU or a CUDA device, and a call "
        "of `apply` outside of `torch.compile`; on TensorFlow, one device or a "
        "`MirroredStrategy`. Nothing was changed. "
        f"Received: inner_optimizer={inner!r}"
    )
