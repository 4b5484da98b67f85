"""Write docs/defaults.md from what tools/measure.py has measured (docs/measured/*.json)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from measured_all import SECTIONS
from measured_sections import SWEEPS, Section, Sweep, default_of

from perdure.report.statistics import paired_difference, summarize

ROOT = Path(__file__).resolve().parents[1]
MEASURED = ROOT / "docs" / "measured"
PAGE = ROOT / "docs" / "defaults.md"
INTRO = """# Defaults and figures

This page is written by `make measure` (tools/measure.py): each table is a set of small runs on one
thread, and docs/measured holds the figures of every seed. Choices were made on validation rows of
the seeds 100 to 102; figures on test rows are of other seeds, on which nothing was chosen.
Accuracies are in points (0 to 100): the mean over the seeds, and the sample standard deviation
where it is shown. Other pages define [the metrics](metrics.md) and [the methods](methods.md).
"""

Runs = dict[str, dict[str, Any]]
"""What was measured by label and seed."""


def write_measured(name: str, values: dict[str, Any]) -> None:
    """Write what was measured in a section."""
    MEASURED.mkdir(parents=True, exist_ok=True)
    text = json.dumps(values, indent=1) + "\n"
    (MEASURED / f"{name}.json").write_text(text, encoding="utf-8")


def write_page() -> None:
    """Write the page from all sections that were measured."""
    PAGE.write_text(page(), encoding="utf-8")


def page() -> str:
    """Return the page."""
    parts = [INTRO]
    for name, section in SECTIONS.items():
        file = MEASURED / f"{name}.json"
        if file.is_file():
            runs: Runs = json.loads(file.read_text(encoding="utf-8"))["runs"]
            tables = sweep_table(runs) if name == "defaults" else section_tables(section, runs)
            text = section.text + missing_seeds(section, runs)
            parts.append(f"## {section.title}\n\n{text}\n\n{tables}")
    return "\n".join(parts)


def missing_seeds(section: Section, runs: Runs) -> str:
    """Return a sentence that names the seeds of a section that were not measured, if any."""
    measured = set.intersection(*(set(by_seed) for by_seed in runs.values()))
    missing = [str(seed) for seed in section.seeds if str(seed) not in measured]
    return f" Not measured yet: seed {', '.join(missing)}." if missing else ""


# ---- sweeps


def sweep_table(runs: Runs) -> str:
    """Return one row per default and stream: five values, the default in bold."""
    lines = ["| method | key | stream | five values, the default in bold |", "|---|---|---|---|"]
    for sweep in SWEEPS:
        for stream in sweep.streams:
            cells = " · ".join(_sweep_cell(runs, sweep, stream, value) for value in sweep.values)
            kind, key = sweep.method["kind"], sweep.key.removeprefix("method.")
            lines.append(f"| `{kind}` | `{key}` | {stream} | {cells} |")
    return "\n".join(lines) + "\n"


def _sweep_cell(runs: Runs, sweep: Sweep, stream: str, value: Any) -> str:
    label = f"{stream} / {sweep.method['kind']} {sweep.key} = {value}"
    shown = mean_of(runs[label], "validation", "task_agnostic", "ACC")
    text = f"{value}: {shown}"
    return f"**{text}**" if value == default_of(sweep) else text


def mean_of(by_seed: dict[str, Any], rows: str, mode: str, metric: str) -> str:
    """Return the mean of a metric in points, or what happened instead."""
    values = seed_values(by_seed, rows, mode, metric)
    if len(values) < len(by_seed):
        return "diverged" if any("error" in run for run in by_seed.values()) else "none"
    summary = summarize([100 * value for value in values.values()])
    return f"{summary.mean:.1f}" if summary else "none"


def seed_values(by_seed: dict[str, Any], rows: str, mode: str, metric: str) -> dict[int, float]:
    """Return a metric by seed, without the seeds that do not have it."""
    key = "validation" if rows == "validation" else "metrics"
    found: dict[int, float] = {}
    for seed, run in by_seed.items():
        value = ((run.get(key) or {}).get(mode) or {}).get(metric)
        if value is not None:
            found[int(seed)] = value
    return found


# ---- tables


def section_tables(section: Section, runs: Runs) -> str:
    """Return one table per stream."""
    streams: dict[str, dict[str, Any]] = {}
    for label, by_seed in runs.items():
        stream, _, name = label.partition(" / ")
        streams.setdefault(stream, {})[name] = by_seed
    return "\n".join(
        f"### {stream}\n\n" + "\n".join(_table(section, rows)) + "\n"
        for stream, rows in streams.items()
    )


def _table(section: Section, rows: dict[str, Any]) -> Iterator[str]:
    titles = [f"{metric}, {mode.replace('_', '-')}" for mode, metric in section.columns]
    with_difference = section.reference in rows
    if with_difference:
        titles.append(f"difference from {section.reference} (95% interval)")
    yield f"| method | {' | '.join(titles)} |"
    yield "|---" * (len(titles) + 1) + "|"
    for name, by_seed in rows.items():
        cells = [_cell(section, by_seed, *column) for column in section.columns]
        if with_difference and section.reference is not None:
            cells.append(_difference(section, by_seed, rows[section.reference]))
        yield f"| {name} | {' | '.join(cells)} |"


def _cell(section: Section, by_seed: dict[str, Any], mode: str, metric: str) -> str:
    values = seed_values(by_seed, section.rows, mode, metric)
    summary = summarize([100 * value for value in values.values()])
    failed = sum("error" in run for run in by_seed.values())
    note = f" ({failed} of {len(by_seed)} diverged)" if failed else ""
    if summary is None:
        return "-" + note
    return f"{summary.mean:.1f}" + (f" ± {summary.std:.1f}" if summary.std else "") + note


def _difference(section: Section, by_seed: dict[str, Any], reference: dict[str, Any]) -> str:
    if by_seed is reference:
        return ""
    mode, metric = section.columns[0]
    ours, theirs = (
        {seed: 100 * v for seed, v in seed_values(run, section.rows, mode, metric).items()}
        for run in (by_seed, reference)
    )
    gap = paired_difference(ours, theirs)
    if gap is None:
        return "-"
    interval = "" if gap.low is None else f" ({gap.low:+.1f} to {gap.high:+.1f})"
    return f"{gap.mean:+.1f}{interval}"
