"""The versions in requirements/."""

import pathlib
import re

from packaging.utils import canonicalize_name

FOLDER = pathlib.Path(__file__).parents[1] / "requirements"
_PIN = re.compile(r"^([\w.-]+)==([\w.!]+)", re.MULTILINE)


def pins_of(name):
    """Returns a dict of packages, by their canonical names, to versions, of a file.

    PyTorch's is in a file of its own, which is installed with those that need it.
    """
    text = (FOLDER / "torch.txt").read_text() + (FOLDER / f"{name}.txt").read_text()
    return {canonicalize_name(package): pin for package, pin in _PIN.findall(text)}
