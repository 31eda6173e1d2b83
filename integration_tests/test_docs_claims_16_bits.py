"""What the pages say of weights of 16 bits: their bytes, and who moves them."""

import ast
import contextlib
import itertools
import re

import keras
import numpy as np
import pytest
from keras import ops

import keras_lso
from integration_tests.docs_blocks import (
    BACKEND,
    PAGES,
    code_in,
    numpy_of,
    table_of,
)
from keras_lso._backend.masters import KINDS
from testing.keras_versions import takes_muon

pytestmark = pytest.mark.slow


# --- policies.md: weights of 16 bits -------------------------------------------------


def bytes_of(policy, master_weights):
    """Bytes a weight: its own, what is kept with it, its gradient's, its slots'."""
    layer = keras.layers.Dense(8, use_bias=False, dtype=policy)
    layer.build((None, 4))
    optimizer = keras_lso.LossScaleOptimizer(
        keras.optimizers.Adam(), master_weights=master_weights
    )
    gradient = ops.zeros(layer.kernel.shape, layer.kernel.dtype)
    optimizer.apply([gradient], [layer.kernel], scaled=True)
    # What is a scalar is not a weight's. The wrapper's variables have the slots.
    kept = [v for v in optimizer.variables if len(v.shape)]
    slots = [v for v in optimizer.inner_optimizer.variables if len(v.shape)]
    kept = [v for v in kept if all(v is not slot for slot in slots)]
    groups = [layer.kernel], kept, [gradient], slots
    return [
        sum(numpy_of(tensor).nbytes for tensor in group) // (4 * 8) for group in groups
    ]


@pytest.mark.filterwarnings("ignore:.*trains float16 variables without")
def test_bytes_per_weight_on_page_match_real_variables():
    """That stand-ins take none is shown by `test_master_kinds.py`."""
    rows = table_of("docs/policies.md", "dtype policy | `master_weights`")
    assert len(rows) == 5
    for policies, kind, *columns, total in rows:
        columns = list(map(int, columns))
        assert sum(columns) == int(total)
        kinds = code_in(kind) or ["'auto'", *map(repr, KINDS), "False"]
        for name, kind in itertools.product(code_in(policies), kinds):
            found = bytes_of(ast.literal_eval(name), ast.literal_eval(kind))
            assert found == columns, (name, kind)


def test_policies_page_lists_all_master_kinds_and_meaning_of_auto():
    rows = table_of("docs/policies.md", "`master_weights` | kept with each weight")
    named = [ast.literal_eval(code) for row in rows for code in code_in(row[0])]
    assert named == ["float32", True, "remainder", "stochastic", False]
    text = PAGES["docs/policies.md"].read_text()
    [kind] = re.findall(r'^`"auto"`, the default, is `"(\w+)"` on', text, re.MULTILINE)
    assert bytes_of("bfloat16", kind) == bytes_of("bfloat16", "auto")


@pytest.mark.filterwarnings("ignore:.*trains float16 variables without")
def test_bytes_of_optimizers_on_bfloat16_page_match_table():
    """bfloat16.md repeats the last column, with the optimizer that takes as much."""
    rows = table_of("docs/bfloat16.md", "bytes | optimizer")
    names = {"GuardedOptimizer": keras_lso.GuardedOptimizer}
    names["Adam"] = keras.optimizers.Adam
    for size, code, _ in rows:
        optimizer = eval(code_in(code)[0], names)
        assert sum(bytes_of("bfloat16", optimizer.master_weights)) == int(size)


