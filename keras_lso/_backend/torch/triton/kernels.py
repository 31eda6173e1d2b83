"""Kernels that step many tensors in one pass, in Triton's language.

Each kernel reads a gradient of any float dtype, unscales it, and updates the slots and
the weight. It trains a 16-bit weight as the float32 number of its master. `KIND` is the
kind of master, a key in `masters.KINDS`, or None for float32 weights. If `found_inf` is
1.0, nothing is written.

The formulas are those of the classes in `rules.py` and `masters.py`, operation by
operation. The kernels are launched without the fusion of products and sums, so that
each operation rounds as in the formula.

Tensors are passed by their addresses, in a table with a column for each of the `count`
weights. The rows of the table are, in this order,

- the number of elements, and the first block,
- the address of the weight, and the address of each slot,
- the address of the part kept with the weight, if its kind keeps one,
- the position of the weight among the optimizer's weights, and the place of its first
  element in the whole tensor, if its kind draws random bits.

`gradients` is one more such row, with other addresses in each step. `owners` has an
item for each block, the column of its tensor. `found_inf`, `inv_scale`,
`learning_rate`, `alpha` and `decay` point to a float32. If random bits are drawn,
`iterations` points to an int32. The other coefficients are numbers.

Only `steps.py` imports this file, since it needs Triton.
"""

import triton
import triton.language as tl

from keras_lso._backend.torch.triton.masters import (
    drawn,
    joined,
    key_of,
    parts,
    random_bits,
    rounded,
)

# The elements and the warps of a block. Each thread has four elements, 16 bytes in
# float32. With more elements, the compiler would give a thread different ones in
# float16, and exchange them through shared memory.
BLOCK = 1024
WARPS = 8
_ALIGNMENT = tl.constexpr(16)
_TABLES = ["table", "gradients", "owners", "count"]
_VARY = [*_TABLES, "iterations", "found_inf", "inv_scale"]


def kernel(*coefficients):
    """Returns a decorator for kernels, which compiles them once for all arguments.

    Otherwise Triton would compile them again for a pointer with another alignment.
    """
    names = [*_VARY, *coefficients]
    return triton.jit(do_not_specialize=names, do_not_specialize_on_alignment=names)


# --- Blocks of tensors --------------------------------------------------------------


@triton.jit
def _address(table, row, count, owner):
    return tl.load(table + row * count + owner)


@triton.jit
def _place(table, owners, count, N: tl.constexpr):
    """Returns the column of this block's tensor, the block's start, and its size."""
    block = tl.program_id(0)
    owner = tl.load(owners + block)
    # An int64, like the items of the table: a tensor may have over 2**31 elements.
    start = (block - _address(table, 1, count, owner)) * N
    return owner, start, _address(table, 0, count, owner)


@triton.jit
def _pointers(address, start, TYPE: tl.constexpr, WHOLE: tl.constexpr, N: tl.constexpr):
    if WHOLE:
        # The address is a multiple already. Written like this, it is one for every
        # caller, so that the hint to the compiler holds. The compiler then loads 16
        # bytes at once.
        address = address // _ALIGNMENT * _ALIGNMENT
        base = tl.multiple_of(address.to(tl.pointer_type(TYPE)), _ALIGNMENT)
    else:
        base = address.to(tl.pointer_type(TYPE))
    return base + (start + tl.arange(0, N))


@triton.jit
def _load(
    address, start, size, TYPE: tl.constexpr, WHOLE: tl.constexpr, N: tl.constexpr
):
    pointers = _pointers(address, start, TYPE, WHOLE, N)
    if WHOLE:
        values = tl.load(pointers)
    else:
        values = tl.load(pointers, mask=start + tl.arange(0, N) < size, other=0.0)
    return values


@triton.jit
def _store(
    address,
    start,
    size,
    values,
    TYPE: tl.constexpr,
    WHOLE: tl.constexpr,
    N: tl.constexpr,
):
    pointers = _pointers(address, start, TYPE, WHOLE, N)
    if WHOLE:
        tl.store(pointers, values)
    else:
        tl.store(pointers, values, mask=start + tl.arange(0, N) < size)


@triton.jit
def _gradient(
    address,
    start,
    size,
    inv_scale,
    TYPE: tl.constexpr,
    WHOLE: tl.constexpr,
    N: tl.constexpr,
):
    """Returns an unscaled gradient in float32."""
    g = _load(address, start, size, TYPE, WHOLE, N)
    return g.to(tl.float32) * inv_scale


# --- Weights ------------------------------------------------------------------------


