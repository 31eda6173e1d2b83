"""What changed is found, and so are the tests that mirror it."""

import os
import pathlib
import subprocess
import tomllib

import pytest

# A source distribution has no tools.
pytest.importorskip("tools")

from tools import mutate_changed

pytestmark = [pytest.mark.one_backend]

ROOT = pathlib.Path(__file__).parents[2]
NAMED = ["-c", "user.name=a", "-c", "user.email=a@b"]


@pytest.fixture
def project(tmp_path):
    """A checkout of which all is pushed and tagged."""
    for name in ("changed", "kept", "deleted"):
        path = tmp_path / f"keras_lso/{name}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text("")
    run_git(tmp_path, "init", "-q")
    commit(tmp_path)
    run_git(tmp_path, "tag", "v1")
    push(tmp_path)
    return tmp_path


def run_git(root, *arguments):
    subprocess.run(["git", *arguments], cwd=root, check=True)


def commit(root, date="2020-01-01T00:00:00Z"):
    run_git(root, "add", "--all")
    subprocess.run(
        ["git", *NAMED, "commit", "-qm", "a"],
        cwd=root,
        check=True,
        env={**os.environ, "GIT_COMMITTER_DATE": date},
    )


def push(root):
    run_git(root, "update-ref", "refs/remotes/origin/main", "HEAD")


def test_changed_files_finds_committed_and_uncommitted_changes(project):
    (project / "keras_lso/changed.py").write_text("1")
    (project / "keras_lso/notes.txt").write_text("")
    (project / "tests.py").write_text("")
    (project / "keras_lso/deleted.py").unlink()
    expected = ["keras_lso/changed.py"]
    assert mutate_changed.changed_files("v1", project) == expected
    commit(project)
    assert mutate_changed.changed_files("v1", project) == expected
    assert mutate_changed.changed_files("HEAD", project) == []


def test_default_base_is_pushed_commit_or_last_tag(project):
    first = mutate_changed.git("rev-parse", "HEAD", root=project)
    assert mutate_changed.default_base(project) == "v1"
    (project / "keras_lso/changed.py").write_text("1")
    commit(project)
    assert mutate_changed.default_base(project) == first
    push(project)
    assert mutate_changed.default_base(project) == "v1"


def test_default_base_without_tag_is_last_commit_before_today(project):
    run_git(project, "tag", "-d", "v1")
    first = mutate_changed.git("rev-parse", "HEAD", root=project)
    (project / "keras_lso/changed.py").write_text("1")
    commit(project, date="")
    push(project)
    assert mutate_changed.default_base(project) == first


def test_main_rejects_unknown_commit(capsys):
    with pytest.raises(SystemExit):
        mutate_changed.main(["no-such-commit"])
    assert "'no-such-commit' is no commit" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("file", "tests"),
    [
        ("optimizers/lamb.py", "optimizers/test_lamb.py"),
        ("diagnostics/underflow.py", "test_underflow.py"),
        ("_backend/torch/masters.py", "_backend/test_torch_masters.py"),
        ("_backend/torch/measure.py", "_backend/test_measure.py"),
        ("_backend/jax/framework.py", "_backend/test_framework.py"),
        ("loss_scales/searching.py", "test_searching_loss_scale.py"),
        ("loss_scales/fixed.py", "test_loss_scales.py"),
        ("loss_scale_optimizer.py", "_core/test_loss_scale_optimizer.py"),
        ("_core/step.py", "_core"),
        ("_core/__init__.py", "_core"),
        ("_keras_internals/rates.py", "_keras_internals test_keras_internals.py"),
        ("callbacks/swap_ema_weights.py", ""),
    ],
)
def test_tests_of_file_are_found_by_name_or_folder(file, tests):
    assert (ROOT / "keras_lso" / file).is_file()
    expected = [f"tests/{name}" for name in tests.split()]
    assert mutate_changed.tests_of(f"keras_lso/{file}", ROOT) == expected


def test_backend_of_backend_file_is_named_in_its_path():
    assert mutate_changed.backend_of("keras_lso/_backend/jax/axes.py") == "jax"
    assert mutate_changed.backend_of("keras_lso/compat/backend/jax.py") == "jax"
    assert mutate_changed.backend_of("keras_lso/_core/step.py") == "torch"


def test_config_is_toml_with_cosmic_ray_settings():
    config = tomllib.loads(mutate_changed.config_of(["a.py"], ["a test"], 5.0))
    config = config["cosmic-ray"]
    assert config["module-path"] == ["a.py"]
    assert config["test-command"].endswith("--all-turns 'a test'")
    assert config["distributor"] == {"name": "local"}
