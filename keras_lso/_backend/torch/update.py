"""The update of variables by a rule on PyTorch, in chunks of tensors, or of shards.

On the host the flag is read first. On an accelerator reading it would synchronise, so
the kernels take `found_inf`, which is 1.0 where the flag is False, and then write
nothing.
"""

import contextlib
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch._utils import _unflatten_dense_tensors

from keras_lso._backend.codecs import PLAIN
from keras_lso._backend.rule import always, given
from keras_lso._backend.torch import compiled, lists, xp
from keras_lso._backend.torch import measure as torch_measure
from keras_lso._backend.torch.lists import Tensors, copy_unless, fused_sgd
from keras_lso._backend.torch.masters import (
    DTYPE_OF_SLOTS,
    RandomBits,
    is_in_place,
    masters_of,
    masters_of_slots,
    resynchronise,
)
from keras_lso._backend.torch.measure import (
    SMALL,
    TENSOR_TYPES,
    Packs,
    dtype_of,
    norms_of,
    norms_of_rules,
    operands,
)
from keras_lso._backend.torch.no_sync import NumbersOnDevice
from keras_lso._backend.torch.shards import any_sharded, shards_of

# The number of elements in a chunk, unless one tensor has more. At this size the cache
# still holds the results of one operation when the next reads them.
_HOST_CHUNK = 2**20
_DEVICE_CHUNK = 2**23
# In elements, 16 MiB. Up to this size, memory is kept between steps. An allocator sorts
# the memory that others have freed at the next request, which may take longer than a
# step.
_KEPT_MEMORY = 2**22
# The float16 elements in a cache line, which holds fewer elements of a wider dtype.
_LINE = 32

# Subtracted from 1 in float64, a smaller rate would lose digits of a float32.
_SMALLEST_RATE = 2.0**-29
# At this step number, Adam's bias correction is 1 for any beta below 1.
_LAST_STEP = 2.0**100

_NO_LIMITS = contextlib.nullcontext()
_WIDE = {torch.float32}
_GRADIENT_DTYPES = {torch.float32, torch.float16, torch.bfloat16}


@torch.no_grad()
def takes_update(rule, leaves, gradients, is_needed=False):
    """Whether there is an update of these tensors, the same in all processes."""
    # `torch.compile` writes its own.
    variables = leaves.variables
    slots = list(itertools.chain(*leaves.slots))
    in_float32 = variables
    if leaves.codecs:
        pairs = zip(variables, leaves.codecs, strict=True)
        in_float32 = [v for v, codec in pairs if codec is PLAIN]
        in_float32 += [leaf.aux for leaf in leaves.with_masters]
    whole = [*variables, *gradients]
    shards = shards_of(whole)
    return (
        not torch.compiler.is_compiling()
        and set(map(type, shards)) <= TENSOR_TYPES
        and variables[0].device.type in lists.DEVICES
        and len(set(map(torch.Tensor.get_device, whole))) == 1
        and set(map(dtype_of, in_float32)) <= {torch.float32}
        and set(map(dtype_of, slots)) <= {torch.float32, DTYPE_OF_SLOTS}
        and set(map(dtype_of, gradients)) <= _GRADIENT_DTYPES
        and all(map(torch.Tensor.is_contiguous, [*in_float32, *slots]))
        # Whole tensors have the same shapes, but their shards need not.
        and (shards is whole or _halves_have_equal_sizes(shards))
    )


def _halves_have_equal_sizes(tensors):
    sizes = list(map(torch.Tensor.numel, tensors))
    half = len(sizes) // 2
    return sizes[:half] == sizes[half:]


