"""Methods by name. Each is one file with the paper's algorithm and nothing else."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, get_type_hints

from pydantic import ConfigDict, TypeAdapter, ValidationError, with_config

from perdure.config import Config
from perdure.config.sentences import describe, type_in_words
from perdure.contract.exchanges import Train
from perdure.contract.method import Method
from perdure.core.errors import UserError, bad_value
from perdure.core.registry import Registry
from perdure.core.text import attribute_docstrings

# A config may also name a custom method by its dotted path, such as `kind: my_file.MyMethod`, or
# one of an installed package by the name of its entry point in the group `perdure.methods`.
KINDS: dict[str, str] = {
    "fedavg": "perdure.methods.fedavg.FedAvg",
    "fedprox": "perdure.methods.fedprox.FedProx",
    "scaffold": "perdure.methods.scaffold.Scaffold",
    "fednova": "perdure.methods.fednova.FedNova",
    "fedavgm": "perdure.methods.fedavgm.FedAvgM",
    "fedadam": "perdure.methods.fedadam.FedAdam",
    "fedyogi": "perdure.methods.fedyogi.FedYogi",
    "special": "perdure.methods.special.Special",
    "special-c": "perdure.methods.special_c.SpecialC",
    "ewc": "perdure.methods.ewc.Ewc",
    "er": "perdure.methods.er.Er",
    "lwf": "perdure.methods.lwf.Lwf",
    "flwf-2t": "perdure.methods.flwf_2t.Flwf2T",
    "fot": "perdure.methods.fot.FOT",
    "fedprotip": "perdure.methods.fedprotip.FedProTIP",
    "gpm": "perdure.methods.gpm.GPM",
    "stamp": "perdure.methods.stamp.Stamp",
    "fedomg": "perdure.methods.fedomg.FedOmg",
    "fed-l2p": "perdure.methods.fed_l2p.FedL2P",
    "fed-dualp": "perdure.methods.fed_dualp.FedDualP",
    "pip": "perdure.methods.pip.Pip",
    "calibrate": "perdure.methods.calibrate.Calibrate",
    "single": "perdure.methods.single.Single",
    "fedncm": "perdure.methods.fedncm.FedNCM",
    "fedlda": "perdure.methods.fedlda.FedLDA",
    "fedridge": "perdure.methods.fedridge.FedRidge",
}
METHODS: Registry[Method] = Registry(
    key="method.kind", base=Method, base_name="perdure.Method", builtin=KINDS,
    group="perdure.methods",
)  # fmt: skip


def build(values: dict[str, Any], method_dir: Path | None = None) -> Method:
    """Return the method that a config's `method` section describes, with its values checked."""
    first = _build_one({key: v for key, v in values.items() if key != "with"}, method_dir, "method")
    others = values.get("with") or []
    if not isinstance(others, list) or not all(
        isinstance(other, dict) and isinstance(other.get("kind"), str) for other in others
    ):
        raise bad_value("method.with", others, "a list of methods, each with its kind")
    if not others:
        return first
    from perdure.methods.combine import Combined

    parts = [(values["kind"], first)]
    for index, other in enumerate(others):
        parts.append((other["kind"], _build_one(other, method_dir, f"method.with.{index}")))
    return Combined(tuple(parts))


def _build_one(values: dict[str, Any], method_dir: Path | None, key: str) -> Method:
    options = {name: value for name, value in values.items() if name != "kind"}
    kind = find(values["kind"], method_dir, key)
    adapter = TypeAdapter(with_config(ConfigDict(extra="forbid"))(kind))
    try:
        return adapter.validate_python(options)
    except ValidationError as error:
        known = ("kind", *hyperparameters(values["kind"], method_dir))
        sentence = describe(error.errors()[0], prefix=key, known=known, values=values)
        raise UserError(sentence) from None


def find(kind: str, method_dir: Path | None = None, key: str = "method") -> type[Method]:
    """Return the class that a kind names (see `perdure.core.registry`), with its form checked."""
    method_class = METHODS.find(kind, method_dir, f"{key}.kind")
    _check_class(method_class, f"{key}.kind")
    return method_class


def _check_class(kind: type[Method], key: str) -> None:
    """Refuse what cannot work: hidden or idle functions, and states without defaults."""
    hidden = next((f.name for f in fields(kind) if hasattr(Method, f.name)), None)
    if hidden is not None:
        raise UserError(
            f"{key}: {kind.__name__} has a hyperparameter {hidden!r}, which hides the contract's "
            f"{hidden}, allowed: another name, or ClassVar if it is none"
        )
    for name in ("ServerState", "ClientState"):
        try:
            if isinstance(state := getattr(kind, name), type):
                state()
        except TypeError:
            raise UserError(
                f"{key}: {kind.__name__}.{name} cannot be made without arguments, allowed: a "
                "dataclass whose fields all have a default"
            ) from None
    if kind.exchanges is not Method.exchanges:
        return  # it names the functions that are called
    for name in (f.name for f in fields(Train)):
        function = getattr(kind, name, None)
        if callable(function) and not isinstance(function, type):
            raise UserError(
                f"{key}: {kind.__name__} defines {name!r}, which nothing calls: name it in "
                "exchanges, such as `return [Train(loss=self.loss)]` (docs/write-a-method.md)"
            )


