"""The JSON Schema of a config: it accepts what perdure accepts, as far as a schema can say."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from perdure.cli.main import main
from perdure.config import override_key, read_yaml
from perdure.data.streams import STREAMS
from perdure.methods.registry import METHODS, config_schema
from perdure.recipes import list_recipes

SCHEMA = config_schema()
TYPES: dict[str, Any] = {
    "object": dict, "array": list, "string": str, "boolean": bool, "null": type(None),
    "number": (int, float), "integer": int,
}  # fmt: skip


def accepts(schema: Any, value: Any) -> bool:
    """Return whether a schema accepts a value: the keywords that pydantic writes."""
    if "$ref" in schema and not accepts(SCHEMA["$defs"][schema["$ref"].rpartition("/")[2]], value):
        return False
    if "anyOf" in schema and not any(accepts(choice, value) for choice in schema["anyOf"]):
        return False
    if "oneOf" in schema and sum(accepts(choice, value) for choice in schema["oneOf"]) != 1:
        return False
    if "const" in schema and value != schema["const"]:
        return False
    if "enum" in schema and value not in schema["enum"]:
        return False
    if "type" in schema and not is_type(schema["type"], value):
        return False
    return accepts_number(schema, value) and accepts_text(schema, value) and fits(schema, value)


def is_type(name: str, value: Any) -> bool:
    is_bool = isinstance(value, bool)
    return isinstance(value, TYPES[name]) and (name == "boolean" or not is_bool)


def accepts_number(schema: Any, value: Any) -> bool:
    if not is_type("number", value):
        return True
    return (
        value >= schema.get("minimum", value)
        and value <= schema.get("maximum", value)
        and value > schema.get("exclusiveMinimum", float("-inf"))
        and value < schema.get("exclusiveMaximum", float("inf"))
    )


def accepts_text(schema: Any, value: Any) -> bool:
    if not isinstance(value, str):
        return True
    return len(value) >= schema.get("minLength", 0) and bool(
        re.search(schema.get("pattern", ""), value)
    )


def fits(schema: Any, value: Any) -> bool:
    """Return whether the parts of a list or of a mapping are accepted."""
    if isinstance(value, list):
        return len(value) >= schema.get("minItems", 0) and all(
            accepts(schema.get("items", {}), item) for item in value
        )
    if not isinstance(value, dict) or "properties" not in schema:
        return True
    keys, further = schema["properties"], schema.get("additionalProperties", True)
    known = all(accepts(keys[key], item) for key, item in value.items() if key in keys)
    return (
        known
        and set(schema.get("required", ())) <= set(value)
        and (bool(further) or set(value) <= set(keys))
    )


def test_the_command_prints_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "schema"]) == 0
    assert json.loads(capsys.readouterr().out) == SCHEMA


@pytest.mark.parametrize("recipe", list_recipes(), ids=lambda recipe: recipe.path.stem)
def test_recipes_are_accepted(recipe: Any) -> None:
    assert accepts(SCHEMA, read_yaml(recipe.path))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("sed", 1),
        ("seed", -1),
        ("data", {"source": "npz"}),
        ("data", {"source": "npz", "path": "a", "delimiter": ";"}),
        ("stream", {"kind": "permuted", "overlap": 1}),
        ("stream", {"kind": "spilt"}),
        ("clients.partition", {"kind": "iid", "alpha": 0.1}),
        ("clients.partition", {"alpha": 0.1}),
        ("model", {"kind": "mlp", "patch": 3}),
        ("train.optimizer", "adem"),
        ("train.optimizer", {"kind": "adam", "momentum": 0.9}),
        ("train.momentum", 1),
        ("method", {"kind": "fedavg", "mu": 1}),
        ("method", {"kind": "fot", "threshold": 7}),
        ("method", {"kind": "er", "with": [{"kind": "fedavg", "mu": 1}]}),
        ("engine", {"kind": "serial", "chunk": 3}),
    ],
)
def test_mistakes_are_not_accepted(key: str, value: Any) -> None:
    assert not accepts(SCHEMA, override_key({}, key, value))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("stream", {"kind": "my_file.Stream", "angle": 3}),
        ("stream", {"tasks": 3}),
        ("clients", {"partition": {}}),
        ("train", {"optimizer": "adam", "schedule": {"kind": "cosine", "floor": 0.1}}),
        ("train", {"momentum": 0.9}),
        ("method", {"kind": "my_file.Method", "anything": [1]}),
        ("method", {"kind": "fedprotip", "with": [{"kind": "special-c", "lambda": 0.1}]}),
    ],
)
def test_other_ways_to_write_it_are_accepted(key: str, value: Any) -> None:
    assert accepts(SCHEMA, {key: value})


def test_all_kinds_are_offered_with_meanings() -> None:
    streams, methods = SCHEMA["properties"]["stream"]["anyOf"], SCHEMA["$defs"]["Method"]["anyOf"]
    names, *streams = streams
    assert names == {"enum": STREAMS.names()}
    streams = [SCHEMA["$defs"][c["$ref"].rpartition("/")[2]] if "$ref" in c else c for c in streams]
    offered = [[c["properties"]["kind"].get("const") for c in part] for part in (streams, methods)]
    assert offered == [[*STREAMS.names(), None], [*METHODS.names(), None]]
    fot = methods[offered[1].index("fot")]["properties"]["threshold"]
    assert "protected subspace" in fot["description"]
    assert SCHEMA["properties"]["seed"]["description"].startswith("Seed")
