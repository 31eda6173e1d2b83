"""Each override of a backend, held against the default that it replaces.

The list is made from the class of the backend that runs: an override without a
comparison here fails with its name.
"""

import ast
import contextlib
import inspect
import itertools
import pathlib

import keras
import numpy as np
import pytest
from keras import ops

from keras_lso._backend import backend, framework, without_kernels
from keras_lso._backend.framework import Framework
from keras_lso._backend.measurement import Measurement
from keras_lso._backend.rule import TrustRatio
from keras_lso._backend.targets import Targets
from keras_lso._keras_internals import rules
from keras_lso._keras_internals.rules import registered_rule
from keras_lso._keras_internals.variables import live_storage_of, storage_of
from keras_lso.optimizers.lars import LARSRule
from keras_lso.optimizers.novograd import NovoGradRule
from testing.beside_keras import WAYS, bits, take
from testing.optimizers import OPTIMIZERS, decaying

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in cast")

BACKEND = keras.backend.backend()
FOLDER = pathlib.Path(framework.__file__).parent
REFERENCE = Framework()
COMPARISONS = {}


def overrides(cls):
    """What a class, or one between it and `Framework`, overrides: a list of names."""
    bases = cls.__mro__[: cls.__mro__.index(Framework)]
    ours = Framework.__mro__[:-1]
    known = [name for base in ours for name in vars(base) if not name.startswith("_")]
    return [name for name in known if any(name in vars(base) for base in bases)]


def compares(*names):
    """Registers a function of an override, and of the default, as the comparison."""

    def register(comparison):
        COMPARISONS.update(dict.fromkeys(names, comparison))
        return comparison

    return register


def comparison_of(cls, name):
    assert name in COMPARISONS, (
        f"`{cls.__name__}.{name}` is held against nothing: write a comparison here"
    )
    return COMPARISONS[name]


@pytest.mark.parametrize("name", overrides(type(backend)))
def test_an_override_does_what_the_default_does(name):
    compare = comparison_of(type(backend), name)
    compare(getattr(backend, name), getattr(REFERENCE, name))


def test_an_override_without_a_comparison_fails_with_its_name():
    class Other(Framework):
        def l2_norm(self, values):
            return values

    assert overrides(Other) == ["l2_norm"]
    with pytest.raises(AssertionError, match=r"Other\.l2_norm"):
        comparison_of(Other, "l2_norm")


def test_a_step_calls_what_a_backend_overrides():
    called = {"reduce_gradients", "are_shards"} & set(overrides(type(backend)))
    assert backend.REDUCES_GRADIENTS is bool(called)


def test_the_overrides_of_all_backends_are_compared_and_nothing_else():
    # Read, not imported: a test runs beside one framework.
    found = set()
    for name in ("tensorflow", "jax", "torch"):
        tree = ast.parse((FOLDER / name / "framework.py").read_text())
        [cls] = [node for node in tree.body if is_framework(node)]
        for node in cls.body:
            names = [getattr(node, "name", None)]
            names += [target.id for target in getattr(node, "targets", ())]
            found |= {name for name in names if hasattr(Framework, str(name))}
    assert found == set(COMPARISONS)


def is_framework(node):
    bases = getattr(node, "bases", ())
    return any(getattr(base, "id", "") == "Framework" for base in bases)


def test_a_backend_has_no_primitives_that_others_do_not_have():
    own = {name for name in dir(backend) if not name.startswith("_")}
    assert own == set(filter(lambda name: not name.startswith("_"), dir(Framework)))


def test_without_kernels_the_reference_steps():
    replaced = without_kernels(type(backend))
    for name in ("scalars", "measure", "fused_step", "fused_step_takes"):
        assert getattr(replaced, name) is getattr(Framework, name)
    assert replaced.run_if is type(backend).run_if


# --- Inputs -----------------------------------------------------------------------


def tensor(values, dtype="float32"):
    return ops.convert_to_tensor(np.array(values, "float32"), dtype=dtype)


def number(value):
    return float(ops.convert_to_numpy(ops.cast(value, "float32")))


