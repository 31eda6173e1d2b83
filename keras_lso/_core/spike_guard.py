"""`SpikeGuard`: which steps are outliers, and are skipped like an overflow."""

from typing import Any, Self

import keras

from keras_lso._core.checks import (
    check_factor,
    check_int,
    refusal,
)


@keras.saving.register_keras_serializable("keras_lso", name="SpikeGuard")
class SpikeGuard:
    """Says which steps are outliers by the norm of their gradients.

    An optimizer with a spike guard skips such a step: nothing changes, bit for bit, as
    at an overflow. A batch that is corrupt, or that a model has no use for, then does
    not undo what the steps before it have learned.

    ```python
    limit = mean(norms) + threshold * std(norms)    # of the last `window` norms
    if finite and (norm > limit or norm > max_norm):
        skip()                                      # The loss scale stays as it is.
        norms.append(min(norm, limit))
    elif finite:
        apply()
        norms.append(norm)
    ```

    The norm is that of all unscaled gradients together, over all replicas, processes
    and shards: the one that `global_clipnorm` clips by. With
    `gradient_accumulation_steps` it is that of a window's mean gradient, and the whole
    window is skipped.

    An outlier enters the history as the limit that it exceeded. So the limit rises
    where the level of the norms has changed for good, by a new learning rate or a new
    phase of the data, and a single outlier hardly moves it. Where the norms remain
    above the limit for `window` steps in a row, the next step is applied.

    A spike is no overflow. The loss scale neither falls, since a lower one would not
    make the gradients smaller, nor does it count the step as a good one, since nothing
    was learned at that scale.

    Args:
        threshold: Above 0. By how many standard deviations a norm may lie above the
            mean of the history. Defaults to `6.0`.
        window: 2 or more. The number of norms in the history, of finite steps. Defaults
            to `128`.
        warmup: 2 or more. The number of norms that the history needs before a step is
            judged by it; `window` if that is less. Defaults to `64`.
        max_norm: Above 0. A norm above it is an outlier whatever the history is, from
            the first step on, and for any number of steps. Defaults to `None`: there is
            no such limit.

    Example:

    >>> import keras, keras_lso
    >>> guard = keras_lso.SpikeGuard(threshold=3.0, window=4, warmup=2)
    >>> optimizer = keras_lso.GuardedOptimizer(
    ...     keras.optimizers.SGD(1.0), spike_guard=guard
    ... )
    >>> w = keras.Variable([0.0])
    >>> for gradient in [1.0, 1.5, 100.0, 1.0]:
    ...     optimizer.apply([keras.ops.array([gradient])], [w])
    >>> print(w.numpy(), int(optimizer.skipped_spikes))
    [-3.5] 1

    References:

    - [OLMo-core's `SkipStepOptimizer`](
        https://github.com/allenai/OLMo-core/blob/main/src/olmo_core/optim)
    - [llm.c, issue 711](https://github.com/karpathy/llm.c/issues/711)
    """

    def __init__(
        self,
        threshold: float = 6.0,
        window: int = 128,
        warmup: int = 64,
        max_norm: float | None = None,
    ) -> None:
        self.threshold: float = check_factor("threshold", threshold, above=0.0)
        self.window: int = check_int("window", window, at_least=2)
        self.warmup: int = check_int("warmup", warmup, at_least=2)
        if max_norm is not None:
            max_norm = check_factor("max_norm", max_norm, above=0.0)
        self.max_norm = max_norm

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments, a dict."""
        return {
            "threshold": self.threshold,
            "window": self.window,
            "warmup": self.warmup,
            "max_norm": self.max_norm,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Self:
        """Returns the guard that a config describes.

        Args:
            config: What `get_config` returned.
        """
        return cls(**config)

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and other.get_config() == self.get_config()

    def __hash__(self) -> int:
        return hash(tuple(self.get_config().items()))

    def __repr__(self) -> str:
        arguments = ", ".join(f"{k}={v!r}" for k, v in self.get_config().items())
        return f"{type(self).__name__}({arguments})"


def check_guard(value: Any) -> SpikeGuard | None:
    """Returns a `SpikeGuard`, a copy from its config dict, or None."""
    if isinstance(value, dict):
        value = keras.saving.deserialize_keras_object(value)
    if value is None or isinstance(value, SpikeGuard):
        return value
    raise refusal(
        "spike_guard",
        value,
        "be a `keras_lso.SpikeGuard`, such as `keras_lso.SpikeGuard(threshold=6.0)`, "
        "or None",
        TypeError,
    )
