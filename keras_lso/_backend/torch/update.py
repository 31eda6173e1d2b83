"""The update of variables by a rule on PyTorch, in chunks of tensors, or of shards.

On the host the flag is read first. On an accelerator reading it would synchronise, so
the kernels take `found_inf`, which is 1.0 where the flag is False, and then write
nothing.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._utils import _unflatten_dense_tensors

from keras_lso._backend.codecs import PLAIN, Codec
from keras_lso._backend.framework import Framework
from keras_lso._backend.leaves import Leaf, Leaves, draw_of_slot
from keras_lso._backend.rule import Rule, RuleNorms, given
from keras_lso._backend.tensors import Number
from keras_lso._backend.torch import compiled, layouts, lists, xp
from keras_lso._backend.torch import measure as torch_measure
from keras_lso._backend.torch.layouts import Strides
from keras_lso._backend.torch.lists import Tensors, copy_unless, fused_sgd
from keras_lso._backend.torch.masters import (
    CODECS_OF_SLOTS,
    RandomBits,
    are_current,
    is_in_place,
    masters_of,
    note_versions,
    resynchronise,
)
from keras_lso._backend.torch.measure import (
    SMALL,
    TENSOR_TYPES,
    Packs,
    dtype_of,
    norms_of,
    norms_of_rules,
)
from keras_lso._backend.torch.no_sync import NumbersOnDevice
from keras_lso._backend.torch.shards import any_sharded, shards_of

# The number of elements in a chunk, unless one tensor has more. At this size the cache
# still holds the results of one operation when the next reads them.
_HOST_CHUNK = 2**20
_DEVICE_CHUNK = 2**26
# In elements, 16 MiB. Up to this size, all steps use the same memory. An allocator
# sorts the memory that others have freed at the next request, which may take longer
# than a step.
_REUSED_MEMORY = 2**22
# The float16 elements in a cache line, which holds fewer elements of a wider dtype.
_LINE = 32

# Subtracted from 1 in float64, a smaller rate would lose digits of a float32.
_SMALLEST_RATE = 2.0**-29
# At this step number, Adam's bias correction is 1 for any beta below 1.
_LAST_STEP = 2.0**100

_NO_LIMITS = contextlib.nullcontext()
_WIDE = {torch.float32}
_DTYPES_OF_SLOTS = {torch.float32, *CODECS_OF_SLOTS}
_GRADIENT_DTYPES = {torch.float32, torch.float16, torch.bfloat16}


@torch.no_grad()
def takes_update(
    rule: type[Rule], leaves: Leaves, gradients: list[Tensor], is_needed: bool = False
) -> bool:
    """Whether there is an update of these tensors, the same in all processes."""
    variables = leaves.variables
    slots = list(itertools.chain(*leaves.slots))
    if leaves.has_gaps:
        slots = [s for s in slots if s is not None]
    plain, masters = variables, []
    if leaves.codecs:
        pairs = zip(variables, leaves.codecs, strict=True)
        plain = [v for v, codec in pairs if codec is PLAIN]
        masters = [leaf.aux for leaf in leaves.with_masters]
    tensors = [*variables, *gradients]
    shards = shards_of(tensors)
    # Here and below `map` takes three quarters of a comprehension's time: it saves 2 us
    # for 160 tensors.
    return (
        set(map(type, shards)) <= TENSOR_TYPES
        and variables[0].device.type in lists.DEVICES
        and len(set(map(torch.Tensor.get_device, tensors))) == 1
        and set(map(dtype_of, itertools.chain(plain, masters))) <= {torch.float32}
        and set(map(dtype_of, slots)) <= _DTYPES_OF_SLOTS
        and set(map(dtype_of, gradients)) <= _GRADIENT_DTYPES
        and (
            layouts.are_dense(plain) and (not leaves.scales or _have_blocks(leaves))
            if shards is tensors
            # Whole tensors have the same shapes, but their shards need not.
            else not rule.mixes_matrices
            and all(map(torch.Tensor.is_contiguous, [*plain, *masters, *slots]))
            and _halves_have_equal_sizes(shards)
        )
        and not (rule.mixes_matrices and _has_matrix_as_vector(variables))
    )


def _has_matrix_as_vector(variables: list[Tensor]) -> bool:
    """Whether `layouts.in_memory_order` makes a vector of a matrix."""
    return any(v.dim() == 2 and not v.is_contiguous() for v in variables)


def _have_blocks(leaves: Leaves) -> bool:
    """Whether the blocks of slots in 8 bits are neighbours in memory."""
    return all(
        variable.is_contiguous()
        for scales in leaves.scales
        for variable, of_slot in zip(leaves.variables, scales, strict=True)
        if of_slot is not None
    )


def _halves_have_equal_sizes(tensors: list[Tensor]) -> bool:
    """Whether both halves of a list have tensors of the same sizes."""
    sizes = list(map(torch.Tensor.numel, tensors))
    half = len(sizes) // 2
    return sizes[:half] == sizes[half:]


@torch.no_grad()
def update(
    framework: Framework,
    rules: list[Rule],
    leaves: Leaves,
    grads: list[Tensor],
    factor: Number = None,
    flag: Tensor | None = None,
    norms: RuleNorms | None = None,
) -> None:
    """See `Framework.update`."""
    chunks = leaves.chunks or Chunks([id(rule) for rule in rules], leaves)
    factor = 1.0 if factor is None else factor
    is_sharded = any_sharded(leaves.variables)
    if is_sharded:
        wholes, grads = leaves.variables, shards_of(grads)
        leaves = leaves.mapped(shards_of)
        if rules[0].has_norms and norms is None:
            state = leaves.decoded(framework)
            norms = norms_of_rules(rules, grads, factor, state, wholes)
    first = leaves.variables[0]
    on_host = torch_measure.is_on_host(first)
    if on_host:
        if flag is not None and not flag:
            return
        flag = None
    strides: dict = {}
    if not is_sharded:
        leaves, grads, strides = layouts.in_memory_order(leaves, grads)
    # Products with a factor are copies, made before the only chunk is written.
    copies = torch.is_tensor(factor) and rules[0].kernel not in _READ_GRADIENTS
    grads = _readable(grads, leaves, copies and len(chunks.items) == 1)
    memory = chunks.memory(first) if on_host else None
    ctx = StepContext(framework, leaves, factor, flag, memory, strides)
    has_16_bits = bool(leaves.codecs) or leaves.iterations is not None
    is_compiled = has_16_bits and compiled.is_on(first)
    limits = torch._dynamo.config.patch(compiled.LIMITS) if is_compiled else _NO_LIMITS
    with limits:
        for chunk in chunks.items:
            rule = rules[chunk.positions[0]]
            columns = chunk.columns_of(leaves, grads, norms)
            if not has_16_bits:
                _step(ctx, rule, columns)
            elif not (is_compiled and compiled.step(ctx, rule, columns)):
                _step_by_masters(ctx, rule, columns)


def _step(ctx: StepContext, rule: Rule, columns: Columns) -> None:
    """Writes the step of float32 tensors."""
    STEPS[rule.kernel](ctx, rule, columns)
    if not ctx.are_private:
        # Autograd relies on the version, and the fused kernels do not increment it.
        written = list(itertools.chain(columns.weights, *columns.slots))
        torch.autograd.graph.increment_version(written)


def _step_by_masters(ctx: StepContext, rule: Rule, columns: Columns) -> None:
    """Writes the step of weights or slots in 16 bits."""
    masters = [masters_of(ctx, columns.chunk, leaf) for leaf in columns.leaves()]
    weights, *slots = [m.tensors for m in masters]
    _step(ctx, rule, columns._replace(weights=weights, slots=slots))
    for of_leaf in masters:
        of_leaf.write()


def _readable(grads: list[Tensor], leaves: Leaves, are_copied: bool) -> list[Tensor]:
    """Returns gradients that kernels can read in the order of their memory."""
    # They alias no tensor that the step writes, and do not have the negative bit, as
    # the imaginary part of a complex conjugate has. Copies do neither.
    if are_copied and all(map(torch.Tensor.is_contiguous, grads)):
        return grads
    if not leaves.are_private:
        written = set(map(torch.Tensor.data_ptr, leaves.variables)) - {0}
        if not written.isdisjoint(map(torch.Tensor.data_ptr, grads)):
            grads = [g.clone() if g.data_ptr() in written else g for g in grads]
    are_contiguous = all(map(torch.Tensor.is_contiguous, grads))
    if are_contiguous and not any(map(torch.Tensor.is_neg, grads)):
        return grads
    return [g.contiguous().resolve_neg() for g in grads]


@torch.no_grad()
def synchronise_masters(framework: Framework, leaves: Leaves, flag: Tensor) -> None:
    """See `Framework.synchronise_masters`."""
    leaves, chunks = leaves.mapped(shards_of), leaves.chunks
    on_host = torch_measure.is_on_host(flag)
    memory = chunks.memory(leaves.variables[0]) if on_host else None
    for chunk, weights, masters in chunks.with_masters(leaves):
        resynchronise(framework, chunk, weights, masters, memory)


@torch.no_grad()
def clear(tensors: list[Tensor], flag: Tensor) -> None:
    """See `Framework.clear`."""
    shards = shards_of(tensors)
    if not torch_measure.is_on_host(flag):
        torch._foreach_mul_(shards, torch_measure.found_inf_of(flag))
    elif flag:
        torch._foreach_zero_(shards)


# --- Chunks -------------------------------------------------------------------------


class Columns(NamedTuple):
    """The tensors of a chunk: lists with an item for each weight."""

    grads: list[Tensor]
    weights: list[Tensor]
    slots: list[list[Tensor]]
    # What the codec of the weights stores with them, and what those of each list of
    # slots do; empty without.
    aux: list[Tensor]
    scales: list[list[Tensor]]
    # The norms that the rule takes, if they are known.
    norms: list | None
    chunk: Chunk

    def leaves(self) -> list[Leaf]:
        """Returns the weights and the slots as leaves of lists."""
        leaves = [Leaf(self.weights, self.chunk.codec, self.aux)]
        for i, (column, scales) in enumerate(zip(self.slots, self.scales, strict=True)):
            of_slot = CODECS_OF_SLOTS.get(column[0].dtype, PLAIN)
            leaves.append(Leaf(column, of_slot, scales, *draw_of_slot(0, i)))
        return leaves


class Chunk:
    """The positions of tensors that are updated together, by one rule and codec."""

    def __init__(self, positions: list[int], codec: Codec) -> None:
        self.positions, self.codec = positions, codec
        # For codecs that round at random.
        self.random_bits: Any = None
        # The versions of weights and masters after the last step: see `resynchronise`.
        self.versions: list | None = None

    def of(self, items: Sequence) -> list:
        """Returns the items of these tensors."""
        return list(map(items.__getitem__, self.positions))

    def aux_of(self, leaves: Leaves) -> list[Tensor]:
        """Returns the tensors that the codec stores with the weights."""
        return self.of(leaves.aux) if self.codec.aux_dtype is not None else []

    def keys(self, ctx: StepContext, offset: int) -> Tensor:
        """Returns the keys of the random bits that a step draws."""
        strides = list(map(ctx.strides.get, self.positions))
        return self.random_bits.keys(ctx.iterations, offset, strides)

    def columns_of(
        self, leaves: Leaves, grads: list[Tensor], norms: RuleNorms | None
    ) -> Columns:
        """Returns the tensors of a step."""
        slots = list(map(self.of, leaves.slots))
        if leaves.has_gaps:
            # Those of a chunk all have a slot, or none has.
            slots = [column for column in slots if column[0] is not None]
        scales: list[list[Tensor]] = [[]] * len(slots)
        if leaves.scales:
            # And scales likewise.
            of_all = map(self.of, leaves.scales[: len(slots)])
            scales = [[s for s in column if s is not None] for column in of_all]
        return Columns(
            self.of(grads),
            self.of(leaves.variables),
            slots,
            self.aux_of(leaves),
            scales,
            norms and self.of(norms),
            self,
        )


class Chunks:
    """See `Framework.chunked`: `items` are `Chunk`s, and `packs` of the gradients."""

    def __init__(self, groups: list[Hashable], leaves: Leaves) -> None:
        variables = shards_of(leaves.variables)
        codecs = leaves.codecs or [PLAIN] * len(variables)
        triples = zip(groups, codecs, variables, strict=True)
        groups = [(g, c, c is not PLAIN and v.dtype) for g, c, v in triples]
        for column in leaves.slots if leaves.scales else ():
            pairs = zip(groups, column, strict=True)
            groups = [(g, s is not None and s.dtype) for g, s in pairs]
        sizes = [v.numel() for v in variables]
        limits = (_DEVICE_CHUNK, _DEVICE_CHUNK)
        if torch_measure.is_on_host(variables[0]):
            limits = (_HOST_CHUNK, SMALL)
        self.items: list[Chunk] = []
        are_random = leaves.are_random
        for positions in _split(groups, sizes, *limits):
            chunk = Chunk(positions, codecs[positions[0]])
            if are_random:
                columns = leaves.positions, leaves.variables, variables
                chunk.random_bits = RandomBits(*[chunk.of(c) for c in columns])
            self.items.append(chunk)
        self.packs = Packs(variables)
        self._size_of_largest = max(sum(c.of(sizes)) for c in self.items)
        self._memory: Memory | None = None

    def are_current(self, leaves: Leaves) -> bool:
        """Whether only steps have written the weights with masters in place."""
        return all(are_current(*c) for c in self.with_masters(leaves))

    def note_versions(self, leaves: Leaves) -> None:
        """Remembers that a step has just written them."""
        for columns in self.with_masters(leaves):
            note_versions(*columns)

    def with_masters(
        self, leaves: Leaves
    ) -> Iterator[tuple[Chunk, list[Tensor], list[Tensor]]]:
        """Returns the chunks with masters in place, their weights and masters."""
        for chunk in self.items:
            if is_in_place(chunk.codec):
                yield chunk, chunk.of(leaves.variables), chunk.aux_of(leaves)

    def memory(self, like: Tensor) -> Memory:
        """Returns the `Memory` for a step on the host. A small one is reused."""
        memory = self._memory or Memory(like, self._size_of_largest)
        if self._size_of_largest <= _REUSED_MEMORY:
            self._memory = memory
        return memory


def _split(
    groups: list[Hashable], sizes: list[int], limit: int, small_limit: int
) -> list[list[int]]:
    """Splits positions into chunks of one group, of at most `limit` elements."""
    # A tensor with more than `small_limit` elements is a chunk.
    large: list[list[int]] = []
    small: dict[Hashable, list[int]] = {}
    for i, group in enumerate(groups):
        if sizes[i] > small_limit:
            large.append([i])
        else:
            small.setdefault(group, []).append(i)
    chunks = []
    for positions in small.values():
        # The number of the chunk in which each tensor ends.
        ends = itertools.accumulate(sizes[i] for i in positions)
        numbers = [end // limit for end in ends]
        pairs = itertools.groupby(zip(numbers, positions, strict=True), lambda p: p[0])
        chunks += [[i for _, i in chunk] for _, chunk in pairs]
    # In reverse: the cache still holds the gradients that were measured last.
    return [*large[::-1], *chunks[::-1]]


# --- What the chunks of an update have in common ------------------------------------


class Memory:
    """A buffer for all chunks: new memory costs more than the arithmetic on it."""

    # A chunk takes the middle of the buffer. Each thread takes a part of a tensor, so
    # each of two threads writes the same cache lines for a large tensor as for a small
    # one. If their cores share no cache, a line that another core has written takes
    # longer to access than main memory.

    def __init__(self, like: Tensor, size: int) -> None:
        # The buffer may be kept, and a tensor from inference mode must not be written
        # outside that mode.
        with torch.inference_mode(False):
            self._flat = like.new_empty(size, dtype=torch.float32)
        self._copies: dict[Hashable, tuple[Tensor, list[Tensor]]] = {}

    def flat(self, size: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Returns a part of the buffer with a chunk's number of elements."""
        # A view by dtype that is taken in inference mode must not be written outside.
        flat = self._flat if dtype == torch.float32 else self._flat.view(dtype)
        start = (flat.numel() - size) // 2
        start -= start % _LINE
        return flat[start : start + size]

    def for_copies(
        self, chunk: Chunk, tensors: list[Tensor]
    ) -> tuple[Tensor, list[Tensor]]:
        """Returns a chunk's part of the buffer, and its views like these tensors."""
        # 160 new tensors or views take as long as Adam's kernel on small gradients. A
        # weight that gets another layout has a flat gradient: see `layouts.py`.
        key = chunk, *map(torch.Tensor.dim, tensors)
        if key not in self._copies:
            flat = self.flat(sum(map(torch.Tensor.numel, tensors)))
            # Those without elements are new tensors, and kept as the buffer is.
            with torch.inference_mode(False):
                views = list(_unflatten_dense_tensors(flat, tensors))
            self._copies[key] = flat, views
        return self._copies[key]


