"""What all sections of a config share: types of values, and how a section is read."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    Tag,
    ValidationError,
    model_validator,
)
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from perdure.config.sentences import KIND_KEYS, describe
from perdure.core.errors import UserError
from perdure.core.registry import Registry, import_object

# ---- Types of the values in a config: numbers with bounds, strings, and words that YAML changes.


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


# ---- What tuning may do with a number: `Annotated[PositiveFloat, Search(0.01, 1, log=True)]`.
# Values
# outside of a range remain valid.


@dataclass(frozen=True)
class Search:
    """The range in which tuning looks for a number."""

    low: float
    high: float
    log: bool = False
    """Whether it looks on a logarithmic scale."""


@dataclass(frozen=True)
class Fixed:
    """Marks a number that tuning leaves alone: a budget, a size, or what the paper fixes."""


# ---- Sections whose other keys are arguments of the user's class or function


def with_arguments(values: Any, fields: Container[str]) -> Any:
    """Return the values of a section with the keys that are no fields in `arguments`.

    Raises:
        ValueError: An argument is given twice.

    """
    if not isinstance(values, dict):
        return values
    free = {key: value for key, value in values.items() if key not in fields}
    arguments = values.get("arguments", {})
    twice = next((key for key in free if key in arguments), None)
    if twice is not None:
        expected = "given once, as a key or in arguments"
        raise ValueError(f"{twice}: must be {expected}, got {free[twice]!r}")
    known = {key: value for key, value in values.items() if key in fields}
    return {**known, "arguments": {**arguments, **free}}


def check_plain(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments; ValueError if one is not a value that YAML can hold."""
    for key, value in arguments.items():
        if not _is_plain(value):
            raise ValueError(f"{key}: must be a value that YAML can hold, got {value!r}")
    return arguments


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_plain(inner) for key, inner in value.items())
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)


Arguments = Annotated[dict[str, Any], AfterValidator(check_plain)]
"""Arguments of a user's class or function, as a config holds them."""


# ---- What all sections of a config share, and how a section with several kinds is read

Context = dict[str, Any] | None
"""Validation context: `folder`, where files with custom classes are looked up."""
_Section = TypeVar("_Section", bound=BaseModel)


class ConfigSection(BaseModel):
    """A section of a config. Unknown keys are refused.

    A key's meaning is the string below its field; docs and schema are made from it. Numbers may be
    written as strings, because YAML reads 1e-3 (without a point) as a string.
    """

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        use_attribute_docstrings=True,
        ser_json_inf_nan="constants",
    )

    def model_post_init(self, _: Any, /) -> None:
        """Count the kind as given, so that `model_dump(exclude_unset=True)` keeps it."""
        self.model_fields_set.update(key for key in KIND_KEYS if key in type(self).model_fields)


def as_mapping(value: Any) -> Mapping[str, Any]:
    """Return the value if it is a mapping, else refuse it."""
    if not isinstance(value, Mapping):
        raise PydanticCustomError("must_be", "a mapping")
    return value


def read_section(cls: type[_Section], values: Mapping[str, Any], context: Context) -> _Section:
    """Return a section of a class; a mistake is a ValueError whose sentence begins with the key."""
    try:
        return cls.model_validate(values, context=context)
    except ValidationError as error:
        raise ValueError(describe(error.errors()[0], section=cls, values=values)) from None


# ---- Sections with several kinds. A kind is one class: its keys, what it does, and its check
#
# A section's base class stands in this package; the classes of its kinds and the registry that
# names them stand in the package that uses them. The registry is found by its dotted path when a
# config is read, so that lower layers need not import higher ones.


