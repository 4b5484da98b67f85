"""Write the pages of docs/ that are made from the code: config.md, metrics.md, combinations.md.

python tools/reference.py
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from perdure.config import Config, PrivacyConfig
from perdure.config.data import DomainConfig
from perdure.config.overrides import KIND_SECTIONS
from perdure.config.section import KindSection
from perdure.config.sentences import type_in_words, value_in_words
from perdure.core.registry import import_object
from perdure.evaluation.forgetting import DEFINITIONS
from perdure.evaluation.metrics import METRICS, meaning

sys.path.insert(0, str(Path(__file__).parent))
import combinations

DOCS = Path(__file__).resolve().parents[1] / "docs"
INTRODUCTION = """# The keys of a config

A config is a YAML file of sections; nearly every key has a default, and a key that is not listed
here is refused. So is a key of another kind: `alpha` belongs to `clients.partition.kind: dirichlet`
alone. `perdure run FILE --set section.key=value` changes a key for one run; another kind drops the
keys of the kind before. `perdure config schema` prints the JSON Schema with which editors complete
and check a config. (This page is made from `src/perdure/config` by `tools/reference.py`.)
"""


def config_page() -> str:
    """Return every key of a config with its type, default and meaning."""
    lines = [INTRODUCTION, *_table(_own_keys(Config, "", skip=set(Config.model_fields) - _PLAIN))]
    for section in Config.model_fields:
        if section not in _PLAIN:
            lines += _section(section)
    return "\n".join(lines) + "\n"


Row = tuple[str, FieldInfo]
_PLAIN = {"seed", "method", "device"}
"""Keys of a config that are not sections."""


def _section(name: str) -> list[str]:
    """Return the heading, the description and the tables of a section."""
    field = Config.model_fields[name]
    heading = ["", f"## {name}", ""]
    if name in KIND_SECTIONS:
        return [*heading, field.description or "", *_section_with_kinds(name)]
    cls = PrivacyConfig.whole() if name == "privacy" else _class(field.annotation)
    inner = [path for key in cls.model_fields if (path := f"{name}.{key}") in KIND_SECTIONS]
    skip = {path.rpartition(".")[2] for path in inner}
    lines = [*heading, _text(cls.__doc__ or ""), "", *_table(_own_keys(cls, f"{name}.", skip))]
    for path in inner:
        description = cls.model_fields[path.rpartition(".")[2]].description or ""
        lines += ["", f"### {path}", "", _text(description), *_section_with_kinds(path)]
    return lines


def _section_with_kinds(section: str) -> list[str]:
    """Return the keys of each kind of a section."""
    base = KIND_SECTIONS[section]
    registry = base.registry()
    classes = {kind: registry.find(kind) for kind in registry.builtin}
    lines = _kinds(section, base.kind_key, classes)
    if registry.others is None:
        return lines
    others = import_object(registry.others)
    return [*lines, *_custom(section, base.kind_key, others, classes)]


def _custom(
    section: str, key: str, custom: type[BaseModel], classes: dict[str, type[BaseModel]]
) -> list[str]:
    """Return the keys of the class of custom kinds that the first built-in kind does not have."""
    first = next(iter(classes.values())).model_fields
    rows = ((f"{section}.{name}", field) for name, field in custom.model_fields.items()
            if name not in first)  # fmt: skip
    title = f"`{key}`: a dotted path. {_text(custom.__doc__ or '')}"
    return ["", title, "", *_table(rows)]


def _kinds(section: str, key: str, classes: dict[str, type[BaseModel]]) -> list[str]:
    """Return the keys that all kinds share, then each kind with the keys that it adds."""
    fields = [cls.model_fields for cls in classes.values()]
    names = [name for name in fields[0] if name != key]
    shared = [name for name in names if all(_same(name, each, fields[0]) for each in fields)]
    default, first = next(iter(classes.items()))
    meaning = _inherited_description(first, key)
    lines = ["", *_head(), f"| `{section}.{key}` | {' or '.join(classes)} | `{default}` | "
             f"{_cell(meaning)} |"]  # fmt: skip
    lines += [_row(f"{section}.{name}", fields[0][name]) for name in shared]
    for cls in dict.fromkeys(classes.values()):
        own = set(cls.model_fields) - set(shared) - {key}
        kinds = [kind for kind in classes if classes[kind] is cls]
        title = f"`{key}: {kinds[0]}`" + (f" (or {', '.join(kinds[1:])})" if kinds[1:] else "")
        lines += ["", f"{title}: {_text(cls.__doc__ or '')}"]
        if own:
            rows = ((f"{section}.{name}", cls.model_fields[name])
                    for name in cls.model_fields if name in own)  # fmt: skip
            lines += ["", *_table(rows)]
    return lines


def _inherited_description(cls: type[BaseModel], name: str) -> str:
    """Return the description of a field where it was first declared."""
    for base in cls.__mro__:
        fields = getattr(base, "model_fields", {})
        if name in fields and fields[name].description:
            return str(fields[name].description)
    raise SystemExit(f"{cls.__name__}.{name}: has no docstring below its field")


def _same(name: str, fields: dict[str, FieldInfo], first: dict[str, FieldInfo]) -> bool:
    """Return whether a key has one type, default and meaning."""
    return name in fields and _row(name, fields[name]) == _row(name, first[name])


def _own_keys(cls: type[BaseModel], prefix: str, skip: set[str]) -> Iterator[Row]:
    for name, field in cls.model_fields.items():
        if name not in skip:
            yield f"{prefix}{name}", field


def _head() -> list[str]:
    return ["| key | type | default | meaning |", "|---|---|---|---|"]


def _table(rows: Iterator[Row]) -> list[str]:
    return [*_head(), *(_row(key, field) for key, field in rows)]


def _row(key: str, field: FieldInfo) -> str:
    if not field.description:
        raise SystemExit(f"{key}: has no docstring below its field")
    kind = type_in_words(field.annotation, field.metadata)
    if DomainConfig in get_args(get_args(field.annotation)[0] if get_args(field.annotation) else 0):
        kind = "list of: mapping"
    return f"| `{key}` | {_cell(kind)} | {_default(field)} | {_cell(field.description)} |"


def _default(field: FieldInfo) -> str:
    if field.default_factory is not None:
        made = field.get_default(call_default_factory=True)
        return f"`{value_in_words(made.kind_name if isinstance(made, KindSection) else made)}`"
    if field.is_required():
        return "must be given"
    return "-" if field.default is None else f"`{value_in_words(field.default)}`"


def _class(annotation: Any) -> type[BaseModel]:
    if isinstance(annotation, type):
        return annotation
    return next(part for part in get_args(annotation) if isinstance(part, type))


def _text(docstring: str) -> str:
    """Return a docstring as one paragraph per block."""
    blocks = docstring.strip().split("\n\n")
    return "\n\n".join(" ".join(block.split()) for block in blocks)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def metrics_page() -> str:
    """Every metric with its definition."""
    rows = [f"| {name} | {_cell(text)} |" for name, text in DEFINITIONS.items()]
    lines = [
        "# The metrics",
        "",
        "a[i][j] is the accuracy (0 to 1) on task j after learning task i, tasks counted from 1 to",
        "T. The word forgetting stands for several formulas in this field, so every number that",
        "perdure prints goes by one of these names. Metrics that compare two moments are null",
        "after one task. (This page is made from `src/perdure/evaluation/forgetting.py` by",
        "`tools/reference.py`.)",
        "",
        "| name | definition |",
        "|---|---|",
        *rows,
        "",
        "Each is given in up to three modes of inference: `task_agnostic` (the best of all outputs",
        "of the tasks so far), `task_aware` (the best of the outputs of the example's own task,",
        "which is given) and `routed` (the best of the outputs of the task that the method",
        "predicts; of all tasks so far for an example of no known task). `routed` is null for",
        "methods that predict no task, and where all tasks have the same outputs: a task restricts",
        "nothing there.",
        *_score_lines(),
    ]
    return "\n".join(lines) + "\n"


def _score_lines() -> list[str]:
    """Return the metrics of `evaluate.metrics`, and how to write one."""
    rows = [f"| `{name}` | {_cell(meaning(name))} |" for name in METRICS.builtin]
    return ["", "## Beside accuracy", "", *SCORES.splitlines(), "",
            "| name | definition, on one task's test data |", "|---|---|", *rows, "",
            *NUMBERS.splitlines(), "", *YOUR_METRIC.splitlines()]  # fmt: skip


SCORES = """\
`evaluate: {metrics: [accuracy, macro_f1, auroc]}` in a config chooses more metrics of the
predictions. Each has a matrix over tasks in result.json, `scores.<metric>.<mode>[i][j]`, shaped
like `matrix`, which stays accuracy, and what the table above defines for accuracy under
`score_metrics.<metric>.<mode>`. Of an error (`ece`, `mae`) forgetting is positive if it grew.
`perdure run`, the tables of `perdure compare` and the report show the mean over all tasks after the
last; the report also shows the forgetting. Null stands for what is not defined, such as the AUROC
of a class without examples.

