"""What all sections of a config share, and how a section with several kinds is read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar, get_args

from pydantic import (
    BaseModel,
    ConfigDict,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    ValidationError,
)
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from perdure.config.messages import KIND_KEYS, describe, join_or
from perdure.core.given import is_object

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
    kind_names: ClassVar[tuple[str, ...]] = ()
    """Kinds of a class that stands for several. If empty, the default of its key is the one."""

    def model_post_init(self, _: Any, /) -> None:
        """Count the kind as given, so that `model_dump(exclude_unset=True)` keeps it."""
        self.model_fields_set.update(key for key in KIND_KEYS if key in type(self).model_fields)


@dataclass(frozen=True)
class ByKind:
    """Choose the class of a section by one of its keys.

    Use it as `Annotated[A | B, ByKind()]`: the value of `key` in a class's default names the class,
    and the first class is used if the key is omitted. A class with `kind_names` stands for these. A
    class whose key has no default is that of all other kinds: dotted paths, objects given in
    Python, and names of installed packages.
    """

    key: str = "kind"
    others: Callable[[], Mapping[str, str]] = dict
    """Returns further names of custom kinds, those of installed packages."""

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        """Return a schema that validates with the chosen class alone."""
        classes = named_classes(source, self.key)
        custom = custom_class(source, self.key)

        def choose(value: Any, _: Any, info: core_schema.ValidationInfo) -> BaseModel:
            if isinstance(value, BaseModel) and isinstance(value, get_args(source)):
                return value
            values = as_mapping(value)
            kind = values.get(self.key, next(iter(classes)))
            if isinstance(kind, str) and kind in classes:
                return read_section(classes[kind], values, info.context)
            if custom is None or not self._is_custom(kind):
                names = [repr(name) for name in classes]
                named = "function" if self.key == "source" else "class"
                names += [f"a dotted path to a {named}"] if custom is not None else []
                raise ValueError(f"{self.key}: must be {join_or(names)}, got {kind!r}")
            return read_section(custom, values, info.context)

        return core_schema.with_info_wrap_validator_function(choose, handler(source))

    def _is_custom(self, kind: Any) -> bool:
        if not isinstance(kind, str):
            return False
        return "." in kind or is_object(kind) or kind in self.others()

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        """Return the schema of all classes; all but the first require the key."""
        json_schema = handler(schema)
        for choice in json_schema["anyOf"][1:]:
            required = handler.resolve_ref_schema(choice).setdefault("required", [])
            required[:] = [self.key, *(name for name in required if name != self.key)]
        return json_schema


def named_classes(union: Any, key: str) -> dict[str, type[ConfigSection]]:
    """Return the classes of a union by the value of `key` that chooses them."""
    named = {cls: cls.kind_names or _default_kind(cls, key) for cls in get_args(union)}
    return {kind: cls for cls, kinds in named.items() for kind in kinds}


def _default_kind(cls: type[ConfigSection], key: str) -> tuple[str, ...]:
    field = cls.model_fields[key]
    return () if field.is_required() else (field.default,)


def custom_class(union: Any, key: str) -> type[ConfigSection] | None:
    """Return the class of a union for all kinds that no other class names, or None."""
    named = set(named_classes(union, key).values())
    return next((cls for cls in get_args(union) if cls not in named), None)


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
