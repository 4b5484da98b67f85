"""Types of the values in a config: numbers with bounds, strings, and words that YAML changes."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag
from pydantic_core import PydanticCustomError


def reject_bool(value: Any) -> Any:
    """Refuse true and false, which Python takes for 1 and 0."""
    if isinstance(value, bool):
        raise PydanticCustomError("switch_for_number", "a number")
    return value


def _one_or_several(value: Any) -> str:
    return "<several>" if isinstance(value, list) else "<one>"


UNQUOTED_OFF = BeforeValidator(lambda value: "off" if value is False else value)
"""YAML reads the word off as false."""
Integer = Annotated[int, BeforeValidator(reject_bool)]
FiniteFloat = Annotated[float, Field(allow_inf_nan=False), BeforeValidator(reject_bool)]
NonNegativeInt = Annotated[Integer, Field(ge=0)]
PositiveInt = Annotated[Integer, Field(ge=1)]
Fraction = Annotated[FiniteFloat, Field(gt=0, le=1)]
PositiveFloat = Annotated[FiniteFloat, Field(gt=0)]
NonNegativeFloat = Annotated[FiniteFloat, Field(ge=0)]
Probability = Annotated[FiniteFloat, Field(ge=0, lt=1)]
Probabilities = Annotated[
    Annotated[Probability, Tag("<one>")] | Annotated[list[Probability], Tag("<several>")],
    Discriminator(_one_or_several),
]
Channels = Annotated[Literal[1, 3], BeforeValidator(reject_bool)]
Text = Annotated[str, Field(min_length=1)]
