"""Faults of what processes agree on, whatever connects them."""

from tools.faults.fault import Fault

FAULTS = [
    Fault(
        name="processes are not looked for before gradients are averaged",
        file="keras_lso/compat/backend/__init__.py",
        old="    check_processes_run()\n    return",
        new="    return",
        tests="tests/compat/backend/test_processes.py::test_where_nothing_runs_the_error_says_how_to_start_it",
    ),
    Fault(
        name="a backend that cannot train has a process",
        file="keras_lso/compat/backend/loading_only.py",
        old="    return None\n",
        new="    return 1\n",
        tests="tests/compat/backend/test_processes.py::test_a_backend_that_cannot_train_has_none",
    ),
    Fault(
        name="gradients of different dtypes come back in another order",
        file="keras_lso/_backend/tensors.py",
        old="            results[i] = result\n",
        new="            results[group[0]] = result\n",
        tests="tests/compat/backend/test_processes.py::test_horovod_averages",
    ),
    Fault(
        name="what only another process has is missing here",
        file="keras_lso/compat/backend/processes.py",
        old="g if kind is None or g is not None else ops.zeros(kind[1], dtype=kind[0])",
        new="g",
        tests="tests/compat/backend/test_processes.py::test_what_only_the_other_process_has_is_zero_here",
    ),
    Fault(
        name="a Horovod that nobody has initialised is taken",
        file="keras_lso/compat/backend/processes.py",
        old="    except ValueError:  # ",
        new="    except KeyError:  # ",
        tests="tests/compat/backend/test_processes.py::test_horovod_has_to_be_initialised",
    ),
    Fault(
        name="processes that train other variables average them",
        file="keras_lso/compat/backend/processes.py",
        old="        if any(kind != kinds[0] for kind in kinds):\n",
        new="        if any(kind[0] != kinds[0][0] for kind in kinds):\n",
        tests="tests/compat/backend/test_processes.py::test_other_variables_in_another_process_are_refused",
    ),
]
