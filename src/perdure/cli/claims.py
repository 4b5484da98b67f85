"""perdure claims: what the papers say, and what small runs here say about it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from perdure.claims.catalogue import Claim, read_catalogue
from perdure.claims.reproduction_page import conclusion, reproduction_page, said
from perdure.claims.verdicts import Plan, Verdict, evaluator, make_plan
from perdure.cli.arguments import Quiet
from perdure.cli.compare import Jobs
from perdure.cli.comparison_progress import viewing
from perdure.cli.console import setup_logging, stdout_console
from perdure.cli.interrupts import Stopped, shell_command
from perdure.comparison.processes import CpuBudget, run_all
from perdure.core.errors import RunError, UserError
from perdure.core.files import write_atomic


def claims(
    papers: Annotated[
        str, typer.Option(help="Such as fot,pip; without it all.", metavar="A,B")
    ] = "",
    out: Annotated[Path, typer.Option(help="Where the runs are kept.", metavar="DIR")] = Path(
        "runs/claims"
    ),
    data: Annotated[
        Path | None, typer.Option(help="A folder with data files that some need.", metavar="DIR")
    ] = None,
    only_list: Annotated[bool, typer.Option("--list", help="Show them, run nothing.")] = False,
    write: Annotated[
        Path | None, typer.Option(help="Write the page of verdicts.", metavar="FILE")
    ] = None,
    run: Annotated[bool, typer.Option(help="Make the runs, or judge what is finished.")] = True,
    jobs: Jobs = None,
    quiet: Quiet = False,
) -> None:
    """Test the papers' claims by small runs and say which hold.

    The same command goes on after a stop; runs that claims share are made once.
    """
    setup_logging(quiet=True)
    catalogue = read_catalogue().of([name for name in papers.split(",") if name])
    if only_list:
        for claim in catalogue.claims:
            stdout_console().print("\n".join(_listed(claim)) + "\n")
        return
    if write is not None and not write.resolve().parent.is_dir():
        raise UserError(f"--write {write}: the folder does not exist")
    command = _again(papers, out, data, write)
    plan = make_plan(catalogue, out, data)
    failed = _run(plan, out, jobs, quiet, command) if run else []
    verdicts = [evaluator(claim, plan, out) for claim in catalogue.claims]
    for verdict in verdicts:
        stdout_console().print("\n".join(_judged(verdict)) + "\n")
    if write is not None:
        wanted = ["perdure", "claims", *(["--papers", papers] if papers else [])]
        named = shell_command(
            [*wanted, "--data", "DIR", "--write", str(write)]
        )  # no path of this machine
        page = reproduction_page(catalogue, verdicts, write.parent / "results", named)
        write_atomic(write, page.encode())
    if failed:
        raise RunError(f"failed: {'; '.join(failed)}; go on with: {shell_command(command)}")


def _run(plan: Plan, out: Path, jobs: int | None, quiet: bool, command: list[str]) -> list[str]:
    """Make the runs; those that failed are named with their reasons."""
    try:
        with viewing(quiet) as view:
            failures = run_all(plan.all, out, CpuBudget.divide(jobs, len(plan.all)), view)
    except KeyboardInterrupt:
        raise Stopped(
            f"every finished round is kept; go on with: {shell_command(command)}"
        ) from None
    return [f"{each.run.name} ({each.reason})" for each in failures]


def _again(papers: str, out: Path, data: Path | None, write: Path | None) -> list[str]:
    chosen = ["--papers", papers] if papers else []
    brought = ["--data", str(data)] if data is not None else []
    page = ["--write", str(write)] if write is not None else []
    return ["perdure", "claims", *chosen, "--out", str(out), *brought, *page]


def _listed(claim: Claim) -> list[str]:
    test = claim.criterion.text if claim.criterion else f"not testable: {claim.untestable}"
    return [
        f"{claim.id} ({claim.paper}, {claim.where})",
        f"  says: {claim.says}",
        f"  test: {test}",
    ]


def _judged(verdict: Verdict) -> list[str]:
    claim = verdict.claim
    measured = [f"  measured: {', '.join(said(value) for value in verdict.measured)}"]
    return [
        f"{claim.id} ({claim.paper}, {claim.where})",
        f"  paper says: {claim.says}",
        *(measured if verdict.measured else []),
        f"  {conclusion(verdict)}",
    ]
