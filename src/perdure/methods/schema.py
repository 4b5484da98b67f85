"""The JSON Schema of a config, with every method and stream that is built in or installed."""

from __future__ import annotations

from typing import Any

from perdure.config import STREAMS, Config
from perdure.methods import METHODS, method_schema


def config_schema() -> dict[str, Any]:
    """Return the JSON Schema of a config.

    Custom classes by dotted path are accepted with any keys.
    """
    schema = Config.model_json_schema(ref_template="#/$defs/{model}")
    definitions, properties = schema["$defs"], schema["properties"]
    streams = [_stream(kind, definitions) for kind in STREAMS.names()]
    properties["stream"] |= {"anyOf": [*streams, _custom()]}
    properties["stream"].pop("$ref", None)
    methods = [_method(kind, definitions) for kind in METHODS.names()]
    method = {"anyOf": [*methods, _custom()]}
    for choice in methods:
        choice["properties"]["with"] = {"type": "array", "items": {"$ref": "#/$defs/Method"}}
    definitions["Method"] = method
    properties["method"] |= {"$ref": "#/$defs/Method"}
    for key in ("type", "additionalProperties"):
        properties["method"].pop(key, None)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def _stream(kind: str, definitions: dict[str, Any]) -> dict[str, Any]:
    schema = STREAMS.find(kind).model_json_schema(ref_template="#/$defs/{model}")
    definitions |= schema.pop("$defs", {})
    schema["properties"]["kind"] |= {"const": kind}
    if kind != "permuted":
        schema["required"] = ["kind", *schema.get("required", [])]
    return schema


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


def _custom() -> dict[str, Any]:
    """Return the schema of a class by dotted path."""
    kind = {"type": "string", "pattern": r"\.", "description": "Dotted path of a class."}
    return {"type": "object", "properties": {"kind": kind}, "required": ["kind"]}
