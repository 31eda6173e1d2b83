"""What a program trains, and by what: strategies for the set-up of a machine.

Where a choice has a usual value, that is listed more often than others, and first: it
is what Hypothesis shrinks to.
"""

import dataclasses
from typing import Any

import numpy as np
from hypothesis import strategies as st

from integration_tests.attack import gradients
from integration_tests.attack.execution import BACKEND
from integration_tests.attack.optimizers import one_in, optimizers
from integration_tests.attack.policies import POLICIES, between

# Of each backend, how a step may be compiled: in a mode's program it is one of these.
EXECUTIONS = {
    "tensorflow": {"graph": ["graph"], "xla": ["xla"]},
    "jax": {"jit": ["jit", "donated"]},
    "torch": {},
}[BACKEND]
# On JAX float64 would silently be float32.
WIDE = [] if BACKEND == "jax" else ["float64"]
DTYPES = ["float32", "float32", "float16", "bfloat16", *WIDE]
MASTERS = ["auto", False, "remainder", "remainder8", "stochastic"]
GUARDS = [
    None,
    None,
    {"max_norm": 3.0},
    {"threshold": 0.5, "window": 3, "warmup": 2},
    {"threshold": 2.0, "window": 5, "warmup": 3, "max_norm": 100.0},
]
RECORDS = [[], [], ["record_steps"], ["record_overflows"]]
RECORDS += [["record_overflows", "record_steps"]]

# JAX compiles each operation for each new shape, XLA a step for each tensor.
FEW_SHAPES = [(), (7,), (3, 5), (2, 3, 4), (0,), (2**14 + 3,)]
# XLA's CPU may compute a number twice, each time rounded in its own way.
LARGE_SHAPES = [(60_000, 8), (2**18 + 5,)]
# Of weights whose slots are in 8 bits.
SHAPES_OF_BLOCKS = [(64, 64), (33, 128)]
# Not (0, 3), which Keras on TensorFlow takes for a bias where dtypes differ.
RARE_SHAPES = [(0,), (0, 1), (2**14 + 3,), (131, 130)]
# Of which a variable of a narrower dtype has the largest, or zero.
SPECIAL = [0.0, -0.0, 1e-45, -1e-39, 6e-8, 2.0**-14, 65504.0, -3.38e38, 3.4028e38]
SPECIAL += [np.inf, np.nan]
# Sizes of gradients that a dtype may not hold, or not their squares.
EXTREMES = [1e-40, 1e-37, 1e-30, 1e-15, 1e-8, 1e15, 1e30, 1e37, 3e38, 0.0]

# What the caller does with the loss scale, and what `apply` is told.
SCALED_BY_SCALE_LOSS, SAYS_SCALED = "scale_loss", "scaled=True"
UNSCALES, SAYS_UNSCALED = "get_unscaled_gradients", "scaled=False"
FLOWS = [SCALED_BY_SCALE_LOSS, SAYS_SCALED, UNSCALES, SAYS_UNSCALED]
APPLY, PAIRS, STATELESS = "apply", "apply_gradients", "stateless_apply"
# Keras has no `stateless_apply` on TensorFlow.
CALLS = [APPLY, PAIRS] + [STATELESS] * (BACKEND != "tensorflow")
SEEDS = st.integers(0, 2**16)


@dataclasses.dataclass
class Weight:
    """A variable, and the dtype of its gradients.

    Its first values are random numbers of about this size, some of which may be
    `SPECIAL`.
    """

    shape: tuple
    dtype: str
    gradient_dtype: str
    size: float
    is_special: bool

    def start(self, random):
        values = np.clip(random.normal(size=self.shape) * self.size, -65504, 65504)
        return special(random, values, self.dtype) if self.is_special else values


@dataclasses.dataclass
class Setup:
    """The set-up of a program."""

    optimizer: Any
    policy: Any
    weights: list
    seed: int
    master_weights: Any
    slot_dtype: str | None
    guard: dict | None
    records: list
    execution: str

    @property
    def is_compiled(self):
        return self.execution != "eager"