@torch.no_grad()
def update(framework, rules, leaves, grads, factor=None, flag=None, norms=None):
    """See `Framework.update`."""
    chunks = leaves.chunks or Chunks(list(map(id, rules)), leaves)
    factor = 1.0 if factor is None else factor
    if any_sharded(leaves.variables):
        if rules[0].has_norms and norms is None:
            norms = _norms_of_shards(framework, rules, leaves, grads, factor)
        leaves, grads = _shards_of(leaves), shards_of(grads)
    first = leaves.variables[0]
    on_host = torch_measure.is_on_host(first)
    if on_host:
        if flag is not None and not flag:
            return
        flag = None
    # Products with a factor are copies, made before the only chunk is written.
    copies = torch.is_tensor(factor) and rules[0].kernel not in _READ_GRADIENTS
    grads = _readable(grads, leaves, copies and len(chunks.items) == 1)
    memory = chunks.memory(first) if on_host else None
    ctx = StepContext(framework, leaves, factor, flag, memory)
    has_16_bits = bool(leaves.codecs) or leaves.iterations is not None
    is_compiled = has_16_bits and compiled.is_on(first)
    limits = torch._dynamo.config.patch(compiled.LIMITS) if is_compiled else _NO_LIMITS
    with limits:
        for chunk in chunks.items:
            rule, masters = rules[chunk.positions[0]], []
            columns = list(map(chunk.of, (grads, leaves.variables, *leaves.slots)))
            known = norms and chunk.of(norms)
            if has_16_bits:
                aux = chunk.aux_of(leaves)
                if is_compiled and compiled.step(ctx, rule, chunk, aux, columns, known):
                    continue
                masters = _in_32_bits(ctx, chunk, aux, columns)
            STEPS[rule.kernel](rule, ctx, known, *columns)
            if not ctx.are_private:
                # Autograd relies on the version, and the fused kernels do not
                # increment it.
                written = list(itertools.chain(*columns[1:]))
                torch.autograd.graph.increment_version(written)
            for of_column in masters:
                of_column.write()


def _in_32_bits(ctx, chunk, aux, columns):
    """Replaces the columns in 16 bits by their masters, and returns these."""
    masters = []
    if chunk.codec is not PLAIN:
        masters.append(masters_of(ctx, chunk, columns[1], aux))
        columns[1] = masters[0].tensors
    for i, slots in enumerate(columns[2:]):
        if slots[0].dtype is DTYPE_OF_SLOTS:
            masters.append(masters_of_slots(ctx, chunk, slots, i))
            columns[2 + i] = masters[-1].tensors
    return masters


def _shards_of(leaves):
    """Returns the shards of `Leaves` that belong to this process."""
    return leaves.mapped(shards_of) if any_sharded(leaves.variables) else leaves


def _readable(grads, leaves, are_copied):
    """Returns gradients that kernels can read in the order of their memory."""
    # None aliases a tensor that the step writes, and none has the negative bit, as the
    # imaginary part of a complex conjugate has. Copies have neither.
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


def _norms_of_shards(framework, rules, leaves, grads, factor):
    """Returns the norms that rules take of the whole tensors, for each of them."""
    shards = _shards_of(leaves)
    state = shards._replace(variables=shards.read(framework), codecs=())
    return norms_of_rules(rules, grads, factor, state, leaves.variables)


@torch.no_grad()
def synchronise_masters(framework, leaves, flag):
    """See `Framework.synchronise_masters`."""
    leaves, chunks = _shards_of(leaves), leaves.chunks
    on_host = torch_measure.is_on_host(flag)
    memory = chunks.memory(leaves.variables[0]) if on_host else None
    for chunk in chunks.items:
        if is_in_place(chunk.codec):
            weights = chunk.of(leaves.variables)
            resynchronise(framework, chunk, weights, chunk.aux_of(leaves), memory)


@torch.no_grad()
def clear(tensors, flag):
    """See `Framework.clear`."""
    shards = shards_of(tensors)
    if not torch_measure.is_on_host(flag):
        torch._foreach_mul_(shards, torch.logical_not(flag).float())
    elif flag:
        torch._foreach_zero_(shards)


# --- Chunks -------------------------------------------------------------------------


class Chunk:
    """The positions of tensors that are updated together, by one rule and codec."""

    def __init__(self, positions, codec):
        self.positions, self.codec = positions, codec
        self.random_bits = self.written = None

    def of(self, items):
        """Returns the items of these tensors."""
        return list(map(items.__getitem__, self.positions))

    def aux_of(self, leaves):
        """Returns the tensors that the codec stores with the weights, a list."""
        return self.of(leaves.aux) if self.codec.aux_dtype is not None else []