class StepContext:
    """What the chunks of an update have in common."""

    def __init__(
        self,
        framework: Framework,
        leaves: Leaves,
        factor: Number,
        flag: Tensor | None,
        memory: Memory | None,
        strides: dict[int, Strides],
    ) -> None:
        # On an accelerator there is no `Memory`, since the allocator reuses memory. On
        # the host there is no flag: no skipped step comes here.
        self.framework, self.factor, self.flag = framework, factor, flag
        self.memory, self.is_on_host = memory, memory is not None
        # Of the weights in the order of memory, by their positions among the leaves.
        self.strides = strides
        # 1.0 where nothing may be written.
        self.found_inf = None if flag is None else torch_measure.found_inf_of(flag)
        iterations = leaves.iterations
        self.iterations = None if iterations is None else iterations.value
        self.are_private = leaves.are_private
        self._owns_gradients = leaves.owns_gradients

    def without_host(self) -> AbstractContextManager:
        """Returns a context in which formulas copy no number to the device."""
        return contextlib.nullcontext() if self.is_on_host else NumbersOnDevice()

    def scaled(self, columns: Columns, factor: Number) -> list[Tensor]:
        """Returns the products of gradients and a factor, in float32."""
        grads = columns.grads
        is_product = not (isinstance(factor, float) and factor == 1.0)
        are_wide = set(map(dtype_of, grads)) == _WIDE
        if are_wide and not is_product:
            return grads
        if self.memory is not None:
            flat, copies = self.memory.for_copies(columns.chunk, grads)
            if are_wide and len(grads) == 1:
                return [torch.mul(grads[0], factor, out=copies[0])]
            torch._foreach_copy_(copies, grads)
            if is_product:
                flat.mul_(factor)
            return copies
        if are_wide:
            return list(torch._foreach_mul(grads, factor))
        copies = [torch.empty_like(g, dtype=torch.float32) for g in grads]
        torch._foreach_copy_(copies, grads)
        if is_product:
            torch._foreach_mul_(copies, factor)
        return copies

    def scaled_in_kernel(
        self, columns: Columns, factor: Number
    ) -> tuple[list[Tensor], Tensor | None]:
        """Returns float32 gradients, and the divisor for the fused kernel, or None."""
        # The quotients equal the products of `scaled`. The kernel writes them into the
        # gradients, so these must be the step's own, or copies. Without a divisor they
        # are multiplied here.
        writes = self._owns_gradients
        if not (writes or self.is_on_host):
            writes = set(map(dtype_of, columns.grads)) != _WIDE
        if not writes or not torch.is_tensor(factor):
            return self.scaled(columns, factor), None
        return self.scaled(columns, 1.0), torch.reciprocal(factor)


