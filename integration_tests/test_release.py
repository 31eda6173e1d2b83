"""The description of a release links to its own files."""

import pathlib
import re
import tomllib

import pytest

import hatch_build

ROOT = pathlib.Path(__file__).parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
REPOSITORY = PYPROJECT["tool"]["hatch"]["metadata"]["hooks"]["custom"]["repository"]


class Hook(hatch_build.Hosted):
    """The hook of a build, in the root of the repository."""

    def __init__(self, repository=REPOSITORY):
        super().__init__(str(ROOT), {"repository": repository})

    def metadata(self, version, **known):
        metadata = {"version": version, **known}
        self.update(metadata)
        return metadata


@pytest.fixture
def no_host(monkeypatch):
    monkeypatch.delenv("REPOSITORY_URL", raising=False)


def test_description_of_release_links_to_its_tag(no_host):
    text = Hook().metadata("1.2.3")["readme"]["text"]
    targets = re.findall(r"\]\(([^)]+)\)|(?:src|srcset|href)=\"([^\"]+)\"", text)
    targets = ["".join(target) for target in targets]
    assert f"{REPOSITORY}/blob/v1.2.3/CONTRIBUTING.md" in targets
    picture = f"{REPOSITORY}/raw/v1.2.3/docs/images/keras_beside_keras_lso.png"
    assert picture in targets
    assert all(target.startswith(("https://", "#")) for target in targets)
    assert "--8<--" not in text


def test_repository_url_in_environment_replaces_project_urls(monkeypatch):
    monkeypatch.setenv("REPOSITORY_URL", "https://host.example/fork/")
    metadata = Hook().metadata("1.2.3")
    assert metadata["urls"]["Source"] == "https://host.example/fork"
    assert REPOSITORY not in metadata["readme"]["text"]