class Chunks:
    """See `Framework.chunked`: `items` are `Chunk`s, and `packs` of the gradients."""

    def __init__(self, groups, leaves):
        variables = shards_of(leaves.variables)
        codecs = leaves.codecs or [PLAIN] * len(variables)
        triples = zip(groups, codecs, variables, strict=True)
        groups = [(g, c, c is not PLAIN and v.dtype) for g, c, v in triples]
        sizes = list(map(torch.Tensor.numel, variables))
        limits = (_DEVICE_CHUNK, _DEVICE_CHUNK)
        if torch_measure.is_on_host(variables[0]):
            limits = (_HOST_CHUNK, SMALL)
        self.items, are_random = [], leaves.are_random
        for positions in _split(groups, sizes, *limits):
            chunk = Chunk(positions, codecs[positions[0]])
            if are_random:
                columns = leaves.positions, leaves.variables, variables
                chunk.random_bits = RandomBits(*map(chunk.of, columns))
            self.items.append(chunk)
        self.packs = Packs(variables)
        self._most = max(sum(c.of(sizes)) for c in self.items)
        self._memory: Memory | None = None

    def memory(self, like):
        """Returns the `Memory` for a step on the host. A small one is reused."""
        memory = self._memory or Memory(like, self._most)
        if self._most <= _KEPT_MEMORY:
            self._memory = memory
        return memory


