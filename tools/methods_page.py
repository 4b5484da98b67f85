"""The page docs/methods.md: the methods by family, with their hyperparameters.

Families, ideas and references are written here. Types, defaults, meanings, streams and what the
server sees are taken from the methods and from small runs (recorded in tests/golden, or made here),
so that the page stays true.

python tools/methods_page.py
"""

from __future__ import annotations

import ast
import inspect
import json
import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import TypeAdapter

import perdure
from perdure import Method, Needs
from perdure.methods.registry import KINDS, build, find

ROOT = Path(__file__).resolve().parents[1]
GOLDEN = ROOT / "tests" / "golden" / "results"
_SETTINGS = ("mlp", "vit")
"""Small runs without running statistics: `buffers` are sent by every method that trains them."""


class Entry(NamedTuple):
    """What is written by hand about a method."""

    title: str
    idea: str
    reference: str
    note: str = ""
    """What else the server sees, or does not."""


class Family(NamedTuple):
    """Methods that share an idea."""

    title: str
    idea: str
    kinds: tuple[str, ...]


FAMILIES = (
    Family(
        "Baselines",
        "Federated optimization that ignores the tasks. A continual method should beat these.",
        ("fedavg", "fedprox", "scaffold", "fednova"),
    ),
    Family(
        "Server optimizers",
        "The server treats the mean update of a round as a gradient and gives it to an optimizer. "
        "`train.server_lr` is the step size.",
        ("fedavgm", "fedadam", "fedyogi"),
    ),
    Family(
        "Projection",
        "Updates must not change what the layers compute for inputs of earlier tasks, so the "
        "component of an update inside the subspace of those inputs is removed.",
        ("fot", "fedprotip", "gpm"),
    ),
    Family(
        "Replay",
        "Clients store a few examples of earlier tasks and train on them again. The examples never "
        "leave the client.",
        ("er",),
    ),
    Family(
        "Regularization and distillation",
        "A term of the loss, or a step on the server, keeps the model close to that of the "
        "previous task: in its weights or in its outputs.",
        ("ewc", "special", "special-c", "lwf", "flwf-2t"),
    ),
    Family(
        "Alignment",
        "The server looks for an update that agrees with all clients instead of taking the mean. "
        "STAMP does the same on the clients over their tasks, with stored examples.",
        ("fedomg", "stamp"),
    ),
    Family(
        "Prompts",
        "A pretrained transformer is frozen; only prompts and the head are trained and sent. "
        "[Prompts](prompts.md) compares the three, with their costs.",
        ("fed-l2p", "fed-dualp", "pip"),
    ),
    Family(
        "References",
        "What a method's figures are judged by. `single` has one model per task; "
        "[comparisons](compare.md#references) add `joint`, FedAvg on all examples so far, and the "
        "heads in closed form below.",
        ("single",),
    ),
    Family(
        "Heads in closed form",
        "The head follows from sums over the examples' features, without gradient steps. "
        "`calibrate` refits the head of a model that another method trains. The others are "
        "references: one exchange per task on frozen features, nothing is forgotten. Their "
        "features are those of the initial model, so they make sense with a pretrained backbone "
        "or with `train_first: true`.",
        ("calibrate", "fedncm", "fedlda", "fedridge"),
    ),
)

