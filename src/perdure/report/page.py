"""The HTML report of finished runs: a single file that needs no network."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from importlib.resources import files
from pathlib import Path

from perdure.core.errors import UserError
from perdure.core.files import write_atomic
from perdure.core.text import argument
from perdure.core.version import __version__
from perdure.report.accuracy import (
    MODE_MEANINGS,
    MODE_NAMES,
    accuracy_figures,
    repeated_modes,
    round_figures,
    shown_modes,
)
from perdure.report.axes import DARK, LEVELS, LIGHT, heat_color, text_color
from perdure.report.comparison import DIVIDER, Comparison, ScoreMeasure, compare_groups
from perdure.report.diagnostics import diagnostic_figures
from perdure.report.figure_data import LEVEL, Figure, Quantity, quantity_of
from perdure.report.figure_html import Content, Html, el, figure_html, join, table
from perdure.report.records import ROW_TITLES, Runs
from perdure.report.scores import client_scores, cost_figures, score_figures, sweep_figures
from perdure.report.sections import (
    client_bytes,
    client_rows,
    config_section,
    page_title,
    participation,
    server_view,
    settings_sentence,
    task_table,
)
from perdure.report.tables import (
    Column,
    Table,
    TableRow,
    difference_cell,
    measures_table,
    mode_table,
)

_NONE = "\u2013"
_DIFFERENCES = ("ACC", "FGT", "learned", "worst_drop", "AF", "Avg", "F")
"""Metrics whose differences are shown; FT follows from AF, and BWT from FGT."""
PageSection = tuple[str, str, list[Html]]
"""Anchor, heading and content of a section."""


def page(runs: Runs) -> str:
    """Return the report as HTML."""
    sections = [section for section in _sections(runs) if section[2]]
    title = page_title(runs)
    count = sum(len(group) for group in runs.groups.values())
    head = el(
        "head",
        el("meta", charset="utf-8"),
        el("meta", name="viewport", content="width=device-width, initial-scale=1"),
        el("meta", name="color-scheme", content="light dark"),
        el("title", f"{title} - perdure"),
        el("style", Html(_style())),
    )
    body = el(
        "body",
        el("a", "Skip to the results", href="#main", class_="skip"),
        _header(runs, title, sections),
        el("main", *(
            el("section", el("h2", name, id=f"{anchor}-name"), *inside, id=anchor,
               aria_labelledby=f"{anchor}-name")
            for anchor, name, inside in sections
        ), id="main"),
        el("footer", el("p", f"Created by perdure {__version__} from "
                             f"{f'{count} runs' if count > 1 else 'one run'}.")),
        el("script", Html(_read("script.js"))),
    )  # fmt: skip
    return f'<!doctype html>\n<html lang="en">{head}{body}</html>\n'


def write_page(runs: Runs, file: str | Path) -> None:
    """Write the report to a file, completely or not at all.

    Raises:
        UserError: The file cannot be written.

    """
    file = Path(file)
    if not file.parent.is_dir():
        raise UserError(f"{argument('file', file, '--html')}: the directory does not exist")
    text = page(runs).encode()
    try:
        write_atomic(file, text)
    except OSError as error:
        where = argument("file", file, "--html")
        raise UserError(f"{where}: cannot be written ({error.strerror})") from None


def all_figures(runs: Runs) -> list[Figure]:
    """Return every figure of the report, in its order."""
    shown: list[Figure] = []
    for mode in shown_modes(runs):
        shown += accuracy_figures(runs, mode) + score_figures(runs, mode)
        shown += sweep_figures(runs, mode)
    for mode in shown_modes(runs):
        shown += cost_figures(runs, mode)
    return shown + round_figures(runs, shown_modes(runs)) + diagnostic_figures(runs)


def _sections(runs: Runs) -> list[PageSection]:
    comparison = compare_groups(runs.groups, notes=runs.notes)
    shown = shown_modes(runs)
    accuracy = {mode: accuracy_figures(runs, mode) for mode in shown}
    cost = {mode: cost_figures(runs, mode) for mode in shown}
    scores = {mode: figures for mode in shown if (figures := score_figures(runs, mode))}
    sweeps = {mode: figures for mode in shown if (figures := sweep_figures(runs, mode))}
    inside, by_round = diagnostic_figures(runs), round_figures(runs, shown)
    what = quantity_of(runs).title
    return [
        ("summary", "Comparison", _comparison(comparison, shown, runs)),
        ("accuracy", f"{what} and forgetting", [_tabs("accuracy", accuracy, runs)]),
        ("scores", "Other metrics", [_tabs("scores", scores, runs)] if scores else []),
        ("sweeps", "Sweeps", [_tabs("sweeps", sweeps, runs)] if sweeps else []),
        ("cost", f"{what} against cost", [_tabs("cost", cost, runs)]),
        ("rounds", "By round", [_grid(by_round)] if by_round else []),
        ("tasks", "Tasks", task_table(runs)),
        ("clients", "Clients", [*client_rows(runs), *participation(runs), *client_scores(runs)]),
        ("inside", "Inside the methods", [_grid(inside)] if inside else []),
        ("server", "What the server could see", server_view(runs)),
        ("definitions", "Definitions", _definitions(comparison, quantity_of(runs))),
        ("configs", "Configs and commands", config_section(runs)),
    ]


def _header(runs: Runs, title: str, sections: Iterable[PageSection]) -> Html:
    links = (el("li", el("a", name, href=f"#{anchor}")) for anchor, name, _ in sections)
    skipped = [el("li", el("code", str(each.path)), f": {each.reason}") for each in runs.skipped]
    left_out = el("div", "Not included:", el("ul", *skipped), class_="notes", role="note")
    return el(
        "header",
        el("h1", title),
        el("p", settings_sentence(runs), class_="lead"),
        left_out if skipped else None,
        el("nav", el("ul", *links), aria_label="Sections"),
    )


def _comparison(comparison: Comparison, shown: list[str], runs: Runs) -> list[Html]:
    one_seed = max(len(group) for group in runs.groups.values()) == 1
    spread = (
        "One seed, so no spread and no interval is given."
        if one_seed
        else "Mean and, below it, one sample standard deviation (divided by n-1) over n seeds."
    )
    about = f"{spread} {quantity_of(runs).about}"
    content = [el("p", about), *(el("p", note) for note in comparison.notes)]
    for selection in runs.selections:
        content += [el("h3", "Selected settings"), table(ROW_TITLES, selection.rows(), words=2)]
    for mode in shown:
        content += [
            el("h3", _mode_title(mode, runs)),
            table_html(mode_table(comparison, mode, differences=())),
            *differences_html(comparison, mode),
        ]
        forgetting = measures_table(comparison, comparison.measures_by_task(mode))
        if len(forgetting.columns) > 1:
            note = "Forgetting of the earlier tasks after each task (F_t), whose mean is F."
            content += [el("p", note, class_="note"), table_html(forgetting)]
    same = [MODE_NAMES[mode] for mode in repeated_modes(runs)]
    if same:
        content += [
            el("p", f"{' and '.join(same).capitalize()} results equal these on this stream "
               "and are not repeated."),
        ]  # fmt: skip
    costs = table_html(mode_table(comparison, None))
    return [*content, el("h3", "Cost"), costs, *client_bytes(runs)]


def table_html(shown: Table, counts: bool = True) -> Html:
    """Return a table; references stand below a separate row."""
    heads = ["method", *(["n"] if counts else []), *(column.title for column in shown.columns)]
    rows: list[list[Content]] = []
    for row in shown.rows:
        line: list[Content] = [row.label, *([str(row.count)] if counts else [])]
        for cell in row.cells:
            if cell.mark == "missing":
                line.append(_NONE)
            elif len(cell.spread) == 2:  # a difference and the ends of its interval
                mean = el("strong" if cell.mark == "sure" else "span", cell.text)
                line.append([mean, el("small", " to ".join(cell.spread))])
            elif cell.spread:
                line.append([cell.text, el("small", f"\u00b1 {cell.spread[0]}")])
            else:
                line.append(cell.text)
        rows.append(line)
    if shown.divided_at is not None:
        rows.insert(shown.divided_at, [DIVIDER, *[""] * (len(heads) - 1)])
    return table(heads, rows)


def differences_html(comparison: Comparison, mode: str) -> list[Html]:
    """Return the table of paired differences and their intervals; empty for a single method."""
    measures = [measure for measure in comparison.measures_of(mode) if measure.name in _DIFFERENCES]
    cells = {
        label: tuple(difference_cell(comparison.cell(label, m.key)) for m in measures)
        for label in comparison.labels
    }
    rows = [
        TableRow(label, 0, row, label in comparison.references)
        for label, row in cells.items()
        if any(cell.mark != "missing" for cell in row)
    ]
    if not rows:
        return []
    about = (
        f"Difference from {comparison.reference}, seed by seed, and the {LEVEL:.0%} interval of "
        "Student's t (a single seed has none). Bold: the interval does not contain zero."
    )
    columns = tuple(Column(measure.name) for measure in measures)
    return [el("p", about, class_="note"), table_html(Table("", columns, tuple(rows)), False)]


def _mode_title(mode: str, runs: Runs) -> str:
    meaning = quantity_of(runs).mode_meaning(MODE_MEANINGS[mode])
    return f"{MODE_NAMES[mode].capitalize()}: {meaning}"


def _tabs(anchor: str, by_mode: Mapping[str, Sequence[Figure]], runs: Runs) -> Html:
    """Return one section per mode, which script.js turns into tabs."""
    parts = (
        el(
            "section",
            el("h3", _mode_title(mode, runs), class_="mode"),
            _grid(figures),
            id=f"{anchor}-{mode}",
            data_tab=MODE_NAMES[mode].capitalize(),
        )
        for mode, figures in by_mode.items()
    )
    return el("div", *parts, data_tabs="Mode of inference")


def _grid(figures: Iterable[Figure]) -> Html:
    return el("div", *(figure_html(each) for each in figures), class_="figures")


def _definitions(comparison: Comparison, quantity: Quantity) -> list[Html]:
    """Return the definitions of all metrics, modes and costs."""
    costs = {measure.name: measure.meaning for measure in comparison.measures_of(None)}
    terms = {
        **quantity.definitions,
        **{MODE_NAMES[m]: quantity.mode_meaning(text) for m, text in MODE_MEANINGS.items()},
        **{m.name: m.meaning for m in comparison.measures if isinstance(m, ScoreMeasure)},
        **costs,
    }
    items = (join([el("dt", name), el("dd", meaning)]) for name, meaning in terms.items())
    return [
        el("p", f"a[i][j] is the {quantity.name} on task j after learning task i, with tasks "
           "counted from 1 to T. Publications define forgetting in different ways; every number "
           "of this page has one of these names."),
        el("dl", *items),
    ]  # fmt: skip


def _style() -> str:
    """Return the style sheet with the colors of lines and heat maps, for both themes."""
    light, dark = "", ""
    for n, (one, other) in enumerate(zip(LIGHT, DARK, strict=True)):
        light += f".s{n}{{--c:{one}}}"
        dark += f".s{n}{{--c:{other}}}"
    for step in range(LEVELS + 1):
        one, other = heat_color(step), heat_color(step, dark=True)
        light += f".h{step}{{background:{one};color:{text_color(one)}}}"
        dark += f".h{step}{{background:{other};color:{text_color(other)}}}"
    return f"{_read('style.css')}{light}@media screen and (prefers-color-scheme: dark) {{{dark}}}"


def _read(name: str) -> str:
    return (files("perdure.report") / name).read_text(encoding="utf-8")
