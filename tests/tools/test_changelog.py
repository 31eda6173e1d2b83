"""The sections of a changelog, and the text of a release."""

import pytest

# A wheel has no tools.
changelog = pytest.importorskip("tools.changelog")

pytestmark = pytest.mark.one_backend

TEXT = """\
# Changelog

## [Unreleased]

### Added

- `[1.0]` is no heading.

## [0.2.0] - 2026-11-26

- Two.

## [0.1.0] - not released

- One.

[Unreleased]: https://example.org/compare/v0.2.0...main
[0.2.0]: https://example.org/releases/v0.2.0
"""


@pytest.fixture(autouse=True)
def written(tmp_path, monkeypatch):
    path = tmp_path / "CHANGELOG.md"
    path.write_text(TEXT)
    monkeypatch.setattr(changelog, "CHANGELOG", path)


def test_sections_have_date_and_text_without_links():
    assert changelog.sections(TEXT) == {
        "Unreleased": (None, "### Added\n\n- `[1.0]` is no heading."),
        "0.2.0": ("2026-11-26", "- Two."),
        "0.1.0": ("not released", "- One."),
    }


def test_links_are_read_from_end_of_changelog():
    assert changelog.links(TEXT) == {
        "Unreleased": "https://example.org/compare/v0.2.0...main",
        "0.2.0": "https://example.org/releases/v0.2.0",
    }


@pytest.mark.parametrize("tag", ["", "v0.2.0"])
def test_notes_of_release_are_its_section(tag):
    assert changelog.notes("0.2.0", tag) == "- Two."


def test_notes_of_development_version_are_unreleased_section():
    assert changelog.notes("0.3.0.dev0") == "### Added\n\n- `[1.0]` is no heading."


def test_tag_of_other_version_is_rejected():
    message = r"^The tag is v0\.3\.0, and keras_lso/_version\.py has 0\.2\.0\.$"
    with pytest.raises(SystemExit, match=message):
        changelog.notes("0.2.0", "v0.3.0")


def test_version_without_section_is_rejected():
    message = r"has no section 0\.4\.0\. It has: Unreleased, 0\.2\.0, 0\.1\.0\.$"
    with pytest.raises(SystemExit, match=message):
        changelog.notes("0.4.0")