def distance_at_the_end(rate, master_weights):
    """Trains as policies.md says, and returns the root of the mean square distance."""
    random, best = np.random.default_rng(0), np.float32(0.75)
    weight = keras.Variable(np.full(1000, best), dtype="bfloat16")
    sgd = keras.optimizers.SGD(rate)
    optimizer = keras_lso.GuardedOptimizer(sgd, master_weights=master_weights)
    squares = []
    for _ in range(int(3 / rate)):
        distances = numpy_of(weight).astype("float32") - best
        squares.append(np.mean(distances**2))
        noise = random.standard_normal(1000).astype("float32")
        optimizer.apply([ops.convert_to_tensor(distances + noise)], [weight])
    return np.mean(squares[len(squares) // 2 :]) ** 0.5


@pytest.mark.full
@pytest.mark.one_backend
def test_stochastic_rounding_noise_on_page_matches_measurement():
    heading = "learning rate | float32 masters, remainders | stochastic rounding"
    for rate, right, noisy in table_of("docs/policies.md", heading):
        # Remainders are as float32 masters to the bit: `test_master_kinds.py`.
        for kind, distance in (("float32", right), ("stochastic", noisy)):
            found = distance_at_the_end(float(rate), kind)
            # To the digits of the table, and 3 % of chance.
            assert found == pytest.approx(float(distance), rel=0.03, abs=6e-4)


# --- bfloat16.md: what Keras's own optimizers do with such weights -------------------


def outcomes_on_the_page():
    """Yields the name of each optimizer, and the row that it is in."""
    rows = table_of("docs/bfloat16.md", "`keras.optimizers`")
    outcomes = ("never move", "become NaN", "move")
    for row, outcome in zip(rows, outcomes, strict=True):
        assert row[1].startswith(outcome)
        yield from ((name, outcome) for name in code_in(row[0]))


@pytest.mark.in_turn
@pytest.mark.parametrize(("name", "outcome"), outcomes_on_the_page())
def test_optimizer_treats_bfloat16_weights_as_page_says(name, outcome):
    if name == "Muon" and not takes_muon:
        pytest.skip("Keras 3.12's Muon reads a path that TensorFlow's variables lack")
    random = np.random.default_rng(0)
    weight = keras.Variable(random.normal(0, 0.1, (8, 8)), dtype="bfloat16")
    before = numpy_of(weight)
    optimizer = getattr(keras.optimizers, name)(0.1)
    gradient = ops.cast(ops.array(random.normal(0, 0.01, (8, 8))), "bfloat16")
    fails = outcome == "become NaN" and BACKEND == "torch"
    with pytest.raises(TypeError) if fails else contextlib.nullcontext():
        for _ in range(3):
            optimizer.apply([gradient], [weight])
    after = numpy_of(weight).astype("float32")
    assert np.isnan(after).all() == (outcome == "become NaN" and not fails)
    assert (after != before).any() == (outcome != "never move" and not fails)


def two_dtypes(optimizer):
    """Returns a bfloat16 and a float32 weight, 1 before three steps."""
    weights = [keras.Variable([1.0], dtype=d) for d in ("bfloat16", "float32")]
    for _ in range(3):
        optimizer.apply([ops.ones(1, w.dtype) for w in weights], weights)
    return [float(numpy_of(w)[0]) for w in weights]


@pytest.mark.skipif(BACKEND != "torch", reason="the sentence is about PyTorch")
def test_leading_bfloat16_weight_stops_float32_weight_in_bare_adam():
    assert two_dtypes(keras.optimizers.Adam(0.1)) == [1.0, 1.0]
    # "But for their decay".
    decayed = two_dtypes(keras.optimizers.AdamW(0.1, weight_decay=0.01))
    assert decayed == pytest.approx([1.0, 0.999**3], abs=1e-6)
    ours = two_dtypes(keras_lso.GuardedOptimizer(keras.optimizers.Adam(0.1)))
    assert ours == pytest.approx([0.7, 0.7], abs=2e-3)


@pytest.mark.skipif(BACKEND != "tensorflow", reason="the sentence is about TensorFlow")
def test_global_clipnorm_with_two_dtypes_fails_only_without_guard():
    def clipping():
        return keras.optimizers.SGD(0.1, global_clipnorm=2**0.5)

    with pytest.raises(Exception, match="bfloat16"):
        two_dtypes(clipping())
    ours = two_dtypes(keras_lso.GuardedOptimizer(clipping()))
    assert ours == pytest.approx([0.7, 0.7], abs=2e-3)


@pytest.mark.in_turn("torch")
def test_bfloat16_floatx_degrades_metrics_and_schedules():
    keras.config.set_floatx("bfloat16")
    try:
        mean = keras.metrics.Mean()
        schedule = keras.optimizers.schedules.CosineDecay(1e-3, 10_000)
        assert float(schedule(1010)) == float(schedule(1000))
    finally:
        keras.config.set_floatx("float32")
    # The loss of a batch counts as often as it has rows.
    for loss in [1.0] * 500 + [0.0] * 500:
        mean.update_state(loss, sample_weight=32.0)
    assert float(mean.result()) == 1.0
