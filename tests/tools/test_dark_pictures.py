"""The dark pictures are those that the light ones make."""

import numpy as np
import pytest
from PIL import Image

# A source distribution has no tools.
pytest.importorskip("tools")

from tools import dark_pictures
from tools.dark_pictures import BACKGROUND, TEXT, dark, oklab, srgb

pytestmark = pytest.mark.one_backend

PICTURES = list(dark_pictures.pictures())


@pytest.mark.slow
@pytest.mark.parametrize(("light_path", "dark_path"), PICTURES)
def test_each_picture_has_a_dark_version_that_was_made_of_it(light_path, dark_path):
    made = dark(dark_pictures.read(light_path)).astype(int)
    stored = dark_pictures.read(dark_path).astype(int)
    assert made.shape == stored.shape
    # Another libm may round a value to its neighbour.
    assert np.abs(made - stored).max() <= 1


def test_white_becomes_the_background_and_black_becomes_the_text():
    ends = dark(np.array([[255, 255, 255], [0, 0, 0]], "uint8")).astype(int)
    assert np.abs(ends - [BACKGROUND, TEXT]).max() <= 1


# Okabe and Ito's orange, blue and green, as the examples draw with them.
@pytest.mark.parametrize("color", [(213, 94, 0), (0, 114, 178), (0, 158, 115)])
def test_a_colour_keeps_its_hue_and_can_be_read_on_the_background(color):
    before = oklab(np.array(color, "uint8"))
    after = oklab(dark(np.array(color, "uint8")))
    angles = [np.arctan2(lab[2], lab[1]) for lab in (before, after)]
    # What sRGB cannot show is clipped, which turns a hue by less than ten degrees.
    assert abs(angles[0] - angles[1]) < np.radians(10)
    assert after[0] - oklab(np.array(BACKGROUND, "uint8"))[0] > 0.4


def test_oklab_there_and_back_is_the_same_colour():
    rgb = np.random.default_rng(0).integers(0, 256, (50, 3)).astype("uint8")
    np.testing.assert_array_equal(srgb(oklab(rgb)), rgb)
    # White has no colour, and the lightness of 1.
    np.testing.assert_allclose(oklab(np.full(3, 255, "uint8")), [1, 0, 0], atol=1e-6)


def test_main_writes_what_is_missing(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(dark_pictures, "IMAGES", tmp_path / "docs" / "images")
    dark_pictures.IMAGES.mkdir(parents=True)
    # Half transparent black is grey on white.
    Image.new("RGBA", (3, 2), (0, 0, 0, 128)).save(dark_pictures.IMAGES / "a.png")
    dark_pictures.main()
    dark_pictures.main()
    files = sorted(path.name for path in dark_pictures.IMAGES.iterdir())
    assert files == ["a-dark.png", "a.png"]
    grey = np.full((2, 3, 3), 127, "uint8")
    made = dark_pictures.read(dark_pictures.IMAGES / "a-dark.png")
    np.testing.assert_array_equal(made, dark(grey))
    assert capsys.readouterr().out.splitlines() == ["Wrote docs/images/a-dark.png"] * 2
