"""Mutates the files of the package that changed since a commit, and runs their tests.

Cosmic Ray makes the mutants, one at a time, in a copy of the checkout: an operator, a
comparison, a number, a condition. The tests are the unit tests that mirror the file,
under the backend that the file is for, or PyTorch. What survives is printed with its
diff: a line that no unit test sees, or a mutant that does the same.
"""

import argparse
import collections
import json
import os
import pathlib
import shlex
import shutil
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).parents[1]
BACKENDS = ("tensorflow", "jax", "torch")
# Not copied: environments, caches and what is built, which the tests do not read.
LEFT_OUT = shutil.ignore_patterns(".*", "__pycache__", "build", "dist", "site")
# Cosmic Ray replaces an operator by several others. Only the nearest is left: a test
# that notices the nearest notices the others.
EXCLUDED = (
    "core/ReplaceBinaryOperator_(?!Add_Sub|Sub_Add|Mul_Div|Div_Mul|FloorDiv_Div"
    "|Mod_FloorDiv|Pow_Mul|BitAnd_BitOr|BitOr_BitAnd)",
    "core/ReplaceComparisonOperator_(?!Eq_NotEq|NotEq_Eq|Lt_LtE|LtE_Lt|Gt_GtE|GtE_Gt"
    "|Is_IsNot|IsNot_Is)",
)


# --- What to mutate -------------------------------------------------------------


def git(*arguments, root=ROOT):
    """Returns what git prints, or "" where there is no such commit."""
    command = ["git", *arguments]
    result = subprocess.run(command, cwd=root, capture_output=True, text=True)
    return result.stdout.strip()


def default_base(root=ROOT):
    """The base to compare with: the pushed branch, the last tag, or yesterday's state.

    It is the first of these that exists. The pushed branch must also differ from HEAD.
    """
    if git("log", "-1", "--format=%h", "origin/main..HEAD", root=root):
        return git("merge-base", "origin/main", "HEAD", root=root)
    return git("describe", "--tags", "--abbrev=0", root=root) or git(
        "rev-list", "-1", "--before=1 day ago", "HEAD", root=root
    )


def changed_files(since, root=ROOT):
    """The package's files that differ from a commit, committed or not."""
    listed = git(
        "diff", "--name-only", "--diff-filter=d", since, "--", "keras_lso", root=root
    )
    return [name for name in listed.splitlines() if name.endswith(".py")]


def backend_of(file):
    """The backend that a file is for, or PyTorch: the quickest to import."""
    parts = pathlib.PurePath(file).with_suffix("").parts
    return next((name for name in BACKENDS if name in parts), "torch")


def tests_of(file, root=ROOT):
    """The unit tests of a file: those of its name, else those of its folder.

    `torch/masters.py` has `test_torch_masters.py`, `lars.py` has `test_lars.py` and
    `test_lars_*.py`, and `_core/step.py` all that is in `tests/_core`.
    """
    *folders, stem = pathlib.PurePath(file).with_suffix("").parts[1:]
    tests = pathlib.Path(root, "tests")
    mirrored = [tests.joinpath(*folders[:end]) for end in range(len(folders), -1, -1)]
    of_name = [place / name for name in names_of(folders, stem) for place in mirrored]
    found = [path for path in of_name if path.is_file()][:1]
    found += [more for path in found for more in path.parent.glob(f"{path.stem}_*.py")]
    if not found and not folders:
        found = list(tests.glob(f"*/test_{stem}.py"))
    for place, folder in zip(mirrored[1:], reversed(folders), strict=True):
        if not found:
            name = folder.strip("_")
            found = [path for path in [place / folder] if path.is_dir()]
            found += [*place.glob(f"test_{name}.py"), *place.glob(f"test_{name}_*.py")]
    return sorted(str(path.relative_to(root)) for path in found)


def names_of(folders, stem):
    """What the test file of a module may be called, the most telling first."""
    if stem == "__init__":
        return []
    words = stem.split("_")
    names = ["_".join([*folders[i:], stem]) for i in range(len(folders))]
    names += [f"{stem}_{folder.removesuffix('s')}" for folder in folders[-1:]]
    names += ["_".join(words[:end]) for end in range(len(words), 0, -1) if words[0]]
    return [f"test_{name}.py" for name in names]


# --- Cosmic Ray -----------------------------------------------------------------


def config_of(files, tests, timeout):
    """What Cosmic Ray reads: TOML, which writes strings and lists as JSON does."""
    pytest = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
    command = [*pytest, "--all-turns", *tests]
    return f"""\
[cosmic-ray]
module-path = {json.dumps(files)}
timeout = {timeout}
excluded-modules = []
test-command = {json.dumps(shlex.join(command))}
distributor.name = "local"

[cosmic-ray.filters.operators-filter]
exclude-operators = {json.dumps(EXCLUDED)}
"""


def mutate(files, tests, backend, folder, timeout):
    """Runs each mutant of files in a copy of the checkout; False if no test passes."""
    config, session = folder / "mutants.toml", folder / "mutants.sqlite"
    config.write_text(config_of(files, tests, timeout))
    env = {**os.environ, "KERAS_BACKEND": backend, "OMP_NUM_THREADS": "1"}

    def run(*command):
        return subprocess.run(command, cwd=folder, env=env).returncode == 0

    print(f"{' '.join(files)}: {' '.join(tests)}, {backend}", flush=True)
    if not run("cosmic-ray", "baseline", str(config)):
        print("The tests fail without a mutant.", flush=True)
        return False
    return (
        run("cosmic-ray", "init", "--force", str(config), str(session))
        and run("cr-filter-operators", str(session), str(config))
        and run("cosmic-ray", "exec", str(config), str(session))
        # In its share of survivors the operators that were left out count as killed.
        and run("cr-report", "--surviving-only", "--show-diff", str(session))
    )


# --- The command ----------------------------------------------------------------


def main(argv=None):
    parser = argparse.ArgumentParser(
        prog="nox -s mutate_changed --",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    help_of_since = (
        "a commit (default: origin/main, or the last tag where all is pushed)"
    )
    add("since", nargs="?", help=help_of_since)
    add("--timeout", type=float, default=600.0, help="seconds a mutant (default: 600)")
    options = parser.parse_args(argv)
    since = options.since or default_base()
    if not git("rev-parse", "--verify", "--quiet", f"{since}^{{commit}}"):
        parser.error(f"{since!r} is no commit: name one, as in SINCE=HEAD~5")
    groups = collections.defaultdict(list)
    for file in changed_files(since):
        groups[backend_of(file), tuple(tests_of(file))].append(file)
    print(f"{sum(map(len, groups.values()))} files changed since {since}.", flush=True)
    for key in [key for key in groups if not key[1]]:
        print(f"No unit tests mirror {', '.join(groups.pop(key))}.", flush=True)
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        shutil.copytree(ROOT, folder, ignore=LEFT_OUT, dirs_exist_ok=True)
        passed = [
            mutate(files, tests, backend, pathlib.Path(folder), options.timeout)
            for (backend, tests), files in groups.items()
        ]
    return 0 if all(passed) else 1


if __name__ == "__main__":
    sys.exit(main())
