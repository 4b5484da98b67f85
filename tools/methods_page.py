"""The methods by family, with their hyperparameters: docs/methods.md, and the table of README.md.

A method's class says its family, title, idea and paper, and its docstring the full reference.
Types, defaults, meanings, streams and what the server sees are taken from the methods and from
small runs (recorded in tests/golden, or made here), so that the page stays true. Written here are
the ideas of the families, and what is worth knowing about some methods besides.

python tools/methods_page.py
"""

from __future__ import annotations

import ast
import inspect
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

import perdure
from perdure import Method, Needs
from perdure.methods.registry import KINDS, build, find

sys.path.insert(0, str(Path(__file__).parent))
from readme_table import with_table

ROOT = Path(__file__).resolve().parents[1]
GOLDEN = ROOT / "tests" / "golden" / "results"
_SETTINGS = ("mlp", "vit")
"""Small runs without running statistics: `buffers` are sent by every method that trains them."""


FAMILIES = {
    "Baselines": (
        "Federated optimization that ignores the tasks. A continual method should beat these."
    ),
    "Server optimizers": (
        "The server treats the mean update of a round as a gradient and gives it to an optimizer. "
        "`train.server_lr` is the step size."
    ),
    "Projection": (
        "Updates must not change what the layers compute for inputs of earlier tasks, so the "
        "component of an update inside the subspace of those inputs is removed."
    ),
    "Replay": (
        "Clients store a few examples of earlier tasks and train on them again. The examples never "
        "leave the client."
    ),
    "Regularization and distillation": (
        "A term of the loss, or a step on the server, keeps the model close to that of the "
        "previous task: in its weights or in its outputs."
    ),
    "Alignment": (
        "The server looks for an update that agrees with all clients instead of taking the mean. "
        "STAMP does the same on the clients over their tasks, with stored examples."
    ),
    "Prompts": (
        "A pretrained transformer is frozen; only prompts and the head are trained and sent. "
        "[Prompts](prompts.md) compares the three, with their costs."
    ),
    "Calibration": (
        "At a task's end the head is computed again from sums over the examples' features, without "
        "gradient steps, beside any method that trains the body: `with: [{kind: calibrate}]`."
    ),
    "References": (
        "What a method's figures are judged by. `single` has one model per task; "
        "[comparisons](compare.md#references) add `joint`, FedAvg on all examples so far. The "
        "others are heads in closed form: one exchange per task on frozen features, no training, "
        "nothing is forgotten. Their features are those of the initial model, so they make sense "
        "with a pretrained backbone or with `train_first: true`."
    ),
}
"""The idea of each family, in the order of the page."""
NOTES = {
    "fot": (
        "After a task the server estimates the new subspaces from a sum of random sketches: at the "
        "task's end, or when the next task begins (`closing: false`). Once the subspaces use up "
        "most of a layer's inputs, it hardly learns: a run warns at 90%."
    ),
    "fedprotip": (
        "The task of a test example is predicted from the subspaces of the features (routing), so "
        "that no task label is needed. Tasks with the same inputs and other labels cannot be "
        "distinguished, by any router; with `router: gaussian` a run warns of them (`warnings` in "
        "result.json). An example of no known task is recognized with `unknown` above 0; its class "
        "is then predicted among those of all tasks so far, and `predict_tasks` of a trained model "
        "returns -1 for it. With `transport: sketch` the server sees sums alone."
    ),
    "gpm": "The server averages as in FedAvg; no subspace leaves a client.",
    "stamp": "With `spatial: false` the server averages, and sees sums alone.",
    "special": (
        "It goes lambda / (1 + lambda) of the way after every round. Clients train as in FedAvg, "
        "and nothing else is sent. Lambda 0 is FedAvg, bit for bit. The paper also has the plain "
        "mean of clients and a server step that falls with the task (`train.weighting: uniform`, "
        "`train.server_schedule: 1/k`); that step alone forgets and learns less with every method, "
        "so compare methods with it or without it."
    ),
    "special-c": (
        "In a round a client goes about lr x steps x lambda of the way, recorded as `pull`; a run "
        "warns if that is nothing."
    ),
    "scaffold": "They start at zero in every task.",
    "flwf-2t": "The model of the round keeps what other clients know.",
    "fedomg": "It looks within a radius around the mean.",
    "fed-dualp": "The nearest key chooses the expert.",
    "pip": (
        "Clients train the head on the prototypes of classes that they lack, and the server "
        "averages by participation."
    ),
    "calibrate": "It combines with every method that trains the body.",
}
"""What is worth knowing about a method besides its idea."""

