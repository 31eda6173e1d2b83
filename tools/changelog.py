"""Prints what CHANGELOG.md says of a version: the text of its release.

    python -m tools.changelog            # of the version in keras_lso/__init__.py
    python -m tools.changelog v0.2.0     # and the tag has to be that of the version

For a development version it prints the section of unreleased changes.
"""

import pathlib
import re
import sys

from keras_lso import __version__

CHANGELOG = pathlib.Path(__file__).resolve().parent.parent / "CHANGELOG.md"
_HEADING = re.compile(r"^## \[(?P<version>[^\]]+)\](?: - (?P<date>.+))?$", re.MULTILINE)
_LINKS = re.compile(r"^\[[^\]]+\]: https?://\S+$\n?", re.MULTILINE)


def sections(text):
    """Returns a dict of versions, the newest first, to tuples of a date and a text."""
    headings = list(_HEADING.finditer(text))
    ends = [heading.start() for heading in headings[1:]] + [len(text)]
    return {
        heading["version"]: (
            heading["date"],
            _LINKS.sub("", text[heading.end() : end]).strip(),
        )
        for heading, end in zip(headings, ends, strict=True)
    }


def links(text):
    """Returns the addresses behind the versions, a dict."""
    found = (line.split("]: ") for line in _LINKS.findall(text))
    return {version[1:]: address.strip() for version, address in found}


def notes(version, tag=""):
    """Returns the section of a version, which is what a tag has to name."""
    if tag not in ("", f"v{version}"):
        raise SystemExit(f"The tag is {tag}, and keras_lso/__init__.py has {version}.")
    named = "Unreleased" if "dev" in version else version
    found = sections(CHANGELOG.read_text(encoding="utf-8"))
    if named not in found:
        listed = ", ".join(found)
        raise SystemExit(f"CHANGELOG.md has no section {named}. It has: {listed}.")
    return found[named][1]


if __name__ == "__main__":
    print(notes(__version__, *sys.argv[1:]))