@dataclasses.dataclass
class Step:
    """How a step is taken: one of `FLOWS`, of `CALLS`, and what the gradients are like.

    The layouts, of which `"missing"` is None in place of a gradient, are those of the
    first variables, and again of the next ones.
    """

    flow: str
    call: str
    update_scale: bool
    layouts: list


@dataclasses.dataclass
class Numbers:
    """The numbers of a step's gradients: random ones of about this size.

    `bad` is the position of a variable, and the number that its gradient has somewhere.
    """

    size: float
    seed: int
    bad: tuple | None = None


def special(random, values, dtype):
    """Returns an array with some `SPECIAL` numbers, as far as `dtype` has them."""
    count = len(SPECIAL) if random.random() < 0.3 else -2
    numbers = random.choice(SPECIAL[:count], values.shape)
    mixed = np.where(random.random(values.shape) < 0.3, numbers, values)
    limit = {"float16": 65504.0}.get(dtype, 3.38e38)
    return np.where(np.isfinite(mixed), np.clip(mixed, -limit, limit), mixed)


@st.composite
def shapes(draw, is_compiled, has_blocks):
    if has_blocks and draw(one_in(2)):
        return draw(st.sampled_from(SHAPES_OF_BLOCKS))
    if is_compiled and draw(one_in(33)):
        return draw(st.sampled_from(LARGE_SHAPES))
    if is_compiled or BACKEND == "jax":
        return draw(st.sampled_from(FEW_SHAPES))
    if draw(one_in(7)):
        return draw(st.sampled_from(RARE_SHAPES))
    return tuple(draw(st.lists(st.integers(1, 7), max_size=3)))


@st.composite
def weights(draw, is_compiled, has_blocks):
    count = draw(st.integers(1, 3 if is_compiled else 6))
    usual, found = draw(st.sampled_from(DTYPES)), []
    for _ in range(count):
        dtype = draw(st.sampled_from([usual, usual, usual, *DTYPES]))
        of_gradients = [dtype, dtype, "float32", "float16", "bfloat16", *WIDE]
        size = 6e4 if draw(one_in(20)) else 10 ** draw(between(-2, 1))
        found.append(
            Weight(
                draw(shapes(is_compiled, has_blocks)),
                dtype,
                draw(st.sampled_from(of_gradients)),
                size,
                draw(one_in(20)),
            )
        )
    is_long = not is_compiled and BACKEND != "jax" and draw(one_in(20))
    return found[:1] * 60 if is_long else found


@st.composite
def setups(draw, mode):
    """Strategies for a `Setup` in one of the `EXECUTIONS`, or else eagerly."""
    optimizer = draw(optimizers())
    slot_dtype = draw(st.sampled_from([None, None, "bfloat16", "int8"]))
    return Setup(
        optimizer,
        draw(POLICIES),
        draw(weights(mode in EXECUTIONS, slot_dtype == "int8")),
        draw(SEEDS),
        draw(st.sampled_from(MASTERS)),
        slot_dtype,
        # Each member of a pair would have its window.
        None if optimizer.biases else draw(st.sampled_from(GUARDS)),
        draw(st.sampled_from(RECORDS)),
        draw(st.sampled_from(EXECUTIONS.get(mode, ["eager"]))),
    )


@st.composite
def steps(draw, is_compiled=False):
    # Keras's sums refuse sparse ones under `jax.jit`.
    others = [] if is_compiled and BACKEND == "jax" else gradients.LAYOUTS
    layouts = ["plain"] * 6 + others * (6 // max(len(others), 1)) + ["missing"]
    return Step(
        draw(st.sampled_from(FLOWS)),
        draw(st.sampled_from(CALLS)),
        not draw(one_in(7)),
        draw(st.lists(st.sampled_from(layouts), min_size=1, max_size=6)),
    )


@st.composite
def numbers(draw, *sizes, is_bad=False):
    size, seed, bad = draw(st.sampled_from(sizes)), draw(SEEDS), None
    if is_bad:
        bad = draw(st.integers(0, 5)), draw(st.sampled_from(gradients.NOT_FINITE))
    return Numbers(size, seed, bad)
