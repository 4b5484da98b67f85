"""Write docs/reproduction.md: per claim, the statement of the paper and the measured values."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from perdure.claims.catalog import PAPERS, Catalog, Setting
from perdure.claims.verdicts import SEEDS, Measured, Verdict, Word
from perdure.core.version import __version__
from perdure.report.comparison_text import format_summary


def measured_text(value: Measured) -> str:
    """Return a measured value as text: fractions as points (0 to 100), bytes in their unit."""
    summary = value.summary
    if summary is None:
        return f"{value.name} -"
    if value.measure.unit != "share":
        return f"{value.name} {format_summary(value.measure, summary)}"
    mean = f"{value.name} {100 * summary.mean:.1f}"
    return mean if summary.std is None else f"{mean} ± {100 * summary.std:.1f}"


def verdict_text(verdict: Verdict) -> str:
    """Return the verdict in a few words, with its reason or the number of agreeing seeds."""
    if verdict.reason:
        return f"{verdict.word}: {verdict.reason}"
    return f"{verdict.word} ({verdict.seeds_that_agree} of {verdict.seeds} seeds alone)"


def reproduction_page(
    catalog: Catalog, verdicts: Sequence[Verdict], results: Path, command: str
) -> str:
    """Return the page as Markdown.

    Args:
        catalog: The claims, with their settings.
        verdicts: One per claim.
        results: Folder with results of longer runs (JSON files), which the page lists.
        command: Command that wrote the page.
    """
    parts = [
        "# What was reproduced",
        f"Written by `{command}` (perdure {__version__}), never by hand. Each claim of a paper is "
        "tested by small runs, mostly on the digits of scikit-learn, with a "
        "criterion on means of the seeds " + ", ".join(map(str, SEEDS)) + ". The criteria are in "
        "[claims.yaml](../src/perdure/claims/claims.yaml). They test the direction that a paper "
        "reports, not its figures: data, models and rounds are far smaller here. "
        "Measured values are points (0 to 100), mean ± sample standard deviation (divided by "
        "n-1); [metrics.md](metrics.md) defines them. Behind a verdict: how many of the seeds "
        "agree with the criterion by themselves. Three seeds are few.",
        _counts(verdicts),
    ]
    for paper in PAPERS:
        parts += _paper(paper, [one for one in verdicts if one.claim.paper == paper])
    parts += ["## Settings", *(_setting(setting) for setting in _used_settings(catalog))]
    parts += _longer_runs(results)
    return "\n\n".join(parts) + "\n"


WORDS: tuple[Word, ...] = ("holds", "does not hold", "not testable", "not run")


def _counts(verdicts: Sequence[Verdict]) -> str:
    lines = ["| paper | " + " | ".join(WORDS) + " |", "|---|" + "---:|" * len(WORDS)]
    for paper in PAPERS:
        counts = Counter(one.word for one in verdicts if one.claim.paper == paper)
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
    for verdict in verdicts:
        claim = verdict.claim
        criterion = f"`{claim.criterion.text}`" if claim.criterion else "-"
        measured = "<br>".join(measured_text(value) for value in verdict.measured) or "-"
        cells = (claim.where, claim.says, criterion, measured, verdict_text(verdict))
        lines.append("| " + " | ".join(_cell(text) for text in cells) + " |")
    return [f"## {paper}", "\n".join(lines)]


def _used_settings(catalog: Catalog) -> list[Setting]:
    names = {
        run.setting: None
        for claim in catalog.claims
        if claim.criterion
        for run in claim.runs.values()
    }
    return [catalog.settings[name] for name in names]


def _setting(setting: Setting) -> str:
    if setting.recipe:
        changes = ", ".join(f"{key}={value}" for key, value in setting.changes.items())
        base = f"[{setting.recipe}](../src/perdure/recipes/{setting.recipe}.yaml)"
        return f"- {setting.name}: {base}" + (f" with {changes}" if changes else "")
    return f"- {setting.name}: `{json.dumps(setting.config)}`"


def _longer_runs(folder: Path) -> list[str]:
    files = sorted(folder.glob("*.json")) if folder.is_dir() else []
    if not files:
        return []
    rows = [row for path in files for row in _result_rows(path)]
    lines = [
        "| result | run | seeds | task-agnostic | seconds per run | the paper says |",
        "|---|---|---:|---|---:|---|",
        *rows,
    ]
    intro = (
        "The files of [results](results) hold the commands and all figures; some runs have the "
        "scale of the paper. Other runs shared the machine: the seconds show the order of "
        "magnitude, not which method is faster."
    )
    return ["## Longer runs", intro, "\n".join(lines)]


def _result_rows(path: Path) -> Iterator[str]:
    """Yield the rows of a comparison (comparison.json) or of one run (result.json).

    Further keys of the file: `command`, `paper_says` and `shown`, the metrics to show.
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
        metrics = values["metrics"]["task_agnostic"]
        figures = ", ".join(f"{key} {100 * metrics[key]:.2f}" for key in shown)
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
    figures = []
    for name in shown:
        cell = cells.get(f"metrics.task_agnostic.{name}")
        if cell:
            std = "" if cell["std"] is None else f" ± {100 * cell['std']:.2f}"
            figures.append(f"{name} {100 * cell['mean']:.2f}{std}")
    return ", ".join(figures)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
