"""`keras-lso info` prints what a bug report needs."""

import os
import subprocess
import sys

import keras
import pytest

import keras_lso
from keras_lso.__main__ import main, steps
from testing.keras_versions import takes_muon


def test_info_prints_versions_backend_and_devices(capsys):
    assert main(["info"]) == 0
    printed = capsys.readouterr().out
    for expected in (
        f"keras_lso {keras_lso.__version__}",
        f"keras {keras.__version__}",
        f"{keras.backend.backend()}, kernels framework",
        "python",
        "devices",
    ):
        assert expected in printed
    # There is at least a CPU.
    [line] = [x for x in printed.splitlines() if x.startswith("devices")]
    assert "cpu" in line.lower()
    assert max(map(len, printed.splitlines())) <= 80


def test_info_lists_optimizers_with_kind_of_step():
    found = steps()
    assert {"keras_lso.LARC", "Ftrl", "Adafactor"} <= {*found}
    fast = {name for name, step in found.items() if step.startswith("one pass")}
    rules = {"SGD", "SGD, momentum", "Adam", "AdamW", "Nadam", "Adamax", "Lion"}
    rules |= {"RMSprop", "Adagrad", *(["Muon"] if takes_muon else [])}
    with_norms = {"keras_lso.LAMB", "keras_lso.LARS", "keras_lso.NovoGrad", "Lamb"}
    # `run_if` is as fast on JAX, for all of them.
    expected = with_norms if keras.backend.backend() == "jax" else rules | with_norms
    assert fast == expected
    other = {
        "tensorflow": "a branch",
        "jax": "the check",
        "torch": "accelerator, undone",
    }
    assert found["Ftrl"].endswith(other[keras.backend.backend()])


@pytest.mark.parametrize("arguments", [[], ["inform"], ["info", "all"]])
def test_invalid_command_line_is_rejected(arguments, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert capsys.readouterr().err.startswith("usage: keras-lso")


def test_import_says_what_to_do_if_keras_has_no_backend():
    result = subprocess.run(
        [sys.executable, "-m", "keras_lso", "info"],
        env={**os.environ, "KERAS_BACKEND": "missing"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 1
    assert not result.stdout
    line = result.stderr.splitlines()[-1]
    for words in ("missing)", "Set the environment variable KERAS_BACKEND to", "torch"):
        assert words in line
