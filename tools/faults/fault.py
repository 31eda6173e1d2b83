"""What a fault is: one small change of the package, and who should notice it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """A change that a careful engineer would fear, and the tests that should see it.

    Attributes:
        name: What is wrong then, in a few words.
        file: The file, from the root of the checkout.
        old: A piece of it that occurs once.
        new: What stands there instead.
        tests: "path/of/test_file.py::test_name", separated by blanks. A name stands
            for all tests of that file whose names hold it.
        backend: The Keras backend under which they run.
    """

    name: str
    file: str
    old: str
    new: str
    tests: str
    backend: str = "torch"

    @property
    def test_files(self):
        return list(dict.fromkeys(t.partition("::")[0] for t in self.tests.split()))

    @property
    def test_names(self):
        return [t.partition("::")[2] for t in self.tests.split() if "::" in t]
