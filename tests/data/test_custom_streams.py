"""Streams that are not built in: by dotted path, as a class, and as CONTRIBUTING.md shows."""

from __future__ import annotations

import ast
import importlib.util
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import perdure
from perdure.config import Config, StreamConfig, parse
from perdure.core.rng import Rng
from perdure.data.streams import STREAMS, make_stream
from perdure.data.streams.permuted import PermutedStream

GUIDE = Path(__file__).resolve().parents[2] / "CONTRIBUTING.md"
TINY: dict[str, Any] = {
    "stream": {"kind": "rotated.RotatedStream", "tasks": 2},
    "clients": {"count": 3},
    "train": {"rounds": 2, "local_epochs": 1, "max_steps": 2},
    "engine": {"kind": "serial"},
    "runs": {"report": False},
}


def shown_blocks() -> list[str]:
    """Return the Python blocks of the section that shows how a stream is added."""
    text = GUIDE.read_text(encoding="utf-8")
    section = text.partition("## Add a stream")[2].partition("\n## ")[0]
    return re.findall(r"```python\n(.*?)```", section, re.S)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with the shown file, which is no longer imported after the test."""
    (tmp_path / "rotated.py").write_text(shown_blocks()[0], encoding="utf-8")
    monkeypatch.delitem(sys.modules, "rotated", raising=False)
    yield tmp_path
    sys.modules.pop("rotated", None)


def written(folder: Path, values: dict[str, Any]) -> Path:
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(values), encoding="utf-8")
    return path


def first_image(stream: Any, task: int) -> torch.Tensor:
    return stream.tasks[task].train.rows[0].view(8, 8)


def check_rotation(config: Config) -> None:
    stream = make_stream(config, Rng(0))
    assert [task.name for task in stream.tasks] == ["0 degrees", "90 degrees"]
    assert torch.equal(first_image(stream, 1), torch.rot90(first_image(stream, 0)))


def test_the_shown_file_works_beside_a_config(folder: Path) -> None:
    config = perdure.config.load(written(folder, TINY))
    assert config.stream.kind == "rotated.RotatedStream"
    check_rotation(config)


def test_the_shown_line_registers_the_kind(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ((name, path),) = ast.literal_eval("{" + shown_blocks()[1] + "}").items()
    module = path.rpartition(".")[0]
    spec = importlib.util.spec_from_file_location(module, folder / "rotated.py")
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, module, loaded)
    spec.loader.exec_module(loaded)
    monkeypatch.setitem(STREAMS.builtin, name, path)
    check_rotation(parse({**TINY, "stream": {"kind": "rotated", "tasks": 2}}))
    with pytest.raises(perdure.UserError) as caught:
        parse({"stream": {"kind": "rotated", "order": [1]}})
    assert str(caught.value) == (
        "stream.order: unknown key for kind 'rotated', got [1]; "
        "its keys: kind, tasks, presence, cumulative, clockwise"
    )


def test_its_keys_are_checked(folder: Path) -> None:
    values = {**TINY, "stream": {"kind": "rotated.RotatedStream", "clockwise": "perhaps"}}
    with pytest.raises(perdure.UserError) as caught:
        perdure.config.load(written(folder, values))
    assert str(caught.value) == "stream.clockwise: must be true or false, got 'perhaps'"


def test_a_run_keeps_the_file_and_can_be_resumed(folder: Path, tmp_path: Path) -> None:
    """The run is stopped, the file is gone, and the result is that of an uninterrupted run."""
    path, out = written(folder, TINY), tmp_path / "run"
    whole = perdure.run(path)

    def stop(state: Any, event: dict[str, Any]) -> None:
        if event["event"] == "task":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        perdure.run(path, out=out, watch=stop)
    (folder / "rotated.py").unlink()
    sys.modules.pop("rotated")
    assert (out / "method" / "rotated.py").read_text(encoding="utf-8") == shown_blocks()[0]
    resumed = perdure.resume(out, trust=True)
    assert resumed.values["model_sha256"] == whole.values["model_sha256"]
    assert resumed.matrix == whole.matrix


def test_a_run_is_read_without_its_file(folder: Path, tmp_path: Path) -> None:
    """Reports and predictions do not execute a custom stream."""
    out = tmp_path / "run"
    perdure.run(written(folder, TINY), out=out)
    (out / "method" / "rotated.py").unlink()
    (folder / "rotated.py").unlink()
    sys.modules.pop("rotated")
    images = torch.zeros(2, 8, 8, dtype=torch.uint8)
    assert perdure.load(out).predict(images).shape == (2,)


class Doubled(StreamConfig):
    """Two permutations per task number, for a test."""

    factor: int = 2
    """How many tasks there are per task."""

    def build(self, config: Config, rng: Rng) -> Any:
        return PermutedStream(tasks=self.factor * self.tasks).build(config, rng)


def test_a_class_is_a_kind() -> None:
    config = parse({**TINY, "stream": {"kind": Doubled, "tasks": 2, "factor": 3}})
    assert config.stream.kind == f"{__name__}.Doubled"
    assert config.stream == Doubled(tasks=2, factor=3)
    assert len(make_stream(config, Rng(0)).tasks) == 6
    assert parse(config.model_dump(mode="json")) == config


def test_a_local_class_runs() -> None:
    class Local(Doubled):
        """A class that cannot be imported."""

    result = perdure.run({**TINY, "stream": {"kind": Local, "tasks": 1}})
    assert result.values["tasks"] == 2


def test_methods_see_what_a_stream_resembles() -> None:
    class Pooled(Doubled):
        """A stream of which methods think that clients have separate classes."""

        resembles = "pool"

    with pytest.raises(perdure.UserError, match=r"^stream\.kind: must be .* with this method"):
        perdure.run({**TINY, "stream": {"kind": Pooled}, "method": {"kind": "pip"}})


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("collections.OrderedDict", "a subclass of perdure.StreamConfig"),
        (dict, "a subclass of perdure.StreamConfig"),
        ("nowhere.Stream", "a class that can be imported (ModuleNotFoundError"),
        ("spilt", "permuted, split, domains, pool, given, or a dotted path to a class"),
    ],
)
def test_what_is_no_stream(kind: Any, reason: str) -> None:
    with pytest.raises(perdure.UserError) as caught:
        parse({"stream": {"kind": kind}})
    assert str(caught.value).startswith(f"stream.kind: must be {reason}")
    assert str(caught.value).endswith(f", got {kind!r}")
