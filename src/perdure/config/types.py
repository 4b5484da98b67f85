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


def one_or_several(value: Any) -> str:
    """Return the tag of a value that may be a list."""
    return "<several>" if isinstance(value, list) else "<one>"


UNQUOTED_OFF = BeforeValidator(lambda value: "off" if value is False else value)
"""YAML reads the word off as false."""
NOT_BOOL = BeforeValidator(reject_bool)
"""Comes after the bounds of a number, which otherwise are missing in the JSON schema."""
Integer = Annotated[int, NOT_BOOL]
FiniteFloat = Annotated[float, Field(allow_inf_nan=False), NOT_BOOL]
NonNegativeInt = Annotated[int, Field(ge=0), NOT_BOOL]
PositiveInt = Annotated[int, Field(ge=1), NOT_BOOL]
Fraction = Annotated[float, Field(gt=0, le=1, allow_inf_nan=False), NOT_BOOL]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False), NOT_BOOL]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False), NOT_BOOL]
Probability = Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False), NOT_BOOL]
OpenFraction = Annotated[float, Field(gt=0, lt=1, allow_inf_nan=False), NOT_BOOL]
Probabilities = Annotated[
    Annotated[Probability, Tag("<one>")] | Annotated[list[Probability], Tag("<several>")],
    Discriminator(one_or_several),
]


def _number_or_name(value: Any) -> str:
    return "<name>" if isinstance(value, str) else "<number>"


PerTask = Annotated[
    Annotated[PositiveInt, Tag("<one>")]
    | Annotated[list[PositiveInt], Field(min_length=1), Tag("<several>")],
    Discriminator(one_or_several),
]
"""A count for every task, or a list with one per task whose last entry repeats."""
Item = Annotated[
    Annotated[NonNegativeInt, Tag("<number>")] | Annotated[str, Tag("<name>")],
    Discriminator(_number_or_name),
]
"""The number, from 0, or the name of something."""
Channels = Annotated[Literal[1, 3], NOT_BOOL]
Text = Annotated[str, Field(min_length=1)]
TextColumn = Annotated[
    Annotated[Text, Tag("<one>")]
    | Annotated[list[Text], Field(min_length=2, max_length=2), Tag("<several>")],
    Discriminator(one_or_several),
]
"""The column of texts, or the two columns of pairs of texts."""
