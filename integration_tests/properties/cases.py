"""A case: what is trained, by what, on which gradients, in which way."""

import dataclasses
import math

import keras
import numpy as np
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_numpy

from integration_tests.properties import optimizers, policies
from integration_tests.properties.optimizers import mostly

BACKEND = keras.backend.backend()
NOT_FINITE = [np.inf, -np.inf, np.nan]
# On JAX float64 would be float32 without a word.
WIDE = [] if BACKEND == "jax" else ["float64"]

# --- How a step is taken ----------------------------------------------------------

# What the caller does with the loss scale, and what `apply` is told.
SCALED_BY_SCALE_LOSS, SAYS_SCALED = "scale_loss", "scaled=True"
UNSCALES, SAYS_UNSCALED = "get_unscaled_gradients", "scaled=False"
FLOWS = [SCALED_BY_SCALE_LOSS, SAYS_SCALED, UNSCALES, SAYS_UNSCALED]

APPLY, PAIRS, STATELESS = "apply", "apply_gradients", "stateless_apply"
CALLS = [APPLY, PAIRS]
if BACKEND != "tensorflow":
    # Keras has none on TensorFlow.
    CALLS.append(STATELESS)

COMPILED = {"tensorflow": ["graph", "xla"], "jax": ["jit"], "torch": []}[BACKEND]

# --- How a run goes on ------------------------------------------------------------

OWN_VARIABLES, VARIABLES, KERAS_FILE = "save_own_variables", "variables", ".keras"


@dataclasses.dataclass
class Step:
    """What one step is given.

    Args:
        gradients: List of arrays, unscaled, or None.
        bad: Tuple of the positions of a gradient and of an element in it, and of what
            that is to be; None if all are finite.
        flow: One of `FLOWS`.
        call: One of `CALLS`.
        update_scale: Bool.
    """

    gradients: list
    bad: tuple | None
    flow: str
    call: str
    update_scale: bool


@dataclasses.dataclass
class Case:
    """See `cases`.

    Args:
        inner: `optimizers.Inner`.
        policy: `policies.Policy`.
        start: List of arrays, the first values of the variables, in float64.
        dtypes: List of strings, of the variables.
        gradient_dtypes: List of strings.
        master_weights: `"auto"`, True or False.
        has_kernels: Bool. Whether fast paths are on.
        execution: `"eager"` or one of `COMPILED`.
        steps: List of `Step`s.
        saved: Tuple of the number of steps after which the run is saved, and how; None
            if it is not.
    """

    inner: optimizers.Inner
    policy: policies.Policy
    start: list
    dtypes: list
    gradient_dtypes: list
    master_weights: object
    has_kernels: bool
    execution: str
    steps: list
    saved: tuple | None


# JAX compiles each of its operations for each new shape, XLA a step for each tensor.
FEW_SHAPES = st.sampled_from([(3, 5), (), (7,), (2, 3, 4)])
SHAPES = FEW_SHAPES
if BACKEND != "jax":
    SHAPES |= st_numpy.array_shapes(min_dims=0, max_dims=3, max_side=9)
EMPTY = st.sampled_from([(0,), (0, 1)])


@st.composite
def shapes(draw, inner, few):
    """One to five shapes, or very many small ones; at least one is not empty."""
    first = draw(FEW_SHAPES if few else SHAPES)
    if draw(st.integers(0, 19)) == 0 and not few and BACKEND != "jax":
        return [first] * 60
    one = FEW_SHAPES if few else SHAPES
    if not inner.reduces:
        one |= EMPTY
    return [first, *draw(st.lists(one, max_size=2 if few else 4))]


@st.composite
def values(draw, random, shape, size):
    factor = draw(mostly(size, size, 0.0, -0.0))
    return (random.normal(size=shape) if factor else np.ones(shape)) * factor


@st.composite
def bad_elements(draw, start, missing):
    i = draw(st.sampled_from([i for i, w in enumerate(start) if w.size]))
    if i in missing:
        return None
    position = draw(st.integers(0, math.prod(start[i].shape) - 1))
    return i, position, draw(st.sampled_from(NOT_FINITE))


@st.composite
def cases(draw, execution="eager", saved=(None,), max_steps=6):
    """Any case.

    Args:
        execution: See `Case`. Defaults to `"eager"`.
        saved: The ways to save a run, None among them. Defaults to `(None,)`.
        max_steps: Int. Defaults to `6`.
    """
    is_compiled = execution != "eager"
    inner = draw(optimizers.inners())
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    start = [
        np.asarray(random.normal(size=shape)) * draw(mostly(1.0, 0.0, -0.0))
        for shape in draw(shapes(inner, few=is_compiled))
    ]
    # On TensorFlow Keras's global norm is of one dtype, and its Muon knows no float64.
    is_narrow = "global_clipnorm" in inner.options or inner.name == "Muon"
    wide = [] if is_narrow else WIDE
    # On PyTorch Keras's Nadam divides by a bfloat16 of NumPy, which PyTorch refuses.
    is_refused = BACKEND == "torch" and inner.name == "Nadam"
    bfloat16 = [] if is_refused else ["bfloat16"]
    of_all = draw(mostly("float32", "float16", *bfloat16, *wide))
    others = st.sampled_from(["float32", "float16"])
    if {"global_clipnorm", "gradient_accumulation_steps"} <= set(inner.options):
        others = st.just(of_all)
    dtypes = [draw(mostly(of_all, draw(others))) for _ in start]
    gradient_dtypes = [draw(mostly(dtype, draw(others))) for dtype in dtypes]
    # The square of the last one is inf. PyTorch's kernels of Adam multiply by
    # `1 - beta_2` first, and Keras later: at 1e30 both are.
    is_late = BACKEND == "torch" and inner.name in ("Adam", "AdamW")
    huge = 1e30 if is_late else 1e20
    if inner.clips_by_the_norm_of_all:
        # So that it is inf of any window, and not of one that is longer alone.
        huge = 1e30
    size = draw(mostly(1.0, 1e-3, 30.0, huge))

    # A compiled step is one program: all are taken in the same way.
    count = draw(st.integers(2, max_steps))
    ways = st.tuples(
        st.sampled_from(FLOWS),
        st.sampled_from(CALLS),
        # The first variable always has a gradient.
        st.sets(st.integers(1, len(start)), max_size=1),
        mostly(True, False),
    )
    fixed_way = draw(ways)
    steps = []
    for _ in range(count):
        flow, call, missing, update_scale = fixed_way if is_compiled else draw(ways)
        gradients = [
            None if i in missing else draw(values(random, w.shape, size))
            for i, w in enumerate(start)
        ]
        bad = draw(mostly(None, draw(bad_elements(start, missing))))
        steps.append(Step(gradients, bad, flow, call, update_scale))
    how = draw(st.sampled_from(saved))
    return Case(
        inner,
        draw(policies.ANY),
        start,
        dtypes,
        gradient_dtypes,
        draw(st.sampled_from(["auto", True, False])),
        draw(st.booleans()),
        execution,
        steps,
        how and (draw(st.integers(1, count - 1)), how),
    )
