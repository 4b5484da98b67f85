"""Colors that color-blind readers can distinguish, on light and on dark background.

Lines use Okabe and Ito's hues, darkened for white and lightened for black background until the
contrast suffices; markers and dashes distinguish them without color. Heat maps map 0 to the
background and 1 to a strong blue, so that large values stand out in both themes.
"""

from __future__ import annotations

Rgb = tuple[int, int, int]

LIGHT_PAPER, DARK_PAPER = "#ffffff", "#14171c"
LIGHT = ("#0072b2", "#c94f00", "#00805d", "#a3478c", "#9a6a00", "#2b8cc4", "#4d4d4d")
DARK = ("#56b4e9", "#f08a4b", "#2fc79c", "#e39cc8", "#f0c04a", "#a9c7ff", "#c9c9c9")
MARKERS = ("circle", "square", "triangle", "diamond", "cross", "plus", "ring")
DASHES = ("", "7 3", "2 3", "9 3 2 3", "4 2", "1 2", "12 4")


def dash_pattern(style: int, second: bool = False) -> str:
    """Return the dash pattern of a line as in SVG's stroke-dasharray; empty if it is solid.

    Args:
        style: Index of the line; lines whose color repeats get other dashes.
        second: Whether it is the second line with this style.
    """
    return DASHES[(style // len(LIGHT) + second) % len(DASHES)]


LEVELS = 20
"""Number of the highest color of heat maps; the lowest is 0."""
_LIGHT_SCALE: tuple[Rgb, ...] = ((247, 250, 253), (158, 202, 225), (49, 130, 189), (8, 48, 107))
_DARK_SCALE: tuple[Rgb, ...] = ((27, 32, 39), (24, 68, 112), (49, 130, 189), (190, 222, 245))


def heat_level(fraction: float) -> int:
    """Return the number of the color, 0 to LEVELS, that represents a fraction."""
    return round(min(max(fraction, 0.0), 1.0) * LEVELS)


def heat_color(step: int, dark: bool = False) -> str:
    """Return the background color of a heat map cell as #rrggbb."""
    stops = _DARK_SCALE if dark else _LIGHT_SCALE
    position = step / LEVELS * (len(stops) - 1)
    first = min(int(position), len(stops) - 2)
    return _hex(_between(stops[first], stops[first + 1], position - first))


def text_color(paper: str) -> str:
    """Return black or white, whichever has more contrast to a background color."""
    return max("#000000", "#ffffff", key=lambda color: contrast_ratio(color, paper))


def contrast_ratio(one: str, other: str) -> float:
    """Return the contrast ratio of two colors by WCAG 2, from 1 to 21."""
    darker, lighter = sorted((_luminance(one), _luminance(other)))
    return (lighter + 0.05) / (darker + 0.05)


def _luminance(color: str) -> float:
    parts = (int(color[at : at + 2], 16) / 255 for at in (1, 3, 5))
    red, green, blue = (p / 12.92 if p <= 0.03928 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def _between(one: Rgb, other: Rgb, fraction: float) -> Rgb:
    red, green, blue = (round(a + (b - a) * fraction) for a, b in zip(one, other, strict=True))
    return red, green, blue


def _hex(color: Rgb) -> str:
    return "#{:02x}{:02x}{:02x}".format(*color)