def equal(actual, expected):
    actual, expected = (ops.convert_to_numpy(v) for v in (actual, expected))
    assert actual.dtype == expected.dtype
    np.testing.assert_array_equal(actual, expected)


def close(actual, expected):
    # A dozen roundings, in another order.
    np.testing.assert_allclose(number(actual), number(expected), rtol=1e-6)


RANDOM = [np.random.default_rng(i).normal(size=(3, 4)) for i in range(4)]
RATIO = TrustRatio(eeta=0.1)


def rules_of(make):
    """The rules of each group that the optimizers of a table step by."""
    for options in ({}, decaying(make)):
        optimizer = make(0.5, **options)
        optimizer.build([keras.Variable(np.ones((3, 4), "float32"))])
        rule = registered_rule(optimizer)
        yield from rule.of_groups(optimizer, tensor(0.5)).values()


RULES = [rule for make in OPTIMIZERS.values() for rule in rules_of(make)]
RULES += [rules.Average(tensor(0.75)), rules.Overwrite()]


WITH_SQUARES = rules.RMSprop, rules.Adagrad


def state_of(rule):
    """The variable of a rule, and its slots, of which the second is a scalar's."""
    is_scalar = isinstance(rule, NovoGradRule)
    # Sums of squares are positive.
    first = RANDOM[1] ** 2 if isinstance(rule, WITH_SQUARES) else RANDOM[1]
    slots = [first, np.float32(2.0) if is_scalar else RANDOM[2] ** 2]
    return [np.asarray(v, "float32") for v in (RANDOM[0], *slots[: len(rule.slots)])]


def sparse(values):
    """A sparse gradient of which a row comes twice."""
    if BACKEND == "tensorflow":
        import tensorflow as tf

        indices, shape = map(tf.constant, ([2, 0, 2][: len(values)], (3, 4)))
        return tf.IndexedSlices(tensor(values), indices, shape)
    if BACKEND == "jax":
        from jax.experimental import sparse

        indices = np.array([2, 0, 2][: len(values)])[:, np.newaxis]
        return sparse.BCOO((tensor(values), indices), shape=(3, 4))
    import torch

    indices = torch.tensor([[2, 0, 2][: len(values)]])
    return torch.sparse_coo_tensor(indices, tensor(values), (3, 4))


# --- A step -----------------------------------------------------------------------


@compares("measure")
def same_measurement(own, reference):
    for rule in [None, *RULES]:
        for dtype, inv_scale in [("float32", 0.25), ("float16", 2.0), ("float32", 1e3)]:
            for bad in (1.0, np.inf, np.nan, 1e37 if dtype == "float32" else 6e4):
                grads = [tensor(RANDOM[3], dtype), tensor(RANDOM[2] * [bad, 1, 1, 0])]
                told = {}
                if rule is not None:
                    variable, *slots = map(tensor, state_of(rule))
                    targets = Targets([variable] * 2, [tuple(slots)] * 2)
                    told = {"rules": [rule] * 2, "targets": targets}
                scale = tensor(inv_scale)
                args = grads, True, scale
                assert_same(own(*args, **told), reference(*args, **told), grads, scale)


def assert_same(actual, expected, grads, inv_scale):
    assert bool(actual.finite) is bool(expected.finite)
    if not bool(expected.finite):
        return
    assert number(actual.amax) == number(expected.amax)
    if actual.gradient_norms:
        unscaled = [ops.cast(g, "float32") * inv_scale for g in grads]
        pairs = zip(actual.gradient_norms, unscaled, strict=True)
        for norm, g in pairs:
            close(norm, REFERENCE.l2_norm(g))
    for ours, theirs in zip(
        actual.rule_norms or [], expected.rule_norms or [], strict=False
    ):
        assert (ours is None) is (theirs is None)
        for norm, by_reference in zip(ours or (), theirs or (), strict=True):
            close(norm, by_reference)


