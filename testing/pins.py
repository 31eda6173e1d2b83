"""The versions in requirements/."""

import pathlib
import re

from packaging.utils import canonicalize_name

FOLDER = pathlib.Path(__file__).parents[1] / "requirements"
_PIN = re.compile(r"^([\w.-]+)==([\w.!]+)", re.MULTILINE)


def pins_of(name):
    """Returns a dict of the packages' canonical names to the versions in a file.

    PyTorch's version is in its own file, which is installed with the files that need
    it.
    """
    text = (FOLDER / "torch.txt").read_text() + (FOLDER / f"{name}.txt").read_text()
    return {canonicalize_name(package): pin for package, pin in _PIN.findall(text)}
