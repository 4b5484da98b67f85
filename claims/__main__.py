"""Test the claims of the papers by small runs, and print which of them hold.

python -m claims [ID ...] [--resume] [--budget 2h] [--data DIR] [--write FILE]
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from claims.catalog import Catalog, Claim, read_catalog
from claims.reproduction_page import measured_text, reproduction_page, verdict_text
from claims.verdicts import Plan, Verdict, evaluate_claim, make_plan
from perdure.cli.compare import show_run_progress
from perdure.cli.console import (
    Stopped,
    print_error,
    print_json,
    setup_logging,
    shell_command,
    stdout_console,
    stoppable,
)
from perdure.core.errors import PerdureError, RunError, UserError, bad_value
from perdure.core.files import write_atomic
from perdure.runs.compare.processes import CpuBudget, run_all
from tools.results import write_results

UNITS = {"s": 1, "m": 60, "h": 3600}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return the exit code; an error is one sentence on stderr."""
    given = _parser().parse_args(arguments)
    setup_logging(quiet=True)
    try:
        judge(given)
    except Stopped as stop:
        print_error("stopped", str(stop))
        return stop.exit_code
    except PerdureError as error:
        print_error("error", str(error))
        return error.exit_code
    return 0


def _parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m claims",
        description="Test the claims of the papers by small runs, and print which of them hold. "
        "Runs that several claims need are made once.",
    )
    add = made.add_argument
    add("ids", nargs="*", metavar="ID", help="claims such as fot-accuracy; default: all")
    add("--papers", default="", metavar="A,B", help="such as fot,pip; default: all")
    add("--out", type=Path, default=Path("runs/claims"), metavar="DIR", help="folder of the runs")
    add("--data", type=Path, metavar="DIR", help="folder with data files")
    add("--list", action="store_true", help="print the claims and run nothing")
    add("--resume", action="store_true", help="continue with the runs that --out has already")
    add("--budget", metavar="TIME", help="start no run after this time, such as 90m or 2h")
    add("--no-run", action="store_true", help="judge what is finished and run nothing")
    add("--write", type=Path, metavar="FILE",
        help="write the verdicts as a Markdown page, and the figures to measured/claims.json "
        "beside it")  # fmt: skip
    add("--jobs", type=int, metavar="N", help="runs at a time; default: one per core")
    add("--quiet", "-q", action="store_true", help="show no progress")
    add("--json", action="store_true", help="print one JSON document instead of text")
    return made


def judge(given: argparse.Namespace) -> None:
    """Make the runs that are missing, print the verdicts and write the page.

    Raises:
        UserError: A value that was given is wrong.
        RunError: Some runs failed.
    """
    papers = [name for name in given.papers.split(",") if name]
    catalog = read_catalog().for_papers(papers).with_ids(given.ids)
    if given.list:
        _print_claims(catalog, given.json)
        return
    check_paths(given)
    budget = seconds_of(given.budget) if given.budget else None
    plan = make_plan(catalog, given.out, given.data)
    failed = [] if given.no_run else make_runs(plan, given, budget)
    verdicts = [evaluate_claim(claim, plan, given.out) for claim in catalog.claims]
    _print_verdicts(verdicts, given.json)
    if given.write is not None:
        _write_page(given, catalog, verdicts)
    if failed:
        again = shell_command(resume_command(given))
        raise RunError(f"failed: {'; '.join(failed)}; resume with: {again}")


def check_paths(given: argparse.Namespace) -> None:
    """Refuse a folder that has runs already unless it is meant, and a page without a folder."""
    if not (given.resume or given.no_run) and given.out.is_dir() and any(given.out.iterdir()):
        raise UserError(f"--out {given.out}: holds runs already; continue with --resume")
    if given.write is not None and not given.write.resolve().parent.is_dir():
        raise UserError(f"--write {given.write}: the folder does not exist")


