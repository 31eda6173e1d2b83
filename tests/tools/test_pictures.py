"""Each picture of the pages is drawn in light and in dark, of the same results."""

import json
import sys

import matplotlib
import matplotlib.style
import numpy as np
import pytest
from PIL import Image

# A source distribution has no tools.
pictures = pytest.importorskip("tools.pictures")

matplotlib.use("Agg")

pytestmark = pytest.mark.one_backend

LIGHT = [p for p in sorted(pictures.IMAGES.glob("*.png")) if "-dark" not in p.name]


@pytest.fixture(scope="module")
def backgrounds():
    found = {}
    for suffix, style in pictures.STYLES.items():
        with matplotlib.style.context(["default", str(style)]):
            color = matplotlib.rcParams["figure.facecolor"]
            assert color == matplotlib.rcParams["axes.facecolor"]
        found[suffix] = np.rint(255 * np.array(matplotlib.colors.to_rgb(color)))
    return found


def ink(path, background):
    """How far each pixel of a picture is from its background, from 0 to 255."""
    pixels = np.array(Image.open(path).convert("RGB")).astype(float)
    np.testing.assert_array_equal(pixels[0, 0], background)
    return np.abs(pixels - background).max(axis=-1)


@pytest.mark.slow
@pytest.mark.parametrize("path", LIGHT, ids=lambda path: path.stem)
def test_light_and_dark_versions_of_picture_show_same_content(path, backgrounds):
    light = ink(path, backgrounds[""])
    dark = ink(path.with_stem(f"{path.stem}-dark"), backgrounds["-dark"])
    assert light.shape == dark.shape
    # What is pale in one of them may be lost in the other; lines and letters are not.
    for one, other in ((light, dark), (dark, light)):
        strong = one > 128
        assert strong.any()
        assert (other[strong] > 24).mean() > 0.98


EXAMPLE = """
import pathlib
import sys
import matplotlib.pyplot as plt

trained, drawn = [], []

def main():
    trained.append(sys.argv)
    draw([1.0, 3.0], pathlib.Path("elsewhere", "example.png"))

def draw(results, path):
    figure, axis = plt.subplots(figsize=(1, 1))
    axis.plot(results)
    figure.savefig(path)
    plt.close(figure)
    drawn.append((results, path.name, plt.rcParams["axes.facecolor"]))
"""
BOTH = ["example-dark.png", "example.png"]


@pytest.fixture
def run(tmp_path, monkeypatch):
    """`run(source, *arguments)`: the module, and the names of what it has drawn."""
    examples, images = tmp_path / "examples", tmp_path / "docs" / "images"
    for name, folder in (("EXAMPLES", examples), ("IMAGES", images)):
        folder.mkdir(parents=True)
        monkeypatch.setattr(pictures, name, folder)

    def ran(source, *arguments):
        (examples / "example.py").write_text(source)
        pictures.main("example", *arguments)
        return sys.modules["example"], sorted(path.name for path in images.iterdir())

    yield ran
    sys.modules.pop("example", None)


def test_example_runs_once_and_draws_light_and_dark_pictures(run, capsys):
    before = matplotlib.rcParams.copy(), list(sys.path), list(sys.argv)
    example, drawn = run(EXAMPLE, "--steps", "3")
    assert (matplotlib.rcParams, sys.path, sys.argv) == before
    assert example.trained == [["example", "--steps", "3"]]
    assert example.drawn == [
        ([1.0, 3.0], "example.png", "white"),
        ([1.0, 3.0], "example-dark.png", "#0B0C0F"),
    ]
    assert drawn == BOTH
    printed = capsys.readouterr().out.splitlines()
    assert printed == [f"Drew docs/images/{name}" for name in reversed(BOTH)]


def test_stored_results_are_drawn_without_training(run):
    results = pictures.EXAMPLES / "example.json"
    results.write_text(json.dumps({"backend": "jax", "results": [2.0]}))
    example, drawn = run(EXAMPLE)
    assert example.trained == []
    assert [results for results, *_ in example.drawn] == [[2.0], [2.0]]
    assert drawn == BOTH