_HEAD = """# Methods by family

A config names a method by its `kind` and sets hyperparameters beside it:

```yaml
method: {kind: fot, threshold: 0.9}
```

`perdure methods` prints this list in a terminal. "Server sees" says which fields a client uploads
besides running statistics of batch norm. A **sum** field is needed as a sum over clients only, so
it works under [secure aggregation](privacy.md); a per-client field must be visible for each client.
Unless stated otherwise a method learns all kinds of [streams](data.md#streams). Which methods
combine is on [a separate page](combinations.md), and [a custom method](write-a-method.md) is one
file.
"""
_FOOT = """
Types, defaults and meanings are read from the methods by `tools/methods_page.py`.
"""


def page() -> str:
    """Return the page."""
    parts = [_HEAD, _overview(), *map(_family, FAMILIES), _FOOT]
    return "\n".join(part.strip("\n") + "\n" for part in parts)


def kinds_of(family: str) -> list[str]:
    """Return the kinds of a family, in the order of the registry."""
    return [kind for kind in KINDS if find(kind).family == family]


def readme_rows() -> list[str]:
    """Return the table of README.md."""
    rows = [
        f"| {family} | `{kind}` | {find(kind).idea} | {find(kind).paper} | "
        f"{_server_sees_briefly(kind)} |"
        for family in FAMILIES
        for kind in kinds_of(family)
    ]
    return ["| family | `kind` | idea | reference | server sees |", "|---|---|---|---|---|", *rows]


def _overview() -> str:
    rows = [
        f"| {family} | [`{kind}`](#{kind}) | {_server_sees_briefly(kind)} |"
        for family in FAMILIES
        for kind in kinds_of(family)
    ]
    return "\n".join(["| family | kind | server sees |", "|---|---|---|", *rows])


def _family(family: str) -> str:
    methods = "\n".join(map(_method, kinds_of(family)))
    return f"## {family}\n\n{FAMILIES[family]}\n\n{methods}"


def _method(kind: str) -> str:
    method = build({"kind": kind})
    streams = method.needs.streams
    known = "" if streams == Needs().streams else f"Streams: {', '.join(sorted(streams))}.\n\n"
    about = " ".join(filter(None, (method.idea, NOTES.get(kind))))
    return (
        f"### {method.title} {{#{kind}}}\n\n`kind: {kind}`. {about}\n\n{known}"
        f"Server sees: {_server_sees(kind, method)}"
        f"\n\n{_table(kind)}\n\nReference: {reference(type(method))}\n"
    )


def reference(method: type[Method]) -> str:
    """Return the paragraph of a method's docstring that begins with "Reference:", or its paper."""
    paragraphs = inspect.cleandoc(method.__doc__ or "").split("\n\n")
    found = [text for text in paragraphs if text.startswith("Reference:")]
    text = found[0].removeprefix("Reference:") if found else method.paper
    return " ".join(text.split()).removesuffix(".") + "."


def _server_sees(kind: str, method: Method) -> str:
    single = method.needs.per_client_fields
    summed = [name for name in uploaded(kind) if name not in single]
    parts = [
        f"{words} {', '.join(f'`{name}`' for name in names)}"
        for words, names in (("sums of", summed), ("each client's", single))
        if names
    ]
    return " and ".join(parts) + "."


def _server_sees_briefly(kind: str) -> str:
    single = build({"kind": kind}).needs.per_client_fields
    return f"each client's {', '.join(f'`{name}`' for name in single)}" if single else "sums"


def uploaded(kind: str) -> list[str]:
    """Return the fields that clients sent in a small run of a method."""
    first = min(GOLDEN.glob("*.json"))  # the bytes are the same on every machine
    results = json.loads(first.read_text(encoding="utf-8"))["results"]
    recorded = [results[f"{kind} {s}"] for s in _SETTINGS if f"{kind} {s}" in results]
    sent = recorded[0]["bytes"] if recorded else _small_run(kind)["bytes"]
    names = (field.partition("/") for field in sent["by_field"])
    return [name for way, _, name in names if way == "up"]


