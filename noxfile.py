"""What needs an environment of its own: other versions, another machine's packages.

`make` calls these sessions (`make test-oldest` calls `oldest`); alone they run by

    .venv/bin/nox -s oldest -- -k lars

Each environment is a folder in .nox, made from requirements/ and kept.
"""

import functools
import os
import pathlib
import shutil
import sys

import nox

nox.options.default_venv_backend = "venv"
nox.options.error_on_missing_interpreters = True
nox.options.reuse_venv = "yes"
# None, unless it is named: each of them takes minutes.
nox.options.sessions = []

BACKENDS = ("tensorflow", "jax", "torch")
KERAS_3_16 = "keras-nightly==3.16.0.dev2026102704"
# The one that PyTorch 2.13 is built with.
TRITON = "triton==3.7.1"
GROUPS = nox.project.load_toml("pyproject.toml")


def install(session, *names):
    """Installs requirements/NAME.txt for each name, and the package."""
    for name in names:
        # These do not ask for what their packages ask for: it is there, or unwanted.
        alone = name.endswith(("originals", "torch"))
        options = ["--no-deps"] if alone else []
        session.install(*options, "-r", f"requirements/{name}.txt")
    install_package(session)


def install_package(session):
    session.install("--no-deps", "--no-build-isolation", "-e", ".")


