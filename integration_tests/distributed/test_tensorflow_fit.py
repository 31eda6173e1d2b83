"""`fit` under `MirroredStrategy`, with overflows on one replica, the other and both.

Keras's `fit` does not run under `MultiWorkerMirroredStrategy`, with any optimizer
(keras#20585).
"""

import functools

import numpy as np
import pytest

from integration_tests.distributed import launch, problem, tensorflow_fit

WORKER = "worker_tensorflow_fit"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("fit")


@pytest.fixture(scope="module")
def printed(folder):
    [printed] = launch.run(WORKER, [str(folder)])
    return printed


@functools.cache
def reference(**options):
    """Returns what a single process records, and its losses."""
    recorder = tensorflow_fit.Recorder(lambda v: [_of_file(v)])
    losses = tensorflow_fit.fit(tensorflow_fit.make_model(**options), [recorder])[
        "loss"
    ]
    states = [of_replicas[0] for of_replicas in recorder.recorded]
    return losses, [np.stack(column) for column in zip(*states, strict=True)]


def _of_file(variable):
    return np.float32(variable) if variable.dtype == "bfloat16" else variable.numpy()


def skipped_steps(columns):
    # The first variable of the wrapper follows four weights.
    return columns[4].tolist()


@pytest.mark.parametrize("way", tensorflow_fit.WAYS)
def test_fit_skips_step_on_all_replicas_if_one_overflows(folder, printed, way):
    first, second = (problem.load(folder / f"{way} {r}.npz") for r in (0, 1))
    problem.assert_bitwise_equal(second, first)
    assert skipped_steps(first) == tensorflow_fit.SKIPPED_AFTER
    options = tensorflow_fit.WAYS[way] if way == "int8" else {}
    losses, expected = reference(**options)
    # Adam's steps of 0.01 take the float16 roundings of a gradient, 2**-11 each. The
    # reference of bfloat16 slots has slots in float32. Numbers in 8 bits are shares of
    # the largest of their blocks.
    limit = 2.0**-6 if way in ("slots", "int8") else 18 * 0.01 * 2.0**-8
    for column, other in zip(first, expected, strict=True):
        assert np.isfinite(column).all()
        if column.dtype in ("int8", "uint8"):
            continue
        np.testing.assert_allclose(column, other, rtol=0, atol=limit)
    [actual] = (a for w, a in launch.lines_of(printed, "LOSSES") if w == way)
    # Some batches have a loss of 1e36 / 4, to which the weights add nothing.
    assert actual == pytest.approx(losses, rel=1e-3)


def test_values_read_after_mirrored_fit_match_fit_without_strategy(folder, printed):
    [[found, norms]] = launch.lines_of(printed, "READS")
    expected, whole_norms = tensorflow_fit.fit_and_read(f"{folder}/alone.keras")
    assert found == expected and found["is loaded"]
    # Those of whole gradients, up to their roundings to float16, as above.
    assert norms == pytest.approx(whole_norms, rel=2.0**-8)


def test_keras_wrapper_applies_step_that_overflows_on_last_replica(printed):
    """This shows the need for a test of all replicas, until Keras has one."""
    [weights] = launch.lines_of(printed, "KERAS")
    assert not np.isfinite(np.concatenate(list(map(np.ravel, weights)))).any()


def test_jit_compile_true_raises_under_strategy(printed):
    [error] = launch.lines_of(printed, "XLA")
    assert "located in device" in error
