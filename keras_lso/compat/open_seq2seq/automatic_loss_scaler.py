"""`AutomaticLossScaler`: OpenSeq2Seq's name for the loss-scale policies."""

import functools

from keras import ops

from keras_lso import loss_scales
from keras_lso._backend import backend
from keras_lso._checks import (
    check_bool,
    check_bounds,
    check_factor,
    check_positive_int,
    check_scale,
)
from keras_lso._core.gradients import split_pairs
from keras_lso._option_checks import check_names, check_rate, check_real

BACKOFF, LOGMAX = "backoff", "logmax"

_BETA = functools.partial(check_factor, above=0.0, below=1.0)
# What each algorithm takes, and the check of it.
_PARAMS = {
    BACKOFF: {
        "scale_min": check_scale,
        "scale_max": check_scale,
        "step_factor": functools.partial(check_factor, above=1.0),
        "step_window": check_positive_int,
    },
    LOGMAX: {
        "scale_min": check_scale,
        "scale_max": check_scale,
        "log_max": check_real,
        "beta1": _BETA,
        "beta2": _BETA,
        "overflow_std_dev": check_rate,
        "original_overflow": check_bool,
    },
}


class AutomaticLossScaler:
    """A loss scale that adapts itself, by one of OpenSeq2Seq's two algorithms.

    It translates names. The algorithms are policies that any
    `keras_lso.LossScaleOptimizer` takes:

    - `"Backoff"` is `keras_lso.loss_scales.DynamicLossScale`, started at its highest
      scale. A window that is counted from the last overflow ends at the same steps
      as one that starts again when the scale grows.
    - `"LogMax"` is `keras_lso.loss_scales.LogMaxLossScale`, with `original_overflow`
      switched on: one overflow keeps the scale at its lowest for thousands of steps,
      as it does in OpenSeq2Seq.

    Args:
        algorithm: `"Backoff"` or `"LogMax"`, in any case. Defaults to `"Backoff"`.
        params: Dict of the algorithm's parameters. Defaults to `None`: none. For
            Backoff: `scale_min` (`1.0`), `scale_max` (`2**14`), `step_factor`
            (`2.0`), by which the scale moves, and `step_window` (`2000`), the number
            of steps without overflow after which it grows. For LogMax: the arguments
            of `keras_lso.loss_scales.LogMaxLossScale`, with the same defaults except
            that `original_overflow` is `True`.

    Attributes:
        SUPPORTED_ALGOS: List of the algorithms' names, in lower case.
        algorithm: String. The name of this one's, in lower case.
        policy: The `keras_lso.loss_scales.LossScale` that does the work.

    Raises:
        ValueError, TypeError: If the algorithm or a parameter is none of these.

    Example:

    >>> from keras_lso.compat.open_seq2seq import AutomaticLossScaler
    >>> scaler = AutomaticLossScaler("Backoff", {"scale_max": 1024.0})
    >>> float(scaler.loss_scale)
    1024.0
    >>> scaler.update_op(has_nan=True, amax=0.0)
    >>> float(scaler.loss_scale)
    512.0

    Reference:

    - [OpenSeq2Seq, optimizers](
        https://nvidia.github.io/OpenSeq2Seq/html/api-docs/optimizers.html)
    """

    SUPPORTED_ALGOS = list(_PARAMS)

    def __init__(self, algorithm="Backoff", params=None):
        self.algorithm = _check_algorithm(algorithm)
        params = _check_params(algorithm, _PARAMS[self.algorithm], params)
        make = _backoff if self.algorithm == BACKOFF else _logmax
        self.policy = make(**params)

    @property
    def loss_scale(self):
        """The current loss scale, a float32 scalar tensor."""
        return self.policy.value

    def update_op(self, has_nan, amax):
        """Moves the loss scale after a step.

        For loops that scale the loss themselves. An optimizer that was given this
        object does it by itself.

        Args:
            has_nan: Boolean scalar (tensor). Whether a gradient holds a NaN.
            amax: Scalar (tensor). The largest magnitude among the unscaled gradients.
        """
        self.policy.build()
        amax = ops.convert_to_tensor(amax, dtype="float32")
        has_nan = ops.logical_or(has_nan, ops.isnan(amax))
        finite = ops.logical_not(ops.logical_or(has_nan, ops.isinf(amax)))
        self.policy.step(finite, amax)

    @staticmethod
    def check_grads(grads_and_vars):
        """Looks through gradients.

        Args:
            grads_and_vars: List of `(gradient, variable)` pairs. Gradients that are
                None are ignored.

        Returns:
            A tuple of a boolean scalar tensor, whether one of them holds a NaN, and a
            float32 scalar tensor, their largest magnitude: inf if one is, and of no
            meaning beside a NaN.
        """
        grads = [backend.as_gradient(g) for g in split_pairs(grads_and_vars)[0]]
        grads = [g for g in grads if g is not None]
        if not grads:
            return ops.zeros((), dtype="bool"), ops.zeros((), dtype="float32")
        has_nan = [ops.any(ops.isnan(backend.to_dense(g))) for g in grads]
        amax = backend.measure(grads, amax=True).amax
        return ops.any(ops.stack(has_nan)), amax


def _check_algorithm(algorithm):
    name = algorithm.lower() if isinstance(algorithm, str) else None
    if name not in _PARAMS:
        raise ValueError(
            "Argument `algorithm` must be 'Backoff' or 'LogMax'. "
            f"Received: algorithm={algorithm!r}"
        )
    return name


def _check_params(algorithm, checks, params):
    """Returns the checked parameters, or says which there are."""
    if params is None:
        return {}
    if not isinstance(params, dict):
        raise TypeError(
            "Argument `params` must be a dict, such as {'scale_min': 1.0}. "
            f"Received: params={params!r} of type {type(params).__name__}"
        )
    check_names(algorithm, "params", params, checks)
    return {name: checks[name](name, value) for name, value in params.items()}


def _backoff(scale_min=1.0, scale_max=2.0**14, step_factor=2.0, step_window=2000):
    check_bounds(scale_min, scale_max, ("scale_min", "scale_max"))
    return loss_scales.DynamicLossScale(
        initial_loss_scale=scale_max,
        increment_period=step_window,
        multiplier=step_factor,
        min_scale=scale_min,
        max_scale=scale_max,
    )


def _logmax(original_overflow=True, **params):
    return loss_scales.LogMaxLossScale(original_overflow=original_overflow, **params)
