"""`AutomaticLossScaler`: OpenSeq2Seq's name for the loss-scale policies."""

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import keras
from keras import ops

from keras_lso import loss_scales
from keras_lso._backend import backend
from keras_lso._backend.framework import MeasureOptions
from keras_lso._backend.tensors import Tensor
from keras_lso._core.checks import (
    check_bounds,
    check_choice,
    check_factor,
    check_positive_int,
    check_scale,
    refusal,
)
from keras_lso._core.gradients import split_pairs


def check_names(owner: str, argument: str, params: Any, known: Iterable[str]) -> None:
    """Raises a `ValueError` if a dict has a parameter that `owner` does not know."""
    for name in params:
        if name not in known:
            raise ValueError(
                f"{owner} has no parameter {name!r}. It takes "
                f"{', '.join(map(repr, known))}. Received: {argument}={params!r}"
            )


def _backoff(
    scale_min: Any = 1.0,
    scale_max: Any = 2.0**14,
    step_factor: Any = 2.0,
    step_window: Any = 2000,
) -> loss_scales.DynamicLossScale:
    """Returns the policy of the algorithm "Backoff"."""
    # Checked here, so that an error names the argument as the user passed it.
    scale_min = check_scale("scale_min", scale_min)
    scale_max = check_scale("scale_max", scale_max)
    check_bounds(scale_min, scale_max, ("scale_min", "scale_max"))
    return loss_scales.DynamicLossScale(
        initial_loss_scale=scale_max,
        increment_period=check_positive_int("step_window", step_window),
        multiplier=check_factor("step_factor", step_factor, above=1.0),
        min_scale=scale_min,
        max_scale=scale_max,
    )


_POLICIES: dict[str, Callable[..., loss_scales.LossScale]] = {
    "backoff": _backoff,
    "logmax": functools.partial(loss_scales.LogMaxLossScale, original_overflow=True),
}


class AutomaticLossScaler:
    """A dynamic loss scale, by one of OpenSeq2Seq's two algorithms.

    `"Backoff"` is `keras_lso.loss_scales.DynamicLossScale`, initialised to its highest
    scale; `"LogMax"` is `keras_lso.loss_scales.LogMaxLossScale`.

    Args:
        algorithm: `"Backoff"` or `"LogMax"`, in any case. Defaults to `"Backoff"`.
        params: Dict of the algorithm's parameters. Defaults to `None`: the defaults.
            For Backoff: `scale_min` (`1.0`), `scale_max` (`2**14`), `step_factor`
            (`2.0`), the multiplier of the scale, and `step_window` (`2000`), the growth
            interval in steps. For LogMax: the arguments of the class, with the same
            defaults except that `original_overflow` is `True`.

    Attributes:
        SUPPORTED_ALGOS: List of the algorithms' names, in lower case.
        algorithm: The name of the algorithm, in lower case.
        policy: The underlying `keras_lso.loss_scales.LossScale`.

    Raises:
        ValueError, TypeError: If the algorithm or a parameter is not valid.

    Example:

    >>> from keras_lso.compat.open_seq2seq import AutomaticLossScaler
    >>> scaler = AutomaticLossScaler("Backoff", {"scale_max": 1024.0})
    >>> float(scaler.loss_scale)
    1024.0
    >>> scaler.update_op(has_nan=True, amax=0.0)
    >>> float(scaler.loss_scale)
    512.0
    """

    SUPPORTED_ALGOS: list[str] = list(_POLICIES)

    def __init__(
        self, algorithm: str = "Backoff", params: dict[str, Any] | None = None
    ) -> None:
        name = algorithm.lower() if isinstance(algorithm, str) else algorithm
        self.algorithm: str = check_choice("algorithm", name, _POLICIES)
        params = {} if params is None else params
        if not isinstance(params, dict):
            requirement = "be a dict of the algorithm's parameters or None"
            raise refusal("params", params, requirement, TypeError)
        make = _POLICIES[self.algorithm]
        check_names(algorithm, "params", params, inspect.signature(make).parameters)
        self.policy: loss_scales.LossScale = make(**params)

    @property
    def loss_scale(self) -> Tensor:
        """The current loss scale, a float32 scalar tensor."""
        return self.policy.value

    def update_op(self, has_nan: bool | Tensor, amax: float | Tensor) -> None:
        """Updates the loss scale after a step of a loop that scales the loss itself.

        Args:
            has_nan: Boolean scalar (tensor). Whether a gradient holds a NaN.
            amax: Scalar (tensor). The largest magnitude among the unscaled gradients.
        """
        self.policy.build()
        amax = ops.convert_to_tensor(amax, dtype="float32")
        finite = ops.logical_and(ops.isfinite(amax), ops.logical_not(has_nan))
        self.policy.step(finite, amax)

    @staticmethod
    @backend.do_not_convert
    def check_grads(
        grads_and_vars: Iterable[tuple[Tensor | None, keras.Variable]],
    ) -> tuple[Tensor, Tensor]:
        """Checks gradients for NaN, and finds their largest magnitude.

        Args:
            grads_and_vars: The `(gradient, variable)` pairs. A None is ignored.

        Returns:
            `(has_nan, amax)`, scalar tensors: a bool, whether a gradient holds a NaN,
            and the largest magnitude in float32: inf with an inf, undefined with a NaN.
        """
        grads = backend.as_gradients(split_pairs(grads_and_vars)[0])
        grads = [g for g in grads if g is not None]
        if not grads:
            return ops.zeros((), dtype="bool"), ops.zeros((), dtype="float32")
        has_nan = [ops.any(ops.isnan(backend.to_dense(g))) for g in grads]
        amax = backend.measure(grads, MeasureOptions(amax=True)).amax
        return ops.any(ops.stack(has_nan)), amax
