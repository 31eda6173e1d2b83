"""What `pip install` of the sdist and of the wheel gives, used outside of the checkout.

Each runs in a new virtual environment, which downloads Keras and a framework: hundreds
of megabytes, so that `make test` leaves this out and `make test-install` is for it.
Versions are those of requirements/dev.txt.
"""

import os
import pathlib
import re
import shutil
import subprocess
import sys
import tarfile
import venv

import pytest

from testing.pins import pins_of

ROOT = pathlib.Path(__file__).parents[1]

# What is installed, and the frameworks' packages for a CPU.
INSTALLS = [("wheel", "jax"), ("sdist", "jax"), ("wheel", "tensorflow")]
INSTALLS += [("wheel", "torch")]
PACKAGES = {"jax": "jax", "tensorflow": "tensorflow-cpu", "torch": "torch"}

ON_EVERY_BACKEND = [
    ("underflow.py",),
    ("log_max.py",),
    ("large_batch_digits.py", "--fast"),
    ("transformer_char.py", "--steps", "10"),
    ("spikes.py", "--steps", "20"),
    ("schedules.py",),
    ("float16_range.py",),
    ("float16_report.py",),
    ("keras_beside_keras_lso.py", "--steps", "1450"),
    ("large_batch_transformer.py", "--fast"),
    ("train_digits.py", "--epochs", "2"),
    ("float16_digits.py", "--epochs", "1"),
    ("float16_digits.py", "--dtype", "bfloat16", "--epochs", "1"),
]
OF_ONE_BACKEND = {
    "jax": [("custom_loop_jax.py",), ("jax_processes.py",), ("shard_map.py",)],
    "tensorflow": [("custom_loop_tensorflow.py",), ("multi_worker.py",)],
    "torch": [("custom_loop_torch.py",), ("gan.py",), ("ddp.py",), ("fsdp.py",)],
}


def run(*command, folder, check=True, **environment):
    """Runs a command as a user would, who has no checkout and has set nothing."""
    unset = ("PYTHONPATH", "KERAS_BACKEND", "VIRTUAL_ENV")
    inherited = {name: os.environ[name] for name in os.environ if name not in unset}
    finished = subprocess.run(
        [str(part) for part in command],
        cwd=folder,
        env={**inherited, "OMP_NUM_THREADS": "1", "COLUMNS": "80", **environment},
        capture_output=True,
        text=True,
        timeout=1800,
    )
    if check:
        assert finished.returncode == 0, finished.stdout + finished.stderr
    return finished


@pytest.fixture(scope="module")
def distributions(request, tmp_path_factory):
    """The sdist, and the wheel that is built from it."""
    folder = request.config.getoption("dist")
    if folder is None:
        folder = tmp_path_factory.mktemp("dist")
        command = ("-m", "build", "--no-isolation", "--outdir", folder, ROOT)
        run(sys.executable, *command, folder=folder)
    (sdist,), (wheel,) = folder.glob("*.tar.gz"), folder.glob("*.whl")
    return {"sdist": sdist, "wheel": wheel}


class Environment:
    """A virtual environment of its own, with the package and a framework."""

    def __init__(self, folder, distribution, backend):
        self.folder = folder
        self.distribution = distribution
        self.backend = backend
        self.python = folder / "venv" / "bin" / "python"
        venv.create(folder / "venv", with_pip=True)
        self.install(distribution, PACKAGES[backend])

    def install(self, *requirements):
        # With hashes, pip would want one of the distribution as well.
        pins = self.folder / "pins.txt"
        lines = [f"{name}=={version}" for name, version in pins_of("dev").items()]
        pins.write_text("\n".join(lines))
        command = ("-m", "pip", "install", "-qq", "-c", pins)
        run(self.python, *command, *requirements, folder=self.folder)

    def run(self, *arguments, **options):
        options.setdefault("folder", self.folder)
        return run(self.python, *arguments, KERAS_BACKEND=self.backend, **options)


@pytest.fixture(scope="module", params=INSTALLS, ids="-".join)
def bare(request, distributions, tmp_path_factory):
    """An environment without any extra."""
    kind, backend = request.param
    folder = tmp_path_factory.mktemp(f"{kind}-{backend}")
    yield Environment(folder, distributions[kind], backend)
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def complete(bare):
    """The same, with what the examples need."""
    bare.install(f"{bare.distribution}[plot,tensorboard]", "scikit-learn")
    return bare


# `bare` comes before `complete`, and so do its tests.


def test_package_is_imported_from_virtual_environment(bare):
    code = "import keras_lso as k; print(k.__version__); print(k.__file__)"
    version, file = bare.run("-c", code).stdout.splitlines()
    assert bare.distribution.name.startswith(f"keras_lso-{version}")
    assert pathlib.Path(file).is_relative_to(bare.folder / "venv")
    # Without it no type checker looks at the types.
    assert pathlib.Path(file).with_name("py.typed").exists()


