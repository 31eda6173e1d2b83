"""Two PyTorch processes call Keras's `fit`, which it has for them from Keras 3.16 on.

With `DataParallel` Keras wraps the model in `DistributedDataParallel`. With
`ModelParallel` weights are sharded, and what autograd leaves as a gradient may be a sum
of which each process has a part.
"""

import functools

import numpy as np
import pytest

from integration_tests.distributed import launch, problem, torch_fits
from integration_tests.distributed.torch_fits import FITS, STEPS
from testing.keras_versions import fits_torch_processes

pytestmark = pytest.mark.skipif(
    not fits_torch_processes, reason="Keras fits in one process there, before 3.16"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("fits")


@pytest.fixture(scope="module")
def printed(folder):
    """What each of two processes has printed."""
    [port] = launch.free_ports(1)
    arguments = [[str(rank), port, str(folder)] for rank in range(2)]
    return launch.run("worker_torch_fit", *arguments, OMP_NUM_THREADS="1")


@pytest.fixture(scope="module")
def histories(printed):
    """What `fit` has returned in both processes, by the name of the fit."""
    return [dict(launch.lines_of(of_one, "HISTORY")) for of_one in printed]


@functools.cache
def alone(name):
    return torch_fits.train_alone(FITS[name])


def recorded(folder, name):
    return [problem.load(folder / f"{name}-{rank}.npz") for rank in range(2)]


def as_whole(columns, expected):
    """Returns what two processes hold the halves of, and how many arrays that are.

    What both of them hold as a whole has to be the same, bit for bit.
    """
    whole, halves = [], 0
    for first, last, like in zip(*columns, expected, strict=True):
        if first.shape == like.shape:
            problem.assert_bitwise_equal([first], [last])
            whole.append(first)
            continue
        halves += 1
        differs = np.not_equal(first.shape, like.shape)
        whole.append(np.concatenate([first, last], axis=int(np.argmax(differs))))
    return whole, halves


def overflows(fit):
    """Returns for each step of all epochs whether it overflows anywhere."""
    of_an_epoch = [bool(problem.overflowing(fit.pattern, i, 2)) for i in range(STEPS)]
    return of_an_epoch * torch_fits.EPOCHS


@pytest.mark.parametrize("name", [n for n in FITS if not FITS[n].statistics])
def test_fit_in_two_processes_matches_single_process(name, folder, histories):
    fit, (expected, history) = FITS[name], alone(name)
    columns, halves = as_whole(recorded(folder, name), expected)
    # The kernel and the bias of the first layer, and their slots.
    has_shards = fit.mesh is not None and fit.mesh[1] > 1
    assert bool(halves) is has_shards and halves % 2 == 0
    assert histories[0][name] == histories[1][name]
    for key in ("loss_scale", "skipped_steps"):
        # Of a run that was resumed: the epochs since.
        epochs = history[key][int(fit.is_resumed) :]
        assert histories[0][name][key] == epochs
    # A unit of float16 at weights below 2, or roundings of float32 that add up.
    atol = 2.0**-10 if fit.dtype == "float16" else 2e-5
    for i, (column, other) in enumerate(zip(columns, expected, strict=True)):
        if np.issubdtype(column.dtype, np.integer):
            np.testing.assert_array_equal(column, other, err_msg=f"array {i}")
            continue
        np.testing.assert_allclose(
            column, other, rtol=1e-3, atol=atol, err_msg=f"array {i}"
        )


@pytest.mark.parametrize("name", [n for n in FITS if "accumulating" not in n])
def test_overflow_in_one_process_skips_step_in_both(name, folder, histories):
    for columns in recorded(folder, name):
        weights = columns[: len(problem.initial_weights())]
        steps = list(zip(*weights, strict=True))
        for step, overflow in enumerate(overflows(FITS[name])[1:], start=1):
            before, after = steps[step - 1 : step + 1]
            stays = all(
                np.array_equal(a, b) for a, b in zip(after, before, strict=True)
            )
            assert stays is overflow, step
    assert histories[0][name]["skipped_steps"][-1] == sum(overflows(FITS[name]))


def test_statistics_differ_between_processes_and_survive_overflow(folder, histories):
    first, last = recorded(folder, "statistics")
    problem.assert_bitwise_equal(first, last)
    moving = [problem.load(folder / f"moving-{rank}.npz") for rank in range(2)]
    assert not np.array_equal(moving[0][0], moving[1][0])
    for columns in moving:
        assert all(np.isfinite(column).all() for column in columns)
        for column in columns:
            for step, overflow in enumerate(overflows(FITS["statistics"])[1:], start=1):
                assert np.array_equal(column[step], column[step - 1]) is overflow