@triton.jit
def _weight_at(table, row, count, owner, iterations, KIND: tl.constexpr):
    """Returns the addresses of a weight and its kept part, and a key of random bits.

    `row` is the first row of the table after the slots. Without `iterations` no bits
    are drawn.
    """
    weight = _address(table, 2, count, owner)
    # These are not used where nothing is kept or drawn.
    kept = weight
    key = 0
    if KIND == "stochastic":
        if iterations is not None:
            position = _address(table, row, count, owner)
            first_place = _address(table, row + 1, count, owner)
            key = key_of(tl.load(iterations), position, first_place)
    elif KIND is not None:
        kept = _address(table, row, count, owner)
    return weight, kept, key


@triton.jit
def _weight(
    weight,
    kept,
    start,
    size,
    WEIGHT: tl.constexpr,
    KIND: tl.constexpr,
    WHOLE: tl.constexpr,
    N: tl.constexpr,
):
    """Returns the float32 number that a step begins with."""
    w = _load(weight, start, size, WEIGHT, WHOLE, N)
    if KIND == "float32":
        # The master restarts where the weight was assigned.
        number = _load(kept, start, size, tl.float32, WHOLE, N)
        value = w.to(tl.float32)
        w = tl.where(rounded(number, WEIGHT).to(tl.float32) == value, number, value)
    elif KIND == "remainder":
        w = joined(w, _load(kept, start, size, tl.int16, WHOLE, N), WEIGHT)
    return w.to(tl.float32)


@triton.jit
def _store_weight(
    weight,
    kept,
    key,
    start,
    size,
    w,
    WEIGHT: tl.constexpr,
    KIND: tl.constexpr,
    WHOLE: tl.constexpr,
    N: tl.constexpr,
):
    """Writes the weight and its kept part, for the number after a step."""
    if KIND == "float32":
        _store(kept, start, size, w, tl.float32, WHOLE, N)
        w = rounded(w, WEIGHT)
    elif KIND == "remainder":
        w, low = parts(w, WEIGHT)
        _store(kept, start, size, low, tl.int16, WHOLE, N)
    elif KIND == "stochastic":
        w = drawn(w, random_bits(key, start + tl.arange(0, N)), WEIGHT)
    _store(weight, start, size, w, WEIGHT, WHOLE, N)


@triton.jit
def _decayed(w, decay):
    if decay is not None:
        w = w - w * tl.load(decay)
    return w


# --- Gradient descent ---------------------------------------------------------------


@triton.jit
def _sgd_block(
    gradient,
    weight,
    kept,
    key,
    start,
    size,
    inv_scale,
    rate,
    decay,
    GRADIENT: tl.constexpr,
    WEIGHT: tl.constexpr,
    KIND: tl.constexpr,
    WHOLE: tl.constexpr,
    N: tl.constexpr,
):
    g = _gradient(gradient, start, size, inv_scale, GRADIENT, WHOLE, N)
    w = _weight(weight, kept, start, size, WEIGHT, KIND, WHOLE, N)
    w = _decayed(w, decay) - g * rate
    _store_weight(weight, kept, key, start, size, w, WEIGHT, KIND, WHOLE, N)


@kernel("learning_rate", "decay")
def sgd(
    table,
    gradients,
    owners,
    count,
    iterations,
    found_inf,
    inv_scale,
    learning_rate,
    decay,
    GRADIENT: tl.constexpr,
    WEIGHT: tl.constexpr,
    KIND: tl.constexpr,
    N: tl.constexpr,
):
    """The step of `rules.SGD`."""
    if tl.load(found_inf) == 1.0:
        return
    owner, start, size = _place(table, owners, count, N)
    gradient = tl.load(gradients + owner)
    weight, kept, key = _weight_at(table, 3, count, owner, iterations, KIND)
    inv_scale = tl.load(inv_scale)
    rate = tl.load(learning_rate)
    misaligned = (gradient | weight | kept) % _ALIGNMENT
    if (misaligned == 0) & (start + N <= size):
        _sgd_block(
            gradient, weight, kept, key, start, size, inv_scale, rate, decay,
            GRADIENT, WEIGHT, KIND, True, N,
        )  # fmt: skip
    else:
        _sgd_block(
            gradient, weight, kept, key, start, size, inv_scale, rate, decay,
            GRADIENT, WEIGHT, KIND, False, N,
        )  # fmt: skip


@triton.jit
def _momentum_block(
    gradient,
    weight,
    kept,
    key,
    slot,
    start,
    size,
    inv_scale,
    rate,
    decay,
    momentum,
    NESTEROV: tl.constexpr,
    GRADIENT: tl.constexpr,
    WEIGHT: tl.constexpr,
    KIND: tl.constexpr,
    WHOLE: tl.constexpr,
    N: tl.constexpr,
):
    g = _gradient(gradient, start, size, inv_scale, GRADIENT, WHOLE, N)
    m = _load(slot, start, size, tl.float32, WHOLE, N)
    w = _weight(weight, kept, start, size, WEIGHT, KIND, WHOLE, N)
    descent = g * rate
    m = m * momentum - descent
    step = m
    if NESTEROV:
        step = m * momentum - descent
    _store(slot, start, size, m, tl.float32, WHOLE, N)
    w = _decayed(w, decay) + step
    _store_weight(weight, kept, key, start, size, w, WEIGHT, KIND, WHOLE, N)