@compares("fused_step")
def same_step(own, reference):
    for rule in RULES:
        for finite in (True, False):
            for low_dtype in (None, "float16"):
                results = [
                    stepped(step, in_place, rule, finite, low_dtype)
                    for step, in_place in (
                        (own, backend.UPDATES_IN_PLACE),
                        (reference, False),
                    )
                ]
                for actual, expected in zip(*results, strict=True):
                    digits = 1e-3 if actual.dtype == "float16" else 2e-6
                    atol = digits * np.abs(expected).max() if finite else 0.0
                    np.testing.assert_allclose(actual, expected, rtol=0, atol=atol)


@compares("synchronise_masters")
def same_masters(own, reference):
    for flag in (True, False):
        found = []
        for synchronise, in_place in ((own, backend.UPDATES_IN_PLACE), (reference, 0)):
            variables = [keras.Variable(np.float32([1.0, 1.0])) for _ in "ab"]
            copy = keras.Variable(np.float16([1.0, 3.0]), dtype="float16")
            stored = storage_of([*variables, copy]) if in_place else [*variables, copy]
            targets = Targets(stored[:2], [(), ()], [stored[2], None])
            if in_place:
                chunks = backend.chunked(["a", "b"], targets, stored[:2])
                targets = targets._replace(chunks=chunks)
            synchronise(targets, ops.array(flag))
            found.append([v.numpy().tolist() for v in variables])
        assert found[0] == found[1] == [[1.0, 3.0 if flag else 1.0], [1.0, 1.0]]


def stepped(step, in_place, rule, finite, low_dtype):
    """The values after a step of one variable, or of a master that is out of step."""
    variables = [keras.Variable(v) for v in state_of(rule)]
    low = [keras.Variable(RANDOM[1], dtype=low_dtype)] if low_dtype else []
    storage = storage_of if in_place else lambda vs: vs
    stored = storage(variables)
    gradient = tensor(RANDOM[3] * 8.0 if finite else RANDOM[3] * np.inf)
    step(
        [rule],
        Targets(stored[:1], [tuple(stored[1:])], storage(low) if low else None),
        [gradient],
        Measurement(ops.convert_to_tensor(finite)),
        tensor(0.125),
    )
    return [np.array(v.numpy()) for v in variables + low]


@compares("fused_step_takes")
def takes_what_it_steps(own, reference):
    variables = [keras.Variable(RANDOM[0], dtype="float32")]
    grads = [tensor(RANDOM[1])]
    assert own(LARSRule, storage_of(variables), grads)
    assert not reference(LARSRule, variables, grads)


@compares("scalars")
def same_functions_of_scalars(own, reference):
    yes, no, one, two = ops.array(True), ops.array(False), tensor(1), tensor(2)
    calls = {
        "where": [(yes, one, two), (no, one, two)],
        "clip": [(two, 0.5, 1.5), (two, 3.0, 4.0)],
        "maximum": [(one, two)],
        "reciprocal": [(two,)],
        "sqrt": [(two,)],
        "zeros_like": [(two,)],
        "ones_like": [(two,)],
        "logical_and": [(yes, no), (yes, yes)],
        "logical_not": [(yes,), (no,)],
        "logical_or": [(yes, no), (no, no)],
        "cast": [(two, "int32"), (two, two.dtype), (yes, "float32")],
        "copy": [(two,)],
    }
    for name, arguments in calls.items():
        for args in arguments:
            equal(getattr(own, name)(*args), getattr(reference, name)(*args))
    compared = {*calls, "move_scale", "count_step"}
    assert {n for n in vars(type(own)) if not n.startswith("_")} <= compared
    for period, backoff, growth, bounds in itertools.product(
        (1, 3), (0.5, tensor(0.3)), (2.0, 1.1), ((1.0, 100.0), (1.0, 3e38))
    ):
        rules_ = growth, backoff, period, bounds
        for drops in (None, yes, no):
            assert_moved_alike(own, reference, drops, *rules_)


@compares("known")
def knows_what_is_there(own, reference):
    for value in (tensor(2), ops.array(True)):
        assert own(value) == number(value)
        assert reference(value) is None


