"""A random case: what is trained, by what, and in which way."""

import numpy as np

from integration_tests.attack import gradients, optimizers, policies
from integration_tests.attack.optimizers import one_of
from integration_tests.properties import cases as properties
from integration_tests.properties.cases import BACKEND, WIDE, Case

# JAX compiles each operation for each new shape, XLA a step for each tensor.
FEW_SHAPES = [(), (7,), (3, 5), (2, 3, 4), (0,), (2**14 + 3,)]
SAVED = [properties.OWN_VARIABLES, properties.VARIABLES, properties.KERAS_FILE]
# A compiled step has cost its seconds before the first.
STEPS = {"eager": 8, "graph": 16, "xla": 16, "jit": 16}


def case(random, mode):
    """Returns a `Case` without steps: they depend on the scale, and are drawn later.

    Args:
        random: NumPy's generator.
        mode: String, of `MODES`.
    """
    is_compiled = mode in properties.COMPILED
    inner = optimizers.inner(random)
    shapes = [_shape(random, is_compiled) for _ in range(random.integers(1, 7))]
    shapes = shapes[: 3 if is_compiled else 6]
    dtypes = ["float32", "float32", "float16", "bfloat16", *WIDE]
    of_all = one_of(*dtypes)(random)
    dtypes = [one_of(of_all, of_all, of_all, *dtypes)(random) for _ in shapes]
    of_gradients = [one_of(dtype, dtype, *gradients.DTYPES)(random) for dtype in dtypes]
    # What a method has excluded from decay is in no config.
    is_saved = random.random() < 0.3 and "bias excluded" not in inner.words
    return Case(
        inner,
        policies.policy(random),
        [_start(random, shape) for shape in shapes],
        dtypes,
        of_gradients,
        one_of("auto", True, False)(random),
        mode != "generic",
        mode if is_compiled else "eager",
        [],
        (int(random.integers(1, 8)), one_of(*SAVED)(random)) if is_saved else None,
    )


def _start(random, shape):
    """Returns the first values of a variable; now and then those that fill float16."""
    size = 6e4 if random.random() < 0.05 else 10 ** random.uniform(-2, 1)
    return np.asarray(random.normal(size=shape) * size)


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
        f"saved={case.saved}\n  variables and gradients: {', '.join(variables)}"
    )
