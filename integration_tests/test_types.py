"""`mypy --strict` accepts the examples and the pages' code, as users' programs."""

import itertools
import os
import re
import subprocess
import sys

import pytest

from integration_tests.docs_blocks import PAGES, ROOT, blocks_of

# An environment of older versions lacks it.
pytest.importorskip("mypy")

BACKENDS = ("tensorflow", "jax", "torch")
# It is about the inside of the package, whose functions have no types.
FOR_CONTRIBUTORS = "docs/extending.md"
# Without types, or so large that it would take minutes.
UNTYPED = ("jax", "jmp", "keras", "keras_hub", "matplotlib", "optax", "rich")
UNTYPED += ("sklearn", "tensorflow", "tf_keras", "torch")
SETTINGS = """\
[mypy]
strict = true
explicit_package_bases = true
# Of the programs: they have few types of their own.
disallow_untyped_defs = false
disallow_incomplete_defs = false
disallow_any_generics = false
disallow_untyped_calls = false
# Keras and TensorFlow have no types, so that their classes are `Any`.
disallow_subclassing_any = false
disallow_untyped_decorators = false
warn_return_any = false
# A page may show two programs that define one name.
disable_error_code = no-redef

# As of an installed package.
[mypy-keras_lso.*]
follow_imports = silent

# It calls `sys.stdout.reconfigure`, which not every `TextIO` has.
[mypy-multi_worker]
disable_error_code = union-attr

""" + "\n".join(
    f"[mypy-{package}.*]\nfollow_imports = skip\nignore_missing_imports = true"
    for package in UNTYPED
)


def write_pages(folder):
    """Writes the programs of the pages, as they run on each backend."""
    paths = []
    pages = sorted(PAGES.keys() - {FOR_CONTRIBUTORS})
    for page, backend in itertools.product(pages, BACKENDS):
        blocks = [b for b in blocks_of(page) if b.language == "python"]
        if own := [b.source for b in blocks if b.runs_on(backend)]:
            name = re.sub(r"\W", "_", f"{page}_{backend}")
            paths.append(folder / f"{name}.py")
            paths[-1].write_text("\n".join(own))
    return paths


def check(paths, folder):
    """Returns the lines that mypy prints about some programs."""
    settings = folder / "mypy.ini"
    settings.write_text(SETTINGS)
    # Where an example finds the ones that it imports.
    places = [ROOT, *{path.parent for path in paths}]
    command = ["--config-file", settings, "--cache-dir", folder / "cache", *paths]
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--no-error-summary", *command],
        env={**os.environ, "MYPYPATH": os.pathsep.join(map(str, places))},
        cwd=folder,
        capture_output=True,
        text=True,
    )
    assert done.returncode in (0, 1), done.stderr
    return done.stdout.splitlines()


def test_mypy_accepts_examples_and_pages_and_reports_wrong_types(tmp_path):
    examples = sorted((ROOT / "examples").glob("*.py"))
    wrong = tmp_path / "a_wrong_program.py"
    wrong.write_text(
        "import keras, keras_lso\n"
        "inner = keras.optimizers.SGD(0.1)\n"
        "keras_lso.LossScaleOptimizer(inner, master_weights='both')\n"
        "keras_lso.LARS(0.1).trust_ratios(3)\n"
        "keras_lso.schedules.Linear(0.1)\n"
        "optimizer = keras_lso.LARC(inner, eta=0.1)\n"
        "steps: str = optimizer.eta\n"
        # Methods and functions with a decorator.
        "keras_lso.LossScaleOptimizer(inner).apply([], scaled='yes')\n"
        "keras_lso.plotting.plot_record(3)\n"
        "keras_lso.schedules.LinearWarmup(0.1, 'few')\n"
        "keras_lso.GuardedOptimizer(inner, init_scale=3)\n"
        "keras_lso.LossScaleOptimizer(inner, init_scale=3)\n"
    )
    pages = write_pages(tmp_path)
    assert len(pages) > 20
    said = check([*examples, *pages, wrong], tmp_path)
    # The types are known: contradictions are reported.
    about_it = [line for line in said if line.startswith(wrong.name)]
    places = [int(line.split(":")[1]) for line in about_it]
    assert places == [3, 4, 5, 7, 8, 9, 10, 11, 12], about_it
    assert "\n".join(line for line in said if line not in about_it) == ""
