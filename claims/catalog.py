"""The catalog of claims: read from claims.yaml and checked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from claims.criteria import Criterion
from perdure.config import override_key, read_yaml
from perdure.core.errors import UserError, bad_value
from perdure.recipes import recipe_path

PAPERS = ("FOT", "FedProTIP", "STAMP", "SPECIAL", "PIP")
_DEFAULT = Path(__file__).resolve().parent / "claims.yaml"


@dataclass(frozen=True)
class Setting:
    """The config that the runs of a claim share."""

    name: str
    recipe: str | None = None
    """Name of a recipe. If None, `config` is the whole config."""
    config: dict[str, Any] = field(default_factory=dict)
    changes: dict[str, Any] = field(default_factory=dict)
    """New values of keys such as `train.rounds`."""
    data: dict[str, str] = field(default_factory=dict)
    """Name of the file in the data folder, by the key that takes its path."""

    def values(self, folder: Path | None) -> dict[str, Any]:
        """Return the values of the config.

        Args:
            folder: Folder with data files. If None, a setting that needs one is refused.

        Raises:
            UserError: A data file is missing.
        """
        values = read_yaml(recipe_path(self.recipe)) if self.recipe else self.config
        for key, value in self.changes.items():
            values = override_key(values, key, value)
        for key, name in self.data.items():
            if folder is None or not (folder / name).is_file():
                raise UserError(f"requires {name} in the folder of --data")
            values = _set(values, key.split("."), str(folder / name))
        return values


@dataclass(frozen=True)
class ClaimedRun:
    """One method of a claim: its setting, its kind and its hyperparameters."""

    setting: str
    kind: str
    keys: dict[str, Any]


@dataclass(frozen=True)
class Claim:
    """A statement of a paper, and the runs and the criterion that test it."""

    id: str
    paper: str
    where: str
    """Table, figure or section of the paper."""
    says: str
    runs: dict[str, ClaimedRun]
    """By the name that the criterion uses."""
    criterion: Criterion | None
    untestable: str | None
    """Why small runs cannot show it, if there is no criterion."""


@dataclass(frozen=True)
class Catalog:
    """All settings and claims."""

    settings: dict[str, Setting]
    claims: tuple[Claim, ...]

    def for_papers(self, papers: Sequence[str]) -> Catalog:
        """Return the claims of some papers; of all papers if `papers` is empty."""
        canonical = {paper.lower(): paper for paper in PAPERS}
        for name in papers:
            if name.lower() not in canonical:
                raise bad_value("--papers", name, f"one of {', '.join(PAPERS)}")
        wanted = {canonical[name.lower()] for name in papers} or set(PAPERS)
        claims = tuple(claim for claim in self.claims if claim.paper in wanted)
        return Catalog(self.settings, claims)

    def with_ids(self, ids: Sequence[str]) -> Catalog:
        """Return the claims with these ids; all of them if `ids` is empty."""
        known = [claim.id for claim in self.claims]
        for name in ids:
            if name not in known:
                raise bad_value("ID", name, f"one of {', '.join(known)}")
        return Catalog(self.settings, tuple(c for c in self.claims if not ids or c.id in ids))


def read_catalog(path: Path = _DEFAULT) -> Catalog:
    """Return the catalog of a YAML file. Default: the bundled one."""
    values = yaml.safe_load(path.read_text(encoding="utf-8"))
    settings = {name: _setting(name, setting) for name, setting in values["settings"].items()}
    claims = tuple(_claim(claim, settings) for claim in values["claims"])
    if len({claim.id for claim in claims}) < len(claims):
        raise UserError(f"{path}: claim ids must be unique")
    return Catalog(settings, claims)


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
        name: _run(run, values.get("setting", "")) for name, run in values.get("runs", {}).items()
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
        raise bad_value(f"{claim.id}: paper", claim.paper, f"one of {', '.join(PAPERS)}")
    if (claim.criterion is None) == (claim.untestable is None):
        raise UserError(f"{claim.id}: must have either holds or untestable")
    for run in claim.runs.values() if claim.criterion else ():
        if run.setting not in settings:
            raise bad_value(f"{claim.id}: setting", run.setting, f"one of {', '.join(settings)}")
    for name in claim.criterion.names if claim.criterion else ():
        if name.partition(".")[0] not in claim.runs:
            raise bad_value(f"{claim.id}: holds", name, f"a value of {', '.join(claim.runs)}")


def _set(values: Any, path: list[str], value: Any) -> Any:
    """Return a copy with one value changed; a step of the path may be an index into a list."""
    if not path:
        return value
    if isinstance(values, list):
        index = int(path[0])
        return [*values[:index], _set(values[index], path[1:], value), *values[index + 1 :]]
    return values | {path[0]: _set(values.get(path[0]), path[1:], value)}
