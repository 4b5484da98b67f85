"""The list of claims, read from benchmarks/claims.yaml and checked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from perdure import recipes
from perdure.claims.criteria import Criterion
from perdure.config import override_key, read_yaml
from perdure.core.errors import UserError, bad_value

PAPERS = ("FOT", "FedProTIP", "STAMP", "SPECIAL", "PIP")
_USUAL = Path(__file__).resolve().parents[3] / "benchmarks" / "claims.yaml"


@dataclass(frozen=True)
class Setting:
    """What the runs of a claim have in common."""

    name: str
    recipe: str | None = None
    """A recipe's name; without it `config` is the whole config."""
    config: dict[str, Any] = field(default_factory=dict)
    changes: dict[str, Any] = field(default_factory=dict)
    data: dict[str, str] = field(default_factory=dict)
    """Keys that take a file of the data folder."""

    def values(self, folder: Path | None) -> dict[str, Any]:
        """The values of the config; UserError if a file is needed that is not there."""
        path = recipes.folder() / f"{self.recipe}.yaml"
        values = read_yaml(path) if self.recipe else self.config
        for key, value in self.changes.items():
            values = override_key(values, key, value)
        for key, name in self.data.items():
            if folder is None or not (folder / name).is_file():
                raise UserError(f"needs {name} in the folder of --data")
            values = _put(values, key.split("."), str(folder / name))
        return values


@dataclass(frozen=True)
class ClaimedRun:
    """One method of a claim: its setting, its kind and its keys."""

    setting: str
    kind: str
    keys: dict[str, Any]


@dataclass(frozen=True)
class Claim:
    """Something that a paper reports, and how it is tested."""

    id: str
    paper: str
    where: str
    says: str
    runs: dict[str, ClaimedRun]
    criterion: Criterion | None
    untestable: str | None
    """Why this size cannot show it."""


@dataclass(frozen=True)
class Catalogue:
    """All settings and claims."""

    settings: dict[str, Setting]
    claims: tuple[Claim, ...]

    def of(self, papers: Sequence[str]) -> Catalogue:
        """The claims of some papers; of all without names."""
        known = {paper.lower(): paper for paper in PAPERS}
        for name in papers:
            if name.lower() not in known:
                raise bad_value("--papers", name, ", ".join(PAPERS))
        wanted = {known[name.lower()] for name in papers} or set(PAPERS)
        kept = tuple(claim for claim in self.claims if claim.paper in wanted)
        return Catalogue(self.settings, kept)


def read_catalogue(path: Path = _USUAL) -> Catalogue:
    """The catalogue of a file."""
    if not path.is_file():
        raise UserError("claims: they are part of the repository, run it in a checkout")
    values = yaml.safe_load(path.read_text(encoding="utf-8"))
    settings = {name: _setting(name, each) for name, each in values["settings"].items()}
    claims = tuple(_claim(each, settings) for each in values["claims"])
    if len({claim.id for claim in claims}) < len(claims):
        raise UserError(f"{path}: two claims have the same id")
    return Catalogue(settings, claims)


def _setting(name: str, values: dict[str, Any]) -> Setting:
    return Setting(
        name,
        values.get("recipe"),
        values.get("config") or {},
        values.get("set") or {},
        values.get("data") or {},
    )


def _claim(values: dict[str, Any], settings: dict[str, Setting]) -> Claim:
    runs = {
        name: _run(each, values.get("setting", "")) for name, each in values.get("runs", {}).items()
    }
    criterion = Criterion(values["holds"]) if "holds" in values else None
    claim = Claim(
        values["id"], values["paper"], values["where"], values["says"],
        runs, criterion, values.get("untestable"),
    )  # fmt: skip
    _check(claim, settings)
    return claim


def _run(values: dict[str, Any], setting: str) -> ClaimedRun:
    keys = {key: value for key, value in values.items() if key not in ("kind", "in")}
    return ClaimedRun(values.get("in", setting), values["kind"], keys)


def _check(claim: Claim, settings: dict[str, Setting]) -> None:
    if claim.paper not in PAPERS:
        raise bad_value(f"{claim.id}: paper", claim.paper, ", ".join(PAPERS))
    if (claim.criterion is None) == (claim.untestable is None):
        raise UserError(f"{claim.id}: allowed: either holds or untestable")
    for run in claim.runs.values() if claim.criterion else ():
        if run.setting not in settings:
            raise bad_value(f"{claim.id}: setting", run.setting, ", ".join(settings))
    for name in claim.criterion.names if claim.criterion else ():
        if name.partition(".")[0] not in claim.runs:
            raise bad_value(f"{claim.id}: holds", name, f"a value of {', '.join(claim.runs)}")


def _put(values: Any, path: list[str], value: Any) -> Any:
    """The values with one changed, where a part of the path may be a place in a list."""
    if not path:
        return value
    if isinstance(values, list):
        place = int(path[0])
        return [*values[:place], _put(values[place], path[1:], value), *values[place + 1 :]]
    return values | {path[0]: _put(values.get(path[0]), path[1:], value)}
