"""The figures of docs/defaults.md: what is run, and how it is shown."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

import measure
import measured_page
from measured_all import SECTIONS
from measured_sections import REPORTED_SEEDS, SWEEPS, VALIDATION_SEEDS, default_of

from perdure.config import parse


def run_of(accuracy: float) -> dict[str, object]:
    metrics = {"task_agnostic": {"ACC": accuracy}}
    return {"metrics": metrics, "validation": metrics}


@pytest.mark.parametrize("sweep", SWEEPS, ids=lambda sweep: f"{sweep.method['kind']} {sweep.key}")
def test_a_sweep_has_five_values_and_two_streams_and_the_default_is_among_them(sweep) -> None:
    assert len(set(sweep.values)) == 5
    assert len(sweep.streams) == 2
    assert default_of(sweep) in sweep.values


def test_twenty_defaults_are_swept() -> None:
    assert len({(sweep.method["kind"], sweep.key) for sweep in SWEEPS}) >= 20


def test_nothing_is_chosen_on_seeds_that_are_reported() -> None:
    assert not set(VALIDATION_SEEDS) & set(REPORTED_SEEDS)
    for section in SECTIONS.values():
        chosen = set(section.seeds) <= set(VALIDATION_SEEDS)
        assert chosen == (section.rows == "validation")


@pytest.mark.parametrize("name", SECTIONS)
def test_every_config_of_a_section_can_be_read(name: str) -> None:
    labels = [variant.label for variant in SECTIONS[name].variants]
    assert len(set(labels)) == len(labels)
    for variant in SECTIONS[name].variants:
        config = parse(measure.with_data(variant.config, Path("data")))
        assert bool(config.data.validation) == (SECTIONS[name].rows == "validation")


def test_names_of_files_become_paths() -> None:
    assert measure.with_data({"a": ["$x.npz", 1]}, Path("d")) == {"a": [str(Path("d/x.npz")), 1]}


def test_files_without_a_folder_are_refused() -> None:
    with pytest.raises(SystemExit, match=r"--data: must be a folder with x\.npz"):
        measure.with_data({"a": "$x.npz"}, None)


def test_a_run_is_kept_and_not_repeated(tmp_path: Path) -> None:
    config = {
        "seed": 0, "stream": {"tasks": 1}, "train": {"rounds": 1, "max_steps": 1},
        "clients": {"count": 2}, "method": {"kind": "fedavg"}, "engine": {"kind": "serial"},
    }  # fmt: skip
    file = tmp_path / "run.json"
    assert measure.run_one(config, file, "abc").startswith('{"kind": "fedavg"} seed 0: 0.')
    kept = {"code", "metrics", "validation", "bytes_up", "seconds"}
    assert set(json.loads(file.read_text())) == kept
    assert measure.is_finished(file, "abc")
    assert measure.is_finished(file, None)
    assert not measure.is_finished(file, "other code")


def test_a_diverging_run_is_shown_as_such() -> None:
    by_seed = {"0": {"error": "diverged"}, "1": run_of(0.5)}
    assert measured_page.mean_of(by_seed, "test", "task_agnostic", "ACC") == "diverged"


def test_differences_are_paired_by_seed() -> None:
    section = SECTIONS["five"]
    ours = {"0": run_of(0.5), "1": run_of(0.7)}
    theirs = {"1": run_of(0.4), "0": run_of(0.2)}
    assert measured_page._difference(section, ours, theirs) == "+30.0 (+30.0 to +30.0)"


def test_the_page_shows_what_was_measured() -> None:
    page = measured_page.PAGE
    assert page.read_text(encoding="utf-8") == measured_page.page(), "run: make measure"
