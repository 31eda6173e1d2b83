"""The primitives on PyTorch: eager, in place."""

import contextlib
import functools
import weakref
from collections.abc import Hashable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, cast

import numpy as np
import torch
from keras import ops
from torch import Tensor
from torch.utils import _pytree

from keras_lso._backend.framework import (
    KERNELS_OF_BACKENDS,
    SINCE_UPDATE,
    Assign,
    Framework,
    Streaks,
)
from keras_lso._backend.host import Host, Loss, Trained, refuse_tape, weights_of
from keras_lso._backend.tensors import (
    FLOAT32_MAX,
    FunctionT,
    Grads,
    Number,
    StepFunction,
    Variables,
)
from keras_lso._backend.torch import captured, graphs, operators
from keras_lso._backend.torch import masters as torch_masters
from keras_lso._backend.torch import measure as torch_measure
from keras_lso._backend.torch import no_sync as torch_no_sync
from keras_lso._backend.torch import shards as torch_shards
from keras_lso._backend.torch import update as torch_update
from keras_lso._backend.torch import xp as torch_xp
from keras_lso._backend.torch.xp import dtype_named

# The types of the devices that Keras uses. Each has its own autocast.
_DEVICES = ("cpu", "cuda", "xpu", "mps")


class TorchHost(Host):
    OTHER_STEP = "its own step, left out or, on an accelerator, undone"
    HOW_TO_SCALE = "    optimizer.scale_loss(loss).backward()"
    COMPILES_LOOPS = False

    trained_variables = torch.no_grad()(Host.trained_variables)

    def compute_gradients(
        self, loss_fn: Loss, variables: Trained, grad_loss: Any = None, tape: Any = None
    ) -> tuple[Tensor, Grads]:
        refuse_tape(tape)
        tensors = [] if callable(variables) else [v.value for v in variables]
        with torch.enable_grad(), _requiring_grad(tensors):
            loss = loss_fn()
            # `as_tensor` would move a tensor to PyTorch's default device.
            loss = loss if torch.is_tensor(loss) else torch.as_tensor(loss)
            if callable(variables):
                variables = variables()
            return loss, _gradients(loss, variables, grad_loss)

    def to_host(self, value: Tensor) -> Any:
        return super().to_host(torch_shards.whole(value))

    def register_list_class(self, cls: Any) -> None:
        """See `Host.register_list_class`. Keras registers all but the keys."""

        def flatten_with_keys(items: list) -> tuple[list, None]:
            return [(_pytree.SequenceKey(i), v) for i, v in enumerate(items)], None

        cls.torchtree_flatten_with_keys = flatten_with_keys

    def preserve_random_state(self) -> AbstractContextManager:
        """Restores PyTorch's own generators, from which unseeded dropout draws."""
        return torch.random.fork_rng(range(torch.cuda.device_count()))

    def devices(self) -> list[str]:
        indices = range(torch.cuda.device_count())
        return [torch.cuda.get_device_name(i) for i in indices] or ["cpu"]

    def hardware_of(self, value: Tensor) -> str | None:
        """See `Host.hardware_of`. ROCm's capabilities are of another kind."""
        if value.device.type == "cpu":
            return "cpu"
        if value.device.type != "cuda" or torch.version.hip is not None:
            return None
        major, minor = torch.cuda.get_device_capability(value.device)
        return f"gpu:{major}.{minor}"

    def casts_to_float16(self) -> str | None:
        enabled = [d for d in _DEVICES if torch.is_autocast_enabled(d)]
        if any(torch.get_autocast_dtype(d) == torch.float16 for d in enabled):
            return "`torch.autocast` to float16"
        return None

    def reference_to(self, value: Tensor) -> weakref.ref | None:
        return None if torch.compiler.is_compiling() else weakref.ref(value)

    def has_values(self, value: Tensor) -> bool:
        try:
            value.data_ptr()
        except RuntimeError:  # Inside `torch.vmap`.
            return False
        return value.device.type != "meta"


def _gradients(loss: Tensor, variables: Variables, grad_loss: Any) -> Grads:
    """Returns the gradients of a loss, with None where there is none."""
    values = [v.value for v in variables]
    # Autograd rejects tensors that do not require a gradient.
    followed = [v for v in values if v.requires_grad]
    if not loss.requires_grad or not followed:
        return [None] * len(variables)
    weights = weights_of(loss, grad_loss)
    grads = iter(torch.autograd.grad(loss, followed, weights, allow_unused=True))
    return [next(grads) if v.requires_grad else None for v in values]


@contextlib.contextmanager
def _requiring_grad(tensors: list[Tensor]) -> Iterator[None]:
    """Lets autograd also follow variables that are not trainable."""
    frozen = [t for t in tensors if not t.requires_grad]
    for tensor in frozen:
        tensor.requires_grad_(True)
    try:
        yield
    finally:
        for tensor in frozen:
            tensor.requires_grad_(False)


