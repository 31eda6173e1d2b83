"""Two PyTorch processes call Keras's `fit`, from Keras 3.16 on.

With `DataParallel` Keras wraps the model in `DistributedDataParallel`. With
`ModelParallel` weights are sharded, and each process may have a part of the sum that is
the gradient.
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
    """The output of each of two processes."""
    arguments = "worker_torch_fit", *launch.free_ports(1), folder
    return launch.run_pair(*arguments, OMP_NUM_THREADS="1")


@pytest.fixture(scope="module")
def histories(printed):
    """The results of `fit` in both processes, by the name of the fit."""
    return [dict(launch.lines_of(of_one, "HISTORY")) for of_one in printed]


@functools.cache
def alone(name):
    return torch_fits.train_alone(FITS[name])


def recorded(folder, name):
    return [problem.load(folder / f"{name}-{rank}.npz") for rank in range(2)]


def overflows(fit):
    """Returns for each step of all epochs whether it overflows anywhere."""
    of_an_epoch = [bool(problem.overflowing(fit.pattern, i, 2)) for i in range(STEPS)]
    return of_an_epoch * torch_fits.EPOCHS


@pytest.mark.parametrize("name", [n for n in FITS if not FITS[n].statistics])
def test_fit_in_two_processes_matches_single_process(name, folder, histories):
    fit, (expected, history) = FITS[name], alone(name)
    columns, halves = problem.joined(*recorded(folder, name), expected)
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
    problem.assert_near(columns, expected, rtol=1e-3, atol=atol)


@pytest.mark.parametrize("name", [n for n in FITS if "accumulating" not in n])
def test_overflow_in_one_process_skips_step_in_both(name, folder, histories):
    skipped = overflows(FITS[name])
    for columns in recorded(folder, name):
        weights = columns[: len(problem.initial_weights())]
        problem.assert_skipped(weights, skipped[1:])
    assert histories[0][name]["skipped_steps"][-1] == sum(skipped)


def test_statistics_differ_between_processes_and_survive_overflow(folder, histories):
    first, last = recorded(folder, "statistics")
    problem.assert_bitwise_equal(first, last)
    moving = [problem.load(folder / f"moving-{rank}.npz") for rank in range(2)]
    assert not np.array_equal(moving[0][0], moving[1][0])
    for columns in moving:
        assert all(np.isfinite(column).all() for column in columns)
        for column in columns:
            problem.assert_skipped([column], overflows(FITS["statistics"])[1:])
