"""Building an experiment, and configs that are refused before training."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from perdure.config import parse
from perdure.contract import Client, Method, Needs, Preferences
from perdure.core.errors import UserError
from perdure.training.experiment import build_experiment, choose_device
from perdure.training.state import RunState

VALUES: dict[str, Any] = {
    "data": {"limit": 80},
    "stream": {"kind": "split", "tasks": 3, "classes_per_task": 3},
    "clients": {"count": 4},
    "model": {"hidden": [6]},
}


@dataclass(frozen=True)
class SplitOnly(Method):
    @property
    def needs(self) -> Needs:
        return Needs(streams=frozenset({"split"}))


@dataclass(frozen=True)
class Prefers(Method):
    @property
    def needs(self) -> Needs:
        prefers = Preferences({"split": "growing"}, active_outputs="seen", weighting="uniform")
        return Needs(prefers=prefers)


def client(values: dict[str, Any], number: int = 0, task: int = 0) -> Client:
    experiment = build_experiment(parse(values))
    state = RunState(experiment.initial_state().server, task=task)
    return experiment.client(number, experiment.context(state), state.server, {})


def test_an_unsupported_stream_is_refused_with_the_reason() -> None:
    method = {"kind": f"{__name__}.SplitOnly"}
    build_experiment(parse({**VALUES, "method": method}))
    with pytest.raises(UserError) as refusal:
        build_experiment(parse({**VALUES, "stream": {"kind": "permuted"}, "method": method}))
    sentence = "stream.kind: must be split with this method, got 'permuted'"
    assert str(refusal.value) == sentence
    assert refusal.value.exit_code == 2


def test_a_config_is_refused_before_the_data_is_read() -> None:
    data = {"source": "npz", "path": "/there/is/no/such.npz"}
    with pytest.raises(UserError, match=r"^stream\.kind"):
        build_experiment(parse({"data": data, "method": {"kind": f"{__name__}.SplitOnly"}}))


@pytest.mark.parametrize("name", ["cuda", "mps"])
def test_an_unavailable_device_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    with pytest.raises(UserError) as refusal:
        build_experiment(parse({**VALUES, "device": name}))
    assert str(refusal.value) == f"device: must be auto, cpu on this machine, got '{name}'"


def test_auto_chooses_the_best_available_device(monkeypatch: pytest.MonkeyPatch) -> None:
    for cuda, mps, best in ((True, True, "cuda"), (False, True, "mps"), (False, False, "cpu")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda there=cuda: there)
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda there=mps: there)
        assert choose_device("auto") == torch.device(best)
    assert choose_device("cpu") == torch.device("cpu")


def test_a_growing_head_on_a_pool_stream_is_refused() -> None:
    stream = {"kind": "pool", "tasks": 2, "classes_per_task": 3}
    with pytest.raises(UserError, match=r"^model\.head: must be 'shared' .*, got 'growing'$"):
        build_experiment(parse({**VALUES, "stream": stream, "model": {"head": "growing"}}))


def test_a_task_without_clients_is_refused() -> None:
    """A client may hold nothing of the classes that a pool draws for it."""
    stream = {"kind": "pool", "tasks": 3, "classes_per_task": 2, "presence": 0.4}
    clients = {"count": 3, "partition": {"kind": "shards", "per_client": 1}}
    values = {"data": {"limit": 60}, "stream": stream, "clients": clients}
    found = [refusal({**values, "seed": seed}) for seed in range(6)]
    assert None in found
    assert any(text and "is held by no client" in text for text in found)


def refusal(values: dict[str, Any]) -> str | None:
    """Return why a config is refused, or None after checking that all its tasks have clients."""
    try:
        tasks = build_experiment(parse(values)).stream.tasks
    except UserError as error:
        return str(error)
    assert all(task.partition.sizes.sum() for task in tasks)
    return None


def test_a_task_without_test_data_is_refused(tmp_path: Path) -> None:
    y, x = np.arange(40) % 4, np.zeros((40, 4, 4), np.uint8)
    path, stream = tmp_path / "a.npz", {"kind": "split", "tasks": 4, "classes_per_task": 1}
    np.savez(path, x_train=x, y_train=y, x_test=x[:6], y_test=y[:6] % 3)
    with pytest.raises(UserError, match=r"^stream\.tasks: must be .* has no test data\), got 4$"):
        build_experiment(parse({"data": {"source": "npz", "path": str(path)}, "stream": stream}))


def test_the_needs_of_a_method_are_defaults_that_the_config_overrides() -> None:
    method = {"kind": f"{__name__}.Prefers"}
    wished = build_experiment(parse({**VALUES, "method": method}))
    assert wished.network.outputs.kind == "growing"
    assert client({**VALUES, "method": method}).weight == 1.0
    values = {**VALUES, "method": method, "model": {"hidden": [6], "head": "shared"}}
    values["train"] = {"weighting": "samples"}
    assert build_experiment(parse(values)).network.outputs.kind == "shared"
    found = client(values)
    assert found.weight == len(found.data) > 1


def test_initial_parameters_depend_on_the_seed_alone() -> None:
    one, same, other = (
        build_experiment(parse({**VALUES, "seed": s, "clients": {"count": n}}))
        .initial_state()
        .server.params
        for s, n in ((3, 4), (3, 2), (4, 4))
    )
    assert all(torch.equal(value, same[name]) for name, value in one.items())
    assert not any(torch.equal(value, other[name]) for name, value in one.items())


def test_initial_weights_are_loaded(tmp_path: Path) -> None:
    trained = build_experiment(parse({**VALUES, "seed": 9})).initial_state().server.params
    path = tmp_path / "weights.safetensors"
    save_file(trained, path)
    model = {"hidden": [6], "init": str(path)}
    found = build_experiment(parse({**VALUES, "model": model})).initial_state().server.params
    assert torch.equal(found["fc1.weight"], trained["fc1.weight"])


def test_a_client_holds_only_rows_of_the_task() -> None:
    experiment = build_experiment(parse(VALUES))
    for task in range(3):
        rows = torch.cat([client(VALUES, n, task).data.index for n in range(4)])
        labels = experiment.task(task).train.y[rows]
        assert len(torch.unique(rows)) == len(rows)
        assert set(labels.tolist()) == set(experiment.task(task).classes)


@pytest.mark.parametrize("task", [0, 2])
def test_targets_of_a_growing_head_are_in_the_block_of_the_task(task: int) -> None:
    values = {**VALUES, "model": {"hidden": [6], "head": "growing"}}
    experiment, data = build_experiment(parse(values)), client(values, 0, task).data
    batch = data.batch(data.index)
    labels = experiment.task(task).train.y[data.index].tolist()
    classes = experiment.task(task).classes
    assert batch.y.tolist() == [3 * task + classes.index(label) for label in labels]
    assert batch.active_outputs is not None
    assert batch.active_outputs.tolist() == [False] * 3 * task + [True] * 3


def test_a_growing_head_follows_the_outputs_that_the_method_prefers() -> None:
    values = {**VALUES, "method": {"kind": f"{__name__}.Prefers"}}
    experiment = build_experiment(parse(values))
    params = experiment.grow(experiment.initial_state().server.params, 1)
    active = experiment.plan_task(1, params).active_outputs
    assert active is not None
    assert active.tolist() == [True] * 6


@pytest.mark.parametrize(("outputs", "count"), [("task", 3), ("seen", 6), ("all", None)])
def test_active_outputs_of_a_shared_head(outputs: str, count: int | None) -> None:
    active = client({**VALUES, "train": {"outputs": outputs}}, 0, 1).data.active_outputs
    assert (active is None) if count is None else int(active.sum()) == count


def test_active_outputs_of_a_pool_client_are_its_classes() -> None:
    stream = {"kind": "pool", "tasks": 2, "classes_per_task": 4}
    values = {**VALUES, "stream": stream, "train": {"outputs": "task"}}
    experiment, masks = build_experiment(parse(values)), []
    for number in range(4):
        data = client(values, number, 1).data
        assert data.active_outputs is not None
        masks.append(tuple(data.active_outputs.nonzero().flatten().tolist()))
        assert masks[-1] == experiment.task(1).classes_of(number)
        assert set(data.batch(data.index).y.tolist()) <= set(masks[-1])
    assert len(set(masks)) > 1


def test_a_context_has_the_rounds_and_learning_rate_of_its_task() -> None:
    train = {"rounds": [8, 4], "lr": 0.2, "task_decay": 0.5}
    experiment = build_experiment(parse({**VALUES, "train": train}))
    server = experiment.initial_state().server
    found = [experiment.context(RunState(server, task=task, round=1)) for task in range(3)]
    assert [(c.task, c.round, c.rounds) for c in found] == [(0, 1, 8), (1, 1, 4), (2, 1, 4)]
    assert [c.lr for c in found] == pytest.approx([0.2, 0.1, 0.05])
