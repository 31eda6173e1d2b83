"""Comparisons of the primitives of a step."""

import functools

import keras
import numpy as np
from keras import ops

import keras_lso
from keras_lso._backend import backend
from keras_lso._backend.framework import MeasureOptions
from keras_lso._backend.leaves import Leaves
from keras_lso._keras_internals import rules
from keras_lso._keras_internals.variables import live_storage_of, storage_of
from keras_lso.optimizers.lars import LARSRule
from testing.comparisons.inputs import (
    BACKEND,
    RANDOM,
    REFERENCE,
    RULES,
    close,
    state_of,
    tensor,
)
from testing.comparisons.registry import compares
from testing.harness import bits
from testing.masters import leaves_of
from testing.tensors import number


@compares("measure")
def same_measurement(own, reference):
    for rule in [None, *RULES]:
        for dtype, inv_scale in [("float32", 0.25), ("float16", 2.0), ("float32", 1e3)]:
            for bad in (1.0, np.inf, np.nan, 1e37 if dtype == "float32" else 6e4):
                grads = [tensor(RANDOM[3], dtype), tensor(RANDOM[2] * [bad, 1, 1, 0])]
                options = MeasureOptions(tensor(inv_scale), amax=True)
                if rule is not None:
                    options = options._replace(**of_two_variables(rule))
                # Elsewhere `update` takes the norms, and `same_step` compares it.
                has_norms = BACKEND == "jax" and rule is not None
                assert_same(own(grads, options), reference(grads, options), has_norms)
    if BACKEND == "tensorflow":
        # Under XLA it has them.
        grads = [tensor(RANDOM[3]), tensor(RANDOM[2])]
        for rule in {type(rule): rule for rule in RULES if rule.has_norms}.values():
            options = MeasureOptions(amax=True, **of_two_variables(rule))
            stats = in_xla(own, grads, options)
            assert_same(stats, reference(grads, options), has_norms=True)


def of_two_variables(rule):
    variable, *slots = map(tensor, state_of(rule))
    leaves = Leaves([variable] * 2, [[slot] * 2 for slot in slots])
    return {"rules": [rule] * 2, "leaves": leaves}


def in_xla(measure, grads, options):
    import tensorflow as tf

    return tf.function(lambda: measure(grads, options), jit_compile=True)()


def assert_same(actual, expected, has_norms):
    assert bool(actual.finite) is bool(expected.finite)
    if not bool(expected.finite):
        return
    assert number(actual.amax) == number(expected.amax)
    assert (actual.rule_norms is not None) is has_norms
    if not has_norms:
        return
    for ours, theirs in zip(actual.rule_norms, expected.rule_norms, strict=True):
        assert (ours is None) is (theirs is None)
        for norm, by_reference in zip(ours or (), theirs or (), strict=True):
            close(norm, by_reference)


@compares("update")
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


@compares("assign_here")
def same_value_assigned(own, reference):
    for assign in (own, reference):
        variable = keras.Variable(RANDOM[0], dtype="float32")
        assign(variable, tensor(RANDOM[1]))
        np.testing.assert_array_equal(variable.numpy(), np.float32(RANDOM[1]))


@compares("synchronise_masters")
def same_masters(own, reference):
    for flag in (True, False):
        found = []
        for synchronise, in_place in ((own, backend.UPDATES_IN_PLACE), (reference, 0)):
            variables = [keras.Variable(np.float32([1.0, 1.0])) for _ in "ab"]
            copy = keras.Variable(np.float16([1.0, 3.0]), dtype="float16")
            stored = storage_of([*variables, copy]) if in_place else [*variables, copy]
            leaves = leaves_of(stored[:2], [], [stored[2], None])
            if in_place:
                chunks = backend.chunked(["a", "b"], leaves)
                leaves = leaves._replace(chunks=chunks)
            told = functools.partial(synchronise, leaves, ops.array(flag))
            backend.run_masked(ops.array(flag), told)
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
        leaves_of(
            stored[:1], [[slot] for slot in stored[1:]], storage(low) if low else None
        ),
        [gradient],
        tensor(0.125),
        ops.convert_to_tensor(finite),
    )
    return [np.array(v.numpy()) for v in variables + low]


