"""A random case: what is trained, by what, and in which way."""

import copy
import dataclasses
import pickle
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
# How a mode compiles a step: JAX may write the new values over the old ones.
EXECUTIONS = {"jit": ["jit", "donated"]}
# How a run is saved, those of a model last; and how its optimizer is made anew, which
# is copied without its state.
OWN_VARIABLES, VARIABLES = "save_own_variables", "variables"
WEIGHTS_FILE, KERAS_FILE, PICKLE = ".weights.h5", ".keras", "pickle"
OF_MODELS = [WEIGHTS_FILE, KERAS_FILE, PICKLE]
SAVED = [OWN_VARIABLES, VARIABLES, *OF_MODELS]
# What holds the numbers alone, so that masters of another kind may load them.
OF_NUMBERS = [OWN_VARIABLES, WEIGHTS_FILE]
COPIES = {
    "from_config": lambda made: type(made).from_config(made.get_config()),
    "deepcopy": copy.deepcopy,
    "pickle": lambda made: pickle.loads(pickle.dumps(made)),
}
KINDS = ["auto", False, "remainder", "stochastic"]
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
# Of which a variable of a narrower dtype has the largest, or zero. A run of which a
# weight is inf or NaN has one step.
SPECIAL = [0.0, -0.0, 1e-45, -1e-39, 6e-8, 2.0**-14, 65504.0, -3.38e38, 3.4028e38]
SPECIAL += [np.inf, np.nan]
# A compiled step has cost its seconds before the first.
STEPS = {"eager": 8, "graph": 16, "xla": 16, "jit": 16, "donated": 16}


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
        saved: Tuple of the number of steps after which the run is saved, how, and how
            its optimizer is copied; None if it is not.
        loaded_as: Like `master_weights`, of the run that is loaded.
        guard: Dict of the arguments of a `SpikeGuard`; None for no guard.
        records: List of methods that the optimizer begins its records with.
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
    loaded_as: Any
    guard: dict | None
    records: list


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
    saved = one_of(*SAVED)(random) if is_saved else None
    masters, slot_dtype = one_of(*KINDS)(random), one_of(None, None, "bfloat16")(random)
    is_other = saved in OF_NUMBERS and slot_dtype is None
    execution = one_of(*EXECUTIONS.get(mode, [mode]))(random)
    # Each member of a `MultiOptimizer` would have its window.
    guards = GUARDS if "members" not in inner.options else [None]
    return Case(
        inner,
        policies.policy(random),
        [_start(random, *column) for column in zip(shapes, dtypes, strict=True)],
        dtypes,
        of_gradients,
        masters,
        slot_dtype,
        execution if is_compiled else "eager",
        saved and (int(random.integers(1, 8)), saved, one_of(*COPIES)(random)),
        one_of(masters, "auto", *KINDS[2:])(random) if is_other else masters,
        one_of(*guards)(random),
        one_of(*RECORDS)(random),
    )


def _start(random, shape, dtype):
    """Returns the first values of a variable; now and then those that fill float16."""
    size = 6e4 if random.random() < 0.05 else 10 ** random.uniform(-2, 1)
    found = np.clip(random.normal(size=shape) * size, -65504, 65504)
    return special(random, found, dtype) if random.random() < 0.05 else found


def special(random, values, dtype):
    """Returns an array with some `SPECIAL` numbers, as far as `dtype` has them."""
    count = len(SPECIAL) if random.random() < 0.3 else -2
    found = np.where(
        random.random(values.shape) < 0.3,
        random.choice(SPECIAL[:count], values.shape),
        values,
    )
    limit = {"float16": 65504.0}.get(dtype, 3.38e38)
    return np.where(np.isfinite(found), np.clip(found, -limit, limit), found)


def _shape(random, is_compiled):
    if is_compiled and random.random() < 0.03:
        return one_of(*LARGE_SHAPES)(random)
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
        f"slot_dtype={case.slot_dtype!r}, saved={case.saved}, "
        f"loaded_as={case.loaded_as!r}, guard={case.guard}, records={case.records}, "
        f"{case.execution}\n"
        f"  variables and gradients: {', '.join(variables)}"
    )