# --- The rules ----------------------------------------------------------------------


def _decay(ctx: StepContext, rule: Any, w: list[Tensor]) -> None:
    """Does `w = w - decay * w`."""
    if rule.decay is not None:
        # The kernel reads an element before it writes it.
        fused_sgd(w, w, [], ctx.found_inf, lr=rule.decay)


def _step_sgd(ctx: StepContext, rule: Any, columns: Columns) -> None:
    """Does `w = w - rate * g`."""
    g, w = columns.grads, columns.weights
    _decay(ctx, rule, w)
    rate = rule.learning_rate * ctx.factor
    if set(map(dtype_of, g)) == _WIDE:
        fused_sgd(w, g, [], ctx.found_inf, lr=rate)
    else:
        g, scale = ctx.scaled_in_kernel(columns, rate)
        fused_sgd(w, g, [], ctx.found_inf, lr=1.0, scale=scale)


def _step_momentum(ctx: StepContext, rule: Any, columns: Columns) -> None:
    """Does `m = momentum * m - rate * g`, `w = w + m`."""
    g, w, [m] = columns.grads, columns.weights, columns.slots
    _decay(ctx, rule, w)
    product = rule.learning_rate * ctx.factor
    rate, scale = 0.0, None
    if ctx.is_on_host and not rule.nesterov and set(map(dtype_of, g)) == _WIDE:
        # The kernel multiplies a gradient by `1 - dampening`, in float64.
        rate = float(product)
    if not rate >= _SMALLEST_RATE:
        g, scale = ctx.scaled_in_kernel(columns, product)
        rate = 1.0
    # With `maximize` the kernel subtracts the gradient: `m = momentum * m - rate * g`.
    fused_sgd(
        w,
        g,
        m,
        ctx.found_inf,
        lr=-1.0,
        momentum=rule.momentum,
        nesterov=rule.nesterov,
        dampening=1.0 - rate,
        maximize=True,
        scale=scale,
    )


