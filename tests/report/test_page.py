"""The page: whole, safe, and true to the runs."""

from __future__ import annotations

import logging
import re
import shlex
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_runs import make_run, matrix, several

import perdure
from perdure.cli.main import main
from perdure.core.errors import UserError
from perdure.evaluation.forgetting import DEFINITIONS
from perdure.report import page, write_page
from perdure.report.figure_html import el, join
from perdure.report.page import all_figures
from perdure.runs.records import read_run, read_runs
from perdure.runs.writer import write_run_report

VOID = {"meta", "br", "link"}
EVIL = "<script>alert(1)</script>"


class Reader(HTMLParser):
    """Checks that tags are balanced; collects ids, links within the page and all text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.scripts = 0
        self.text = ""
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        found = dict(attributes)
        self.ids += [found["id"] or ""] if "id" in found else []
        self.links += [found["href"] or ""] if "href" in found else []
        for key in ("aria-labelledby", "aria-controls"):
            self.links += [f"#{name}" for name in (found.get(key) or "").split()]
        self.scripts += tag == "script"
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


@given(st.text())
def test_text_comes_out_as_it_went_in(text: str) -> None:
    """In text and in attributes, read back by Python's own parser."""
    found: list[str | None] = []

    class Back(HTMLParser):
        def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
            found.append(dict(attributes)["title"])

        def handle_data(self, data: str) -> None:
            inside.append(data)

    inside: list[str] = []
    reader = Back()
    reader.feed(el("p", text, title=text))
    reader.close()
    assert found == [text]
    assert "".join(inside) == text


def test_attributes_and_nesting() -> None:
    assert el("p", ["a", None, [el("b", "<")]], hidden=True, lang=None, data_x=1) == (
        '<p hidden data-x="1">a<b>&lt;</b></p>'
    )
    assert el("meta", charset="utf-8") == '<meta charset="utf-8"/>'
    assert join(None) == ""


def test_the_page_is_whole(tmp_path: Path) -> None:
    runs = several(tmp_path)
    text = page(runs)
    read = Reader(text)
    assert len(set(read.ids)) == len(read.ids)
    for link in read.links:
        assert link.startswith("#")
        assert link[1:] in read.ids
    for figure in all_figures(runs):
        assert f"figure-{figure.key}" in read.ids
        assert figure.title in read.text
        assert figure.caption in read.text
    for name, meaning in DEFINITIONS.items():
        assert name in read.text
        assert meaning in read.text
    assert len(text) < 300_000


def test_bytes_per_client_are_shown_by_field_and_task(tmp_path: Path) -> None:
    make_run(tmp_path / "new")
    text = Reader(page(read_runs([tmp_path]))).text
    assert "up/update (mean)" + "200.0 kB" * 3 in text
    assert "up, all fields (max)" + "400.0 kB" * 3 in text
    assert "kept (mean)" + "500 B" * 3 in text


def test_the_page_asks_nothing_of_a_network(tmp_path: Path) -> None:
    text = page(several(tmp_path))
    assert not re.search(r"https?:|\bsrc=|@import|url\(|fetch\(|XMLHttp", text)


def test_numbers_of_the_page_are_those_of_the_runs(tmp_path: Path) -> None:
    text = page(several(tmp_path))
    tables = np.array([matrix(seed, 0.9) for seed in (0, 1)], dtype=float)
    acc = [np.nanmean(table[-1]) for table in tables]
    cell = f"<td>{np.mean(acc):.3f}<small>± {np.std(acc, ddof=1):.3f}</small></td>"
    assert text.count(cell) >= 4  # the four methods have the same numbers
    mean, std = tables[:, 2, 0].mean(), tables[:, 2, 0].std(ddof=1)
    shown = f"{mean:.2f}<small>±{std:.2f}</small>".replace("0.", ".")
    assert shown in text


def test_several_seeds_have_a_band_and_one_has_none(tmp_path: Path) -> None:
    assert 'class="band' in page(several(tmp_path / "several"))
    one = page(read_runs([make_run(tmp_path / "one")]))
    assert 'class="band' not in one
    assert "One seed, so no spread is shown." in one


