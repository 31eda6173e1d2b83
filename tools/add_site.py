"""Adds a built site to the folder of all versions, which GitHub Pages serves.

    python -m tools.add_site site build/pages v0.3.0

The site of a tag gets a folder by the version, and becomes `latest` if it is newest;
that of a branch is `dev`. `versions.json`, in the form of mike, is what the theme's
selector of versions reads.
"""

import json
import pathlib
import shutil
import sys

from packaging.version import Version

_FRONT = """\
<!doctype html>
<meta charset="utf-8">
<title>keras-lso</title>
<meta http-equiv="refresh" content="0; url={0}/index.html">
<a href="{0}/index.html">keras-lso</a>
"""


def add(site, pages, ref):
    """Copies a site to its folder, and renews the list and the front page."""
    name = ref.removeprefix("v") if ref.startswith("v") else "dev"
    replace(site, pages / name)
    names = {folder.name for folder in pages.iterdir() if folder.is_dir()}
    released = [each for each in names if each[0].isdigit()]
    released.sort(key=Version, reverse=True)
    latest = released[:1]
    if latest == [name]:
        replace(site, pages / "latest")
    versions = [
        {"version": v, "title": v, "aliases": ["latest"] if [v] == latest else []}
        for v in [*(["dev"] if "dev" in names else []), *released]
    ]
    (pages / "versions.json").write_text(json.dumps(versions, indent=1) + "\n")
    (pages / "index.html").write_text(_FRONT.format("latest" if latest else "dev"))
    # GitHub would leave out folders whose name begins with an underscore.
    (pages / ".nojekyll").touch()


def replace(site, folder):
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(site, folder)


if __name__ == "__main__":
    _site, _pages, _ref = sys.argv[1:]
    add(pathlib.Path(_site), pathlib.Path(_pages), _ref)
