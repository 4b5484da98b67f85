"""Nodes with local data: what they read, when they open it, and what the server learns."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from in_process import in_process_engine, no_secrets
from sklearn.datasets import load_digits

from perdure.config import parse
from perdure.core.errors import UserError
from perdure.data.partition import DisjointPartition
from perdure.federation.messages import BadMessage, NodeRequest, RoundPosition, pack
from perdure.federation.node.data import local_stream
from perdure.runs.result import model_hash
from perdure.runs.run import run
from perdure.training.engines.serial import SerialEngine
from perdure.training.experiment import build_experiment
from perdure.training.loop import run_stream

CLASSES = [str(digit) for digit in range(10)]
CONFIG = {
    "stream": {"kind": "split", "tasks": 2},
    "clients": {"count": 2},
    "model": {"kind": "mlp", "hidden": [16]},
    "train": {"rounds": 2, "batch_size": 32, "local_epochs": 2},
    "data": {"mean": [0.3], "std": [0.38]},
    "engine": {"kind": "flower"},
    "federation": {
        "classes": CLASSES,
        "shape": [1, 8, 8],
        "tasks": [CLASSES[:5], CLASSES[5:]],
    },
    "device": "cpu",
}


def write(folder, digits, rows):
    """Write one task's file of a node; every fourth row is for testing."""
    bundled = load_digits()
    x = np.rint(bundled.images * (255 / 16)).astype(np.uint8)
    chosen = [row for row in rows if bundled.target[row] in digits]
    test = [row for index, row in enumerate(chosen) if index % 4 == 0]
    train = [row for index, row in enumerate(chosen) if index % 4]
    folder.parent.mkdir(parents=True, exist_ok=True)
    np.savez(
        folder,
        x_train=x[train], y_train=bundled.target[train], x_test=x[test],
        y_test=bundled.target[test], class_names=np.array(CLASSES),
    )  # fmt: skip
    return len(train), len(test)


@pytest.fixture
def data(tmp_path):
    folders = {}
    for node in range(2):
        folders[node] = tmp_path / f"data-{node}"
        rows = range(node, 800, 2)
        write(folders[node] / "task-1.npz", range(5), rows)
        write(folders[node] / "task-2.npz", range(5, 10), rows)
    return folders


def test_nodes_train_together_and_send_only_sums(tmp_path, data):
    engine, transport = in_process_engine(CONFIG, tmp_path, data)
    values = run(CONFIG, out=tmp_path / "run", engine=engine).values
    assert values["matrix"]["task_aware"][1][1] > 0.6
    assert values["client_updates"] == 8
    kinds = [kind for _, kind, _ in transport.log]
    assert kinds.count("announce") == 4
    assert kinds.count("evaluate") == 4


def test_the_accuracy_is_that_of_all_test_rows_together(tmp_path, data):
    engine, transport = in_process_engine(CONFIG, tmp_path, data)
    values = run(CONFIG, engine=engine).values
    totals = [len(transport.node(node).experiment.task(0).test.y) for node in range(2)]
    accuracy = values["matrix"]["task_aware"][0][0]
    correct = accuracy * sum(totals)
    assert correct == pytest.approx(round(correct), abs=1e-6)


def joined_stream(config, streams):
    """Return the stream of one process that holds the rows of all nodes."""
    tasks = []
    for number in range(2):
        parts = [stream.tasks[number] for stream in streams]
        rows = torch.cat([part.train.x for part in parts])
        ends = np.cumsum([0, *(len(part.train.rows) for part in parts)])
        labels = torch.cat([part.train.y for part in parts])
        train, shares = (
            replace(parts[0].train, x=rows, y=labels),
            DisjointPartition(torch.arange(len(rows)), ends),
        )
        tasks.append(replace(parts[0], train=train, partition=shares))
    return replace(streams[0], tasks=tasks)


def test_the_same_rows_in_one_process_give_the_same_weights(tmp_path, data):
    """A node's rows, its weight and its draws are those of a client with this data elsewhere."""
    engine, _ = in_process_engine(CONFIG, tmp_path, data)
    federated = run(CONFIG, engine=engine).values["model_sha256"]
    config = parse(CONFIG)
    stream = joined_stream(config, [local_stream(config, data[node], node) for node in range(2)])
    experiment = build_experiment(config, engine=SerialEngine(), stream=stream)
    state = run_stream(experiment, experiment.initial_state(), lambda state, event: None)
    assert model_hash(state.server.params | state.server.buffers) == federated


def test_an_exchange_that_waits_uses_the_rows_of_the_task_before(tmp_path, data):
    """FOT's GPSE at the start of the next task gives the weights of GPSE at the task's end."""
    hashes = []
    for closing in (True, False):
        config = {**CONFIG, "method": {"kind": "fot", "closing": closing}}
        engine, transport = in_process_engine(config, tmp_path / str(closing), data=data)
        transport.make_secret_source = no_secrets
        hashes.append(run(config, engine=engine).values["model_sha256"])
    assert hashes[0] == hashes[1]


def test_nodes_evaluate_on_the_rows_that_they_hold_out(tmp_path, data):
    config = {**CONFIG, "data": {**CONFIG["data"], "validation": 0.2}}
    engine, transport = in_process_engine(config, tmp_path, data)
    values = run(config, engine=engine).values
    tasks = [[transport.node(n).experiment.task(t) for n in range(2)] for t in range(2)]
    held_out = [[len(task.validation[0].index) for task in nodes] for nodes in tasks]
    assert all(count > 0 for counts in held_out for count in counts)
    for row, counts in zip(
        values["validation"]["matrix"]["task_agnostic"][-1], held_out, strict=True
    ):
        assert row * sum(counts) == pytest.approx(round(row * sum(counts)))
    assert values["validation"]["matrix"] != values["matrix"]


