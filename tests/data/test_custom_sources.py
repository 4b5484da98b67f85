"""A source in a new file is one class and one line, as CONTRIBUTING.md shows."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from perdure.config import load
from perdure.core.errors import UserError
from perdure.core.rng import Rng
from perdure.data.sources import SOURCES
from perdure.data.streams import make_stream

GUIDE = Path(__file__).resolve().parents[2] / "CONTRIBUTING.md"


def shown_blocks() -> list[str]:
    """Return the Python blocks of the section that shows how a source is added."""
    section = GUIDE.read_text(encoding="utf-8").partition("## Add a source of data")[2]
    return re.findall(r"```python\n(.*?)```", section.partition("\n## ")[0], re.S)


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a config with the shown source, which is no longer imported after the test."""
    (tmp_path / "waves.py").write_text(shown_blocks()[0], encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "waves", raising=False)
    monkeypatch.setitem(SOURCES.builtin, "waves", "waves.WavesData")
    path = tmp_path / "config.yaml"
    path.write_text("data: {source: waves, frequencies: 4}\nstream: {tasks: 2}\n")
    yield path
    sys.modules.pop("waves", None)


def test_the_shown_source_is_read_and_held_out(config: Path) -> None:
    task = make_stream(load(config), Rng(0)).tasks[0]
    assert task.train.x.shape == (320, 32)
    assert task.test.y.bincount().tolist() == [20] * 4


def test_it_is_a_domain_with_a_name_like_other_sources(config: Path) -> None:
    listed = "[{source: waves, name: a}, {source: waves, limit: 60}]"
    config.write_text(f"stream: {{kind: domains, domains: {listed}}}\n")
    stream = make_stream(load(config), Rng(0))
    assert [task.name for task in stream.tasks] == ["a", "waves"]


def test_its_keys_are_checked_like_those_of_built_in_kinds(config: Path) -> None:
    config.write_text("data: {source: waves, length: 4}\n")
    with pytest.raises(UserError, match=r"^data\.length: unknown key for source 'waves'"):
        load(config)
    config.write_text("data: {source: waves, frequencies: 17}\n")
    with pytest.raises(UserError, match=r"^data\.frequencies: must be at most 16"):
        make_stream(load(config), Rng(0))


def test_the_shown_line_is_one_of_the_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    name, path = re.findall(r'"([^"]+)"', shown_blocks()[1])
    folder = SOURCES.builtin["npz"].rpartition(".")[0].rpartition(".")[0]
    assert path == f"{folder}.{name}.WavesData"
    assert name not in SOURCES.builtin