def _split(groups, sizes, limit, alone):
    """Splits positions into chunks of one group, of at most `limit` elements."""
    # A tensor with more than `alone` elements gets its own chunk.
    large: list[list[int]] = []
    small: dict[Any, list[int]] = {}
    for i, group in enumerate(groups):
        if sizes[i] > alone:
            large.append([i])
        else:
            small.setdefault(group, []).append(i)
    chunks = []
    for positions in small.values():
        # The number of the chunk in which each tensor ends.
        ends = itertools.accumulate(sizes[i] for i in positions)
        numbers = [end // limit for end in ends]
        pairs = itertools.groupby(zip(numbers, positions, strict=True), lambda p: p[0])
        chunks += [[i for _, i in of_one] for _, of_one in pairs]
    # In reverse: the cache still holds the gradients that were measured last.
    return [*large[::-1], *chunks[::-1]]


# --- What the chunks of an update have in common ------------------------------------


class Memory:
    """A buffer for all chunks: new memory costs more than the arithmetic on it."""

    # A chunk takes the middle of the buffer. Each thread takes a part of a tensor, so
    # each of two threads writes the same cache lines for a large tensor as for a small
    # one. If their cores share no cache, a line that another core has written takes
    # longer to access than main memory.

    def __init__(self, like: torch.Tensor, size: int):
        # The buffer may be kept, and a tensor from inference mode must not be written
        # outside that mode.
        with torch.inference_mode(False):
            self._flat = like.new_empty(size, dtype=torch.float32)

    def flat(self, size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Returns a part of the buffer with a chunk's number of elements."""
        # A view by dtype that is taken in inference mode must not be written outside.
        flat = self._flat if dtype == torch.float32 else self._flat.view(dtype)
        start = (flat.numel() - size) // 2
        start -= start % _LINE
        return flat[start : start + size]

    def like(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Returns views of the buffer with the shapes of a chunk's tensors."""
        flat = self.flat(sum(map(torch.Tensor.numel, tensors)))
        if len(tensors) == 1 and tensors[0].is_contiguous():
            return [flat.view(tensors[0].shape)]
        return _unflatten_dense_tensors(flat, tensors)


class StepContext:
    """What the chunks of an update have in common."""

    def __init__(self, framework, leaves, factor, flag, memory):
        # On an accelerator there is no `Memory`, since the allocator reuses memory. On
        # the host there is no flag: no skipped step comes here.
        self.framework, self.factor, self.flag = framework, factor, flag
        self.memory, self.is_on_host = memory, memory is not None
        # 1.0 where nothing may be written.
        self.found_inf = None if flag is None else torch.logical_not(flag).float()
        iterations = leaves.iterations
        self.iterations = None if iterations is None else iterations.value
        self.are_private = leaves.are_private
        self._owns_gradients = leaves.owns_gradients

    def without_host(self):
        """Returns a context in which formulas copy no number to the device."""
        return contextlib.nullcontext() if self.is_on_host else NumbersOnDevice()

    def scaled(self, grads, factor):
        """Returns the products of gradients and a factor, in float32."""
        is_one = isinstance(factor, float) and factor == 1.0
        if set(map(dtype_of, grads)) != _WIDE:
            wide = self._new(grads)
            torch._foreach_copy_(wide, grads)
            if not is_one and self.memory is None:
                torch._foreach_mul_(wide, operands(factor, wide))
            elif not is_one:
                self.memory.flat(sum(map(torch.Tensor.numel, wide))).mul_(factor)
            return wide
        if is_one:
            return grads
        # For small tensors the calls cost more than new memory.
        if not self.is_on_host or max(map(torch.Tensor.numel, grads)) <= SMALL:
            return list(torch._foreach_mul(grads, operands(factor, grads)))
        pairs = zip(grads, self._new(grads), strict=True)
        return [torch.mul(g, factor, out=out) for g, out in pairs]

    def _new(self, grads):
        if self.memory is None:
            return [torch.empty_like(g, dtype=torch.float32) for g in grads]
        return self.memory.like(grads)

    def scaled_in_kernel(self, grads, factor):
        """Returns float32 gradients, and the divisor for the fused kernel, or None."""
        # The quotients equal the products of `scaled`. The kernel writes them into the
        # gradients, so these must be the step's own, or copies. Without a divisor they
        # are multiplied here.
        writes = self._owns_gradients
        if not (writes or self.is_on_host):
            writes = set(map(dtype_of, grads)) != _WIDE
        if not writes or not torch.is_tensor(factor):
            return self.scaled(grads, factor), None
        return self.scaled(grads, 1.0), torch.reciprocal(factor)


# --- The rules ----------------------------------------------------------------------


def _decay(rule, ctx, w):
    """Does `w = w - decay * w`."""
    if rule.decay is not None:
        # The kernel reads an element before it writes it.
        fused_sgd(w, w, [], ctx.found_inf, lr=rule.decay)


def _step_sgd(rule, ctx, norms, g, w):
    _decay(rule, ctx, w)
    rate = rule.learning_rate * ctx.factor
    if set(map(dtype_of, g)) == _WIDE:
        fused_sgd(w, g, [], ctx.found_inf, lr=rate)
    else:
        g, scale = ctx.scaled_in_kernel(g, rate)
        fused_sgd(w, g, [], ctx.found_inf, lr=1.0, scale=scale)


def _step_momentum(rule, ctx, norms, g, w, m):
    _decay(rule, ctx, w)
    product = rule.learning_rate * ctx.factor
    rate, scale = 0.0, None
    if ctx.is_on_host and not rule.nesterov and set(map(dtype_of, g)) == _WIDE:
        # The kernel multiplies a gradient by `1 - dampening`, in float64.
        rate = float(product)
    if not rate >= _SMALLEST_RATE:
        g, scale = ctx.scaled_in_kernel(g, product)
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


def _step_adam(rule, ctx, norms, g, w, m, v):
    if 1.0 in (rule.beta_1, rule.beta_2):
        # The kernel would divide by its bias correction, which is then 0.
        _step_by_formula(rule, ctx, norms, g, w, m, v)
        return
    # Before the decay: a gradient may be a view of its variable.
    g, scale = ctx.scaled_in_kernel(g, ctx.factor)
    _decay(rule, ctx, w)
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


def _step_by_formula(rule, ctx, norms, g, w, *slots):
    g, columns = Tensors(ctx.scaled(g, ctx.factor)), (w, *slots)
    old = [Tensors([*w])]
    for name, column in zip(rule.slots, slots, strict=True):
        of_all = torch.stack(column) if name in rule.scalars else Tensors([*column])
        old.append(of_all)
    measure = _norms_of_lists if rule.takes_norms else None
    if measure and norms is not None:
        measure = given(tuple(map(torch.stack, zip(*norms, strict=True))))
    # On an accelerator the whole step is masked where it is written.
    new = rule(xp, _written if ctx.is_on_host else always, g, *old, norms=measure)
    new = [v.items if isinstance(v, Tensors) else v.unbind() for v in new]
    for i, values in enumerate(new):
        # A slot may take the old value of another, which is written first.
        if any(values[0] is c[0] for c in columns if c is not columns[i]):
            new[i] = [v.clone() for v in values]
    for column, values in zip(columns, new, strict=True):
        if values[0] is column[0]:
            continue
        if ctx.found_inf is None:
            torch._foreach_copy_(column, values)
        else:
            copy_unless(ctx.found_inf, column, values)


def _norms_of_lists(*columns):
    return tuple(norms_of(column.items) for column in columns)


def _written(new, old):
    """A `select` that writes a new value over the old one at once: it saves a pass."""
    return new.written_over(old) if isinstance(new, Tensors) else new


# The kernels that take the factor as a part of the rate, and read the gradients.
_READ_GRADIENTS = {"sgd", "momentum"}
# Keyed by `Rule.kernel`.
STEPS: dict[str | None, Callable[..., None]] = {
    None: _step_by_formula,
    "sgd": _step_sgd,
    "momentum": _step_momentum,
    "adam": _step_adam,
}
