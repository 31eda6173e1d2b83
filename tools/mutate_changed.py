"""Mutates files of the package by Cosmic Ray, and runs the unit tests that mirror them.

    nox -s mutate_changed -- keras_lso/_core/step.py --sample 40 --seed 1

It works in a copy of the checkout. A mutant that survives is in a line that no unit
test checks, or changes nothing.
"""

import argparse
import os
import pathlib
import random
import re
import shlex
import shutil
import sqlite3
import subprocess
import sys
import tempfile

LEFT_OUT = shutil.ignore_patterns(".*", "__pycache__", "build", "dist", "site")
CONFIG = '''
[cosmic-ray]
module-path = "{file}"
test-command = """{command}"""
excluded-modules = []
timeout = 600.0
distributor.name = "local"
[cosmic-ray.filters.operators-filter]
# Of the operators that may replace one, only the nearest is left.
exclude-operators = [
  "core/ReplaceBinaryOperator_(?!Add_Sub|Sub_Add|Mul_Div|Div_Mul|FloorDiv_Div|\
Mod_FloorDiv|Pow_Mul|BitAnd_BitOr|BitOr_BitAnd)",
  "core/ReplaceComparisonOperator_(?!Eq_NotEq|NotEq_Eq|Lt_LtE|LtE_Lt|Gt_GtE|GtE_Gt|\
Is_IsNot|IsNot_Is)",
]
'''


def tests_of(file, root):
    """Returns the unit tests of a file by its name, otherwise those of its folder."""
    *folders, stem = pathlib.PurePath(file).with_suffix("").parts[1:]
    place = pathlib.Path(root, "tests", *folders)
    while not place.is_dir():
        place = place.parent
    names = [stem, stem.split("_")[0], *(f"{f}_{stem}" for f in folders)]
    names += [f"{stem}_{folder.removesuffix('s')}" for folder in folders]
    found = {path for name in names for path in place.rglob(f"test_{name}.py")}
    found |= {more for path in found for more in path.parent.glob(f"{path.stem}_*.py")}
    return sorted(str(path.relative_to(root)) for path in found or [place])


def sample(session, count, seed):
    """Reduces the waiting mutants in a session of Cosmic Ray to a number."""
    with sqlite3.connect(session) as database:
        # By what they change: the numbers of jobs are random.
        waiting = database.execute(
            "SELECT job_id FROM mutation_specs WHERE job_id NOT IN "
            "(SELECT job_id FROM work_results) ORDER BY operator_name, occurrence"
        ).fetchall()
        kept = random.Random(seed).sample(waiting, min(count, len(waiting)))
        for table in ("mutation_specs", "work_items"):
            others = set(waiting) - set(kept)
            database.executemany(f"DELETE FROM {table} WHERE job_id = ?", others)


def mutate(file, options, folder):
    """Runs the mutants of a file in a copy of the checkout; False if its tests fail."""
    tests = options.tests or tests_of(file, folder)
    backend = (re.findall(r"\b(?:tensorflow|jax)\b", file) or ["torch"])[0]
    pytest = [sys.executable, "-m", "pytest", "-xq", "-p", "no:cacheprovider", *tests]
    config, session = folder / "mutants.toml", folder / "mutants.sqlite"
    config.write_text(CONFIG.format(file=file, command=shlex.join(pytest)))
    env = {**os.environ, "KERAS_BACKEND": backend, "OMP_NUM_THREADS": "1"}

    def run(*command):
        return subprocess.run(list(map(str, command)), cwd=folder, env=env).returncode

    print(f"{file}: {' '.join(tests)}, {backend}", flush=True)
    if run("cosmic-ray", "baseline", config):
        return print("The tests fail without a mutant.", flush=True)
    run("cosmic-ray", "init", "--force", config, session)
    run("cr-filter-operators", session, config)
    if options.sample:
        sample(session, options.sample, options.seed)
    run("cosmic-ray", "exec", config, session)
    return not run("cr-report", "--surviving-only", "--show-diff", session)


def main(argv=None):
    parser = argparse.ArgumentParser(prog="nox -s mutate_changed --")
    add = parser.add_argument
    add("files", nargs="*", help="files of the package")
    add("--tests", nargs="+", help="in place of the tests that mirror a file")
    add("--sample", type=int, help="mutants of each file (default: all)")
    add("--seed", type=int, default=0, help="of the sample")
    add("--root", default=".", help="another checkout")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        shutil.copytree(options.root, folder, ignore=LEFT_OUT, dirs_exist_ok=True)
        passed = [mutate(file, options, pathlib.Path(folder)) for file in options.files]
    return 0 if all(passed) else 1


if __name__ == "__main__":
    sys.exit(main())