def test_no_node_is_asked_before_a_run_begins(tmp_path, data):
    engine, transport = in_process_engine(CONFIG, tmp_path, data)
    build_experiment(parse(CONFIG), engine=engine).initial_state()
    assert transport.log == []


class Stop(Exception):
    pass


@pytest.mark.parametrize("back", [0, 1])
def test_a_server_restarted_in_the_third_task_resumes(back, tmp_path, data):
    """It stored the sizes of earlier tasks, whose data the nodes may have deleted."""
    for node, folder in data.items():
        write(folder / "task-3.npz", range(5), range(node, 800, 2))
    config = {
        **CONFIG,
        "stream": {"kind": "split", "tasks": 3},
        "clients": {"count": 2},
        "privacy": {"clip": 5.0, "noise": 1e-3},
        "federation": {**CONFIG["federation"], "tasks": [CLASSES[:5], CLASSES[5:], CLASSES[:5]]},
    }
    engine, _ = in_process_engine(config, tmp_path, data)
    out, seen = tmp_path / "run", []

    def stop(state, event):
        seen.append(event)
        if (state.task, state.round) == (2, 1):
            raise Stop

    with pytest.raises(Stop):
        run(config, out=out, watch=stop, engine=engine)
    shutil.rmtree(out / "checkpoints/tasks")
    checkpoints = sorted((out / "checkpoints").iterdir())
    for path in checkpoints[len(checkpoints) - back :]:
        path.unlink()
    engine, transport = in_process_engine(config, tmp_path, data)
    values = run(config, out=out, resume=True, engine=engine).values
    assert values["failures"] == []
    assert values["client_updates"] == 12
    assert values["privacy"]["sums_of_one_client"] == 6 + back  # its noise was drawn twice
    assert {task for _, kind, task in transport.log if kind == "announce"} == {2}


def test_later_tasks_are_neither_served_nor_opened(tmp_path, data):
    for folder in data.values():
        (folder / "task-2.npz").write_bytes(b"not to be opened")
    _, transport = in_process_engine(CONFIG, tmp_path, data)
    node = transport.node(0)
    for kind in ("train", "exchange", "evaluate"):
        with pytest.raises(BadMessage, match="not current"):
            node.serve(NodeRequest(kind, RoundPosition(0)), pack({}))
    with pytest.raises(BadMessage, match="announced after"):
        node.serve(NodeRequest("announce", RoundPosition(1)), pack({}))
    node.serve(NodeRequest("announce", RoundPosition(0)), pack({}))
    with pytest.raises(BadMessage, match="task 2 is not current"):
        node.serve(NodeRequest("train", RoundPosition(1), (0,)), pack({}))
    with pytest.raises(BadMessage, match="a test on tasks after"):
        node.serve(NodeRequest("evaluate", RoundPosition(0), tasks=(0, 1)), pack({}))


def test_a_node_without_data_of_a_task_is_not_asked_to_train(tmp_path, data):
    (data[1] / "task-2.npz").unlink()
    engine, transport = in_process_engine(CONFIG, tmp_path, data)
    values = run(CONFIG, engine=engine).values
    assert values["client_updates"] == 6
    assert (1, "train", 1) not in transport.log


def test_data_may_be_image_folders_or_a_list_of_sources(tmp_path, data):
    from PIL import Image

    bundled = load_digits()
    for row in range(60):
        folder = tmp_path / "pictures" / str(bundled.target[row])
        folder.mkdir(parents=True, exist_ok=True)
        pixels = np.rint(bundled.images[row] * (255 / 16)).astype(np.uint8)
        Image.fromarray(pixels).save(folder / f"{row}.png")
    everything = {**CONFIG, "federation": {"classes": CLASSES, "shape": [1, 8, 8]}}
    home = tmp_path / "node"
    home.mkdir()
    (home / "tasks.yaml").write_text("- {source: folder, path: ../pictures}\n- null\n")
    stream = local_stream(parse(everything), home, 0)
    assert stream.tasks[0].partition.sizes[0] + len(stream.tasks[0].test.y) == 60
    assert stream.tasks[1].partition.sizes[0] == 0
    (home / "tasks.yaml").unlink()
    (tmp_path / "pictures").rename(home / "task-2")
    assert local_stream(parse(everything), home, 0).tasks[1].partition.sizes[0] > 0


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"stream": {"kind": "permuted", "tasks": 2}}, "stream.kind: must be .*, got 'permuted'"),
        ({"data": {}}, "data.mean: must be one number per channel .*, got None"),
        (
            {"federation": {**CONFIG["federation"], "tasks": [CLASSES]}},
            "federation.tasks: must be .*, got 1 lists",
        ),
        (
            {"federation": {**CONFIG["federation"], "tasks": [["x"], ["1"]]}},
            "federation.tasks: must be .*, got 'x'",
        ),
    ],
)
def test_a_config_without_an_agreement_is_refused(change, sentence):
    with pytest.raises(UserError, match=sentence):
        build_experiment(parse({**CONFIG, **change}))


def test_data_that_does_not_fit_the_agreement_is_refused(tmp_path, data, caplog):
    """The server learns that it is refused, the owner of the node why."""
    write(data[0] / "task-1.npz", range(6), range(200))
    with pytest.raises(BadMessage, match="its data of task 1 cannot be used"):
        _ = local_stream(parse(CONFIG), data[0], 0).tasks[0]
    assert re.search(r"class: must be .*, got '5'", caplog.text)
    other = {**CONFIG, "federation": {**CONFIG["federation"], "shape": [1, 9, 9]}}
    with pytest.raises(BadMessage, match="its data of task 1 cannot be used"):
        _ = local_stream(parse(other), data[0], 0).tasks[0]
    assert "shape" in caplog.text
