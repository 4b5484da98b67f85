"""The runs that the claims need, each once, and which claims hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from perdure.claims.catalogue import Catalogue, Claim, ClaimedRun
from perdure.comparison.plan import PlannedRun, check_plan, plan
from perdure.comparison.variants import MethodChoice
from perdure.config import override_key
from perdure.core.errors import UserError
from perdure.report.comparison import COSTS, METRICS, Measure
from perdure.report.run_records import RunRecord, read_run
from perdure.report.statistics import Summary, summarize

SEEDS = (0, 1, 2)
Word = Literal["holds", "does not hold", "not testable", "not run"]


@dataclass(frozen=True)
class Measured:
    """A value of a criterion, over the seeds that are finished."""

    name: str
    measure: Measure
    by_seed: dict[int, float]

    @property
    def summary(self) -> Summary | None:
        """Mean and sample standard deviation."""
        return summarize(list(self.by_seed.values()))


@dataclass(frozen=True)
class Verdict:
    """What became of a claim."""

    claim: Claim
    word: Word
    reason: str = ""
    """Why it was not tested."""
    measured: tuple[Measured, ...] = ()
    seeds: int = 0
    seeds_that_agree: int = 0
    """Single seeds for which the criterion is true."""


@dataclass(frozen=True)
class Plan:
    """The runs of all claims, each once, and what cannot run."""

    runs: dict[str, tuple[PlannedRun, ...]]
    """By `setting/label`."""
    refused: dict[str, str]

    @property
    def all(self) -> list[PlannedRun]:
        """Seed by seed, so that all claims have a first figure early."""
        rows = list(self.runs.values())
        return [row[place] for place in range(len(SEEDS)) for row in rows]


def make_plan(catalogue: Catalogue, out: Path, data: Path | None) -> Plan:
    """What is to be run; a run that is refused is kept with its reason and stops nobody else."""
    runs: dict[str, tuple[PlannedRun, ...]] = {}
    refused: dict[str, str] = {}
    for claim in catalogue.claims:
        for run in claim.runs.values() if claim.criterion else ():
            name = run_name(run)
            if name in runs or name in refused:
                continue
            try:
                runs[name] = _planned(catalogue, run, out, data)
            except UserError as error:
                refused[name] = str(error)
    return Plan(runs, refused)


def run_name(run: ClaimedRun) -> str:
    """The folder of a run's seeds below the claims' folder."""
    (planned,) = plan({}, [MethodChoice(run.kind, run.keys)], SEEDS[:1])
    return f"{run.setting}/{planned.label}"


def evaluator(claim: Claim, plan: Plan, out: Path) -> Verdict:
    """The verdict on a claim, from the runs that are finished."""
    if claim.criterion is None:
        return Verdict(claim, "not testable", claim.untestable or "")
    for run in claim.runs.values():
        if run_name(run) in plan.refused:
            return Verdict(claim, "not run", plan.refused[run_name(run)])
    records = {name: _finished(plan.runs[run_name(run)], out) for name, run in claim.runs.items()}
    measured = tuple(_measured(name, records) for name in claim.criterion.names)
    seeds = set.intersection(*(set(each.by_seed) for each in measured))
    if not seeds:
        return Verdict(claim, "not run", "no seed is finished for all its runs", measured)
    return _judged(claim, measured, seeds)


def _judged(claim: Claim, measured: Sequence[Measured], seeds: set[int]) -> Verdict:
    assert claim.criterion is not None
    means = {each.name: sum(each.by_seed[s] for s in seeds) / len(seeds) for each in measured}
    single = [{each.name: each.by_seed[seed] for each in measured} for seed in sorted(seeds)]
    agree = sum(claim.criterion.holds(values) for values in single)
    word: Word = "holds" if claim.criterion.holds(means) else "does not hold"
    return Verdict(claim, word, "", tuple(measured), len(seeds), agree)


def _planned(
    catalogue: Catalogue, run: ClaimedRun, out: Path, data: Path | None
) -> tuple[PlannedRun, ...]:
    values = catalogue.settings[run.setting].values(data)
    usual = {"engine": {"kind": "vector"}}  # auto's choice depends on the machine's load
    values = usual | override_key(values, "runs.report", False) | {"method": {"kind": run.kind}}
    planned = plan(values, [MethodChoice(run.kind, run.keys)], SEEDS)
    named = tuple(PlannedRun(f"{run.setting}/{each.label}", each.config) for each in planned)
    check_plan(named, out)
    return named


def _finished(planned: Sequence[PlannedRun], out: Path) -> list[RunRecord]:
    return [read_run(run.path(out)) for run in planned if run.is_finished(out)]


def _measured(name: str, records: dict[str, list[RunRecord]]) -> Measured:
    run, _, path = name.partition(".")
    measure = find_measure(path)
    found = {record.seed: measure.value_of(record) for record in records[run]}
    return Measured(name, measure, {s: value for s, value in found.items() if value is not None})


def find_measure(path: str) -> Measure:
    """`ACC`, `routed.ACC`, `up` or `down`."""
    mode, _, metric = path.rpartition(".")
    for measure in METRICS:
        if measure.name == metric and measure.mode == (mode or "task_agnostic"):
            return measure
    for measure in COSTS:
        if measure.key == f"bytes.{path}":
            return measure
    raise UserError(f"holds: must be METRIC, MODE.METRIC, up or down, got {path!r}")