def environment(backend, **more):
    # PyTorch's threads would get into the way of what else runs.
    quiet = {"OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "3"}
    return {"KERAS_BACKEND": backend, **quiet, **more}


def run_suite(session, backends):
    """Runs all tests under each backend, the next ones after one has failed as well."""
    failed = []
    for backend in backends:
        command = ["python", "-m", "pytest", "tests", "integration_tests"]
        try:
            session.run(*command, *session.posargs, env=environment(backend))
        except nox.command.CommandFailed:
            failed.append(backend)
    if failed:
        session.error(f"Tests failed under {', '.join(failed)}.")


def freeze(session, path):
    """Writes the versions that are installed, as pins that hold on every index."""
    command = ["python", "-m", "pip", "freeze", "--all", "--exclude", "pip"]
    frozen = session.run(*command, "--exclude-editable", silent=True)
    pathlib.Path(path).parent.mkdir(exist_ok=True)
    pathlib.Path(path).write_text(frozen.replace("+cpu", ""))


@nox.session
def oldest(session):
    """The suite with the oldest Keras, TensorFlow and JAX."""
    install(session, "oldest", "torch", "oldest-originals")
    run_suite(session, BACKENDS)


@nox.session
def newest(session):
    """The suite with the newest of everything; its versions are in build/newest.txt."""
    # PyPI's PyTorch for Linux brings CUDA's gigabytes: without an index that has builds
    # for CPUs, NEWEST_BACKENDS="tensorflow jax" leaves it out.
    backends = os.environ.get("NEWEST_BACKENDS", " ".join(BACKENDS)).split()
    packages = ["keras", "tensorflow-cpu", "jax"]
    packages += nox.project.dependency_groups(GROUPS, "tests")
    torch = [backend for backend in backends if backend == "torch"]
    session.run("python", "-m", "pip", "uninstall", "-qqy", "keras", "keras-nightly")
    upgrade = ("--upgrade", "--upgrade-strategy", "eager")
    session.install(*upgrade, *packages, *torch)
    originals = nox.project.dependency_groups(GROUPS, "originals")
    session.install("--upgrade", "--no-deps", *originals)
    install_package(session)
    # Or `keras-nightly`: tomorrow's Keras.
    keras = os.environ.get("NEWEST_KERAS", "keras")
    if keras != "keras":
        session.run("python", "-m", "pip", "uninstall", "-qqy", "keras")
        session.install("--pre", "--no-deps", keras)
    freeze(session, "build/newest.txt")
    run_suite(session, backends)


@nox.session
def accelerators(session):
    """What a step moves and holds on a GPU or a TPU, by their compilers."""
    command = ["-m", "benchmarks.accelerators", "--targets"]
    torch = {"KERAS_BACKEND": "torch"}
    # By the PyTorch of .venv.
    session.run(sys.executable, *command, "PyTorch", env=torch, external=True)
    # Compilers for a GPU, without NVIDIA's libraries, and for a TPU: neither has to be
    # there. libtpu is the one that this JAX asks for.
    keras, _, jax, *_ = GROUPS["dependency-groups"]["dev"]
    plugins = [jax.replace("jax", f"jax-cuda13-{name}") for name in ("plugin", "pjrt")]
    session.install(keras, jax, *plugins, "libtpu==0.0.42", "hatchling", "editables")
    install_package(session)
    memory = ("--memory", "H200", "TPU v5e", "--shared", "4 x H200", "4 x TPU v5e")
    session.run("python", *command, "H200", "TPU v5e", "4 x TPU v5e", *memory)


@nox.session
def kernels(session):
    """The kernels of compiled 16-bit steps on PyTorch for an H200, by its compilers."""
    # Beside the packages of .venv.
    folder = session.create_tmp()
    session.install("--no-deps", "--upgrade", "--target", folder, TRITON)
    env = {"KERAS_BACKEND": "torch", "KERAS_LSO_KERNELS": "compile"}
    for program in ("accelerators.kernels", "pages"):
        command = [sys.executable, "-m", f"benchmarks.{program}"]
        session.run(*command, env={**env, "PYTHONPATH": folder}, external=True)


@nox.session
def compiled(session):
    """The compiled step of `fit` on PyTorch, with a Keras whose step is one graph."""
    # Beside the packages of .venv.
    folder = session.create_tmp()
    session.install("--pre", "--no-deps", "--upgrade", "--target", folder, KERAS_3_16)
    env = {"KERAS_BACKEND": "torch", "PYTHONPATH": folder}
    for program in ("graphs", "compiled_fit", "pages"):
        command = [sys.executable, "-m", f"benchmarks.{program}"]
        session.run(*command, env=env, external=True)


@nox.session
def conformance(session):
    """What loss scaling promises, asked of this package and of its peers."""
    # Beside the packages of .venv.
    folder = session.create_tmp()
    peers = ("-r", "requirements/peers.txt")
    session.install("--no-deps", "--upgrade", "--target", folder, *peers)
    env = {"OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONPATH": folder}
    for program in ("conformance", "benchmarks.pages"):
        session.run(sys.executable, "-m", program, env=env, external=True)


@nox.session
def release_check(session):
    """Builds the distributions once, and checks and installs those very files."""
    folder = pathlib.Path("build/release").absolute()
    dist = folder / "dist"
    shutil.rmtree(folder, ignore_errors=True)
    session.install("-r", "requirements/release.txt")
    # By the hatchling of requirements/ and with the date of the commit: whoever builds
    # it again gets the same files.
    commit = ("git", "log", "-1", "--pretty=%ct")
    date = session.run(*commit, external=True, silent=True)
    env = {"SOURCE_DATE_EPOCH": date.strip()}
    command = ("python", "-m", "build", "--no-isolation", "--outdir", str(dist))
    session.run(*command, env=env)
    distributions = [str(file) for file in sorted(dist.iterdir())]
    session.run("python", "-m", "twine", "check", "--strict", *distributions)
    # The rest runs in .venv.
    run = functools.partial(session.run, sys.executable, "-m", external=True)
    [version] = {file.name.split("-")[1] for file in dist.glob("*.whl")}
    if os.environ.get("RELEASE_TAG") not in (None, f"v{version}"):
        session.error(f"The tag must be v{version}, as keras_lso/__init__.py says.")
    run("pytest", "install_tests", f"--dist={dist}", *session.posargs)


@nox.session
def mutate_changed(session):
    """What no unit test sees of some files: -- FILES --sample 40."""
    session.install("cosmic-ray==8.7.0")
    # The tests of a mutant run in .venv: all that Cosmic Ray asks is whether they pass.
    command = [sys.executable, "-m", "tools.mutate_changed"]
    session.run(*command, *session.posargs, external=True)


@nox.session(reuse_venv=False)
def lock(session):
    """Renews requirements/NAME.txt from the groups of pyproject.toml: -- NAME."""
    [name] = session.posargs
    # Python 3.11 brings an old one, which nothing has asked for.
    session.run("python", "-m", "pip", "uninstall", "-qqy", "setuptools")
    session.install(*nox.project.dependency_groups(GROUPS, name))
    freeze(session, "build/frozen.txt")
    session.install("uv")
    command = ("python", "-m", "tools.lock_hashes", "build/frozen.txt")
    session.run(*command, f"requirements/{name}.txt")
