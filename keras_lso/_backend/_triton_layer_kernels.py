"""The Triton kernels of LARS, which treats each layer by its norm.

Three launches: `lars_squares` sums the squares of each block, `lars_norms` adds those
of a tensor, always in the same order, and with the rates that come of the norms `lars`
makes the step. See `_triton_kernels.py` for what they are given.
"""

import triton
import triton.language as tl

from keras_lso._backend._triton_kernels import (
    _ALIGNMENT,
    _address,
    _gradient,
    _load,
    _place,
    _store,
    _store_weight,
    _weight,
    kernel,
)

# So many sums of blocks are added together.
SUMMED = 1024


@triton.jit
def _with_penalty(g, w, weight_decay):
    if weight_decay is not None:
        g = g + w * weight_decay
    return g


@triton.jit
def _squares_block(
    gradient,
    weight,
    copy,
    start,
    size,
    inv_scale,
    weight_decay,
    GRADIENT: tl.constexpr,
    COPY: tl.constexpr,
    WHOLE: tl.constexpr,
    N: tl.constexpr,
):
    g = _gradient(gradient, start, size, inv_scale, GRADIENT, WHOLE, N)
    w = _weight(weight, copy, start, size, COPY, WHOLE, N)
    d = _with_penalty(g, w, weight_decay)
    return tl.sum(d * d), tl.sum(w * w)


@kernel("squares", "weight_decay")
def lars_squares(
    table,
    gradients,
    owners,
    count,
    found_inf,
    inv_scale,
    squares,
    weight_decay,
    GRADIENT: tl.constexpr,
    COPY: tl.constexpr,
    N: tl.constexpr,
):
    """Writes for each block the sum of squares of the direction, and of the weight."""
    if tl.load(found_inf) == 1.0:
        return
    owner, start, size = _place(table, owners, count, N)
    gradient = tl.load(gradients + owner)
    weight = _address(table, 2, count, owner)
    copy = weight
    if COPY is not None:
        copy = _address(table, 4, count, owner)
    inv_scale = tl.load(inv_scale)
    misaligned = (gradient | weight | copy) % _ALIGNMENT
    if (misaligned == 0) & (start + N <= size):
        d, w = _squares_block(
            gradient, weight, copy, start, size, inv_scale, weight_decay,
            GRADIENT, COPY, True, N,
        )  # fmt: skip
    else:
        d, w = _squares_block(
            gradient, weight, copy, start, size, inv_scale, weight_decay,
            GRADIENT, COPY, False, N,
        )  # fmt: skip
    block = tl.program_id(0)
    tl.store(squares + block, d)
    tl.store(squares + tl.num_programs(0) + block, w)


@kernel("squares", "norms", "blocks")
def lars_norms(
    table, count, blocks, squares, norms, SUMMED: tl.constexpr, N: tl.constexpr
):
    """Writes the norms of a tensor's direction and weight, each program those of one.

    `blocks` is the number of blocks of all tensors.
    """
    owner = tl.program_id(0)
    first = _address(table, 1, count, owner)
    end = first + (_address(table, 0, count, owner) + N - 1) // N
    d = tl.zeros([SUMMED], tl.float32)
    w = tl.zeros([SUMMED], tl.float32)
    for start in range(first, end, SUMMED):
        at = start + tl.arange(0, SUMMED)
        d += tl.load(squares + at, mask=at < end, other=0.0)
        w += tl.load(squares + blocks + at, mask=at < end, other=0.0)
    tl.store(norms + owner, tl.sqrt_rn(tl.sum(d)))
    tl.store(norms + count + owner, tl.sqrt_rn(tl.sum(w)))


@triton.jit
def _lars_block(
    gradient,
    weight,
    slot,
    copy,
    start,
    size,
    inv_scale,
    rate,
    momentum,
    weight_decay,
    NESTEROV: tl.constexpr,
    GRADIENT: tl.constexpr,
    COPY: tl.constexpr,
    WHOLE: tl.constexpr,
    N: tl.constexpr,
):
    g = _gradient(gradient, start, size, inv_scale, GRADIENT, WHOLE, N)
    v = _load(slot, start, size, tl.float32, WHOLE, N)
    w = _weight(weight, copy, start, size, COPY, WHOLE, N)
    d = _with_penalty(g, w, weight_decay) * rate
    v = v * momentum + d
    update = v
    if NESTEROV:
        update = v * momentum + d
    _store(slot, start, size, v, tl.float32, WHOLE, N)
    _store_weight(weight, copy, start, size, w - update, COPY, WHOLE, N)


@kernel("rates", "momentum", "weight_decay")
def lars(
    table,
    gradients,
    owners,
    count,
    found_inf,
    inv_scale,
    rates,
    momentum,
    weight_decay,
    NESTEROV: tl.constexpr,
    GRADIENT: tl.constexpr,
    COPY: tl.constexpr,
    N: tl.constexpr,
):
    """The step of `layer_rules.LARS` with classic momentum, a rate for each tensor."""
    if tl.load(found_inf) == 1.0:
        return
    owner, start, size = _place(table, owners, count, N)
    gradient = tl.load(gradients + owner)
    weight = _address(table, 2, count, owner)
    slot = _address(table, 3, count, owner)
    copy = weight
    if COPY is not None:
        copy = _address(table, 4, count, owner)
    inv_scale = tl.load(inv_scale)
    rate = tl.load(rates + owner)
    misaligned = (gradient | weight | slot | copy) % _ALIGNMENT
    if (misaligned == 0) & (start + N <= size):
        _lars_block(
            gradient, weight, slot, copy, start, size, inv_scale, rate, momentum,
            weight_decay, NESTEROV, GRADIENT, COPY, True, N,
        )  # fmt: skip
    else:
        _lars_block(
            gradient, weight, slot, copy, start, size, inv_scale, rate, momentum,
            weight_decay, NESTEROV, GRADIENT, COPY, False, N,
        )  # fmt: skip
