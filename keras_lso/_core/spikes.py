"""`SpikeGuard`: decides which steps are outliers."""

import dataclasses
import functools
from typing import Annotated, Any, Self

import keras

from keras_lso._core.checks import check_buffer, check_int, refusal
from keras_lso._core.fields import Positive, check_fields, registered

_Several = Annotated[int, functools.partial(check_int, at_least=2)]
_Window = Annotated[int, functools.partial(check_buffer, at_least=2)]


@registered("SpikeGuard")
@dataclasses.dataclass(unsafe_hash=True)
class SpikeGuard:
    """Decides which steps are outliers, by the norm of their gradients.

    An optimizer with a spike guard skips an outlier as it skips an overflow: nothing
    changes, bit for bit. A corrupt or unsuitable batch then does not undo what the
    model has learned.

    ```python
    limit = mean(norms) + threshold * std(norms)    # of the last `window` norms
    if finite and (norm > limit or norm > max_norm):
        skip()                                      # The loss scale stays as it is.
        norms.append(min(norm, limit))
    elif finite:
        apply()
        norms.append(norm)
    ```

    The norm is the joint norm of all unscaled gradients, over all replicas, processes
    and shards, as in `global_clipnorm`. With `gradient_accumulation_steps` it is the
    norm of a window's mean gradient, and the whole window is skipped. Only averages of
    `use_ema` and moving statistics stay as its earlier micro-batches have left them.

    An outlier enters the history as the limit that it exceeded. A single outlier
    therefore hardly moves the limit, but the limit rises when the level of the norms
    has changed permanently. After `window` outliers in a row, the next step is applied.

    A spike does not lower the loss scale, since a lower scale would not make the
    gradients smaller. It does not count as a good step either, since nothing was
    learned at that scale.

    Args:
        threshold: Above 0. The number of standard deviations by which a norm may exceed
            the mean of the history. Defaults to `6.0`.
        window: 2 to `2**20`. The number of norms in the history. Only finite steps
            enter it. Defaults to `128`.
        warmup: 2 or more. The number of norms that the history needs before it judges
            a step; `window` if that is less. Defaults to `64`.
        max_norm: Above 0. A larger norm is an outlier whatever the history is, from
            the first step on, and for any number of steps. Defaults to `None`: no such
            limit.

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

    threshold: Positive = 6.0
    window: _Window = 128
    warmup: _Several = 64
    max_norm: Positive | None = None

    def __post_init__(self) -> None:
        """Checks the arguments."""
        check_fields(self)

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments as a dict."""
        return dataclasses.asdict(self)

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Self:
        """Creates a guard from the return value of `get_config`."""
        return cls(**config)


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
