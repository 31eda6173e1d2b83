"""What the numbers must not exceed: the report says where they do, and that is all.

Ratios of medians of one run. Those for a GPU are at 100 million parameters and more.
"""

from dataclasses import dataclass

FIRST_STEP_EXCESS_S = 2.0
"""What our first step may take beyond that of the inner optimizer alone."""
COMPILATIONS = 1
"""How often a step is compiled, whatever happens to the scale and the rate."""
REMAINDERS = 1.0
"""What a step with remainders may take, in units of one with float32 masters."""
PROTECTION = 1.02
"""What a batch in `fit` may take with protected statistics, in units of one without."""
RECORD = 1.02
"""What one may take with a record of steps, clipped, in units of one without."""

FIT = {"many small": 1.0}
"""What a batch in `fit` may take, in units of one with Keras's class, by the model."""

_FUSED, _FOREACH = "GradScaler + fused", "GradScaler + foreach"


@dataclass(frozen=True)
class Limit:
    """What a row of ours may take, in units of another row of its group.

    Attributes:
        backend: String, or None for all of them.
        shapes: String.
        inner: Tuple of strings, or None for all of them.
        against: String. `inner`; `peer`, the fastest of them; the name of a peer; or
            `floor`, the time in which the machine moves the bytes of the step.
        at_most: Float.
        aim: Float or None. What would be better still.
        on_gpu: Bool, or None for both. Whether it is for a GPU.
    """

    backend: str | None
    shapes: str
    inner: tuple | None
    against: str
    at_most: float
    aim: float | None = None
    on_gpu: bool | None = False


_MOST = ("SGD+momentum", "Adam")
_ADAPTIVE = ("Adam", "AdamW")
_CLIPPED = ("AdamW, clipped", "AdamW, clipped, of 4")


def _host_limits(shapes):
    """What the host's time must not exceed, on one thread."""
    return (
        Limit("torch", shapes, ("SGD+momentum", "AdamW", *_CLIPPED), _FUSED, 1.0),
        # PyTorch has no Lion, and of the others no kernel that is fused on a GPU too.
        Limit("torch", shapes, ("Lion",), f"{_FOREACH} RMSprop", 1.3),
        Limit("torch", shapes, ("RMSprop", "Nadam", "Adagrad"), _FOREACH, 1.3),
        # Of 160 tensors, in units of the optimizer's own step: 0.04 to unscale, 0.03 to
        # check, 0.04 for scale and counters, 0.02 to see that the plan holds.
        Limit("torch", shapes, ("Adadelta",), "inner", 1.15),
    )


LIMITS = (
    Limit("torch", "resnet50", ("SGD+momentum",), _FUSED, 1.0),
    Limit("torch", "resnet50", _ADAPTIVE, _FUSED, 1.1),
    Limit("torch", "resnet50", ("LARS",), "inner", 1.05),
    Limit("torch", "resnet50", ("LARS",), f"{_FUSED} SGD", 1.6, aim=1.3),
    Limit("jax", "resnet50", _MOST, "inner", 1.35, aim=1.25),
    Limit("jax", "resnet50", _MOST, "peer", 1.0),
    Limit("jax", "resnet50", ("LARS",), "inner", 1.05),
    Limit("tensorflow", "resnet50", _MOST, "inner", 1.5, aim=1.3),
    Limit("tensorflow", "resnet50", _MOST, "peer", 1.0),
    Limit(None, "many-small", None, "peer", 1.0, on_gpu=None),
    Limit("torch", "bert-base", None, "floor", 1.25, on_gpu=True),
    Limit("torch", "bert-base", (*_MOST, "AdamW"), _FUSED, 1.0, on_gpu=True),
    Limit("jax", "bert-base", None, "floor", 1.3, on_gpu=True),
    Limit("jax", "bert-base", None, "peer", 1.0, on_gpu=True),
    *_host_limits("160-of-4"),
    *_host_limits("1000-of-4"),
)


def limits_of(result, group):
    """Returns the limits of a group of rows; on a CPU only float32 has any."""
    on_gpu = result["machine"]["gpu"] is not None
    return [
        limit
        for limit in LIMITS
        if limit.backend in (result["backend"], None)
        and limit.shapes == group["shapes"]
        and (limit.inner is None or group["inner"] in limit.inner)
        and limit.on_gpu in (on_gpu, None)
        and (on_gpu or group["kind"] == "float32")
    ]
