"""Comparisons of `xp`, and of what moves the scale and counts steps."""

import itertools

import keras
import numpy as np
from keras import ops

from keras_lso._keras_internals.variables import storage_of
from testing.comparisons.inputs import equal, tensor
from testing.comparisons.registry import compares
from testing.tensors import number


@compares("xp")
def same_functions_of_scalars(own, reference):
    yes, no, one, two = ops.array(True), ops.array(False), tensor(1), tensor(2)
    bad = [tensor(x) for x in (2.0, 3.4e38, np.inf, -np.inf, np.nan)]
    calls = {
        "abs": [(-two,)],
        "amax": [(tensor([[1, 3, 2], [-5, -6, -4]]),)],
        "average": [(one, two, 0.25)],
        "where": [(yes, one, two), (no, one, two)],
        "clip": [(two, 0.5, 1.5), (two, 3.0, 4.0)],
        "maximum": [(one, two)],
        "reciprocal": [(two,)],
        "sign": [(-two,)],
        "sqrt": [(two,)],
        "square": [(two,)],
        "zeros_like": [(two,)],
        "ones_like": [(two,)],
        "logical_and": [(yes, no), (yes, yes)],
        "logical_not": [(yes,), (no,)],
        "logical_or": [(yes, no), (no, no)],
        "logical_xor": [(yes, no), (yes, yes)],
        "all_finite": [([x, y],) for x in bad for y in bad],
        "cast": [(two, "int32"), (two, two.dtype), (yes, "float32")],
        "copy": [(two,)],
        "each": [(lambda x: x + 1, two)],
    }
    functions = {name for name, value in vars(reference).items() if callable(value)}
    assert set(calls) == functions - {"Tensor", "Callable"}
    for name, arguments in calls.items():
        for args in arguments:
            equal(getattr(own, name)(*args), getattr(reference, name)(*args))


@compares("value_if_on_host")
def knows_what_is_there(own, reference):
    for value in (tensor(2), ops.array(True)):
        assert own(value) == number(value)
        assert reference(value) is None


def variable(value, dtype="float32"):
    return keras.Variable(value, dtype=dtype, trainable=False)


@compares("move_scale")
def moves_scale_alike(own, reference):
    yes, no = ops.array(True), ops.array(False)
    for period, backoff, growth, bounds in itertools.product(
        (1, 3), (0.5, tensor(0.3)), (2.0, 1.1), ((1.0, 100.0), (1.0, 3e38))
    ):
        for drops in (None, yes, no):
            rules_ = growth, backoff, period, bounds
            assert_moved_alike(own, reference, drops, *rules_)


def assert_moved_alike(own, reference, drops, growth, backoff, period, bounds):
    starts = (8.0, 0), (8.0, 2), (90.0, 7), (1.5, 0), (2.9e38, 5), (200.0, 0), (0.5, 1)
    for (scale, count), finite in itertools.product(starts, (True, False)):
        moved = []
        for move_scale, storage in ((own, storage_of), (reference, list)):
            state = [variable(scale), variable(count, "int32")]
            # As a policy with hysteresis says so: at an overflow only.
            drop = drops if drops is None or not finite else ops.array(False)
            numbers = growth, backoff, period, bounds
            flag = ops.array(finite)
            move_scale(*storage(state), flag, drop, *numbers)
            moved.append([v.numpy().item() for v in state])
        assert moved[0] == moved[1], (scale, count, finite, growth, backoff, period)


@compares("append_row")
def appends_rows_alike(own, reference):
    rings = []
    for append_row, storage in ((own, storage_of), (reference, list)):
        state = [variable(np.zeros((3, 3))), variable(0, "int32")]
        for step in range(5):
            row = [ops.array(step, "int32"), tensor(step / 3), float("nan")]
            append_row(*storage(state), row, keras.Variable.assign)
        rings.append([v.numpy() for v in state])
    np.testing.assert_array_equal(rings[0][0], rings[1][0])
    assert rings[0][0][:, 0].tolist() == [3, 4, 2]
    assert rings[0][1] == rings[1][1] == 5


@compares("count_step")
def counts_steps_alike(own, reference):
    found = []
    for count_step, storage in ((own, storage_of), (reference, list)):
        skipped, applied = variable(1, "int32"), variable(4, "int32")
        streaks = variable(np.zeros(3), "int32")
        seen = []
        for is_accepted in (True, False):
            for flags in itertools.product([True, False], repeat=4):
                has_counted, update_scale, is_lowest, finite = flags
                for _ in range(2):
                    stored = storage([skipped, applied, streaks])
                    all_finite = count_step(
                        stored[0],
                        None if has_counted else stored[1],
                        stored[2],
                        ops.array(finite),
                        ops.array(finite and is_accepted),
                        (tensor(1.0 if is_lowest else 2.0), 1.0),
                        update_scale,
                        keras.Variable.assign,
                    )
                    counted = [int(v.numpy()) for v in (skipped, applied)]
                    counted += streaks.numpy().tolist()
                    seen.append((bool(all_finite), *counted))
        found.append(seen)
    assert found[0] == found[1]
    assert len({row[2:] for row in found[0]}) > 4
