"""What a release says of itself: versions, dates and addresses agree."""

import pathlib
import re
import tomllib

import pytest
import yaml
from packaging.version import Version

import hatch_build
from keras_lso._version import __version__
from tools import changelog

ROOT = pathlib.Path(__file__).parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
REPOSITORY = PYPROJECT["tool"]["hatch"]["metadata"]["hooks"]["custom"]["repository"]
CHANGELOG = (ROOT / "CHANGELOG.md").read_text()
SECTIONS = changelog.sections(CHANGELOG)


def released():
    """Returns the versions with a date, the newest first."""
    return [name for name, (date, _) in SECTIONS.items() if re.match(r"\d", date or "")]


# --- Versions ------------------------------------------------------------------------


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


def test_citation_file_names_newest_release():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    newest = released()[0]
    assert citation["version"] == newest
    assert str(citation["date-released"]) == SECTIONS[newest][0]
    assert citation["repository-code"] == REPOSITORY


# --- Addresses -----------------------------------------------------------------------


def files_with_addresses():
    found = [ROOT / "mkdocs.yml", ROOT / "CITATION.cff", ROOT / "CHANGELOG.md"]
    found += [*(ROOT / "docs").rglob("*.md"), *(ROOT / ".github").rglob("*.yml")]
    return [path for path in found if "keras-lso/keras-lso" in path.read_text()]


def test_all_files_use_same_repository_address():
    owner = REPOSITORY.split("/")[-2]
    host = f"https://{owner}.github.io/{REPOSITORY.split('/')[-1]}"
    for path in files_with_addresses():
        for address in re.findall(r"https://[^\s\"'<>)\]]*keras-lso", path.read_text()):
            assert address.startswith((REPOSITORY, host)), (path, address)
    assert len(files_with_addresses()) >= 4
    assert f"@{owner}/" in (ROOT / ".github" / "CODEOWNERS").read_text()


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


def test_relative_links_of_each_form_become_absolute():
    relative = """[a](a.md) [b](#b) [c](https://c.org/c.md)
<img src="d.png"><source srcset="e.png"><a href="f.md">
[g]: docs/g.md#part
[h]: https://h.org
"""
    whole = """[a](R/blob/v1/a.md) [b](#b) [c](https://c.org/c.md)
<img src="R/raw/v1/d.png"><source srcset="R/raw/v1/e.png"><a href="R/blob/v1/f.md">
[g]: R/blob/v1/docs/g.md#part
[h]: https://h.org
"""
    assert hatch_build.absolute(relative, "R", "v1") == whole


def test_repository_url_in_environment_replaces_project_urls(monkeypatch):
    monkeypatch.setenv("REPOSITORY_URL", "https://host.example/fork/")
    metadata = Hook().metadata("1.2.3")
    assert metadata["urls"]["Source"] == "https://host.example/fork"
    assert REPOSITORY not in metadata["readme"]["text"]
