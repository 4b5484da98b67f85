"""Colors that color-blind readers can tell apart, on light and on dark paper.

Series take Okabe and Ito's hues, darkened on white and lightened on black until each stands out
from its background; markers and dashes tell them apart without any color. Shares from 0 to 1 go
from the paper's own tone to a strong blue, so the eye finds large values in both themes.
"""

from __future__ import annotations

Rgb = tuple[int, int, int]

LIGHT_PAPER, DARK_PAPER = "#ffffff", "#14171c"
LIGHT = ("#0072b2", "#c94f00", "#00805d", "#a3478c", "#9a6a00", "#2b8cc4", "#4d4d4d")
DARK = ("#56b4e9", "#f08a4b", "#2fc79c", "#e39cc8", "#f0c04a", "#a9c7ff", "#c9c9c9")
MARKERS = ("circle", "square", "triangle", "diamond", "cross", "plus", "ring")
DASHES = ("", "7 3", "2 3", "9 3 2 3", "4 2", "1 2", "12 4")


def dash_pattern(style: int, second: bool = False) -> str:
    """Solid; other dashes for a second line of a style and once the colors are used up."""
    return DASHES[(style // len(LIGHT) + second) % len(DASHES)]


LEVELS = 20
"""Steps of the scale of heat maps."""
_LIGHT_SCALE: tuple[Rgb, ...] = ((247, 250, 253), (158, 202, 225), (49, 130, 189), (8, 48, 107))
_DARK_SCALE: tuple[Rgb, ...] = ((27, 32, 39), (24, 68, 112), (49, 130, 189), (190, 222, 245))


def heat_level(share: float) -> int:
    """The step of the scale at which a share from 0 to 1 lies."""
    return round(min(max(share, 0.0), 1.0) * LEVELS)


def heat_color(step: int, dark: bool = False) -> str:
    """The color of a step of the scale."""
    stops = _DARK_SCALE if dark else _LIGHT_SCALE
    place = step / LEVELS * (len(stops) - 1)
    first = min(int(place), len(stops) - 2)
    return _hex(_between(stops[first], stops[first + 1], place - first))


def text_color(paper: str) -> str:
    """Black or white, whichever is read more easily on a color."""
    return max("#000000", "#ffffff", key=lambda color: contrast_ratio(color, paper))


def contrast_ratio(one: str, other: str) -> float:
    """The contrast of two colors as WCAG 2 defines it: 1 to 21."""
    darker, lighter = sorted((_luminance(one), _luminance(other)))
    return (lighter + 0.05) / (darker + 0.05)


def _luminance(color: str) -> float:
    parts = (int(color[at : at + 2], 16) / 255 for at in (1, 3, 5))
    red, green, blue = (p / 12.92 if p <= 0.03928 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def _between(one: Rgb, other: Rgb, share: float) -> Rgb:
    red, green, blue = (round(a + (b - a) * share) for a, b in zip(one, other, strict=True))
    return red, green, blue


def _hex(color: Rgb) -> str:
    return "#{:02x}{:02x}{:02x}".format(*color)
