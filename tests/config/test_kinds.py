"""Sections with several kinds: each has its keys, and keys of another kind are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from perdure.cli.main import main
from perdure.config import (
    Config,
    dump,
    load,
    override,
    override_key,
    parse,
    read_saved,
    read_yaml,
)
from perdure.config.overrides import KIND_SECTIONS, keys_of
from perdure.core.errors import UserError
from perdure.deploy.custom_code import custom_kinds
from perdure.runs.run import run
from perdure.training.engines.vector import VectorEngineConfig
from perdure.training.optimizers import SgdOptimizer

SECTIONS = {
    path: {kind: base.registry().find(kind) for kind in base.registry().builtin}
    for path, base in KIND_SECTIONS.items()
}
NEEDED = {"path": "a"}


def refusal(values: dict[str, Any]) -> str:
    with pytest.raises(UserError) as caught:
        parse(values)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def section_values(path: str, kind: str) -> dict[str, Any]:
    """Return the least that a section of a kind must have."""
    key = KIND_SECTIONS[path].kind_key
    fields = SECTIONS[path][kind].model_fields
    return {key: kind, **{name: value for name, value in NEEDED.items() if name in fields}}


CASES = [(path, kind) for path, kinds in SECTIONS.items() for kind in kinds]


@pytest.mark.parametrize(("path", "kind"), CASES)
def test_every_kind_is_read_and_written(path: str, kind: str) -> None:
    config = parse(override_key({}, path, section_values(path, kind)))
    assert parse(yaml.safe_load(dump(config))) == config
    section: Any = config
    for name in path.split("."):
        section = getattr(section, name)
    assert type(section) is SECTIONS[path][kind]
    again = parse(config.model_copy(deep=True).model_dump(mode="json", exclude_unset=True))
    assert again == config


def test_the_kind_is_dumped_though_it_is_a_default() -> None:
    config = Config().model_copy(update={"engine": VectorEngineConfig(chunk=2)})
    short = config.model_dump(mode="json", exclude_unset=True)
    assert short == {"engine": {"kind": "vector", "chunk": 2}}


@pytest.mark.parametrize(("path", "kind"), CASES)
def test_keys_of_other_kinds_are_refused(path: str, kind: str) -> None:
    own = set(SECTIONS[path][kind].model_fields)
    others = {name for cls in SECTIONS[path].values() for name in cls.model_fields} - own
    for name in others:
        values = {**section_values(path, kind), name: None}
        sentence = refusal(override_key({}, path, values))
        assert sentence.startswith(f"{path}.{name}: unknown key for ")
        listed = sentence.partition("; its keys: ")[2].split(", ")
        assert set(listed) == own


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        (
            {"clients": {"partition": {"kind": "iid", "alpha": 0.01}}},
            "clients.partition.alpha: unknown key for kind 'iid', got 0.01; its keys: kind",
        ),
        (
            {"train": {"optimizer": "adam", "momentum": 0.9}},
            "train.momentum: unknown key for optimizer 'adam', got 0.9; allowed for 'sgd'",
        ),
        (
            {"train": {"optimizer": {"kind": "adam", "momentum": 0.9}}},
            "train.optimizer.momentum: unknown key for kind 'adam', got 0.9; its keys: kind",
        ),
        (
            {"train": {"optimizer": {"momentum": 0.9}, "momentum": 0.5}},
            "train.momentum: must be 0.9 as in train.optimizer.momentum, got 0.5",
        ),
        (
            {"train": {"optimizer": "adem", "momentum": 0.9}},
            "train.optimizer.kind: must be sgd, adam, adamw, or a dotted path to a class, "
            "got 'adem'",
        ),
        ({"train": {"momentum": 1}}, "train.momentum: must be less than 1, got 1"),
        (
            {"engine": {"kind": "serial", "chunk": 4}},
            "engine.chunk: unknown key for kind 'serial', got 4; its keys: kind",
        ),
        (
            {"model": {"kind": "vit", "depth": 2}},
            "model.depth: must be null, since the pretrained weights determine it (model.init), "
            "got 2",
        ),
        (
            {"clients": {"partition": {"kind": ["iid"]}}},
            "clients.partition.kind: must be iid, dirichlet, shards, classes, column, folder, or a "
            "dotted path to a class, got ['iid']",
        ),
    ],
)
def test_sentences(values: dict[str, Any], sentence: str) -> None:
    assert refusal(values) == sentence


def test_mistakes_end_with_exit_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("model: {kind: mlp, patch: 3}\n", encoding="utf-8")
    assert main(["check", str(path)]) == 2
    assert "model.patch: unknown key for kind 'mlp', got 3" in " ".join(
        capsys.readouterr().err.split()
    )


@pytest.mark.parametrize(
    "train",
    [
        {"momentum": 0.9},
        {"optimizer": "sgd", "momentum": "0.9"},
        {"optimizer": {"kind": "sgd", "momentum": 0.9}},
        {"optimizer": {"momentum": 0.9}, "momentum": 0.9},
    ],
)
def test_ways_to_write_an_optimizer(train: dict[str, Any]) -> None:
    config = parse({"train": train})
    assert config.train.optimizer == SgdOptimizer(momentum=0.9)
    assert config.train.momentum == 0.9


def test_an_optimizer_without_keys() -> None:
    config = parse({"train": {"optimizer": "adamw", "weight_decay": 0.1}})
    assert config.train.optimizer.kind == "adamw"
    assert (config.train.momentum, config.train.weight_decay) == (0.0, 0.1)


@pytest.mark.parametrize(
    ("text", "key", "line"),
    [
        ("seed: 1\nseed: 2\n", "seed", 2),
        ("train:\n  lr: 0.1\n  rounds: 2\n  lr: 0.2\n", "lr", 4),
        ("method: {kind: fot, with: [{kind: er, budget: 1, budget: 2}]}\n", "budget", 1),
    ],
)
def test_duplicate_keys_are_refused(tmp_path: Path, text: str, key: str, line: int) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UserError) as caught:
        read_yaml(path)
    assert str(caught.value) == f"{path}: {key}: must be given once, got it again in line {line}"
    with pytest.raises(UserError, match=r"^--set train: lr: must be given once"):
        override({}, ["train={lr: 1, lr: 2}"])


def test_anchors_and_merges_still_work(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    text = "data: &base {source: npz, path: a.npz, limit: 5}\nstream:\n  kind: domains\n"
    text += "  domains:\n    - {<<: *base, path: b.npz}\n"
    path.write_text(text, encoding="utf-8")
    domains = parse(read_yaml(path)).model_dump()["stream"]["domains"]
    assert (domains[0]["path"], domains[0]["limit"]) == ("b.npz", 5)


def test_another_kind_drops_the_keys_of_the_kind_before(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    text = (
        "clients: {partition: {kind: dirichlet, alpha: 0.1}}\n"
        "engine: {kind: vector, chunk: 4}\ntrain: {momentum: 0.9}\n"
    )
    path.write_text(text, encoding="utf-8")
    kinds = ["clients.partition.kind=shards", "engine.kind=auto", "train.optimizer=adam"]
    config = load(path, ["clients.partition.per_client=3", *kinds])
    assert config.clients.partition.model_dump() == {"kind": "shards", "per_client": 3}
    assert config.engine.model_dump() == {"kind": "auto", "chunk": 4}
    assert config.train.optimizer.kind == "adam"
    with pytest.raises(UserError, match=r"^clients\.partition\.alpha: unknown key for kind 'iid'"):
        load(path, ["clients.partition.alpha=2", "clients.partition.kind=iid"])


def test_keys_of_unknown_kinds_stay() -> None:
    values = {"stream": {"kind": "my.Stream", "angle": 3}}
    assert override_key(values, "stream.kind", "other.Stream")["stream"]["angle"] == 3
    assert keys_of("stream", "other.Stream") is None
    assert keys_of("clients.partition", "nonsense") is None
    assert keys_of("runs", "iid") is None


def described(cls: type) -> dict[str, str | None]:
    return {name: field.description for name, field in cls.model_fields.items()}


def test_every_key_has_a_meaning() -> None:
    for path, kinds in SECTIONS.items():
        key = KIND_SECTIONS[path].kind_key
        for cls in kinds.values():
            missing = [name for name, text in described(cls).items() if not text and name != key]
            assert not missing, f"{cls.__name__}: {missing}"
    for name in ("clients", "train", "privacy", "runs"):
        cls = type(getattr(Config(), name))
        assert all(described(cls).values()), cls
    assert all(described(Config).values())


EVIL = "from pathlib import Path\nPath('executed').touch()\n"


@pytest.mark.parametrize(
    "values",
    [
        {"stream": {"kind": "evil.Stream"}},
        {"engine": {"kind": "evil.Engine"}},
        {"train": {"aggregation": {"kind": "evil.Rule"}}},
        {"train": {"optimizer": "evil.Optimizer"}},
        {"train": {"schedule": {"kind": "evil.Schedule"}}},
        {"extensions": [{"tasks": 1, "settings": {"train.aggregation": "evil.Rule"}}]},
        {"extensions": [{"tasks": 1, "settings": {"train.optimizer": {"kind": "evil.Optimizer"}}}]},
    ],
    ids=str,
)
def test_reading_a_saved_config_executes_no_code_that_it_names(
    values: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "evil.py").write_text(EVIL, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    if "extensions" in values:
        with pytest.raises(UserError, match=r"^extensions\.settings: "):
            read_saved(values)
    else:
        assert any("evil." in kind for kind in custom_kinds(read_saved(values)))
    assert not (tmp_path / "executed").exists()


RULE = """
from typing import Annotated
import torch
from pydantic import Field
from perdure.config import Aggregation, OptimizerConfig, Schedule
from perdure.training.optimizers import Sgd


