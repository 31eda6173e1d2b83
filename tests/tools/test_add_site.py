"""The folder of all versions of the documentation."""

import json

import pytest

# A wheel has no tools.
add_site = pytest.importorskip("tools.add_site")

pytestmark = pytest.mark.one_backend


@pytest.fixture
def add(tmp_path):
    """Adds a site with a text for a ref, and returns the folder of all versions."""

    def add(ref, text):
        site, pages = tmp_path / "site", tmp_path / "pages"
        site.mkdir(exist_ok=True)
        pages.mkdir(exist_ok=True)
        (site / "index.html").write_text(text)
        add_site.add(site, pages, ref)
        return pages

    return add


def texts(pages):
    """Returns the texts of the versions, by their folders."""
    return {
        folder.name: (folder / "index.html").read_text()
        for folder in pages.iterdir()
        if folder.is_dir()
    }


def listed(pages):
    versions = json.loads((pages / "versions.json").read_text())
    return [(each["version"], *each["aliases"]) for each in versions]


def test_site_without_release_has_only_development_version(add):
    pages = add("main", "of main")
    assert texts(pages) == {"dev": "of main"}
    assert listed(pages) == [("dev",)]
    assert 'url=dev/index.html"' in (pages / "index.html").read_text()


def test_releases_are_listed_newest_first_with_newest_as_latest(add):
    for version in ("0.9.0", "0.10.0"):
        pages = add(f"v{version}", version)
    pages = add("main", "of main")
    expected = {"0.9.0": "0.9.0", "0.10.0": "0.10.0", "latest": "0.10.0"}
    assert texts(pages) == {"dev": "of main", **expected}
    assert listed(pages) == [("dev",), ("0.10.0", "latest"), ("0.9.0",)]
    assert 'url=latest/index.html"' in (pages / "index.html").read_text()


def test_fix_of_older_version_leaves_latest_unchanged(add):
    add("v0.2.0", "new")
    pages = add("v0.1.1", "old")
    assert texts(pages) == {"0.2.0": "new", "0.1.1": "old", "latest": "new"}


def test_site_added_again_replaces_old_files(add):
    pages = add("main", "old")
    (pages / "dev" / "gone.html").touch()
    pages = add("main", "new")
    assert texts(pages) == {"dev": "new"}
    assert not (pages / "dev" / "gone.html").exists()