@compares("are_finite")
def same_verdicts(own, reference):
    one, two, infinite = tensor(1), tensor(2), tensor(np.inf)
    for tensors, is_finite in ([], True), ([one, two], True), ([one, infinite], False):
        # None where the host knows that all are finite.
        assert own(tensors) is None or not is_finite
        for are_finite in (own, reference):
            found = are_finite(tensors)
            assert found is None or bool(found) is is_finite


def variable(value, dtype="float32"):
    return keras.Variable(value, dtype=dtype, trainable=False)


def assert_moved_alike(own, reference, drops, growth, backoff, period, bounds):
    starts = (8.0, 0), (8.0, 2), (90.0, 7), (1.5, 0), (2.9e38, 5), (200.0, 0), (0.5, 1)
    for (scale, count), finite in itertools.product(starts, (True, False)):
        moved = []
        for scalars, storage in ((own, storage_of), (reference, list)):
            state = [variable(scale), variable(count, "int32")]
            # As a policy with hysteresis says so: at an overflow only.
            drop = drops if drops is None or not finite else ops.array(False)
            numbers = growth, backoff, period, bounds
            flag = ops.array(finite)
            scalars.move_scale(*storage(state), flag, drop, *numbers)
            moved.append([v.numpy().item() for v in state])
        assert moved[0] == moved[1], (scale, count, finite, growth, backoff, period)


@pytest.mark.parametrize("way", WAYS)
def test_steps_are_counted_alike(way, monkeypatch):
    take(way, monkeypatch)
    assert_counted_alike(backend.scalars, REFERENCE.scalars)


def assert_counted_alike(own, reference):
    found = []
    for scalars, storage in ((own, storage_of), (reference, list)):
        skipped, applied = variable(1, "int32"), variable(4, "int32")
        streaks = variable(np.zeros(3), "int32")
        seen = []
        for rates_finite in (None, True, False):
            for flags in itertools.product([True, False], repeat=4):
                has_counted, update_scale, is_lowest, finite = flags
                for _ in range(2):
                    stored = storage([skipped, applied, streaks])
                    all_finite = scalars.count_step(
                        stored[0],
                        None if has_counted else stored[1],
                        stored[2],
                        ops.array(finite),
                        None if rates_finite is None else ops.array(rates_finite),
                        (tensor(1.0 if is_lowest else 2.0), 1.0),
                        update_scale,
                        lambda variable, value: variable.assign(value),
                    )
                    counted = [int(v.numpy()) for v in (skipped, applied)]
                    counted += streaks.numpy().tolist()
                    seen.append((bool(all_finite), *counted))
        found.append(seen)
    assert found[0] == found[1]
    assert len({row[2:] for row in found[0]}) > 4


@compares("context_guards")
def equal_unless_something_changed(own, reference):
    assert own() == own()
    assert reference() == reference()


@compares("tensor_guards")
def tells_apart_what_a_step_treats_otherwise(own, reference):
    alike = [tensor(RANDOM[0]), tensor(RANDOM[1])]
    others = [tensor(RANDOM[0], "float16"), tensor(RANDOM[0][:2]), sparse(RANDOM[0])]
    for tensor_guards in (own, reference):
        are_alike = tensor_guards(alike[:1])
        assert are_alike(alike[1:])
        for other in others[:2]:
            assert not are_alike([other])
    # The types of the gradients are compared as well.
    if backend.to_dense(others[2]) is not others[2]:
        assert own([others[2]])([sparse(RANDOM[1])])


@compares("chunked")
def steps_alike_with_and_without_chunks(own, reference):
    rule = rules.Momentum(tensor(0.5), 0.9)
    assert reference([0], Targets([], []), []) is None
    results = []
    for chunked in (own, reference):
        variables = [keras.Variable(v) for v in state_of(rule)]
        stored = storage_of(variables)
        targets = Targets(stored[:1], [tuple(stored[1:])])
        grads = [tensor(RANDOM[3])]
        chunks = chunked(["kind"], targets, grads)
        assert chunks is None or chunks.holds()
        backend.fused_step([rule], targets._replace(chunks=chunks), grads)
        results.append([np.array(v.numpy()) for v in variables])
    np.testing.assert_array_equal(*results)