def seconds_of(text: str) -> float:
    """Return the seconds of a time such as `90s`, `45m`, `1.5h`."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smh])", text)
    if not found:
        raise bad_value("--budget", text, "a number with the unit s, m or h")
    return float(found[1]) * UNITS[found[2]]


def make_runs(plan: Plan, given: argparse.Namespace, budget: float | None) -> list[str]:
    """Make the runs; return the names of those that failed, with reasons, and say what is left."""
    end = None if budget is None else time.monotonic() + budget
    command, quiet = resume_command(given), given.quiet or given.json
    with stoppable(command), show_run_progress(quiet) as view:
        cores = CpuBudget.divide(given.jobs, len(plan.all))
        failures = run_all(plan.all, given.out, cores, view, until=end)
    tried = {failed.run.name for failed in failures}
    left = [r.name for r in plan.all if r.name not in tried and not r.is_finished(given.out)]
    if left:
        sys.stderr.write(
            f"{len(left)} of {len(plan.all)} runs are left after {given.budget}: "
            f"{', '.join(left)}; resume with: {shell_command(command)}\n"
        )
    return [f"{failed.run.name} ({failed.reason})" for failed in failures]


def resume_command(given: argparse.Namespace) -> list[str]:
    """Return the command that resumes the runs."""
    values = {"--papers": given.papers, "--out": given.out, "--data": given.data,
              "--budget": given.budget, "--write": given.write}  # fmt: skip
    options = [word for key, value in values.items() if value for word in (key, str(value))]
    return ["python", "-m", "claims", *given.ids, "--resume", *options]


def _write_page(given: argparse.Namespace, catalog: Catalog, verdicts: list[Verdict]) -> None:
    """Write the page and its figures; the command on it names no folder of this machine."""
    path, options = given.write, ["--papers", given.papers] if given.papers else []
    options += ["--data", "DIR"] if given.data else []
    command = ["python", "-m", "claims", *given.ids, *options, "--write", str(path)]
    results = path.parent / "measured" / "claims.json"
    results.parent.mkdir(exist_ok=True)
    facts, typed = {v.claim.id: _verdict_facts(v) for v in verdicts}, shell_command(command)
    write_results(results, {"command": typed, "claims": facts})
    write_atomic(path, reproduction_page(catalog, verdicts, typed).encode())


def _print_claims(catalog: Catalog, as_json: bool) -> None:
    if as_json:
        print_json([_claim_facts(claim) for claim in catalog.claims])
        return
    for claim in catalog.claims:
        test = claim.criterion.text if claim.criterion else f"not testable: {claim.untestable}"
        _print_lines(_title(claim), f"  says: {claim.says}", f"  test: {test}")


def _print_verdicts(verdicts: list[Verdict], as_json: bool) -> None:
    if as_json:
        print_json([_verdict_facts(verdict) for verdict in verdicts])
        return
    for verdict in verdicts:
        values = ", ".join(measured_text(value) for value in verdict.measured)
        measured = [f"  measured: {values}"] if values else []
        says = f"  paper says: {verdict.claim.says}"
        _print_lines(_title(verdict.claim), says, *measured, f"  {verdict_text(verdict)}")


def _claim_facts(claim: Claim) -> dict[str, Any]:
    return {
        "id": claim.id,
        "paper": claim.paper,
        "where": claim.where,
        "says": claim.says,
        "criterion": claim.criterion.text if claim.criterion else None,
        "untestable": claim.untestable,
    }


def _verdict_facts(verdict: Verdict) -> dict[str, Any]:
    return _claim_facts(verdict.claim) | {
        "verdict": verdict.word,
        "reason": verdict.reason or None,
        "seeds": verdict.seeds,
        "seeds_that_agree": verdict.seeds_that_agree,
        "measured": {value.name: value.by_seed for value in verdict.measured},
    }


def _title(claim: Claim) -> str:
    return f"{claim.id} ({claim.paper}, {claim.where})"


def _print_lines(*lines: str) -> None:
    stdout_console().print("\n".join(lines) + "\n")


if __name__ == "__main__":
    sys.exit(main())
