"""Colors that can be read."""

from __future__ import annotations

import pytest

from perdure.report.axes import (
    DARK,
    DARK_PAPER,
    LEVELS,
    LIGHT,
    LIGHT_PAPER,
    MARKERS,
    contrast_ratio,
    heat_color,
    heat_level,
    text_color,
)


def test_contrast_is_that_of_wcag() -> None:
    assert contrast_ratio("#000000", "#ffffff") == 21
    assert contrast_ratio("#777777", "#ffffff") == pytest.approx(
        4.48, abs=0.005
    )  # W3C's well-known gray
    assert contrast_ratio("#123456", "#123456") == 1


@pytest.mark.parametrize(("colors", "paper"), [(LIGHT, LIGHT_PAPER), (DARK, DARK_PAPER)])
def test_lines_stand_out_from_the_paper(colors: tuple[str, ...], paper: str) -> None:
    """WCAG 1.4.11 asks for 3 to 1 of what is needed to understand a graphic."""
    assert len(colors) == len(MARKERS)
    assert min(contrast_ratio(color, paper) for color in colors) >= 3


@pytest.mark.parametrize("dark", [False, True])
def test_numbers_in_cells_can_be_read(dark: bool) -> None:
    """WCAG 1.4.3 asks for 4.5 to 1 of text."""
    papers = [heat_color(step, dark) for step in range(LEVELS + 1)]
    assert min(contrast_ratio(text_color(paper), paper) for paper in papers) >= 4.5
    assert len(set(papers)) == LEVELS + 1


def test_the_scale_goes_from_pale_to_strong_on_both_papers() -> None:
    light = [contrast_ratio(heat_color(step), LIGHT_PAPER) for step in range(LEVELS + 1)]
    dark = [contrast_ratio(heat_color(step, dark=True), DARK_PAPER) for step in range(LEVELS + 1)]
    assert light == sorted(light)
    assert dark == sorted(dark)


def test_levels_hold_what_is_outside() -> None:
    assert [heat_level(share) for share in (-0.2, 0.0, 0.5, 1.0, 1.3)] == [
        0,
        0,
        LEVELS // 2,
        20,
        20,
    ]