@compares("run_masked")
def runs_what_is_not_masked(own, reference):
    for flag in (True, False):
        results = []
        for run_masked in (own, reference):
            variable, flags = keras.Variable([1.0, -0.0]), ops.convert_to_tensor(flag)

            def step(variable=variable, flags=flags):
                variable.assign(ops.where(flags, variable + 1.0, variable))

            assert run_masked(flags, step) is None
            results.append(np.array(variable.numpy()))
        assert results[0].tobytes() == results[1].tobytes()


@compares("clear")
def same_zeros(own, reference):
    for flag in (True, False):
        results = []
        for clear in (own, reference):
            # As a number, TensorFlow would hand it out for later zeros.
            zero = np.array(-0.0)
            variables = [keras.Variable(v) for v in (RANDOM[0], RANDOM[1][0], zero)]
            stored = storage_of(variables) if clear is own else variables
            clear(stored, ops.convert_to_tensor(flag))
            results.append([np.array(v.numpy()) for v in variables])
        for actual, expected in zip(*results, strict=True):
            np.testing.assert_array_equal(actual, expected)
        assert flag is not any(actual.any() for actual in results[0])


def kept_by_layers():
    values = RANDOM[0], RANDOM[1][0], np.array(-0.0), np.array(np.nan), np.array(7)
    dtypes = "float32", "float16", "float32", "float32", "int32"
    # In copies: TensorFlow hands zeros out for later ones.
    pairs = zip(values, dtypes, strict=True)
    return [keras.Variable(v.copy(), dtype=d, trainable=False) for v, d in pairs]


def overwrite(variables):
    for v in variables:
        v.assign(ops.ones_like(v) * 3)
    return bits(variables)


@compares("copies_of")
def same_copies(own, reference):
    # A variable stands for itself in a `StatelessScope`, and where nothing is in place.
    for copies_of, read in ((own, live_storage_of), (own, list), (reference, list)):
        variables = kept_by_layers()
        start = bits(variables)
        copies = copies_of(read(variables))
        assert overwrite(variables) != start
        assert bits(copies) == start
    assert own([]) == reference([]) == []


@compares("restore")
def same_restored_values(own, reference):
    for flag in map(ops.convert_to_tensor, (True, False)):
        for restore, read in ((own, live_storage_of), (own, list), (reference, list)):
            variables = kept_by_layers()
            start, copies = bits(variables), REFERENCE.copies_of(variables)
            written = overwrite(variables)
            restore(read(variables), copies, flag)
            assert bits(variables) == (start if flag else written)
            restore([], [], flag)


@compares("run_if")
def same_whole_step(own, reference):
    for finite in (True, False):
        results = []
        for run_if in (own, reference):
            variable = keras.Variable([1.0, -0.0])

            def step(grads, variable=variable):
                variable.assign(variable + grads[0])

            run_if(ops.convert_to_tensor(finite), step, [tensor([1, 2])], [variable])
            results.append(np.array(variable.numpy()))
        assert results[0].tobytes() == results[1].tobytes()


# --- Norms, masters and tensors ---------------------------------------------------


@compares("as_written")
def same_function(own, reference):
    def twice(value):
        """Its text."""
        return 2 * value

    for decorated in map(own, (twice, reference(twice))):
        assert (decorated(3), decorated.__doc__) == (6, "Its text.")
        assert list(inspect.signature(decorated).parameters) == ["value"]


@compares("l2_norms")
def same_norms(own, reference):
    values = [tensor(RANDOM[0], dtype) for dtype in ("float32", "float16", "bfloat16")]
    for actual, expected in zip(own(values), reference(values), strict=True):
        assert keras.backend.standardize_dtype(actual.dtype) == "float32"
        close(actual, expected)