ENTRIES = {
    "fedavg": Entry(
        "FedAvg",
        "Clients train with local SGD, and the server takes the weighted mean of their models.",
        "McMahan, Moore, Ramage, Hampson, Agüera y Arcas: Communication-Efficient Learning of Deep "
        "Networks from Decentralized Data. AISTATS 2017.",
    ),
    "fedprox": Entry(
        "FedProx",
        "Every client adds a proximal term to its loss, which holds it near the model that it "
        "received.",
        "Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith: Federated Optimization in Heterogeneous "
        "Networks. MLSys 2020.",
    ),
    "scaffold": Entry(
        "SCAFFOLD",
        "Control variates on the server and on every client correct the drift of clients whose "
        "data differ. They start at zero in every task.",
        "Karimireddy, Kale, Mohri, Reddi, Stich, Suresh: SCAFFOLD: Stochastic Controlled Averaging "
        "for Federated Learning. ICML 2020.",
    ),
    "fednova": Entry(
        "FedNova",
        "The server takes the mean of normalized updates, so that clients with more local steps "
        "do not pull harder.",
        "Wang, Liu, Liang, Joshi, Poor: Tackling the Objective Inconsistency Problem in "
        "Heterogeneous Federated Optimization. NeurIPS 2020.",
    ),
    "fedavgm": Entry(
        "FedAvgM",
        "SGD with momentum on the server.",
        "Hsu, Qi, Brown: Measuring the Effects of Non-Identical Data Distribution for Federated "
        "Visual Classification. 2019.",
    ),
    "fedadam": Entry(
        "FedAdam",
        "Adam on the server, without bias correction.",
        "Reddi, Charles, Zaheer, Garrett, Rush, Konečný, Kumar, McMahan: Adaptive Federated "
        "Optimization. ICLR 2021.",
    ),
    "fedyogi": Entry(
        "FedYogi",
        "Yogi on the server: the second moment changes by small steps, whatever the update's size.",
        "Reddi, Charles, Zaheer, Garrett, Rush, Konečný, Kumar, McMahan: Adaptive Federated "
        "Optimization. ICLR 2021.",
    ),
    "fot": Entry(
        "FOT",
        "The server projects each aggregated update out of the subspaces of earlier tasks' layer "
        "inputs. After a task it estimates the new subspaces from a sum of random sketches: at the "
        "task's end, or when the next task begins (`closing: false`). Once the subspaces use up "
        "most of a layer's inputs, it hardly learns: a run warns at 90%.",
        "Bakman, Yaldiz, Ezzeldin, Avestimehr: Federated Orthogonal Training: Mitigating Global "
        "Catastrophic Forgetting in Continual Federated Learning. ICLR 2024.",
    ),
    "fedprotip": Entry(
        "FedProTIP",
        "Clients project every local step out of the subspaces of earlier tasks. The task of a "
        "test example is predicted from the subspaces of the features (routing), so that no task "
        "label is needed. Tasks with the same inputs and other labels cannot be distinguished, by "
        "any router; with `router: gaussian` a run warns of them (`warnings` in result.json). An "
        "example of no known task is recognized with `unknown` above 0; its class is then "
        "predicted among those of all tasks so far, and `predict_tasks` of a trained model "
        "returns -1 for it.",
        "FedProTIP: Task-Agnostic Federated Continual Learning via Replay-Free Gradient "
        "Projection. Under review.",
        "With `transport: sketch` all fields are sums.",
    ),
    "gpm": Entry(
        "GPM",
        "Each client computes its own subspaces and projects its own steps. The server averages "
        "as in FedAvg; no subspace leaves a client.",
        "Saha, Garg, Roy: Gradient Projection Memory for Continual Learning. ICLR 2021. On FedAvg "
        "as in Bakman et al., ICLR 2024.",
    ),
    "er": Entry(
        "ER",
        "Experience replay: every local step adds examples from a small memory of the client's "
        "earlier examples, which is filled by reservoir sampling.",
        "Chaudhry, Rohrbach, Elhoseiny, Ajanthan, Dokania, Torr, Ranzato: On Tiny Episodic "
        "Memories in Continual Learning. 2019.",
    ),
    "stamp": Entry(
        "STAMP",
        "Clients align the gradient of the current task with those of earlier tasks, computed "
        "from a coreset per task and class; the server aligns the updates of the clients.",
        "Exploiting Client Heterogeneity for Forgetting Mitigation in Federated Continual "
        "Learning: A Spatio-Temporal Gradient Alignment Approach (STAMP). 2025.",
        "With `spatial: false` the server averages, and all fields are sums.",
    ),
    "ewc": Entry(
        "EWC",
        "Each client adds a quadratic penalty that holds back the weights its earlier tasks need, "
        "weighted by the diagonal of the Fisher information.",
        "Kirkpatrick, Pascanu, Rabinowitz, Veness, Desjardins, Rusu, Milan, Quan, Ramalho, "
        "Grabska-Barwinska, Hassabis, Clopath, Kumaran, Hadsell: Overcoming catastrophic "
        "forgetting in neural networks. PNAS 2017.",
    ),
    "special": Entry(
        "SPECIAL",
        "After every round the server pulls the model towards its anchor, the final model of the "
        "previous task: by lambda / (1 + lambda) of the way. Clients train as in FedAvg, and "
        "nothing else is sent. Lambda 0 is FedAvg, bit for bit. The paper also has the plain mean "
        "of clients and a server step that falls with the task (`train.weighting: uniform`, "
        "`train.server_schedule: 1/k`); that step alone forgets and learns less with every method, "
        "so compare methods with it or without it.",
        "Server-Proximal Aggregation for Federated Domain-Incremental Learning under Partial "
        "Participation: Task-Uniform Convergence and Backward Transfer (SPECIAL).",
    ),
    "special-c": Entry(
        "SPECIAL-C",
        "The anchor of SPECIAL on the clients: a proximal map after every local step. In a round a "
        "client goes about lr x steps x lambda of the way to the anchor, recorded as `pull`; a run "
        "warns if that is nothing.",
        "The client-side variant in the paper of SPECIAL (Algorithm 2).",
    ),
    "lwf": Entry(
        "LwF",
        "Learning without forgetting: on the new task's examples, the outputs of earlier tasks "
        "are distilled from the final model of the previous task.",
        "Li, Hoiem: Learning without Forgetting. IEEE TPAMI 2018.",
    ),
    "flwf-2t": Entry(
        "FLwF-2T",
        "Distillation from two teachers: the final model of the previous task, and the server's "
        "model of the round, which keeps what other clients know.",
        "Usmanova, Portet, Lalanda, Vega: Federated Continual Learning through distillation in "
        "pervasive computing. SMARTCOMP 2022.",
    ),
    "fedomg": Entry(
        "FedOMG",
        "The server combines the clients' updates into one that conflicts with none of them, "
        "within a radius around the mean.",
        "Nguyen, Zhao, Lin, Pham et al.: Federated Domain Generalization with Data-free On-server "
        "Matching Gradient. ICLR 2025.",
    ),
    "fed-l2p": Entry(
        "Fed-L2P",
        "Learning to Prompt with federated averaging: each example chooses prompts from a shared "
        "pool by the distance of its query to their keys.",
        "Wang, Zhang, Lee, Zhang, Sun, Ren, Su, Perot, Dy, Pfister: Learning to Prompt for "
        "Continual Learning. CVPR 2022. Federated in Ma'sum et al., CIKM 2024.",
    ),
    "fed-dualp": Entry(
        "Fed-DualP",
        "DualPrompt with federated averaging: one general prompt for all tasks, one expert prompt "
        "per task. The nearest key chooses the expert.",
        "Wang, Zhang, Ebrahimi, Sun, Zhang, Lee, Ren, Su, Perot, Dy, Pfister: DualPrompt: "
        "Complementary Prompting for Rehearsal-free Continual Learning. ECCV 2022. Federated in "
        "Ma'sum et al., CIKM 2024.",
    ),
    "pip": Entry(
        "PIP",
        "Prompts on a frozen backbone, and class prototypes that all clients share: clients train "
        "the head on the prototypes of classes that they lack, and the server averages by "
        "participation.",
        "Ma'sum, Pratama, Ramasamy, Liu, Habibullah, Kowalczyk: PIP: Prototypes-Injected Prompt "
        "for Federated Class Incremental Learning. CIKM 2024.",
    ),
    "calibrate": Entry(
        "Calibrate",
        "At a task's end the server refits the head over all classes seen so far, from Gaussians "
        "of their features. It combines with any method that trains the body: "
        "`with: [{kind: calibrate}]`.",
        "Luo et al.: No Fear of Heterogeneity: Classifier Calibration for Federated Learning with "
        "Non-IID Data (CCVR). NeurIPS 2021.",
    ),
    "single": Entry(
        "Single",
        "Every task is learned by a separate model from the initial weights.",
        "A usual reference: FedAvg on each task alone, evaluated with the task given.",
    ),
    "fedncm": Entry(
        "FedNCM",
        "An example belongs to the class whose mean feature is nearest.",
        "Legate et al.: Guiding the Last Layer in Federated Learning with Pre-Trained Models. "
        "NeurIPS 2023.",
        "They are the count and the total of each class's features.",
    ),
    "fedlda": Entry(
        "FedLDA",
        "Linear discriminant analysis: classes are Gaussians with one shared covariance.",
        "Fisher: The use of multiple measurements in taxonomic problems. 1936. As sums over "
        "clients.",
        "They are the count and the total of each class's features, and their Gram matrix.",
    ),
    "fedridge": Entry(
        "FedRidge",
        "Ridge regression onto the classes; it equals the regression on all examples of all "
        "clients and tasks together.",
        "Ridge regression as sums, the idea of analytic federated continual learning (AFCL). CVPR "
        "2025.",
        "They are the count and the total of each class's features, and their Gram matrix.",
    ),
}

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
    parts = [_HEAD, _overview(), *(_family(family) for family in FAMILIES), _FOOT]
    return "\n".join(part.strip("\n") + "\n" for part in parts)