def _scalar(value: Number, dtype: str) -> Tensor:
    """See `Framework.scalar`. Avoids a copy to the device, for which PyTorch waits."""
    if isinstance(value, torch.Tensor):
        return value.to(dtype_named(dtype))
    if isinstance(value, int | float):
        return ops.zeros((), dtype=dtype).fill_(value)
    return ops.convert_to_tensor(value, dtype=dtype)


def _value_if_on_host(tensor: Tensor) -> Any:
    """See `Framework.value_if_on_host`."""
    reads = torch_measure.is_on_host(tensor) and not torch.compiler.is_compiling()
    return tensor.item() if reads else None


def _only_counts(
    scale: Tensor,
    good_steps: Tensor,
    finite: Tensor,
    period: Number,
    bounds: tuple[float, float],
) -> bool:
    """Whether the host knows that the loss scale stays as it is in this step."""
    return (
        torch_measure.is_on_host(finite)
        and not torch.compiler.is_compiling()
        and bool(finite)
        and isinstance(period, int)
        and good_steps.item() + 1 < period
        and bounds[0] <= scale.item() <= bounds[1]
    )


# --- The primitives -----------------------------------------------------------------


class Torch(Framework):
    xp = torch_xp
    replicas = torch_shards.TorchReplicas()
    host = TorchHost()
    UPDATES_IN_PLACE = True
    STEPS_WRITE_TENSORS = True

    chunked = staticmethod(torch_update.Chunks)
    measure = staticmethod(torch_measure.measure)
    unscaled = torch_measure.unscaled
    clipped = staticmethod(torch_measure.clipped)
    l2_norms = staticmethod(torch_measure.l2_norms)
    takes_update = staticmethod(torch_update.takes_update)
    update = torch_update.update
    synchronise_masters = torch_update.synchronise_masters
    value_if_on_host = staticmethod(_value_if_on_host)
    clear = staticmethod(torch_update.clear)
    copies_of = staticmethod(torch_no_sync.copies_of)
    restore = staticmethod(torch_no_sync.restore)
    prepare_gradients = staticmethod(torch_measure.prepare_gradients)
    to_dense = staticmethod(torch_measure.to_dense)
    map_values = staticmethod(torch_measure.map_values)
    elements_of = staticmethod(torch_measure.elements_of)
    without_memory = staticmethod(torch_masters.without_memory)
    scalar = staticmethod(_scalar)
    without_host = staticmethod(torch_no_sync.without_host)
    in_graphs = staticmethod(graphs.in_graphs)
    traced_step = staticmethod(graphs.traced_step)

    def captured_steps(self) -> captured.CapturedSteps | None:
        return captured.CapturedSteps() if captured.IS_ON else None

    def move_scale(
        self,
        scale: Tensor,
        good_steps: Tensor,
        finite: Tensor,
        drops: Tensor | None,
        growth: Number,
        backoff: Number,
        period: Number,
        bounds: tuple[float, float],
    ) -> None:
        """See `Framework.move_scale`. Uses the kernel of `GradScaler` where it can."""
        if drops is None and _only_counts(scale, good_steps, finite, period, bounds):
            good_steps.add_(1)
            return
        numbers = isinstance(backoff, float) and isinstance(period, int)
        # The kernel does not grow a scale beyond float32.
        if drops is None and numbers and bounds[1] * growth <= FLOAT32_MAX:
            # It grows the scale if the count equals the period, not if it exceeds it.
            good_steps.clamp_(max=period - 1)
            # It multiplies in float64, where the product of two float32 is exact.
            growth, backoff = float(np.float32(growth)), float(np.float32(backoff))
            found_inf = torch_measure.found_inf_of(finite)
            torch._amp_update_scale_(
                scale, good_steps, found_inf, growth, backoff, period
            )
        else:
            good_steps.add_(1)
            overflows = torch.logical_not(finite)
            grows = torch.logical_and(finite, good_steps >= period)
            drops = overflows if drops is None else drops
            dropped = torch.where(drops, scale * backoff, scale)
            scale.copy_(torch.where(grows, scale * growth, dropped))
            good_steps.mul_(torch.logical_and(finite, torch.logical_not(grows)))
        scale.clamp_(*bounds)

    def count_step(
        self,
        skipped: Tensor,
        applied: Tensor | None,
        streaks: Tensor,
        finite: Tensor,
        applies: Tensor,
        scales: tuple[Tensor, float],
        update_scale: bool,
        assign: Assign,
    ) -> Tensor:
        """See `Framework.count_step`. Works in place, without `assign`."""
        if applied is not None:
            applied.add_(applies)
        if torch_measure.is_on_host(applies) and applies:
            if not any(streaks.tolist()):
                return finite
            all_finite = streaks[SINCE_UPDATE] == 0
            (streaks if update_scale else streaks[:SINCE_UPDATE]).zero_()
            return all_finite
        skips = torch.logical_not(torch.stack(Streaks(applies, finite, finite)))
        missed, overflows, _ = skips.unbind()
        skipped.add_(missed)
        streaks.add_(skips)
        all_finite = streaks[SINCE_UPDATE] == 0
        scale, lowest = scales
        at_lowest = overflows & (scale <= lowest)
        continues = missed & finite if update_scale else torch.ones_like(missed)
        streaks.mul_(torch.stack(Streaks(missed, at_lowest, continues)))
        return all_finite

    def append_row(
        self, ring: Tensor, count: Tensor, row: list[Number], assign: Assign
    ) -> None:
        """See `Framework.append_row`. Works in place, without `assign`."""
        place = torch.remainder(count, ring.shape[0]).long()
        scalars = [
            value.float() if torch.is_tensor(value) else ring.new_full((), value)
            for value in row
        ]
        ring.index_copy_(0, place[None], torch.stack(scalars)[None])
        count.add_(1)

    @torch.no_grad()
    def run_if(
        self, finite: Tensor, step: StepFunction, grads: Grads, state: Variables
    ) -> None:
        if not torch_measure.is_on_host(finite):
            torch_no_sync.run_or_undo(finite, step, grads, state)
        elif finite:
            step(grads)

    def in_float16(self, numbers: Tensor) -> Tensor:
        return self.rounded(numbers, "float16").float()

    def bitcast(self, values: Tensor, dtype: str) -> Tensor:
        dtype = getattr(torch, dtype)
        return torch_shards.mapped(lambda t: t.view(dtype), values)

    def flat_indices(self, value: Tensor) -> Tensor:
        first = torch_shards.first_index(value)

        def of_shard(t: Tensor) -> Tensor:
            places = torch.arange(t.numel(), dtype=torch.int32, device=t.device)
            return places.add_(first).view(t.shape)

        return torch_shards.mapped(of_shard, value)

    @contextlib.contextmanager
    def memory_for(self, variables: Variables) -> Iterator[None]:
        tensors = [v.value for v in variables]
        torch_masters.allocate(tensors)
        try:
            yield
        finally:
            torch_masters.without_memory(tensors)

    def as_gradients(self, values: Sequence) -> Any:
        """See `Framework.as_gradients`. Nearly all lists pass a faster test."""
        types = set(map(type, values))
        if types <= {type(None), *torch_measure.TENSOR_TYPES}:
            tensors = filter(torch.is_tensor, values) if type(None) in types else values
            if set(map(torch_measure.dtype_of, tensors)) <= torch_measure.FLOATS:
                return values
        return super().as_gradients(values)

    def do_not_convert(self, function: FunctionT) -> FunctionT:
        """See `Framework.do_not_convert`. One test shows that autocast is off."""

        @functools.wraps(function)
        def outside_of_autocast(*args: Any, **kwargs: Any) -> Any:
            if torch._C._is_any_autocast_enabled():
                for device in filter(torch.is_autocast_enabled, _DEVICES):
                    with torch.autocast(device, enabled=False):
                        return outside_of_autocast(*args, **kwargs)
            return function(*args, **kwargs)

        return cast(FunctionT, outside_of_autocast)

    def memory_of(self, value: Tensor) -> tuple[Hashable, int | None]:
        """See `Framework.memory_of`."""
        is_counted = isinstance(value, torch.Tensor) and not value.is_inference()
        version = value._version if is_counted else None
        # `grad.detach()`, `grad.data` and `grad.view(-1)` share the elements of `grad`.
        if (
            type(value) in torch_measure.TENSOR_TYPES
            and value.layout == torch.strided
            and value.numel()
        ):
            return (value.data_ptr(), value.numel()), version
        return id(value), version

    def detached_copy(self, value: Tensor) -> Tensor:
        copy = value.detach().clone()
        # A value with a history is no leaf, so no gradient may stop at its copy.
        return copy.requires_grad_(value.requires_grad and value.is_leaf)

    def check_stateless_arguments(self, tensors: list) -> None:
        followed = [t for t in tensors if torch.is_tensor(t) and t.requires_grad]
        if followed and torch.is_grad_enabled():
            raise ValueError(
                "PyTorch cannot differentiate through a step, which writes tensors in "
                "place. For the gradients of its result alone pass `[g.detach() for g "
                "in grads]`, or call `stateless_apply` under `torch.no_grad()`. To "
                "differentiate the step as well, write it as a function of your own. "
                "Received: a gradient or a value of the optimizer's own of shape "
                f"{tuple(followed[0].shape)} with requires_grad=True"
            )


_in_graphs = {name: getattr(Framework, name) for name in KERNELS_OF_BACKENDS}
_in_graphs |= {
    "measure": operators.measure,
    "update": operators.update,
    # Inductor fuses any rule.
    "takes_update": lambda self, rule, leaves, *_: leaves.are_float32,
}
for _name, _traced in _in_graphs.items():
    setattr(Torch, _name, graphs.UnlessTraced(vars(Torch)[_name], _traced))