@compares("clipped")
def same_clipped_gradients(own, reference):
    # Zeros, whose norm is no divisor, and short ones, which stay as they are.
    values = [RANDOM[0], RANDOM[1] * 1e-3, np.zeros(3), np.array(-4.0)]
    for dtype in ("float32", "float16"):
        grads = [tensor(v, dtype) for v in values]
        for limits in ({"norm": 0.5}, {"value": 0.25}):
            for factor in (tensor(0.5), 1.0):
                ours, theirs = (f(grads, factor, **limits) for f in (own, reference))
                for actual, expected in zip(ours, theirs, strict=True):
                    actual, expected = map(ops.convert_to_numpy, (actual, expected))
                    assert actual.dtype == "float32"
                    np.testing.assert_allclose(actual, expected, rtol=1e-6)
        for grad, value in zip(grads, values, strict=True):
            equal(grad, tensor(value, dtype))


@compares("unscaled")
def same_unscaled_gradients(own, reference):
    values = [RANDOM[0], RANDOM[1], np.array(-4.0)]
    for dtype in ("float32", "float16", "bfloat16"):
        grads = [tensor(v, dtype) for v in values]
        for factor in (tensor(0.5), 1.0):
            for a, e in zip(own(grads, factor), reference(grads, factor), strict=True):
                assert keras.backend.standardize_dtype(a.dtype) == "float32"
                equal(a, e)
        for grad, value in zip(grads, values, strict=True):
            equal(grad, tensor(value, dtype))
    mixed = [tensor(values[0], "float16"), tensor(values[1])]
    for a, e in zip(own(mixed, tensor(3.0)), reference(mixed, 3.0), strict=True):
        equal(a, e)
    assert own([], tensor(0.5)) == []


@compares("rounded")
def same_rounding(own, reference):
    values = tensor([1.0, 1.0005, -0.0, 1e-9, 7e4, -7e4, np.inf, np.nan])
    for dtype in ("float16", "bfloat16", "float32"):
        actual, expected = own(values, dtype), reference(values, dtype)
        assert actual.dtype == expected.dtype
        equal(ops.cast(actual, "float32"), ops.cast(expected, "float32"))


@compares("sum_over_shards", "max_over_shards", "sharded_like")
def same_tensor(own, reference):
    like = (tensor(RANDOM[1]),) if own.__name__ == "sharded_like" else ()
    equal(own(tensor(RANDOM[0]), *like), reference(tensor(RANDOM[0]), *like))


@compares("as_gradient")
def same_gradient(own, reference):
    for value in (tensor([1.5]), tensor([1.5], "float16"), [1, 2], np.array([3.0])):
        equal(own(value), reference(value))
    assert own(None) is reference(None) is None
    for as_gradient in (own, reference):
        with pytest.raises(ValueError, match="must be real"):
            as_gradient(ops.convert_to_tensor(np.array([1j], "complex64")))


@compares("map_values")
def same_values_mapped(own, reference):
    doubled = own(lambda v: v * 2, sparse(RANDOM[0]))
    expected = reference(lambda v: v * 2, REFERENCE.to_dense(sparse(RANDOM[0])))
    equal(REFERENCE.to_dense(doubled), expected)


@compares("steppable")
def as_the_optimizers_take_them(own, reference):
    dense = tensor(RANDOM[0])
    if BACKEND == "jax":
        same_in_the_order_of_the_variables(own, dense)
        return
    for grads in ([dense, None], [sparse(RANDOM[0]), dense]):
        assert reference(grads) is grads
        for grad, expected in zip(own(grads), grads, strict=True):
            if expected is None or expected is dense:
                assert grad is expected
            else:
                equal(grad, REFERENCE.to_dense(expected))
                assert type(grad) is type(dense)
                assert grad.layout == dense.layout


def same_in_the_order_of_the_variables(own, dense):
    import jax

    rows = sparse(RANDOM[0])
    for grads in ([dense, None], [rows, dense]):
        assert all(a is b for a, b in zip(own(grads), grads, strict=True))
    # Compiled: of a transpose, of a vector, of rows and of nothing.
    step = jax.jit(lambda g, rows: own([g.T, g[0], rows, None]))
    transposed, vector, same_rows, nothing = step(dense, rows)
    equal(transposed, dense.T)
    equal(vector, dense[0])
    equal(REFERENCE.to_dense(same_rows), REFERENCE.to_dense(rows))
    assert type(same_rows) is type(rows)
    assert nothing is None


