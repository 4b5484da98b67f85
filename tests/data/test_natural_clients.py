"""Clients that the data names: a column, an array, a field or a folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from PIL import Image

import perdure
from perdure.cli.main import main
from perdure.config import dump, parse
from perdure.core.errors import UserError
from perdure.training.experiment import Experiment, build_experiment

SITES = ("north", "south", "west")
OWNERS = np.array(SITES)[np.array([0, 1, 1, 2, 2, 2] * 20)]
LABELS = np.array(["sick", "well"])[np.arange(120) // 6 % 2]
VALUES = np.arange(120.0)
"""The number of a row, by which it is recognized."""


def table(folder: Path) -> dict[str, Any]:
    lines = [f"{v},{o},{y}" for v, o, y in zip(VALUES, OWNERS, LABELS, strict=True)]
    (folder / "a.csv").write_text("\n".join(["value,site,label", *lines]))
    return {"source": "table", "path": str(folder / "a.csv")}


def npz(folder: Path) -> dict[str, Any]:
    test = np.arange(120) % 5 == 0
    np.savez(
        folder / "a.npz", x_train=VALUES[~test, None], y_train=LABELS[~test], site=OWNERS[~test],
        x_test=VALUES[test, None], y_test=LABELS[test],
    )  # fmt: skip
    return {"source": "npz", "path": str(folder / "a.npz")}


def npz_domains(folder: Path) -> dict[str, Any]:
    values = {"x": VALUES[:, None], "y": LABELS, "site": OWNERS, "is_test": np.arange(120) % 5 == 0}
    np.savez(folder / "d.npz", **values, domain=np.arange(120) // 60)
    return {"source": "npz", "path": str(folder / "d.npz")}


def text(folder: Path) -> dict[str, Any]:
    lines = [
        json.dumps({"text": f"word{v:.0f}", "site": o, "label": y})
        for v, o, y in zip(VALUES, OWNERS, LABELS, strict=True)
    ]
    (folder / "a.jsonl").write_text("\n".join(lines))
    return {"source": "text", "path": str(folder / "a.jsonl"), "features": 16}


def huggingface(folder: Path) -> dict[str, Any]:
    datasets = pytest.importorskip("datasets")
    texts = [f"word{v:.0f}" for v in VALUES]
    values = {"text": texts, "site": OWNERS.tolist(), "label": LABELS.tolist()}
    datasets.Dataset.from_dict(values).save_to_disk(folder / "hub")
    return {"source": "huggingface", "path": str(folder / "hub"), "features": 16}


def build(data: dict[str, Any], **changes: Any) -> Experiment:
    clients = {"partition": {"kind": "column", "name": "site"}}
    values = {"stream": {"kind": "permuted", "tasks": 2}, "clients": clients, **changes}
    return build_experiment(parse({"data": data, **values}))


def held(experiment: Experiment, task: int = 0) -> dict[str, list[float]]:
    """Return the first value of every training row, by the name of the client."""
    work = experiment.stream.tasks[task]
    names = experiment.stream.client_names or ()
    rows = [work.train.rows[work.partition.index(client), 0] for client in range(len(names))]
    return {name: sorted(row.tolist()) for name, row in zip(names, rows, strict=True)}


@pytest.mark.parametrize("make", [table, npz])
def test_every_client_holds_the_rows_that_name_it(tmp_path, make):
    experiment = build(make(tmp_path))
    assert experiment.config.clients.count == 3
    found = held(experiment)
    assert tuple(found) == SITES
    for site, values in found.items():
        assert values
        assert all(OWNERS[int(value)] == site for value in values)
    assert sum(map(len, found.values())) == len(experiment.stream.tasks[0].train)


@pytest.mark.parametrize("make", [table, npz, npz_domains, text, huggingface])
@pytest.mark.parametrize("kind", ["permuted", "split", "pool"])
def test_sizes_are_those_of_the_data(tmp_path, make, kind):
    tasks = 2 if kind == "permuted" else 1
    experiment = build(make(tmp_path), stream={"kind": kind, "tasks": tasks})
    sizes = experiment.stream.tasks[0].partition.sizes
    assert experiment.stream.client_names == SITES
    assert sizes.sum() == 96
    assert np.abs(sizes - np.array([16, 32, 48])).max() <= 5


def test_domains_share_their_clients(tmp_path):
    data = npz_domains(tmp_path)
    experiment = build(data, stream={"kind": "domains"})
    assert [task.partition.sizes.tolist() for task in experiment.stream.tasks] == [[8, 16, 24]] * 2
    found = held(experiment, 1)
    assert all(OWNERS[int(value)] == site for site, values in found.items() for value in values)


def test_listed_domains_join_clients_by_name(tmp_path):
    for name, sites in {"a": ["x", "z"], "b": ["y", "z"]}.items():
        rows = [f"{i},{sites[i % 2]},{i // 2 % 2}" for i in range(40)]
        (tmp_path / f"{name}.csv").write_text("\n".join(["value,site,label", *rows]))
    listed = [{"source": "table", "path": str(tmp_path / f"{name}.csv")} for name in "ab"]
    experiment = build({"source": "digits"}, stream={"kind": "domains", "domains": listed})
    assert experiment.stream.client_names == ("x", "y", "z")
    sizes = np.stack([task.partition.sizes for task in experiment.stream.tasks])
    assert sizes[0, 1] == sizes[1, 0] == 0
    assert sizes.sum(1).tolist() == [32, 32]
    joined = build({"source": "digits"}, stream={"kind": "split", "tasks": 1, "domains": listed})
    assert joined.stream.tasks[0].partition.sizes.tolist() == sizes.sum(0).tolist()


def test_clients_may_be_absent_from_a_task(tmp_path):
    stream = {"kind": "permuted", "tasks": 4, "presence": 0.34}
    tasks = build(table(tmp_path), stream=stream).stream.tasks
    assert all((task.partition.sizes > 0).sum() == 1 for task in tasks)


def folders(root: Path, levels: list[str]) -> None:
    for number, level in enumerate(levels):
        folder = root / level
        folder.mkdir(parents=True)
        for image in range(4):
            pixels = np.full((4, 4), 10 * number + image, np.uint8)
            Image.fromarray(pixels).save(folder / f"{image}.png")


def test_a_folder_level_names_the_clients(tmp_path):
    folders(tmp_path, ["a/cat", "a/dog", "b/dog", "c/train/cat", "c/train/dog", "c/test/dog"])
    data = {"source": "folder", "path": str(tmp_path)}
    experiment = build(data, clients={"partition": {"kind": "folder"}})
    assert experiment.stream.class_names == ("cat", "dog")
    assert experiment.stream.client_names == ("a", "b", "c")
    assert experiment.stream.tasks[0].partition.sizes.tolist() == [6, 3, 8]
    found = held(experiment)
    assert {int(value) // 10 for value in found["a"]} == {0, 1}
    assert {int(value) // 10 for value in found["c"]} == {3, 4}
    assert len(experiment.stream.tasks[0].test) == 2 + 1 + 4


def test_folders_of_clients_may_hold_domains(tmp_path):
    folders(tmp_path, ["a/photo/cat", "a/photo/dog", "b/photo/cat", "b/sketch/cat", "b/sketch/dog"])
    data = {"source": "folder", "path": str(tmp_path)}
    experiment = build(data, clients={"partition": {"kind": "folder"}}, stream={"kind": "domains"})
    assert [task.name for task in experiment.stream.tasks] == ["photo", "sketch"]
    assert [t.partition.sizes.tolist() for t in experiment.stream.tasks] == [[6, 3], [0, 6]]


def test_a_config_that_leaves_the_count_to_the_data_can_be_written_and_read():
    config = parse({"clients": {"partition": {"kind": "column", "name": "site"}}})
    again = parse(yaml.safe_load(dump(config)))
    assert not again.clients.is_counted
    assert again == config


@pytest.mark.parametrize("count", [None, 3])
def test_the_count_may_be_null_or_right(tmp_path, count):
    partition = {"kind": "column", "name": "site"}
    experiment = build(table(tmp_path), clients={"count": count, "partition": partition})
    assert experiment.config.clients.count == 3


@pytest.mark.parametrize(
    ("clients", "sentence"),
    [
        ({"count": 4}, r"^clients\.count: must be 3 \(clients in the data\) or null, got 4$"),
        ({"per_round": 4}, r"^clients\.per_round: must be 1 to 3, the number of clients in the da"),
        (
            {"partition": {"kind": "column", "name": "town"}},
            r"^clients\.partition\.name: must be a",
        ),
        ({"count": None, "partition": {"kind": "iid"}}, r"^clients\.count: must be an integer"),
    ],
)
@pytest.mark.parametrize("make", [table, npz, text])
def test_mistakes_are_one_sentence(tmp_path, make, clients, sentence):
    if make is text and "town" in str(clients):
        sentence = r"a row has no field 'town' \(clients\.partition\.name\)"
    natural = {"partition": {"kind": "column", "name": "site"}}
    with pytest.raises(UserError, match=sentence) as caught:
        build(make(tmp_path), clients=natural | clients)
    assert "\n" not in str(caught.value)


def test_sources_that_name_no_clients_are_refused(tmp_path):
    sentence = r"^clients\.partition\.kind: must be iid, .* since data\.source 'npz' does not"
    with pytest.raises(UserError, match=sentence):
        build(npz(tmp_path), clients={"partition": {"kind": "folder"}})
    with pytest.raises(UserError, match=r"since data\.source 'digits' does not name clients"):
        build({"source": "digits"})


def test_check_run_resume_and_report_name_the_clients(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    table(tmp_path)
    Path("config.yaml").write_text(
        "data: {source: table, path: a.csv}\n"
        "stream: {kind: permuted, tasks: 2}\n"
        "clients: {partition: {kind: column, name: site}}\n"
        "train: {rounds: 1}\n"
    )
    assert main(["check", "config.yaml"]) == 0
    said = capsys.readouterr().out
    assert "3 clients" in said.replace("\n", " ")
    rows = dict(line.strip().split(": ") for line in said.splitlines() if line.startswith("  "))
    assert set(rows) == set(SITES)
    assert main(["check", "config.yaml", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["client_rows"]
    assert found["names"] == list(SITES)
    assert rows["west"] == f"{found['rows'][2][0]}, {found['rows'][2][1]}"
    assert main(["run", "config.yaml", "--out", "run", "--quiet"]) == 0
    result = json.loads(Path("run/result.json").read_text())
    assert result["clients"] == found
    assert main(["run", "config.yaml", "--out", "run", "--quiet", "--resume"]) == 0
    assert perdure.resume("run").values["model_sha256"] == result["model_sha256"]
    page = Path("run/report.html").read_text()
    assert "north" in page
    assert f">{found['rows'][1][0]}</td>" in page
    assert torch.tensor(found["rows"]).sum() == 2 * 96
