"""Adds to a distribution's metadata what depends on where the repository is hosted.

PyPI shows README.md without the repository around it, so that its pictures and its
links to files of the repository need whole addresses there. Its links to the
documentation have them.
"""

import os
import pathlib
import re

from hatchling.metadata.plugin.interface import MetadataHookInterface

# The target of a link or a picture, in Markdown and in HTML, that is no whole address.
_RELATIVE = re.compile(
    r"""(?P<before>\]\(|\]:\s+|\bhref="|\bsrc="|\bsrcset=")"""
    r"""(?!\w+:|\#)(?P<path>[^)"\s]+)"""
)
_PICTURES = (".png", ".svg", ".jpg", ".gif")


class Hosted(MetadataHookInterface):
    """Sets `urls` and `readme`, for the host in REPOSITORY_URL or pyproject.toml."""

    def update(self, metadata):
        if "readme" in metadata:
            # An sdist has them, from when it was built.
            return
        repository = os.environ.get("REPOSITORY_URL") or self.config["repository"]
        repository = repository.rstrip("/")
        version = metadata["version"]
        tag = "main" if "dev" in version else f"v{version}"
        readme = pathlib.Path(self.root, "README.md").read_text(encoding="utf-8")
        text = absolute(readme, repository, tag)
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
        metadata["urls"] = {
            "Documentation": self.config.get("site", repository),
            "Source": repository,
            "Changelog": f"{repository}/blob/{tag}/CHANGELOG.md",
            "Issues": f"{repository}/issues",
            "Security": f"{repository}/blob/{tag}/SECURITY.md",
        }


def absolute(text, repository, tag):
    """Returns Markdown whose relative links and pictures lead into the repository."""

    def address(match):
        path = match["path"]
        view = "raw" if path.endswith(_PICTURES) else "blob"
        return f"{match['before']}{repository}/{view}/{tag}/{path}"

    return _RELATIVE.sub(address, text)
