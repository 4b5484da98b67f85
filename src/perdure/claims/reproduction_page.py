"""docs/reproduction.md: claim by claim, what the papers say and what was measured here."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from perdure.claims.catalogue import PAPERS, Catalogue, Setting
from perdure.claims.verdicts import SEEDS, Measured, Verdict, Word
from perdure.core.version import __version__
from perdure.report.comparison_text import format_summary


def said(each: Measured) -> str:
    """One measured value: points (0 to 100) for shares, bytes as they are."""
    summary = each.summary
    if summary is None:
        return f"{each.name} -"
    if each.measure.unit != "share":
        return f"{each.name} {format_summary(each.measure, summary)}"
    mean = f"{each.name} {100 * summary.mean:.1f}"
    return mean if summary.std is None else f"{mean} ± {100 * summary.std:.1f}"


def conclusion(verdict: Verdict) -> str:
    """The verdict in a few words."""
    if verdict.reason:
        return f"{verdict.word}: {verdict.reason}"
    return f"{verdict.word} ({verdict.seeds_that_agree} of {verdict.seeds} seeds alone)"


def reproduction_page(
    catalogue: Catalogue, verdicts: Sequence[Verdict], results: Path, command: str
) -> str:
    """The whole page."""
    parts = [
        "# What was reproduced",
        f"Written by `{command}` (perdure {__version__}), never by hand. Each claim of a paper is "
        "tested by small runs, mostly on the digits that come with scikit-learn, and judged by a "
        "criterion over means of the seeds " + ", ".join(map(str, SEEDS)) + ". The criteria are in "
        "[benchmarks/claims.yaml](../benchmarks/claims.yaml). They ask for the direction that a "
        "paper reports, not for its figures: data, models and rounds here are far smaller. "
        "Measured values are points (0 to 100), mean ± sample standard deviation (divided by "
        "n-1); [metrics.md](metrics.md) defines them. Behind a verdict: how many of the seeds "
        "agree with the criterion by themselves. Three seeds are few.",
        _counts(verdicts),
    ]
    for paper in PAPERS:
        parts += _paper(paper, [each for each in verdicts if each.claim.paper == paper])
    parts += ["## Settings", *(_setting(each) for each in _used(catalogue))]
    parts += _longer_runs(results)
    return "\n\n".join(parts) + "\n"


WORDS: tuple[Word, ...] = ("holds", "does not hold", "not testable", "not run")


def _counts(verdicts: Sequence[Verdict]) -> str:
    lines = ["| paper | " + " | ".join(WORDS) + " |", "|---|" + "---:|" * len(WORDS)]
    for paper in PAPERS:
        counts = Counter(each.word for each in verdicts if each.claim.paper == paper)
        if counts:
            lines.append(f"| {paper} | " + " | ".join(str(counts[word]) for word in WORDS) + " |")
    return "\n".join(lines)


def _paper(paper: str, verdicts: Sequence[Verdict]) -> list[str]:
    if not verdicts:
        return []
    lines = [
        "| where | the paper says | criterion | measured here | verdict |",
        "|---|---|---|---|---|",
    ]
    for each in verdicts:
        criterion = f"`{each.claim.criterion.text}`" if each.claim.criterion else "-"
        measured = "<br>".join(said(value) for value in each.measured) or "-"
        cells = (each.claim.where, each.claim.says, criterion, measured, conclusion(each))
        lines.append("| " + " | ".join(_cell(text) for text in cells) + " |")
    return [f"## {paper}", "\n".join(lines)]


def _used(catalogue: Catalogue) -> list[Setting]:
    names = {
        run.setting: None
        for claim in catalogue.claims
        if claim.criterion
        for run in claim.runs.values()
    }
    return [catalogue.settings[name] for name in names]


def _setting(setting: Setting) -> str:
    if setting.recipe:
        changes = ", ".join(f"{key}={value}" for key, value in setting.changes.items())
        base = f"[{setting.recipe}](../recipes/{setting.recipe}.yaml)"
        return f"- {setting.name}: {base}" + (f" with {changes}" if changes else "")
    return f"- {setting.name}: `{json.dumps(setting.config)}`"


def _longer_runs(folder: Path) -> list[str]:
    files = sorted(folder.glob("*.json")) if folder.is_dir() else []
    if not files:
        return []
    rows = [row for path in files for row in _result_rows(path)]
    lines = [
        "| result | run | seeds | task-agnostic | seconds a run | the paper says |",
        "|---|---|---:|---|---:|---|",
        *rows,
    ]
    intro = (
        "Made by the commands that stand in the files of [results](results), which hold all "
        "figures; some at the paper's own scale. Other runs shared the machine: seconds tell the "
        "order of magnitude, not which method is faster."
    )
    return ["## Longer runs", intro, "\n".join(lines)]


def _result_rows(path: Path) -> Iterator[str]:
    """A comparison's summary (comparison.json) or one run's result (result.json).

    Beside their own keys they hold `command`, `paper_says` and `shown`, the metrics to show.
    """
    values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    says = _cell(str(values.get("paper_says", "-")))
    link = f"[{path.stem}](results/{path.name})"
    shown = values.get("shown", ["ACC", "FGT"])
    if values.get("table"):
        for label, cells in values["table"]["cells"].items():
            figures, seconds = _headline(cells, shown), _mean_seconds(cells)
            row = (link, _cell(label), str(_seeds(cells)), figures, seconds, says)
            yield f"| {' | '.join(row)} |"
    elif values.get("metrics"):
        found = values["metrics"]["task_agnostic"]
        figures = ", ".join(f"{key} {100 * found[key]:.2f}" for key in shown)
        row = (
            link,
            _cell(values["method"]),
            "1",
            figures,
            f"{values['seconds']['total']:.0f}",
            says,
        )
        yield f"| {' | '.join(row)} |"


def _seeds(cells: dict[str, Any]) -> int:
    return max(int(cell["count"]) for cell in cells.values())


def _mean_seconds(cells: dict[str, Any]) -> str:
    cell = cells.get("seconds.total")
    return f"{cell['mean']:.0f}" if cell else "-"


def _headline(cells: dict[str, Any], shown: Sequence[str]) -> str:
    found = []
    for name in shown:
        cell = cells.get(f"metrics.task_agnostic.{name}")
        if cell:
            std = "" if cell["std"] is None else f" ± {100 * cell['std']:.2f}"
            found.append(f"{name} {100 * cell['mean']:.2f}{std}")
    return ", ".join(found)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
