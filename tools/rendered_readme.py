"""Renders descriptions as PyPI does, and looks for addresses that lead nowhere.

    python -m tools.rendered_readme build/release/dist/*

It needs readme_renderer, from requirements/release.txt. PyPI shows the description
without the repository around it: a link or a picture needs a whole address.
"""

import email
import fnmatch
import html.parser
import sys
import tarfile
import zipfile

import readme_renderer.markdown


def metadata(path):
    """Returns the metadata of a wheel or of an sdist, an `email.message.Message`."""
    if str(path).endswith(".whl"):
        with zipfile.ZipFile(path) as archive:
            [name] = fnmatch.filter(archive.namelist(), "*.dist-info/METADATA")
            return email.message_from_bytes(archive.read(name))
    with tarfile.open(path) as archive:
        name = min(fnmatch.filter(archive.getnames(), "*/PKG-INFO"), key=len)
        return email.message_from_binary_file(archive.extractfile(name))


class _Addresses(html.parser.HTMLParser):
    def __init__(self):
        super().__init__()
        self.found = []

    def handle_starttag(self, tag, attributes):
        named = dict(attributes)
        names = ("href", "src", "srcset")
        self.found += [named[name] for name in names if named.get(name)]


def faults(described):
    """Returns what is wrong with a description, a list of strings."""
    if described["Description-Content-Type"] != "text/markdown":
        return [f"the type is {described['Description-Content-Type']}"]
    rendered = readme_renderer.markdown.render(described.get_payload())
    if rendered is None:
        return ["it does not render"]
    addresses = _Addresses()
    addresses.feed(rendered)
    if not any(each.endswith(".png") for each in addresses.found):
        return ["it has no picture"]
    is_whole = ("https://", "#")
    return [each for each in addresses.found if not each.startswith(is_whole)]


if __name__ == "__main__":
    found = {path: faults(metadata(path)) for path in sys.argv[1:]}
    for path, wrong in found.items():
        print(f"{path}: {', '.join(wrong) or 'each address is whole'}")
    sys.exit(any(found.values()))