@kernel("learning_rate", "decay", "momentum")
def momentum(
    table,
    gradients,
    owners,
    count,
    iterations,
    found_inf,
    inv_scale,
    learning_rate,
    decay,
    momentum,
    NESTEROV: tl.constexpr,
    GRADIENT: tl.constexpr,
    WEIGHT: tl.constexpr,
    KIND: tl.constexpr,
    N: tl.constexpr,
):
    """The step of `rules.Momentum`."""
    if tl.load(found_inf) == 1.0:
        return
    owner, start, size = _place(table, owners, count, N)
    gradient = tl.load(gradients + owner)
    weight, kept, key = _weight_at(table, 4, count, owner, iterations, KIND)
    slot = _address(table, 3, count, owner)
    inv_scale = tl.load(inv_scale)
    rate = tl.load(learning_rate)
    misaligned = (gradient | weight | kept | slot) % _ALIGNMENT
    if (misaligned == 0) & (start + N <= size):
        _momentum_block(
            gradient, weight, kept, key, slot, start, size, inv_scale, rate, decay,
            momentum, NESTEROV, GRADIENT, WEIGHT, KIND, True, N,
        )  # fmt: skip
    else:
        _momentum_block(
            gradient, weight, kept, key, slot, start, size, inv_scale, rate, decay,
            momentum, NESTEROV, GRADIENT, WEIGHT, KIND, False, N,
        )  # fmt: skip


# --- Adam ---------------------------------------------------------------------------


@triton.jit
def _adam_block(
    gradient,
    weight,
    kept,
    key,
    first,
    second,
    start,
    size,
    inv_scale,
    alpha,
    decay,
    rate_1,
    rate_2,
    epsilon,
    GRADIENT: tl.constexpr,
    WEIGHT: tl.constexpr,
    KIND: tl.constexpr,
    WHOLE: tl.constexpr,
    N: tl.constexpr,
):
    g = _gradient(gradient, start, size, inv_scale, GRADIENT, WHOLE, N)
    m = _load(first, start, size, tl.float32, WHOLE, N)
    v = _load(second, start, size, tl.float32, WHOLE, N)
    w = _weight(weight, kept, start, size, WEIGHT, KIND, WHOLE, N)
    m = m + (g - m) * rate_1
    v = v + (g * g - v) * rate_2
    # Rounded as in IEEE 754, which `/` and `tl.sqrt` are not.
    step = tl.div_rn(m * alpha, tl.sqrt_rn(v) + epsilon)
    _store(first, start, size, m, tl.float32, WHOLE, N)
    _store(second, start, size, v, tl.float32, WHOLE, N)
    w = _decayed(w, decay) - step
    _store_weight(weight, kept, key, start, size, w, WEIGHT, KIND, WHOLE, N)


@kernel("alpha", "decay", "rate_1", "rate_2", "epsilon")
def adam(
    table,
    gradients,
    owners,
    count,
    iterations,
    found_inf,
    inv_scale,
    alpha,
    decay,
    rate_1,
    rate_2,
    epsilon,
    GRADIENT: tl.constexpr,
    WEIGHT: tl.constexpr,
    KIND: tl.constexpr,
    N: tl.constexpr,
):
    """The step of `rules.Adam`, where `rate_1` is `1 - beta_1`."""
    if tl.load(found_inf) == 1.0:
        return
    owner, start, size = _place(table, owners, count, N)
    gradient = tl.load(gradients + owner)
    weight, kept, key = _weight_at(table, 5, count, owner, iterations, KIND)
    first = _address(table, 3, count, owner)
    second = _address(table, 4, count, owner)
    inv_scale = tl.load(inv_scale)
    alpha = tl.load(alpha)
    misaligned = (gradient | weight | kept | first | second) % _ALIGNMENT
    if (misaligned == 0) & (start + N <= size):
        _adam_block(
            gradient, weight, kept, key, first, second, start, size, inv_scale, alpha,
            decay, rate_1, rate_2, epsilon, GRADIENT, WEIGHT, KIND, True, N,
        )  # fmt: skip
    else:
        _adam_block(
            gradient, weight, kept, key, first, second, start, size, inv_scale, alpha,
            decay, rate_1, rate_2, epsilon, GRADIENT, WEIGHT, KIND, False, N,
        )  # fmt: skip