@compares("takes_update")
def takes_what_it_steps(own, reference):
    variables = [keras.Variable(RANDOM[0], dtype="float32")]
    grads = [tensor(RANDOM[1])]
    assert own(LARSRule, Leaves(storage_of(variables), []), grads)
    assert not reference(LARSRule, Leaves(variables, []), grads)


@compares("chunked")
def steps_alike_with_and_without_chunks(own, reference):
    rule = rules.Momentum(tensor(0.5), 0.9)
    assert reference([0], Leaves([], [])) is None
    results = []
    for chunked in (own, reference):
        variables = [keras.Variable(v) for v in state_of(rule)]
        stored = storage_of(variables)
        leaves = Leaves(stored[:1], [[slot] for slot in stored[1:]])
        leaves = leaves._replace(chunks=chunked(["kind"], leaves))
        backend.update([rule], leaves, [tensor(RANDOM[3])])
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


def layer_state_of():
    values = RANDOM[0], RANDOM[1][0], np.array(-0.0), np.array(np.nan), np.array(7)
    dtypes = "float32", "float16", "float32", "float32", "int32"
    # In copies: TensorFlow hands zeros out for later ones.
    pairs = zip(values, dtypes, strict=True)
    return [keras.Variable(v.copy(), dtype=d, trainable=False) for v, d in pairs]


def overwrite(variables):
    for v in variables:
        v.assign(ops.ones_like(v) * 3)
    return bits(variables)


@compares("value_of")
def same_value(own, reference):
    variable = keras.Variable([1.0, -0.0])
    assert bits([own(variable)]) == bits([reference(variable)]) == bits([variable])
    assert not isinstance(own(variable), keras.Variable)


@compares("copies_of")
def same_copies(own, reference):
    # A `StatelessScope`, and a backend that changes nothing in place, read variables.
    for copies_of, read in ((own, live_storage_of), (own, list), (reference, list)):
        variables = layer_state_of()
        start = bits(variables)
        copies = copies_of(read(variables))
        assert overwrite(variables) != start
        assert bits(copies) == start
    assert own([]) == reference([]) == []


@compares("restore")
def same_restored_values(own, reference):
    for flag in map(ops.convert_to_tensor, (True, False)):
        for restore, read in ((own, live_storage_of), (own, list), (reference, list)):
            variables = layer_state_of()
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


@compares("packed")
def same_elements(own, reference):
    values = [tensor(values) for values in RANDOM]
    packs = [
        np.concatenate([ops.ravel(v) for v in f(values)]) for f in (own, reference)
    ]
    np.testing.assert_array_equal(*map(np.sort, packs))


@compares("traced_step")
def same_step_as_of_optimizer(own, reference):
    results = []
    for traced_step in (own, reference):
        weight = keras.Variable([1.0, 2.0])
        optimizer = keras.optimizers.SGD(0.5)
        optimizer.build([weight])
        step = traced_step(optimizer, [weight], [optimizer], live_storage_of)
        step = step or optimizer
        step.apply([tensor([1.0, 4.0])])
        results.append(ops.convert_to_numpy(weight))
    np.testing.assert_array_equal(*results)


@compares("captured_steps")
def same_step_in_graphs(own, reference):
    from testing.cuda_graphs import capturing_steps

    results = []
    with capturing_steps():
        for captured_steps in (own, reference):
            weight = keras.Variable([1.0, 2.0])
            optimizer = keras_lso.GuardedOptimizer(keras.optimizers.SGD(0.5))
            optimizer.build([weight])
            optimizer._step._captured_steps = captured_steps()
            for _ in range(5):
                optimizer.apply([tensor([1.0, 4.0])])
            results.append(ops.convert_to_numpy(weight))
    np.testing.assert_array_equal(*results)