def is_reference(kind: str) -> bool:
    """Return whether a built-in kind is a reference, which tables set apart from what it judges."""
    return METHODS.is_builtin(kind) and METHODS.find(kind).family == "References"


def parts_of(method: Method, kind: str = "") -> list[tuple[str, Method]]:
    """Return the methods that a combination consists of, by kind; any other method is one part."""
    from perdure.methods.combine import Combined

    return list(method.parts) if isinstance(method, Combined) else [(kind, method)]


def fill_defaults(values: dict[str, Any], method_dir: Path | None = None) -> dict[str, Any]:
    """Return a `method` section with every hyperparameter that it leaves to its default."""
    return build_complete(values, method_dir)[1]


def build_complete(
    values: dict[str, Any], method_dir: Path | None = None
) -> tuple[Method, dict[str, Any]]:
    """Return the method of a `method` section, and the section with every hyperparameter.

    A custom class may have fields that a config cannot hold: then the section is not changed.
    """
    method = build(values, method_dir)
    try:
        first, *others = (
            {"kind": kind, **TypeAdapter(type(part)).dump_python(part, mode="json", by_alias=True)}
            for kind, part in parts_of(method, values["kind"])
        )
        whole = {**first, "with": others} if others else first
        holds = is_builtin(values) or build(whole, method_dir) == method
        return method, whole if holds else values
    except Exception:  # whatever a custom class does
        return method, values


def is_builtin(values: dict[str, Any]) -> bool:
    """Return whether a `method` section names methods of the library alone."""
    others = values.get("with") or []
    parts = [values, *others] if isinstance(others, list) else [None]
    return all(isinstance(part, dict) and METHODS.is_builtin(part.get("kind")) for part in parts)


def drop_defaults(values: dict[str, Any]) -> dict[str, Any]:
    """Return a `method` section without defaults; those of a custom method stay."""
    if not is_builtin(values):
        return values
    defaults = hyperparameters(values["kind"])
    brief = {key: v for key, v in values.items() if key not in defaults or v != defaults[key]}
    others = [drop_defaults(other) for other in values.get("with") or ()]
    return {**brief, "with": others} if others else brief


def hyperparameters(kind: str, method_dir: Path | None = None) -> dict[str, Any]:
    """Return the hyperparameters of a method, spelled as in a config, and their defaults."""
    schema = method_schema(kind, method_dir)
    return {name: value.get("default") for name, value in schema.get("properties", {}).items()}


@dataclass(frozen=True)
class Hyperparameter:
    """A hyperparameter of a method, as a config spells it."""

    name: str
    type: str
    """Its type and bounds in words."""
    default: Any
    meaning: str


def describe_hyperparameters(
    kind: str, method_dir: Path | None = None
) -> tuple[Hyperparameter, ...]:
    """Return the hyperparameters of a method; meanings are the strings below its fields."""
    method_class = find(kind, method_dir)
    types = get_type_hints(method_class, include_extras=True)
    meanings = attribute_docstrings(method_class)
    defaults = hyperparameters(kind, method_dir).items()
    return tuple(
        Hyperparameter(name, type_in_words(types[f.name]), default, meanings.get(f.name, ""))
        for f, (name, default) in zip(fields(method_class), defaults, strict=True)
    )


def method_schema(kind: str, method_dir: Path | None = None) -> dict[str, Any]:
    """Return the JSON schema of a method's hyperparameters, described by their docstrings."""
    method_class = find(kind, method_dir)
    schema: dict[str, Any] = TypeAdapter(method_class).json_schema()
    meanings = attribute_docstrings(method_class)
    for field, value in zip(
        fields(method_class), schema.get("properties", {}).values(), strict=True
    ):
        if meanings.get(field.name):
            value["description"] = meanings[field.name]
    return schema


# ---- The JSON Schema of a config, with every method and stream that is built in or installed


def config_schema() -> dict[str, Any]:
    """Return the JSON Schema of a config.

    Custom classes by dotted path are accepted with any keys.
    """
    schema = Config.model_json_schema(ref_template="#/$defs/{model}")
    definitions, properties = schema["$defs"], schema["properties"]
    methods = [_method(kind, definitions) for kind in METHODS.names()]
    dotted_path = {"type": "string", "pattern": r"\.", "description": "Dotted path of a class."}
    custom = {"type": "object", "properties": {"kind": dotted_path}, "required": ["kind"]}
    method = {"anyOf": [*methods, custom]}
    for choice in methods:
        choice["properties"]["with"] = {"type": "array", "items": {"$ref": "#/$defs/Method"}}
    definitions["Method"] = method
    properties["method"] |= {"$ref": "#/$defs/Method"}
    for key in ("type", "additionalProperties"):
        properties["method"].pop(key, None)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def _method(kind: str, definitions: dict[str, Any]) -> dict[str, Any]:
    schema = method_schema(kind)
    definitions |= schema.pop("$defs", {})
    properties = {"kind": {"const": kind}, **schema.get("properties", {})}
    return {
        "title": kind,
        "type": "object",
        "properties": properties,
        "required": ["kind", *schema.get("required", [])],
        "additionalProperties": False,
    }