def test_what_comes_from_a_config_is_text(tmp_path: Path) -> None:
    evil = {"data": {"source": "npz", "path": EVIL}, "method": {"kind": EVIL}}
    first = make_run(tmp_path / "<b>" / "seed-0", config=evil)
    second = make_run(tmp_path / "x", config={**evil, "method": {"kind": "b\"><img onerror='x'>"}})
    half = make_run(tmp_path / "<i>half")
    (half / "result.json").unlink()
    read = Reader(page(read_runs([first, second, half])))
    assert read.scripts == 1
    assert EVIL in read.text
    assert "img" not in read.open
    assert "<i>half" in read.text


def test_who_must_see_single_clients_is_named(tmp_path: Path) -> None:
    text = Reader(page(several(tmp_path))).text
    assert "stamp: the server must see every client's update" in text
    assert "fot: needs only sums. Secure aggregation was off" in text


def test_the_origin_of_draws_is_told(tmp_path: Path) -> None:
    for seed in (0, 1):
        make_run(tmp_path / f"run-{seed}", seed=seed, draws="those of a seed")
    text = Reader(page(read_runs([tmp_path]))).text
    assert text.count("Random draws: those of a seed.") == text.count("Random draws") == 1


@pytest.mark.parametrize("draws", [["a"], None])
def test_a_result_that_does_not_tell_the_origin_of_draws_is_refused(
    draws: object, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=r"result\.json has an invalid draws"):
        read_run(make_run(tmp_path / "run", draws=draws))


def test_secure_aggregation_and_noise_are_told(tmp_path: Path) -> None:
    make_run(tmp_path / "run", privacy={"secagg": True, "epsilon": 1.25, "delta": 1e-5})
    text = Reader(page(read_runs([tmp_path]))).text
    assert "Secure aggregation was on" in text
    assert "1.25" in text.partition("Privacy: what is covered and what is not")[2]


def test_the_commands_run_the_configs_again(tmp_path: Path) -> None:
    run = make_run(tmp_path / "my run", config={"data": {"limit": 60}, "train": {"rounds": 1}})
    text = Reader(page(read_runs([run]))).text
    (command,) = re.findall(r"perdure run .*-again'", text)
    program, _, file, *out = shlex.split(command)
    assert (program, out) == ("perdure", ["--out", str(tmp_path / "my run-again")])
    assert main(["check", file]) == 0


def test_what_is_left_out_is_said(tmp_path: Path) -> None:
    make_run(tmp_path / "a")
    make_run(tmp_path / "b", seed=1)
    make_run(tmp_path / "longer", "fot", tasks=4)
    assert "longer: has 4 tasks, while most runs have 3" in Reader(page(read_runs([tmp_path]))).text


def test_the_same_runs_give_the_same_page(tmp_path: Path) -> None:
    several(tmp_path)
    assert page(read_runs([tmp_path])) == page(read_runs([tmp_path]))


def test_a_page_that_cannot_be_written(tmp_path: Path) -> None:
    runs = read_runs([make_run(tmp_path / "run")])
    with pytest.raises(UserError, match="the directory does not exist"):
        write_page(runs, tmp_path / "no" / "report.html")
    with pytest.raises(UserError, match="cannot be written"):
        write_page(runs, tmp_path / "run")


def test_a_run_leaves_its_page(tmp_path: Path) -> None:
    values = {
        "data": {"limit": 60}, "stream": {"tasks": 2}, "clients": {"count": 2},
        "model": {"hidden": [4]}, "train": {"rounds": 1}, "engine": {"kind": "serial"},
    }  # fmt: skip
    perdure.run(values, out=tmp_path / "with")
    assert "fedavg on permuted digits, seed 0" in (tmp_path / "with" / "report.html").read_text()
    perdure.run({**values, "runs": {"report": False}}, out=tmp_path / "without")
    assert not (tmp_path / "without" / "report.html").exists()


def test_a_failure_of_the_page_does_not_spoil_a_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = make_run(tmp_path / "run", matrix={"task_agnostic": [[1.0], []]})
    with caplog.at_level(logging.WARNING):
        write_run_report(read_run(run))
    assert "report.html was not written" in caplog.text