def _small_run(kind: str) -> dict[str, Any]:
    config = {
        "data": {"limit": 40, "test_limit": 10},
        "stream": {"tasks": 2},
        "clients": {"count": 2},
        "train": {"rounds": 1},
        "engine": {"kind": "serial"},
        "method": {"kind": kind},
    }
    return perdure.run(config).values


def _table(kind: str) -> str:
    schema = TypeAdapter(find(kind)).json_schema()
    if not schema.get("properties"):
        return "It has no hyperparameters."
    docs = hyperparameter_docs(find(kind))
    rows = [
        f"| `{name}` | {_type(value, schema)} | {_default(value)} | {_cell(docs.get(name, ''))} |"
        for name, value in schema["properties"].items()
    ]
    return "\n".join(["| hyperparameter | type | default | meaning |", "|---|---|---|---|", *rows])


def hyperparameter_docs(method: type[Method]) -> dict[str, str]:
    """Return the meaning of each hyperparameter, by its name in a config.

    It is the string under the field, or else what the class docstring says after `name:`.
    """
    names = {field.name: field.name.rstrip("_") for field in fields(method)}
    docs: dict[str, str] = {}
    for owner in reversed([kind for kind in method.__mro__ if kind is not object]):
        docs |= {names[n]: t for n, t in _field_strings(owner).items() if n in names}
        entries = _entries(owner.__doc__ or "", set(names.values()))
        docs |= {name: text for name, text in entries if name not in docs}
    return docs


def _field_strings(owner: type) -> dict[str, str]:
    body = ast.parse(inspect.cleandoc("\n" + inspect.getsource(owner))).body[0]
    assert isinstance(body, ast.ClassDef)
    return {
        field.target.id: ast.literal_eval(after.value)
        for field, after in zip(body.body, body.body[1:], strict=False)
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(after, ast.Expr)
        and isinstance(after.value, ast.Constant)
    }


def _entries(docstring: str, names: set[str]) -> Iterator[tuple[str, str]]:
    """Yield the entries `name: text` or `name, other: text` of a class docstring."""
    if not names:
        return
    one = "|".join(sorted(names, key=len, reverse=True))
    text = " ".join(docstring.split())
    found = list(re.finditer(rf"(?:^|(?<=\s))((?:{one})(?:, (?:{one}))*): ", text))
    ends = [*(match.start() for match in found[1:]), len(text)]
    for match, end in zip(found, ends, strict=False):
        meaning = text[match.end() : end].strip().rstrip(";,")
        for name in match[1].split(", "):
            yield name, meaning


def _type(value: dict[str, Any], schema: dict[str, Any]) -> str:
    """Return a JSON schema in words."""
    if "$ref" in value:
        return _type(schema["$defs"][value["$ref"].rpartition("/")[2]], schema)
    if "anyOf" in value:
        return " or ".join(dict.fromkeys(_type(part, schema) for part in value["anyOf"]))
    if "enum" in value:
        return ", ".join(f"`{choice}`" for choice in value["enum"])
    if value.get("type") == "array":
        return f"list of {_type(value['items'], schema)}" if "items" in value else "list"
    if value.get("type") == "object":
        return "mapping of names to " + _type(value.get("additionalProperties", {}), schema)
    names = {"number": "float", "boolean": "bool", "null": "null"}
    kind = value.get("type", "any")
    return " ".join([names.get(kind, kind), *_bounds(value)])


def _bounds(value: dict[str, Any]) -> list[str]:
    signs = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
    bounds = [f"{sign} {value[key]:g}" for key, sign in signs.items() if key in value]
    return [", ".join(bounds)] if bounds else []


def _default(value: dict[str, Any]) -> str:
    default = value.get("default")
    return f"`{json.dumps(default)}`".replace('"', "") if "default" in value else "required"


def _cell(text: str) -> str:
    """Return text for a table's cell, as a sentence."""
    line = " ".join(text.split()).replace("|", "\\|")
    if not line:
        return ""
    return line[:1].upper() + line[1:] + ("" if line.endswith(".") else ".")


if __name__ == "__main__":
    homeless = [kind for kind in KINDS if find(kind).family not in FAMILIES]
    if homeless:
        raise SystemExit(f"family: must be one of {', '.join(FAMILIES)} of {', '.join(homeless)}")
    (ROOT / "docs" / "methods.md").write_text(page(), encoding="utf-8")
    readme = ROOT / "README.md"
    text = with_table(readme.read_text(encoding="utf-8"), "methods", readme_rows())
    readme.write_text(text, encoding="utf-8")
