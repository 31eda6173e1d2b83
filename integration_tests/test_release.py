"""What a release says of itself: versions, dates and addresses agree."""

import pathlib
import re
import tomllib

import pytest
from packaging.version import Version

import hatch_build
from keras_lso import __version__
from tools import changelog

ROOT = pathlib.Path(__file__).parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
REPOSITORY = PYPROJECT["tool"]["hatch"]["metadata"]["hooks"]["custom"]["repository"]
CHANGELOG = (ROOT / "CHANGELOG.md").read_text()
SECTIONS = changelog.sections(CHANGELOG)


def released():
    """Returns the versions with a date, the newest first."""
    return [name for name, (date, _) in SECTIONS.items() if re.match(r"\d", date or "")]


def test_version_is_newest_release_or_later_development_version():
    newest, ours = Version(released()[0]), Version(__version__)
    assert ours == newest or (ours.is_devrelease and ours.release > newest.release)


def test_changelog_lists_newest_release_first():
    names = [name for name in SECTIONS if name != "Unreleased"]
    assert names == sorted(names, key=Version, reverse=True)
    # In development there is a place for what is not released.
    assert (next(iter(SECTIONS)) == "Unreleased") is Version(__version__).is_devrelease


def test_changelog_links_each_release_to_its_changes():
    newest, *older = released()
    compare = f"{REPOSITORY}/compare"
    expected = (
        {"Unreleased": f"{compare}/v{newest}...main"} if "dev" in __version__ else {}
    )
    for version, before in zip([newest, *older], older, strict=False):
        expected[version] = f"{compare}/v{before}...v{version}"
    first = [newest, *older][-1]
    expected[first] = f"{REPOSITORY}/releases/tag/v{first}"
    assert changelog.links(CHANGELOG) == expected


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
