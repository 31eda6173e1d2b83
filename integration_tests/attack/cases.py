"""A random case: what is trained, by what, and in which way."""

import dataclasses
from typing import Any

import keras
import numpy as np

from integration_tests.attack import optimizers, policies
from integration_tests.attack.optimizers import one_of

BACKEND = keras.backend.backend()
# On JAX float64 would be float32 without a word.
WIDE = [] if BACKEND == "jax" else ["float64"]
GRADIENT_DTYPES = ["float32", "float16", "bfloat16", *WIDE]

# What the caller does with the loss scale, and what `apply` is told.
SCALED_BY_SCALE_LOSS, SAYS_SCALED = "scale_loss", "scaled=True"
UNSCALES, SAYS_UNSCALED = "get_unscaled_gradients", "scaled=False"
FLOWS = [SCALED_BY_SCALE_LOSS, SAYS_SCALED, UNSCALES, SAYS_UNSCALED]

APPLY, PAIRS, STATELESS = "apply", "apply_gradients", "stateless_apply"
# Keras has no `stateless_apply` on TensorFlow.
CALLS = [APPLY, PAIRS] + [STATELESS] * (BACKEND != "tensorflow")

COMPILED = {"tensorflow": ["graph", "xla"], "jax": ["jit"], "torch": []}[BACKEND]
OWN_VARIABLES, VARIABLES, KERAS_FILE = "save_own_variables", "variables", ".keras"

# JAX compiles each operation for each new shape, XLA a step for each tensor.
FEW_SHAPES = [(), (7,), (3, 5), (2, 3, 4), (0,), (2**14 + 3,)]
SAVED = [OWN_VARIABLES, VARIABLES, KERAS_FILE]
# A compiled step has cost its seconds before the first.
STEPS = {"eager": 8, "graph": 16, "xla": 16, "jit": 16}


@dataclasses.dataclass
class Case:
    """What is trained, by what, and in which way.

    Args:
        inner: `optimizers.Inner`.
        policy: `policies.Policy`.
        start: List of arrays, the first values of the variables, in float64.
        dtypes: List of strings, of the variables.
        gradient_dtypes: List of strings.
        master_weights: `"auto"`, False or a kind of masters.
        slot_dtype: None or `"bfloat16"`.
        execution: `"eager"` or one of `COMPILED`.
        saved: Tuple of the number of steps after which the run is saved, and how; None
            if it is not.
    """

    inner: Any
    policy: Any
    start: list
    dtypes: list
    gradient_dtypes: list
    master_weights: Any
    slot_dtype: str | None
    execution: str
    saved: tuple | None


def case(random, mode):
    """Returns a `Case`. Its steps depend on the scale, and are drawn later."""
    is_compiled = mode in COMPILED
    inner = optimizers.inner(random)
    shapes = [_shape(random, is_compiled) for _ in range(random.integers(1, 7))]
    shapes = shapes[: 3 if is_compiled else 6]
    if not is_compiled and BACKEND != "jax" and random.random() < 0.05:
        shapes = shapes[:1] * 60
    dtypes = ["float32", "float32", "float16", "bfloat16", *WIDE]
    of_all = one_of(*dtypes)(random)
    dtypes = [one_of(of_all, of_all, of_all, *dtypes)(random) for _ in shapes]
    of_gradients = [one_of(dtype, dtype, *GRADIENT_DTYPES)(random) for dtype in dtypes]
    # What a method has excluded from decay is in no config.
    is_saved = random.random() < 0.3 and "bias excluded" not in inner.words
    return Case(
        inner,
        policies.policy(random),
        [_start(random, shape) for shape in shapes],
        dtypes,
        of_gradients,
        one_of("auto", False, "remainder", "stochastic")(random),
        one_of(None, None, "bfloat16")(random),
        mode if is_compiled else "eager",
        (int(random.integers(1, 8)), one_of(*SAVED)(random)) if is_saved else None,
    )


def _start(random, shape):
    """Returns the first values of a variable; now and then those that fill float16."""
    size = 6e4 if random.random() < 0.05 else 10 ** random.uniform(-2, 1)
    return np.clip(random.normal(size=shape) * size, -65504, 65504)


def _shape(random, is_compiled):
    if is_compiled or BACKEND == "jax":
        return one_of(*FEW_SHAPES)(random)
    if random.random() < 0.15:
        return one_of((0,), (0, 3), (2**14 + 3,), (131, 130))(random)
    return tuple(int(n) for n in random.integers(1, 8, size=random.integers(0, 4)))


def words(case):
    """Says what a case is, without the numbers in its variables."""
    columns = case.dtypes, case.start, case.gradient_dtypes
    variables = [f"{d}{v.shape} of {g}" for d, v, g in zip(*columns, strict=True)]
    return (
        f"{case.inner}\n  {case.policy}, master_weights={case.master_weights!r}, "
        f"slot_dtype={case.slot_dtype!r}, saved={case.saved}\n"
        f"  variables and gradients: {', '.join(variables)}"
    )