def _step_adam(ctx: StepContext, rule: Any, columns: Columns) -> None:
    """Does `w = w - alpha * m / (sqrt(v) + epsilon)`."""
    if 1.0 in (rule.beta_1, rule.beta_2):
        # The kernel would divide by its bias correction, which is then 0.
        _step_by_formula(ctx, rule, columns)
        return
    w, [m, v] = columns.weights, columns.slots
    # Before the decay: a gradient may be a view of its variable.
    g, scale = ctx.scaled_in_kernel(columns, ctx.factor)
    _decay(ctx, rule, w)
    step = w[0].new_full((), _LAST_STEP)
    # `alpha` includes the bias correction.
    torch._fused_adam_(
        w,
        g,
        m,
        v,
        [],
        [step] * len(g),
        lr=rule.alpha,
        beta1=rule.beta_1,
        beta2=rule.beta_2,
        weight_decay=0.0,
        eps=rule.epsilon,
        amsgrad=False,
        maximize=False,
        grad_scale=scale,
        found_inf=ctx.found_inf,
    )


def _step_descent(ctx: StepContext, rule: Any, columns: Columns) -> None:
    """Does `m = momentum * m + d`, `w = w - m`, where `d` is the rule's `descent`."""
    w, [m] = columns.weights, columns.slots
    gradient = Tensors(ctx.scaled(columns, ctx.factor))
    d = rule.descent(gradient, Tensors(w), _norms_for(rule, columns)).items
    momentum = dict(momentum=rule.momentum, nesterov=rule.nesterov)
    fused_sgd(w, d, m, ctx.found_inf, lr=1.0, **momentum)