def test_installed_dependencies_are_compatible(bare):
    assert "No broken requirements" in bare.run("-m", "pip", "check").stdout


def test_info_command_prints_versions_backend_and_optimizers(bare):
    command = bare.python.with_name("keras-lso")
    environment = {"folder": bare.folder, "KERAS_BACKEND": bare.backend}
    printed = run(command, "info", **environment).stdout
    assert bare.run("-m", "keras_lso", "info").stdout == printed
    assert re.search(r"^packages +keras_lso \d.*, keras 3\..*, numpy ", printed, re.M)
    assert re.search(rf"^backend +{bare.backend}, kernels framework", printed, re.M)
    assert re.search(r"^ *keras_lso\.LARS +one pass", printed, re.M)


# What a reader adds to the program of README.md.
FIT = """
import numpy as np

x = np.random.default_rng(0).normal(size=(256, 4)).astype("float32")
model.fit(x, x.sum(axis=1, keepdims=True), epochs=3, verbose=0)
print(type(model.optimizer).__name__, model.layers[0].compute_dtype)
print(int(model.optimizer.iterations), float(model.optimizer.loss_scale))
"""


def test_readme_program_runs_in_empty_folder(bare, tmp_path):
    readme = (ROOT / "README.md").read_text()
    [program] = re.findall(r"^```python\n(.*?)^```", readme, re.M | re.S)
    printed = bare.run("-c", program + FIT, folder=tmp_path).stdout
    first, second = printed.splitlines()
    assert first == "LossScaleOptimizer float16"
    steps, scale = second.split()
    # 3 epochs of 8 batches; the first scale may be too high for some.
    assert 20 <= int(steps) <= 24
    assert 2.0**10 <= float(scale) <= 2.0**15
    assert not list(tmp_path.iterdir())


WITHOUT_EXTRAS = {
    "plot": "keras_lso.plotting.plot_loss_scale({'loss_scale': [1.0]})",
    "tensorboard": "keras_lso.callbacks.LossScaleMonitor('logs')",
}


@pytest.mark.parametrize("extra", WITHOUT_EXTRAS)
def test_import_error_names_missing_extra(bare, extra):
    if (bare.backend, extra) == ("tensorflow", "tensorboard"):
        pytest.skip("TensorFlow brings TensorBoard along")
    code = f"import keras_lso; {WITHOUT_EXTRAS[extra]}"
    finished = bare.run("-c", code, check=False)
    last = finished.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: "), finished.stderr
    assert f'`pip install "keras-lso[{extra}]"`' in last


def test_examples_run_on_installed_package(complete):
    folder = complete.folder / "elsewhere"
    shutil.copytree(ROOT / "examples", folder)
    for name, *arguments in ON_EVERY_BACKEND + OF_ONE_BACKEND[complete.backend]:
        finished = complete.run(name, *arguments, folder=folder)
        assert finished.stdout, name
        print(f"--- {name}\n{finished.stdout}")


def test_example_lists_cover_every_example():
    run_here = ON_EVERY_BACKEND + sum(OF_ONE_BACKEND.values(), [])
    workers = {"digits_report.py", "digits_worker.py", "float16_digits_worker.py"}
    # KerasHub asks for TensorFlow's build for GPUs.
    workers.add("keras_hub_finetune.py")
    files = {file.name for file in (ROOT / "examples").glob("*.py")}
    assert {name for name, *_ in run_here} == files - workers


def test_sdist_contains_all_files_for_its_tests(complete):
    if not complete.distribution.name.endswith(".tar.gz"):
        pytest.skip("A wheel has no tests")
    complete.install("pytest", "hypothesis")
    with tarfile.open(complete.distribution) as archive:
        archive.extractall(complete.folder, filter="data")
    folder = complete.folder / complete.distribution.name.removesuffix(".tar.gz")
    # As it was installed, not as it lies here.
    shutil.rmtree(folder / "keras_lso")
    pytest_ = ("-m", "pytest", "-q", "-p", "no:cacheprovider")
    of_a_distributor = "integration_tests docs examples Makefile CITATION.cff"
    for name in of_a_distributor.split():
        assert (folder / name).exists()
    # Every file is imported, and those run that look for files besides the tests.
    complete.run(*pytest_, "--collect-only", "tests", folder=folder)
    names = ("test_import.py", "test_info.py", "_core/test_loss_scale_optimizer.py")
    paths = [f"tests/{name}" for name in names]
    print(complete.run(*pytest_, *paths, folder=folder).stdout)