Metrics are computed from sums over test examples (a confusion matrix, histograms of scores in 1,000
bins, calibration in 15 bins), so that nodes of a federation that evaluate on local data send sums
and no predictions. AUROC from a histogram differs from the exact one by less than 0.002; the others
are exact. Classes are those of the task; the probability of a class is the softmax of the outputs
that the mode allows.

Where the data names the client of a row (`clients.partition: {kind: column}` or `folder`), every
client has its scores in `client_scores[j][client][metric][mode]` after the last task, and the
report draws them by client and task; so has, if metrics are named, every node that evaluates on
local data and every client with a personal model. `worst_client` is the lowest accuracy among them;
it is null where all clients share one model and its test data."""
NUMBERS = """\
## Numbers

With `data.target: number` ([Data and streams](data.md#numbers)) a model predicts a number, and
`matrix` holds its R2: 1 is perfect, 0 is as good as always predicting the mean of the task's test
data, and less is worse. So ACC, FGT and all other metrics above are those of R2 (`measure` in
result.json is `r2`, otherwise `accuracy`). `scores` has `r2` and `mae`, the mean absolute error in
the unit of the data, unless `evaluate.metrics` chooses others. Both follow from sums of errors, so
that they hold in a federation, too."""
YOUR_METRIC = """\
## Your metric

A metric is a class with one function, from counts to a number. It says which counts it needs:
`confusion` (examples by class and predicted class; the last column is a class of another task),
`histograms` or `calibration`; of numbers `errors`; of both `correct`
([ScoreCounts](api.md#metrics)). `lower_is_better = True` marks an error. The first line of its
docstring is its definition in the report. In a file beside the config:

```python
# file: mymetric.py
from perdure import Metric, ScoreCounts


class Kappa(Metric):
    \"\"\"Cohen's kappa: agreement with the labels beyond chance.\"\"\"

    needs = ("confusion",)

    def value(self, counts: ScoreCounts) -> float | None:
        \"\"\"Return (agreement - chance) / (1 - chance).\"\"\"
        shares = counts.confusion / counts.confusion.sum()
        chance = float(shares.sum(1) @ shares.sum(0)[:-1])
        agreement = float(shares.diagonal().sum())
        return (agreement - chance) / (1 - chance) if chance < 1 else None
```

Name it by its dotted path, in Python by the class; a package can add a name by an entry point of
the group `perdure.metrics`:

```python
import perdure
from mymetric import Kappa

config = {
    "stream": {"kind": "split", "tasks": 2},
    "train": {"rounds": 2},
    "evaluate": {"metrics": ["accuracy", "auroc", Kappa]},
}
result = perdure.run(config)
print(sorted(result.scores))
print(result.scores["mymetric.Kappa"]["task_aware"][-1])
```

A run keeps a copy of the file, so that it can be resumed where the file is not; resuming the run of
another user executes it only with `--trust-code`."""


PAGES: dict[str, Callable[[], str]] = {
    "config.md": config_page,
    "metrics.md": metrics_page,
    "combinations.md": combinations.page,
}

if __name__ == "__main__":
    for name, make in PAGES.items():
        (DOCS / name).write_text(make(), encoding="utf-8")