def _step_by_formula(ctx: StepContext, rule: Any, columns: Columns) -> None:
    """Calls the rule with `Tensors`, and writes its results."""
    gradient = Tensors(ctx.scaled(columns, ctx.factor))
    old = [Tensors([*columns.weights])]
    for name, column in zip(rule.slots, columns.slots, strict=True):
        is_scalar = name in rule.scalars
        old.append(torch.stack(column) if is_scalar else Tensors([*column]))
    # On an accelerator the step is masked where it is written.
    select = _written if ctx.is_on_host else partial(_added, ctx.found_inf)
    new = rule(xp, select, gradient, *old, norms=_norms_for(rule, columns))
    new = [v.items if isinstance(v, Tensors) else v.unbind() for v in new]
    written = [columns.weights, *columns.slots]
    for i, values in enumerate(new):
        # A slot may take the old value of another, which is written first.
        if any(values[0] is c[0] for c in written if c is not written[i]):
            new[i] = [v.clone() for v in values]
    for column, values in zip(written, new, strict=True):
        if values[0] is column[0]:
            continue
        if ctx.found_inf is None:
            torch._foreach_copy_(column, values)
        else:
            copy_unless(ctx.found_inf, column, values)


def _norms_for(rule: Any, columns: Columns) -> Callable[..., tuple] | None:
    """Returns the `norms` of a rule that is called with `Tensors`."""
    if not rule.takes_norms:
        return None
    if columns.norms is None:
        return _norms_of_lists
    norms = zip(*columns.norms, strict=True)
    return given(tuple(torch.stack(column) for column in norms))


def _norms_of_lists(*columns: Tensors) -> tuple[Tensor, ...]:
    """Returns the L2 norms of each list, a tensor with one for each item."""
    # One call for all of them.
    items = [item for column in columns for item in column.items]
    return norms_of(items).split(len(items) // len(columns))


def _written(new: Tensors | Tensor, old: Tensors) -> Tensors | Tensor:
    """A `select` that writes a new value over the old one at once: it saves a pass."""
    return new.written_over(old) if isinstance(new, Tensors) else new


def _added(
    found_inf: Tensor | None, new: Tensors | Tensor, old: Tensors
) -> Tensors | Tensor:
    """A `select` that adds to an old value at once, unless `found_inf`."""
    is_sum = isinstance(new, Tensors) and new.is_sum_with(old)
    return new.written_over(old, found_inf) if is_sum else new


# The kernels that take the factor as a part of the rate, and read the gradients.
_READ_GRADIENTS = {"sgd", "momentum"}
# Keyed by `Rule.kernel`.
STEPS: dict[str | None, Callable[[StepContext, Any, Columns], None]] = {
    None: _step_by_formula,
    "sgd": _step_sgd,
    "momentum": _step_momentum,
    "adam": _step_adam,
    "descent": _step_descent,
}
