"""The `data.augment` key: random changes of the images that clients train on."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

from perdure.config.base import ByKind, ConfigSection
from perdure.config.types import Fraction, PositiveInt


class CropAugment(ConfigSection):
    """A window of the image's size, anywhere in the image with a black border."""

    kind: Literal["crop"] = "crop"
    padding: PositiveInt = 4
    """Width of the border in pixels."""


class FlipAugment(ConfigSection):
    """The image mirrored from left to right."""

    kind: Literal["flip"] = "flip"
    probability: Fraction = 0.5
    """Fraction of the images that are mirrored."""


def _named(value: Any) -> Any:
    return {"kind": value} if isinstance(value, str) else value


AugmentConfig = Annotated[
    Annotated[CropAugment | FlipAugment, ByKind()],
    BeforeValidator(_named),
]
"""One change: its name, or a mapping with `kind` and options."""
