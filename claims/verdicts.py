"""Plan the runs that the claims need, each once, and decide which claims hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from claims.catalog import Catalog, Claim, ClaimedRun
from perdure.config import override_key
from perdure.core.errors import UserError
from perdure.report.comparison import COSTS, METRICS, Measure
from perdure.report.figure_data import Summary, summarize
from perdure.report.records import RunRecord
from perdure.runs.compare.plan import PlannedRun, check_plan, plan
from perdure.runs.compare.variants import MethodChoice
from perdure.runs.records import read_run

SEEDS = (0, 1, 2)
Word = Literal["holds", "does not hold", "not testable", "not run"]


@dataclass(frozen=True)
class Measured:
    """A value of a criterion, for every finished seed."""

    name: str
    measure: Measure
    by_seed: dict[int, float]

    @property
    def summary(self) -> Summary | None:
        """Mean and sample standard deviation over the seeds; None if there is no value."""
        return summarize(list(self.by_seed.values()))


@dataclass(frozen=True)
class Verdict:
    """The verdict on a claim, with the measured values."""

    claim: Claim
    word: Word
    reason: str = ""
    """Why it was not tested."""
    measured: tuple[Measured, ...] = ()
    seeds: int = 0
    seeds_that_agree: int = 0
    """Number of seeds for which the criterion alone is true."""


@dataclass(frozen=True)
class Plan:
    """The runs of all claims, each once, and the runs that are impossible."""

    runs: dict[str, tuple[PlannedRun, ...]]
    """By `setting/label`."""
    refused: dict[str, str]
    """Why a run is impossible, by `setting/label`."""

    @property
    def all(self) -> list[PlannedRun]:
        """All runs, seed by seed, so that every claim gets a first value early."""
        rows = list(self.runs.values())
        return [row[index] for index in range(len(SEEDS)) for row in rows]


def make_plan(catalog: Catalog, out: Path, data: Path | None) -> Plan:
    """Plan the runs of all claims.

    Args:
        catalog: Claims to test.
        out: Folder of the runs.
        data: Folder with data files. If None, runs that need one are refused.

    Returns:
        The plan. An impossible run is listed with its reason and does not affect other runs.
    """
    runs: dict[str, tuple[PlannedRun, ...]] = {}
    refused: dict[str, str] = {}
    for claim in catalog.claims:
        for run in claim.runs.values() if claim.criterion else ():
            name = run_name(run)
            if name in runs or name in refused:
                continue
            try:
                runs[name] = _planned(catalog, run, out, data)
            except UserError as error:
                refused[name] = str(error)
    return Plan(runs, refused)


def run_name(run: ClaimedRun) -> str:
    """Return `setting/label`, the folder of a run's seeds below the folder of all claims."""
    (planned,) = plan({}, [MethodChoice(run.kind, run.keys)], SEEDS[:1])
    return f"{run.setting}/{planned.label}"


def evaluate_claim(claim: Claim, plan: Plan, out: Path) -> Verdict:
    """Return the verdict on a claim, from its finished runs in `out`."""
    if claim.criterion is None:
        return Verdict(claim, "not testable", claim.untestable or "")
    for run in claim.runs.values():
        if run_name(run) in plan.refused:
            return Verdict(claim, "not run", plan.refused[run_name(run)])
    records = {name: _finished(plan.runs[run_name(run)], out) for name, run in claim.runs.items()}
    measured = tuple(_measured(name, records) for name in claim.criterion.names)
    seeds = set.intersection(*(set(value.by_seed) for value in measured))
    if not seeds:
        return Verdict(claim, "not run", "no seed is finished for all of its runs", measured)
    return _verdict(claim, measured, seeds)


def _verdict(claim: Claim, measured: Sequence[Measured], seeds: set[int]) -> Verdict:
    assert claim.criterion is not None
    means = {value.name: sum(value.by_seed[s] for s in seeds) / len(seeds) for value in measured}
    single = [{value.name: value.by_seed[seed] for value in measured} for seed in sorted(seeds)]
    agree = sum(claim.criterion.holds(values) for values in single)
    word: Word = "holds" if claim.criterion.holds(means) else "does not hold"
    return Verdict(claim, word, "", tuple(measured), len(seeds), agree)


def _planned(
    catalog: Catalog, run: ClaimedRun, out: Path, data: Path | None
) -> tuple[PlannedRun, ...]:
    values = catalog.settings[run.setting].values(data)
    engine = {"engine": {"kind": "vector"}}  # the choice of auto depends on the machine's load
    values = engine | override_key(values, "runs.report", False) | {"method": {"kind": run.kind}}
    planned = plan(values, [MethodChoice(run.kind, run.keys)], SEEDS)
    named = tuple(PlannedRun(f"{run.setting}/{one.label}", one.config) for one in planned)
    check_plan(named, out)
    return named


def _finished(planned: Sequence[PlannedRun], out: Path) -> list[RunRecord]:
    return [read_run(run.path(out)) for run in planned if run.is_finished(out)]


def _measured(name: str, records: dict[str, list[RunRecord]]) -> Measured:
    run, _, path = name.partition(".")
    measure = find_measure(path)
    by_seed = {record.seed: measure.value_of(record) for record in records[run]}
    return Measured(name, measure, {s: value for s, value in by_seed.items() if value is not None})


def find_measure(path: str) -> Measure:
    """Return the measure of `ACC`, `routed.ACC`, `up` or `down`."""
    mode, _, metric = path.rpartition(".")
    for measure in METRICS:
        if measure.name == metric and measure.mode == (mode or "task_agnostic"):
            return measure
    for measure in COSTS:
        if measure.key == f"bytes.{path}":
            return measure
    raise UserError(f"holds: must be METRIC, MODE.METRIC, up or down, got {path!r}")
