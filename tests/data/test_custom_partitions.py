"""A partition that is not built in works by its dotted path, as CONTRIBUTING.md shows."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from perdure.config import load
from perdure.core.errors import UserError
from perdure.core.rng import Rng
from perdure.data.partition_kinds import PARTITIONS
from perdure.data.streams import make_stream

GUIDE = Path(__file__).resolve().parents[2] / "CONTRIBUTING.md"


def shown_blocks() -> list[str]:
    """Return the Python blocks of the section that shows how a partition is added."""
    section = GUIDE.read_text(encoding="utf-8").partition("## Add a partition")[2]
    return re.findall(r"```python\n(.*?)```", section.partition("\n## ")[0], re.S)


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a config beside the shown file, which is no longer imported after the test."""
    (tmp_path / "unequal.py").write_text(shown_blocks()[0], encoding="utf-8")
    monkeypatch.delitem(sys.modules, "unequal", raising=False)
    path = tmp_path / "config.yaml"
    path.write_text(
        "data: {limit: 103}\nstream: {tasks: 2}\n"
        "clients: {count: 5, partition: {kind: unequal.UnequalPartition, shares: 2}}\n"
    )
    yield path
    sys.modules.pop("unequal", None)


def test_the_shown_partition_divides_all_rows_of_a_task(config: Path) -> None:
    task = make_stream(load(config), Rng(0)).tasks[0]
    assert task.partition.sizes.tolist() == [50, 50, 1, 1, 1]
    rows = sorted(row for client in range(5) for row in task.partition.index(client).tolist())
    assert rows == list(range(103))


def test_its_keys_are_checked_like_those_of_built_in_kinds(config: Path) -> None:
    config.write_text(config.read_text().replace("shares: 2", "share: 2"))
    with pytest.raises(UserError, match=r"^clients\.partition\.share: unknown key"):
        load(config)


def test_the_shown_line_is_one_of_the_registry() -> None:
    name, path = re.findall(r'"([^"]+)"', shown_blocks()[1])
    assert path.rpartition(".")[0] == PARTITIONS.builtin["iid"].rpartition(".")[0]
    assert name not in PARTITIONS.builtin
