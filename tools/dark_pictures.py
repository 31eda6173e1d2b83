"""Makes the dark version of each picture in docs/images/ from the light one.

    python -m tools.dark_pictures

The scripts in examples/ draw on white. `name-dark.png` is the same picture for a page
with a dark background: what is white becomes that background, what is black becomes the
colour of the page's text, and each colour keeps its hue. So both versions show the same
numbers, and none is drawn by a second training.

Lightness is exchanged in Oklab, in which a step of lightness looks equally large for
every hue: https://bottosson.github.io/posts/oklab/
"""

import pathlib

import numpy as np
from PIL import Image

IMAGES = pathlib.Path(__file__).resolve().parent.parent / "docs/images"
# Of the site's dark scheme, in which GitHub's differs little.
BACKGROUND, TEXT = (11, 12, 15), (226, 228, 233)
# How much lighter a colour becomes, in units of its chroma: orange, which is light
# beside black ink, must not become a brown that is as dark beside white ink.
LIFT = 1.6

TO_CONES = np.array(
    [
        [0.4122214708, 0.5363325363, 0.0514459929],
        [0.2119034982, 0.6806995451, 0.1073969566],
        [0.0883024619, 0.2817188376, 0.6299787005],
    ]
)
TO_LAB = np.array(
    [
        [0.2104542553, 0.7936177850, -0.0040720468],
        [1.9779984951, -2.4285922050, 0.4505937099],
        [0.0259040371, 0.7827717662, -0.8086757660],
    ]
)


def dark(rgb):
    """Returns a picture, uint8 of shape (..., 3), for a dark background."""
    background, text = (oklab(np.array(c, "uint8")) for c in (BACKGROUND, TEXT))
    lab = oklab(rgb)
    lightness = lab[..., :1]
    # The tint of the two ends is added, and the hue of the picture stays.
    turned = text + lightness * (background - text)
    turned[..., 1:] += lab[..., 1:]
    turned[..., 0] += LIFT * np.hypot(lab[..., 1], lab[..., 2])
    turned[..., 0] = np.minimum(turned[..., 0], text[0])
    return srgb(turned)


def oklab(rgb):
    """Converts sRGB in uint8 to Oklab."""
    rgb = rgb / 255
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    return np.cbrt(linear @ TO_CONES.T) @ TO_LAB.T


def srgb(lab):
    """Converts Oklab to sRGB in uint8; what sRGB cannot show is clipped."""
    linear = ((lab @ np.linalg.inv(TO_LAB).T) ** 3) @ np.linalg.inv(TO_CONES).T
    linear = np.clip(linear, 0, 1)
    rgb = np.where(
        linear <= 0.0031308, linear * 12.92, 1.055 * linear ** (1 / 2.4) - 0.055
    )
    return np.rint(rgb * 255).astype("uint8")


def pictures():
    """Yields the path of each light picture, and that of its dark version."""
    for path in sorted(IMAGES.glob("*.png")):
        if not path.stem.endswith("-dark"):
            yield path, path.with_stem(f"{path.stem}-dark")


def read(path):
    """Returns the pixels of a picture, on white where it is transparent."""
    with Image.open(path) as image:
        layer = image.convert("RGBA")
    white = Image.new("RGBA", layer.size, "white")
    return np.array(Image.alpha_composite(white, layer).convert("RGB"))


def main():
    for light_path, dark_path in pictures():
        Image.fromarray(dark(read(light_path))).save(dark_path, optimize=True)
        print(f"Wrote docs/images/{dark_path.name}")


if __name__ == "__main__":
    main()
