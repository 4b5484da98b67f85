"""The bars of a run: tasks, rounds and clients."""

from __future__ import annotations

from pathlib import Path

import pytest

import perdure
from perdure.cli.run import ProgressBars
from perdure.config import parse

VALUES = {
    "stream": {"tasks": 2},
    "clients": {"count": 4, "per_round": 3},
    "model": {"hidden": [4]},
    "train": {"rounds": 2, "max_steps": 1},
    "engine": {"kind": "serial"},
}


class Stop(Exception):
    pass


def shown(bars: ProgressBars) -> dict[str, tuple[float, float | None]]:
    return {task.description: (task.completed, task.total) for task in bars.progress.tasks}


def test_bars_show_tasks_rounds_and_clients() -> None:
    bars, seen = ProgressBars(parse(VALUES), ""), []

    def watch(state: perdure.training.state.RunState, event: dict[str, object]) -> None:
        bars(state, event)
        seen.append(shown(bars))

    watch.during = bars.during  # type: ignore[attr-defined]
    perdure.run(VALUES, watch=watch)
    assert seen[0] == {"all rounds": (1, 4), "task 1 of 2": (1, 2), "clients": (3, 3)}
    assert shown(bars) == {"all rounds": (4, 4), "task 2 of 2": (2, 2), "clients": (3, 3)}


def test_the_clients_bar_moves_within_a_round() -> None:
    bars, seen = ProgressBars(parse(VALUES), ""), []

    def watch(state: object, event: object) -> None:
        raise Stop

    def during(state: perdure.training.state.RunState, event: dict[str, object]) -> None:
        bars.during(state, event)
        seen.append(shown(bars)["clients"])

    watch.during = during  # type: ignore[attr-defined]
    with pytest.raises(Stop):
        perdure.run(VALUES, watch=watch)
    assert seen == [(1, 3), (2, 3), (3, 3)]


def test_a_resumed_run_begins_where_it_was(tmp_path: Path) -> None:
    def stop(state: object, event: object) -> None:
        raise Stop

    with pytest.raises(Stop):
        perdure.run(VALUES, out=tmp_path / "run", watch=stop)
    bars = ProgressBars(parse(VALUES), "")
    perdure.resume(tmp_path / "run", watch=bars)
    assert shown(bars)["all rounds"] == (4, 4)
