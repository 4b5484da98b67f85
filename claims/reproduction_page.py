"""Write docs/reproduction.md: per claim, the statement of the paper and the measured values."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence

from claims.catalog import PAPERS, Catalog, Setting
from claims.verdicts import SEEDS, Measured, Verdict, Word
from perdure.core.version import __version__
from perdure.report.tables import format_summary


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


def reproduction_page(catalog: Catalog, verdicts: Sequence[Verdict], command: str) -> str:
    """Return the page as Markdown.

    Args:
        catalog: The claims, with their settings.
        verdicts: One per claim.
        command: Command that wrote the page.
    """
    parts = [
        "# What was reproduced",
        "<!-- figures: docs/measured/claims.json -->",
        f"Written by `{command}` (perdure {__version__}). Each claim of a paper is "
        "tested by small runs, mostly on the digits of scikit-learn, with a "
        "criterion on means of the seeds " + ", ".join(map(str, SEEDS)) + ". The criteria are in "
        "[claims.yaml](../claims/claims.yaml). They test the direction that a paper "
        "reports, not its figures: data, models and rounds are far smaller here. "
        "Measured values are points (0 to 100), mean ± sample standard deviation (divided by "
        "n-1); [metrics.md](metrics.md) defines them. Behind a verdict: how many of the seeds "
        "agree with the criterion by themselves. Three seeds are few.",
        _counts(verdicts),
    ]
    for paper in PAPERS:
        parts += _paper(paper, [one for one in verdicts if one.claim.paper == paper])
    settings = [_setting(setting) for setting in _used_settings(catalog)]
    parts += ["## Settings", *settings, "<!-- /figures -->"]
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


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
