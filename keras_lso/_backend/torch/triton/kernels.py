"""Kernels that step many tensors in one pass, in Triton's language.

Each reads a gradient of any float dtype, unscales it, and updates the slots and the
weight. A weight of 16 bits is trained as the float32 number that its kind of master
makes of it: `KIND` is its name in `masters.KINDS`, and None for float32 weights. If
`found_inf` is 1.0 nothing is written.

The formulas are those of the classes in `rules.py` and `masters.py`, operation by
operation. They are launched without the fusion of products and sums, so that each
operation rounds as it does there.

Tensors are given by their addresses, in a table of `count` columns. Its rows are their
numbers of elements, the first block of each, and then the addresses of the weights, of
each slot and of the parts kept with the weights, if there are any. If their kind
draws random bits, there are two rows more: the positions of the weights among those of
the optimizer, and the place of the first element of each in the whole tensor.
`gradients` is one more such row, of other addresses in each step. `owners` holds for
each block the column of its tensor. `found_inf`, `inv_scale`, `learning_rate`, `alpha`
and `decay` point to a float32, and `iterations` to an int32, if random bits are drawn;
the other coefficients are numbers.

Only `steps.py` imports this file, when tensors on a GPU come: it needs Triton.
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

# So many elements are a block, of so many warps: each thread has four, 16 bytes in
# float32. With more the compiler would give a thread other elements in float16, and
# exchange them through shared memory.
BLOCK = 1024
WARPS = 8
_ALIGNMENT = tl.constexpr(16)
_TABLES = ["table", "gradients", "owners", "count"]
_VARY = [*_TABLES, "iterations", "found_inf", "inv_scale"]


def kernel(*coefficients):
    """Returns a decorator for kernels, which are compiled once for all arguments.

    Otherwise they would be compiled again for a pointer that is aligned differently.
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
    # An int64, as what the table holds: a tensor may have more than 2**31 elements.
    start = (block - _address(table, 1, count, owner)) * N
    return owner, start, _address(table, 0, count, owner)


@triton.jit
def _pointers(address, start, TYPE: tl.constexpr, WHOLE: tl.constexpr, N: tl.constexpr):
    if WHOLE:
        # It is a multiple already. This way it is one of whatever the caller gives, and
        # the compiler may be told so: it then loads 16 bytes at once.
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
    """Returns the places of a weight and its kept part, and a key of random bits.

    `row` is the first of the table after the slots. Without `iterations` no bits are
    drawn.
    """
    weight = _address(table, 2, count, owner)
    # Where nothing is kept or drawn they are never used.
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
        # It restarts where the weight was assigned.
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


# As with TRITON_INTERPRET=1, by which Triton runs what it would compile on the host.
ARE_INTERPRETED = not isinstance(adam, triton.JITFunction)


# --- LARS ---------------------------------------------------------------------------
#
# Three launches: `lars_squares` sums the squares of each block, `lars_norms` adds those
# of a tensor, always in the same order, and with the rates that come of the norms
# `lars` makes the step.

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
    """Writes for each block the sum of squares of the direction, and of the weight."""
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
    """The step of `LARSRule` with classic momentum, a rate for each tensor."""
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