class Largest(Aggregation):
    \"\"\"The largest change of each parameter.\"\"\"

    factor: Annotated[float, Field(gt=0)] = 1.0

    def combine(self, stacked):
        return {name: self.factor * value.amax(0) for name, value in stacked.items()}


class Half(Schedule):
    \"\"\"Half the learning rate in every round.\"\"\"

    def factor(self, round_, rounds):
        return 0.5


class Plain(OptimizerConfig):
    \"\"\"SGD without keys.\"\"\"

    def make(self, decay):
        return Sgd(0.0)
"""


def test_rules_schedules_and_optimizers_by_dotted_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_kinds.py").write_text(RULE, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    train = {
        "rounds": 1, "lr": 0.2, "optimizer": "own_kinds.Plain", "schedule": "own_kinds.Half",
        "aggregation": {"kind": "own_kinds.Largest", "factor": 2},
    }  # fmt: skip
    values = {"stream": {"tasks": 1}, "engine": "serial", "train": train}
    result = run(values, out=tmp_path / "run")
    halved = {"rounds": 1, "lr": 0.1, "aggregation": {"kind": "own_kinds.Largest", "factor": 2}}
    same = run(values | {"train": halved})
    assert result.values["model_sha256"] == same.values["model_sha256"]
    assert (tmp_path / "run" / "method" / "own_kinds.py").is_file()
    assert parse(yaml.safe_load(dump(parse(values)))) == parse(values)
    with pytest.raises(UserError, match=r"^train\.aggregation\.factor: must be greater than 0"):
        parse(values | {"train": {"aggregation": {"kind": "own_kinds.Largest", "factor": 0}}})