# True with TRITON_INTERPRET=1: Triton then interprets the kernels on the host.
ARE_INTERPRETED = not isinstance(adam, triton.JITFunction)


# --- LARS ---------------------------------------------------------------------------
#
# LARS takes three launches. `lars_squares` sums the squares of each block. `lars_norms`
# adds the sums of each tensor, always in the same order. `lars` makes the step, with
# the rates that follow from the norms.

# The number of block sums that are added at once.
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
    kept,
    start,
    size,
    inv_scale,
    weight_decay,
    GRADIENT: tl.constexpr,
    WEIGHT: tl.constexpr,
    KIND: tl.constexpr,
    WHOLE: tl.constexpr,
    N: tl.constexpr,
):
    g = _gradient(gradient, start, size, inv_scale, GRADIENT, WHOLE, N)
    w = _weight(weight, kept, start, size, WEIGHT, KIND, WHOLE, N)
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
    WEIGHT: tl.constexpr,
    KIND: tl.constexpr,
    N: tl.constexpr,
):
    """Writes for each block the sums of squares of the direction and of the weight."""
    if tl.load(found_inf) == 1.0:
        return
    owner, start, size = _place(table, owners, count, N)
    gradient = tl.load(gradients + owner)
    weight, kept, _ = _weight_at(table, 4, count, owner, None, KIND)
    inv_scale = tl.load(inv_scale)
    misaligned = (gradient | weight | kept) % _ALIGNMENT
    if (misaligned == 0) & (start + N <= size):
        d, w = _squares_block(
            gradient, weight, kept, start, size, inv_scale, weight_decay,
            GRADIENT, WEIGHT, KIND, True, N,
        )  # fmt: skip
    else:
        d, w = _squares_block(
            gradient, weight, kept, start, size, inv_scale, weight_decay,
            GRADIENT, WEIGHT, KIND, False, N,
        )  # fmt: skip
    block = tl.program_id(0)
    tl.store(squares + block, d)
    tl.store(squares + tl.num_programs(0) + block, w)


@kernel("squares", "norms", "blocks")
def lars_norms(
    table, count, blocks, squares, norms, SUMMED: tl.constexpr, N: tl.constexpr
):
    """Writes the norms of directions and weights. Each program takes one tensor.

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
    kept,
    key,
    slot,
    start,
    size,
    inv_scale,
    rate,
    momentum,
    weight_decay,
    NESTEROV: tl.constexpr,
    GRADIENT: tl.constexpr,
    WEIGHT: tl.constexpr,
    KIND: tl.constexpr,
    WHOLE: tl.constexpr,
    N: tl.constexpr,
):
    g = _gradient(gradient, start, size, inv_scale, GRADIENT, WHOLE, N)
    v = _load(slot, start, size, tl.float32, WHOLE, N)
    w = _weight(weight, kept, start, size, WEIGHT, KIND, WHOLE, N)
    d = _with_penalty(g, w, weight_decay) * rate
    v = v * momentum + d
    update = v
    if NESTEROV:
        update = v * momentum + d
    _store(slot, start, size, v, tl.float32, WHOLE, N)
    _store_weight(weight, kept, key, start, size, w - update, WEIGHT, KIND, WHOLE, N)


@kernel("rates", "momentum", "weight_decay")
def lars(
    table,
    gradients,
    owners,
    count,
    iterations,
    found_inf,
    inv_scale,
    rates,
    momentum,
    weight_decay,
    NESTEROV: tl.constexpr,
    GRADIENT: tl.constexpr,
    WEIGHT: tl.constexpr,
    KIND: tl.constexpr,
    N: tl.constexpr,
):
    """The step of `LARSRule` with classic momentum, and with a rate for each tensor."""
    if tl.load(found_inf) == 1.0:
        return
    owner, start, size = _place(table, owners, count, N)
    gradient = tl.load(gradients + owner)
    weight, kept, key = _weight_at(table, 4, count, owner, iterations, KIND)
    slot = _address(table, 3, count, owner)
    inv_scale = tl.load(inv_scale)
    rate = tl.load(rates + owner)
    misaligned = (gradient | weight | kept | slot) % _ALIGNMENT
    if (misaligned == 0) & (start + N <= size):
        _lars_block(
            gradient, weight, kept, key, slot, start, size, inv_scale, rate, momentum,
            weight_decay, NESTEROV, GRADIENT, WEIGHT, KIND, True, N,
        )  # fmt: skip
    else:
        _lars_block(
            gradient, weight, kept, key, slot, start, size, inv_scale, rate, momentum,
            weight_decay, NESTEROV, GRADIENT, WEIGHT, KIND, False, N,
        )  # fmt: skip