def _overview() -> str:
    rows = [
        f"| {family.title} | [`{kind}`](#{kind}) | {_server_sees_briefly(kind)} |"
        for family in FAMILIES
        for kind in family.kinds
    ]
    return "\n".join(["| family | kind | server sees |", "|---|---|---|", *rows])


def _family(family: Family) -> str:
    methods = "\n".join(_method(kind) for kind in family.kinds)
    return f"## {family.title}\n\n{family.idea}\n\n{methods}"


def _method(kind: str) -> str:
    entry, method = ENTRIES[kind], build({"kind": kind})
    streams = method.needs.streams
    known = "" if streams == Needs().streams else f"Streams: {', '.join(sorted(streams))}.\n\n"
    return (
        f"### {entry.title} {{#{kind}}}\n\n`kind: {kind}`. {entry.idea}\n\n{known}"
        f"Server sees: {_server_sees(kind, method)} {entry.note}".rstrip()
        + f"\n\n{_table(kind)}\n\nReference: {entry.reference}\n"
    )


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
    if set(ENTRIES) != set(KINDS):
        raise SystemExit(f"ENTRIES: needs {sorted(set(ENTRIES) ^ set(KINDS))} added or removed")
    (ROOT / "docs" / "methods.md").write_text(page(), encoding="utf-8")