@compares("detached_copy")
def copies_without_a_history(own, reference):
    followed = keras.Variable(RANDOM[0]).value * 2.0
    for value in followed, tensor(RANDOM[0]):
        copy = own(value)
        equal(copy.detach(), reference(value).detach())
        assert copy.data_ptr() != value.data_ptr()
        assert copy.is_leaf
        assert not copy.requires_grad
    # A loop may differentiate with respect to it.
    assert own(keras.Variable(RANDOM[0]).value).requires_grad


@compares("check_not_followed")
def refuses_what_has_a_history(own, reference):
    import torch

    followed = keras.Variable(RANDOM[0]).value * 2.0
    reference([followed])
    own([None, followed.detach(), sparse(RANDOM[0])])
    with pytest.raises(ValueError, match="cannot differentiate through a step"):
        own([None, followed])
    with torch.no_grad():
        own([followed])


@compares("to_dense")
def same_dense(own, reference):
    for values in (RANDOM[0], RANDOM[1]):
        np.testing.assert_allclose(
            *(ops.convert_to_numpy(f(sparse(values))) for f in (own, reference)),
            rtol=1e-6,
        )


@compares("elements_of")
def same_elements(own, reference):
    equal(own(tensor(RANDOM[0])), reference(tensor(RANDOM[0])))
    for values in (RANDOM[0], RANDOM[1][:2]):
        # In another order, and without zeros.
        actual, expected = (
            np.sort(ops.convert_to_numpy(f(sparse(values))).ravel())
            for f in (own, reference)
        )
        actual, expected = actual[actual != 0], expected[expected != 0]
        np.testing.assert_allclose(actual, expected, rtol=1e-6)


@compares("scalar")
def same_scalar(own, reference):
    for value in (1, 2.5, True, tensor(3.0)):
        for dtype in ("float32", "int32", "bool"):
            equal(own(value, dtype), reference(value, dtype))


@compares("without_host")
def same_result(own, reference):
    steps = ops.convert_to_tensor(3, dtype="int32")

    def schedule():
        return ops.where(steps > 2, ops.cast(steps, "float32") * 0.5, 7.0)

    equal(own(schedule, near=steps), reference(schedule, near=steps))


# --- Differentiation and compiled functions ---------------------------------------


@compares("compute_gradients")
def differentiates(own, reference):
    a, unused = keras.Variable([3.0, 4.0]), keras.Variable(1.0)
    with pytest.raises(NotImplementedError):
        reference(lambda: a * a, [a])
    loss, grads = own(lambda: a * a, [a, unused], [1.0, -1.0])
    equal(loss, tensor([9.0, 16.0]))
    equal(grads[0], tensor([6.0, -8.0]))
    assert grads[1] is None


@compares("differentiate")
def differentiates_a_tensor(own, reference):
    a = keras.Variable([3.0, 4.0])
    arguments = [a], lambda loss: loss * 3.0
    with pytest.raises(NotImplementedError):
        reference(a * a, *arguments)
    if BACKEND == "jax":
        with pytest.raises(ValueError, match="cannot be differentiated"):
            own(a * a, *arguments)
        return
    tape = None
    if BACKEND == "tensorflow":
        import tensorflow as tf

        tape = tf.GradientTape()
    with tape or contextlib.nullcontext():
        loss = a * a
    [gradient] = own(loss, *arguments, tape=tape)
    equal(gradient, tensor([18.0, 24.0]))


@compares("is_traced")
def same_answer_outside_of_functions(own, reference):
    assert own([tensor(1.0)]) is reference([tensor(1.0)]) is False


@compares("outside_of_functions")
def same_context(own, reference):
    for context in (own(), reference()):
        with context:
            equal(tensor(1.0) + 1.0, tensor(2.0))
    with keras.name_scope("block"):
        inside = keras.Variable(1.0, name="a")
    for like in (inside, keras.Variable(1.0, name="a")):
        with keras.name_scope("other"), own(like):
            copy = keras.Variable(2.0, name="a")
        # On TensorFlow it is the whole path.
        names = [getattr(v.value, "name", None) for v in (copy, like)]
        assert names[0] == names[1]
        with reference(like):
            pass


