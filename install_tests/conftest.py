"""`--dist`: the distributions to install, in place of new ones."""

import pathlib


def pytest_addoption(parser):
    parser.addoption("--dist", type=pathlib.Path, help="a folder with sdist and wheel")