class KindSection(ConfigSection):
    """Base of the sections with several kinds, each a subclass that `registry` names.

    Use `Annotated[SerializeAsAny[Base], ChosenByKind()]` as the type of the section.
    """

    registry_path: ClassVar[str]
    """Dotted path of the registry of kinds, `package.module:NAME`."""
    kind_key: ClassVar[str] = "kind"
    """Key that names the kind."""
    reads_data: ClassVar[bool] = False
    """Whether it says where data comes from, so that a model predicts without it."""

    @property
    def kind_name(self) -> str:
        """The kind, by whichever key the section names it."""
        name: str = getattr(self, self.kind_key)
        return name

    @classmethod
    def registry(cls) -> Registry[Self]:
        """Return the registry of the kinds, whose package is imported."""
        found: Registry[Self] = import_object(cls.registry_path.replace(":", "."))
        return found

    @classmethod
    def default(cls) -> Self:
        """Return the section of a config that names no kind."""
        registry = cls.registry()
        return registry.find(registry.default)()

    @property
    def is_default(self) -> bool:
        """Whether it is of the kind of a config that names none."""
        return self.kind_name == self.registry().default

    @classmethod
    def class_of(cls, found: type[KindSection]) -> type[KindSection]:
        """Return the class of sections here of a kind that the registry has found."""
        return found

    def code(self) -> list[str]:
        """Return the dotted paths of the users' code that it names; nothing is imported."""
        return [self.kind_name] if self.registry().is_custom_class(self.kind_name) else []

    def code_objects(self, folder: Path | None = None) -> list[Any]:
        """Return the classes and functions of `code`, whose files a run keeps."""
        return [type(self)] if self.code() else []

    @model_validator(mode="before")
    @classmethod
    def _kind_of_the_class(cls, values: Any) -> Any:
        if not isinstance(values, dict) or cls.kind_key in values:
            return values
        return {cls.kind_key: cls.registry().name_of(cls), **values}


@dataclass(frozen=True)
class ChosenByKind:
    """Reads a section as the class that its kind names; a name alone stands for the section."""

    def __get_pydantic_core_schema__(
        self, source: type[KindSection], handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        """Return a schema that validates with the class of the kind alone."""

        def choose(value: Any, _: Any, info: core_schema.ValidationInfo) -> KindSection:
            return value if isinstance(value, source) else read_kind(source, value, info.context)

        metadata = {"kind_base": source}
        schema = core_schema.with_info_wrap_validator_function(choose, handler(source))
        return {**schema, "metadata": metadata}

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        """Return the schema of all kinds; all but the first require the key that names it."""
        base: type[KindSection] = schema["metadata"]["kind_base"]
        registry, key = base.registry(), base.kind_key
        names: dict[type[KindSection], list[str]] = {}
        for kind in registry.names() if registry.others is None else registry.builtin:
            names.setdefault(registry.find(kind), []).append(kind)
        choices: list[dict[str, Any]] = [{"enum": registry.names()}]
        for number, (found, kinds) in enumerate(names.items()):
            choices.append(handler(base.class_of(found).__pydantic_core_schema__))
            section = handler.resolve_ref_schema(choices[-1])
            section["properties"][key].pop("default", None)
            section["properties"][key] |= {"const": kinds[0]} if not kinds[1:] else {"enum": kinds}
            if number:
                others = (name for name in section.get("required", []) if name != key)
                section["required"] = [key, *others]
        dotted = {"type": "string", "pattern": r"\.", "description": "Dotted path of a class."}
        custom: dict[str, Any] = {
            "type": "object", "properties": {key: dotted}, "required": [key],
        }  # fmt: skip
        if registry.others is not None:
            others_class: type[KindSection] = import_object(registry.others)
            custom = handler(base.class_of(others_class).__pydantic_core_schema__)
        return {"anyOf": [*choices, custom]}


def read_kind(base: type[KindSection], value: Any, context: Context) -> KindSection:
    """Return a section as the class that its kind names; a mistake is a ValueError."""
    key, registry, context = base.kind_key, base.registry(), context or {}
    values = {key: value} if isinstance(value, str | type) else dict(as_mapping(value))
    kind = values.setdefault(key, registry.default)
    if not context.get("imports", True) and not registry.is_readable(kind):
        return read_section(_saved(base), values, context)
    try:
        found = registry.find(kind, context.get("folder"), key)
    except UserError as error:
        raise ValueError(str(error)) from error
    if isinstance(kind, type):
        values[key] = registry.name_of(kind)
    return read_section(base.class_of(found), values, context)


@cache
def _saved(base: type[KindSection]) -> type[KindSection]:
    """Return the class of a custom kind of a run that is only read: its code is not imported."""
    body = {"model_config": ConfigDict(extra="allow"), "__module__": base.__module__}
    return type(f"Saved{base.__name__}", (base,), body)


def kind_sections(value: Any, path: str = "") -> Iterator[tuple[str, KindSection]]:
    """Yield all sections with kinds within a config, or a part of it, with their keys."""
    if isinstance(value, KindSection):
        yield path, value
    if isinstance(value, BaseModel):
        items = [(name, getattr(value, name)) for name in type(value).model_fields]
    elif isinstance(value, list | tuple):
        items = [(str(number), item) for number, item in enumerate(value)]
    else:
        items = []
    for name, item in items:
        yield from kind_sections(item, f"{path}.{name}" if path else name)