@compares("is_variable")
def same_kinds(own, reference):
    for value in (keras.Variable(1.0), tensor(1.0), 1.0, None):
        assert own(value) is reference(value)


@compares("register_list_class")
def registers_lists(own, reference):
    class Registered(list):
        pass

    reference(Registered)
    own(Registered)
    import jax

    assert jax.tree.leaves(Registered([1, 2])) == [1, 2]


@compares("with_positions")
def same_positions(own, reference):
    for (key, item), (i, expected) in zip(own("ab"), reference("ab"), strict=True):
        assert item == expected
        assert str(key) == f"[{i}]"


# --- Replicas and shards ----------------------------------------------------------


@compares("reduce_gradients")
def same_on_one_replica(own, reference):
    grads = [tensor(RANDOM[0]), None, tensor(1.0, "float16")]
    for actual, expected in zip(own(grads), reference(grads), strict=True):
        assert actual is expected


@compares("any_sharded")
def same_plain_tensors(own, reference):
    assert own([tensor(1.0), None]) is reference([tensor(1.0), None]) is False


@compares("are_shards")
def same_whole_gradients(own, reference):
    variables = [keras.Variable(1.0), keras.Variable(2.0)]
    grads = [tensor(1.0), None]
    assert own(grads, variables) is reference(grads, variables) is False


@compares("check_shards", "check_on_replicas", "check_replica_context")
def same_acceptance(own, reference):
    variables = [keras.Variable(1.0)]
    lists = [tensor(1.0)], variables, [v.value for v in variables]
    # As many arguments as each of them takes.
    arguments = {"check_shards": lists, "check_on_replicas": (variables,)}
    arguments = arguments.get(own.__name__, ("apply",))
    assert own(*arguments) is reference(*arguments) is None


@compares("check_axis_name")
def axes_are_taken(own, reference):
    assert own("batch") is own(None) is reference(None) is None
    with pytest.raises(ValueError, match="`axis_name` is an axis"):
        reference("batch")


@compares("check_stateless_is_supported")
def stateless_steps_are_refused(own, reference):
    assert reference() is None
    with pytest.raises(ValueError, match="stateless_apply is not supported"):
        own()


# --- Facts ------------------------------------------------------------------------


@compares("devices")
def names_devices(own, reference):
    assert reference() == []
    assert own()
    assert all(isinstance(name, str) for name in own())


@compares("has_values")
def says_where_numbers_can_be_read(own, reference):
    assert own(tensor([1.0])) is reference(tensor([1.0])) is True
    found = []

    def traced(x):
        found.append(own(x))
        return x

    ops.vectorized_map(traced, tensor([1.0, 2.0]))
    assert found == [False]


@compares("memory_of")
def is_that_of_all_views(own, reference):
    value, other = tensor(RANDOM[0]), tensor(RANDOM[0])
    assert reference(value) == reference(value) != reference(other)
    assert own(value) == own(value.detach()) == own(value.view(-1)) == own(value.data)
    assert len({own(v) for v in (value, other, value[:1], sparse(RANDOM[0]))}) == 4
    assert own(None) == reference(None)


@compares("version_of")
def changes_with_each_write(own, reference):
    value = tensor([1.0])
    assert reference(value) is None
    before = own(value)
    value.add_(1.0)
    assert own(value) != before
    assert own(np.ones(2)) is None


@compares("random_state_kept")
def restores_random_numbers(own, reference):
    import torch

    with own():
        inside = torch.rand(())
    assert torch.rand(()) == inside
    with reference():
        outside = torch.rand(())
    assert torch.rand(()) != outside


@compares(
    "COMPILES_LOOPS",
    "UPDATES_IN_PLACE",
    "STEPS_WRITE_TENSORS",
    "VALUES_ARE_SHARED",
    "REDUCES_GRADIENTS",
    "TRAIN_STEP_IS_STATELESS",
    "OTHER_STEP",
    "PACKAGES",
    "HOW_TO_SCALE",
)
def differs(own, reference):
    assert type(own) is type(reference)
    assert own != reference
