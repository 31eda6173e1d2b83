"""Checks that the parts of a figure contrast with its background, in any style."""

from matplotlib.collections import LineCollection
from matplotlib.colors import to_rgba
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.spines import Spine
from matplotlib.text import Text

# In WCAG's measure, which is 1 for equal colours and 21 for black on white. The paler
# of the examples' lines has 1.8 on white; grids and transparent parts may be paler.
LEAST, LEAST_OF_PALE = 1.5, 1.1


def assert_visible(figure):
    """Compares every colour of a figure with its background."""
    # Drawing creates the ticks, with their lines and labels.
    figure.draw_without_rendering()
    grids = {
        line: axes
        for axes in figure.axes
        for line in (*axes.get_xgridlines(), *axes.get_ygridlines())
    }
    seen = 0
    for artist in set(figure.findobj(lambda artist: artist.get_visible())):
        for part in parts_of(artist, figure):
            seen += 1
            # A grid line does not know its axes.
            background = background_of(grids.get(artist, artist.axes), figure)
            for color in part:
                is_pale = artist in grids or color[3] < 1
                least = LEAST_OF_PALE if is_pale else LEAST
                if contrast(over(color, background), background) >= least:
                    break
            else:
                raise AssertionError((artist, part, background))
    assert seen


def background_of(axes, figure):
    """Returns the colour of the axes, or of the figure if there are none."""
    below = over(to_rgba(figure.get_facecolor()), (1.0, 1.0, 1.0))
    return below if axes is None else over(to_rgba(axes.get_facecolor()), below)


def parts_of(artist, figure):
    """Returns the colours of each part of an artist; one of them must be visible."""
    alpha = artist.get_alpha()
    backgrounds = [figure.patch, *(axes.patch for axes in figure.axes)]
    # A style's frame may have the colour of the background.
    if artist in backgrounds or isinstance(artist, Spine):
        return []
    if isinstance(artist, Text):
        return [[to_rgba(artist.get_color(), alpha)]] if artist.get_text() else []
    if isinstance(artist, Line2D):
        colors = []
        if artist.get_linestyle() != "None" and artist.get_linewidth():
            colors.append(artist.get_color())
        if artist.get_marker() not in ("None", "", None):
            colors.append(artist.get_markeredgecolor())
        drawn = len(artist.get_xdata())
        return [[to_rgba(color, alpha)] for color in colors if drawn]
    if isinstance(artist, LineCollection):
        return [[color] for color in artist.get_edgecolor()]
    if isinstance(artist, Patch):
        return [[artist.get_facecolor(), artist.get_edgecolor()]]
    return []


def over(color, background):
    """Returns the RGB of a possibly transparent colour on a background."""
    *rgb, alpha = color
    return tuple(
        alpha * c + (1 - alpha) * b for c, b in zip(rgb, background, strict=True)
    )


def contrast(a, b):
    """Returns WCAG's contrast of two colours: https://www.w3.org/TR/WCAG22/."""
    low, high = sorted(luminance(color) + 0.05 for color in (a, b))
    return high / low


def luminance(rgb):
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in rgb]
    return sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))
