"""perdure claims: test the claims of the papers by small runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from perdure.claims.catalog import Catalog, Claim, read_catalog
from perdure.claims.reproduction_page import measured_text, reproduction_page, verdict_text
from perdure.claims.verdicts import Plan, Verdict, evaluate_claim, make_plan
from perdure.cli.arguments import Json, Quiet
from perdure.cli.compare import Jobs
from perdure.cli.comparison_progress import show_run_progress
from perdure.cli.console import print_json, setup_logging, stdout_console
from perdure.cli.interrupts import shell_command, stoppable
from perdure.comparison.processes import CpuBudget, run_all
from perdure.core.errors import RunError, UserError
from perdure.core.files import write_atomic


def claims(
    papers: Annotated[str, typer.Option(help="Such as fot,pip. Default: all.", metavar="A,B")] = "",
    out: Annotated[Path, typer.Option(help="The folder of the runs.", metavar="DIR")] = Path(
        "runs/claims"
    ),
    data: Annotated[
        Path | None, typer.Option(help="A folder with data files.", metavar="DIR")
    ] = None,
    only_list: Annotated[
        bool, typer.Option("--list", help="Print the claims and run nothing.")
    ] = False,
    write: Annotated[
        Path | None, typer.Option(help="Write the verdicts as a Markdown page.", metavar="FILE")
    ] = None,
    run: Annotated[
        bool, typer.Option(help="Run what is missing, or only use finished runs.")
    ] = True,
    jobs: Jobs = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Test the claims of the papers by small runs, and print which of them hold.

    Repeat the command to resume after a stop. Runs that several claims need are made once.
    """
    setup_logging(quiet=True)
    catalog = read_catalog().for_papers([name for name in papers.split(",") if name])
    if only_list:
        _print_claims(catalog, as_json)
        return
    if write is not None and not write.resolve().parent.is_dir():
        raise UserError(f"--write {write}: the folder does not exist")
    command = _command(papers, out, data, write)
    plan = make_plan(catalog, out, data)
    failed = _run(plan, out, jobs, quiet or as_json, command) if run else []
    verdicts = [evaluate_claim(claim, plan, out) for claim in catalog.claims]
    _print_verdicts(verdicts, as_json)
    if write is not None:
        _write_page(write, catalog, verdicts, papers)
    if failed:
        raise RunError(f"failed: {'; '.join(failed)}; resume with: {shell_command(command)}")


def _run(plan: Plan, out: Path, jobs: int | None, quiet: bool, command: list[str]) -> list[str]:
    """Make the runs and return the names of those that failed, with reasons."""
    with stoppable(command), show_run_progress(quiet) as view:
        failures = run_all(plan.all, out, CpuBudget.divide(jobs, len(plan.all)), view)
    return [f"{failed.run.name} ({failed.reason})" for failed in failures]


def _command(papers: str, out: Path, data: Path | None, write: Path | None) -> list[str]:
    """Return the command that resumes the runs."""
    chosen = ["--papers", papers] if papers else []
    files = ["--data", str(data)] if data is not None else []
    page = ["--write", str(write)] if write is not None else []
    return ["perdure", "claims", *chosen, "--out", str(out), *files, *page]


def _write_page(path: Path, catalog: Catalog, verdicts: list[Verdict], papers: str) -> None:
    """Write the page; the command on it names no folder of this machine."""
    chosen = ["--papers", papers] if papers else []
    command = ["perdure", "claims", *chosen, "--data", "DIR", "--write", str(path)]
    results = path.parent / "results"
    page = reproduction_page(catalog, verdicts, results, shell_command(command))
    write_atomic(path, page.encode())


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
