"""FedProTIP's blocks of feature directions, references and task prediction."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from subspace_runs import clients_of, experiment_of, next_task, second_task, train_task

from perdure.algebra.subspaces import Subspace
from perdure.contract import Server
from perdure.contract.method import best_tasks
from perdure.methods.fedprotip import FedProTIP, FedProTIPState
from perdure.methods.parts.routing import block_basis, block_rank
from perdure.training.sampling import clients_with_data


def test_blocks_are_orthogonal_and_references_exact() -> None:
    """The references after two tasks are those of the features of each task's own end."""
    experiment = experiment_of({"kind": "fedprotip"}, stream={"tasks": 2})
    state = experiment.initial_state()
    features = []
    for _ in range(2):
        train_task(experiment, state)
        clients = clients_of(experiment, state, {})
        client = clients[0]
        features.append(torch.cat([client.features(batch) for batch in client.data.batches()]))
        next_task(state) if state.task == 0 else None
    memory = state.server.state
    blocks = [memory.blocks[key].double().numpy() for key in ("0", "1")]
    np.testing.assert_allclose(blocks[0].T @ blocks[1], 0, atol=1e-5)
    rows = memory.references["0"].numpy()
    for task, a in enumerate(features):
        for other, u in enumerate(blocks):
            expected = np.linalg.norm(a.double().numpy() @ u @ u.T) / np.sqrt(len(a))
            assert rows[task, other] == pytest.approx(expected, rel=1e-3, abs=1e-6)


def test_strict_references_are_zero_for_later_blocks() -> None:
    experiment = experiment_of({"kind": "fedprotip", "references": "strict"}, stream={"tasks": 2})
    state = experiment.initial_state()
    train_task(experiment, state)
    next_task(state)
    train_task(experiment, state)
    rows = state.server.state.references["0"]
    assert (rows > 0).tolist() == [[True, False], [True, True]]
    assert set(experiment.client_state(0)[0].moments) == {"1"}


def test_no_activation_is_kept_and_no_moment_sent() -> None:
    experiment = experiment_of({"kind": "fedprotip"})
    state = experiment.initial_state()
    train_task(experiment, state)
    kept = experiment.store.get(0)
    assert set(kept) == {"moments", "counts"}
    assert kept["moments"]["0"].shape == (20, 20)
    assert state.server.state.references["0"].shape == (1, 1)
    assert set(state.ledger.by_field) >= {"up/bases", "up/references", "down/blocks"}


def test_sums_of_references_are_those_of_all_data_together() -> None:
    experiment = experiment_of({"kind": "fedprotip", "transport": "sketch"})
    state = experiment.initial_state()
    train_task(experiment, state)
    block = state.server.state.blocks["0"]
    parts = [
        client.features(batch)
        for client in clients_of(experiment, state, {})
        for batch in client.data.batches()
    ]
    features = torch.cat(parts)
    expected = float((features @ block).norm() / len(features) ** 0.5)
    assert float(state.server.state.references["all"]) == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("pooled", [False, True])
def test_all_clients_that_ever_held_a_task_renew_their_references(pooled: bool) -> None:
    """Alg. 1, line 13: clients without data of a task compare their old tasks with its block."""
    method = {"kind": "fedprotip", "pool_references": pooled}
    sections = {"stream": {"tasks": 3, "presence": 0.4}, "clients": {"count": 8}}
    experiment = experiment_of(method, **sections)
    state, held = experiment.initial_state(), set[int]()
    for task in range(3):
        held |= set(clients_with_data(experiment.task(task)))
        event = train_task(experiment, state)
        assert len(event["routing"]) == 3
        next_task(state) if task < 2 else None
    memory = state.server.state
    absent = held - set(clients_with_data(experiment.task(2)))
    assert absent  # else nothing is tested
    blocks = [memory.blocks[str(task)].double() for task in range(3)]
    moments = {c: experiment.client_state(c)[0] for c in sorted(held)}
    expected = {str(c): squared_relevances(moments[c].moments, blocks) for c in moments}
    if pooled:
        totals = np.zeros((3, 3))
        counts = np.zeros((3, 1))
        for c, kept in moments.items():
            for task, count in kept.counts.items():
                totals[int(task)] += count * expected[str(c)][int(task)]
                counts[int(task)] += count
        expected = {"all": totals / counts}
    assert set(memory.references) == set(expected)
    for name, squares in expected.items():
        found = memory.references[name].double().numpy() ** 2
        np.testing.assert_allclose(found, squares, rtol=1e-3, atol=1e-5)
    experiment.method.route(state.server, torch.zeros(2, 1, 8, 8), experiment.network)


def squared_relevances(moments: Any, blocks: list[torch.Tensor]) -> np.ndarray[Any, Any]:
    """tr(U^T M U) of a client's second moments and all blocks; zeros for tasks it never held."""
    rows = np.zeros((len(blocks), len(blocks)))
    for task, moment in moments.items():
        m = moment.double().numpy()
        rows[int(task)] = [np.trace(u.numpy().T @ m @ u.numpy()) for u in blocks]
    return rows


def test_pooled_references_are_sums_alone() -> None:
    experiment = experiment_of({"kind": "fedprotip", "pool_references": True})
    state = experiment.initial_state()
    train_task(experiment, state)
    assert state.ledger.types["references"] == "Sum"
    assert "references" not in experiment.method.needs.per_client_fields


@pytest.mark.parametrize("transport", ["bases", "sketch"])
def test_the_rank_of_a_block_by_equation_8(transport: str) -> None:
    """One client: the smallest rank whose singular values sum to the threshold of their sum."""
    method = {"kind": "fedprotip", "space_rank": "threshold", "threshold": 0.5,
              "transport": transport, "sketch_size": 4000}  # fmt: skip
    sections = {"clients": {"count": 1}, "stream": {"tasks": 3}, "model": {"hidden": [30, 40]}}
    experiment = experiment_of(method, **sections)
    state, taken = experiment.initial_state(), np.zeros((40, 0))
    for task in range(3):
        train_task(experiment, state)
        client = clients_of(experiment, state, {})[0]
        features = np.concatenate([client.features(b).numpy() for b in client.data.batches()])
        block = state.server.state.blocks[str(task)].double().numpy()
        rest = features - features @ taken @ taken.T
        singular = np.linalg.svd(rest.astype(float), compute_uv=False)
        threshold = experiment.method.threshold_at(task)
        rank = int(np.argmax(np.cumsum(singular) / singular.sum() >= threshold)) + 1
        left = 20 - taken.shape[1]
        assert abs(block.shape[1] - min(rank, -(-left // 2))) <= (transport == "sketch")
        taken = np.concatenate([taken, block], axis=1)
        next_task(state) if task < 2 else None
    assert taken.shape[1] <= 20


def test_block_rank_is_at_most_half_of_what_is_left_of_half_the_space() -> None:
    def taken(rank: int) -> Subspace:
        return Subspace.of(torch.eye(20)[:, :rank])

    assert [block_rank(taken(rank), 20) for rank in range(11)] == [
        5, 5, 4, 4, 3, 3, 2, 2, 1, 1, 0,
    ]  # fmt: skip
    assert [block_rank(taken(rank), 3) for rank in (0, 4, 6, 9, 10)] == [3, 3, 2, 1, 0]


def test_a_block_is_cut_to_the_directions_that_most_candidates_share() -> None:
    eye = torch.eye(12)
    taken = Subspace.of(eye[:, :4])  # of six: two are left
    candidates = torch.stack([eye[0], eye[5], eye[6], eye[5], eye[7], eye[7]], dim=1)
    block = block_basis(taken, candidates)
    assert block.shape == (12, 2)
    onto = eye[:, [5, 7]] @ eye[:, [5, 7]].T
    torch.testing.assert_close(block @ block.T, onto, atol=1e-6, rtol=0)
    assert block_basis(Subspace.of(eye[:, :6]), candidates).shape == (12, 0)


@pytest.mark.parametrize("transport", ["bases", "sketch"])
def test_all_blocks_take_at_most_half_of_the_feature_space(transport: str) -> None:
    """However many tasks come: later tasks get fewer directions and at last none."""
    method = {"kind": "fedprotip", "transport": transport}
    experiment = experiment_of(method, stream={"tasks": 6}, train={"rounds": 1})
    state = experiment.initial_state()
    for task in range(6):
        event = train_task(experiment, state)
        next_task(state) if task < 5 else None
    blocks = [state.server.state.blocks[str(task)] for task in range(6)]
    ranks = [block.shape[1] for block in blocks]
    assert ranks == ([4, 4, 2, 0, 0, 0] if transport == "bases" else [5, 3, 1, 1, 0, 0])
    together = torch.cat(blocks, dim=1)
    torch.testing.assert_close(together.T @ together, torch.eye(10), atol=1e-5, rtol=0)
    assert all(0 <= share <= 1 for share in event["routing"])


def test_a_client_gives_no_direction_where_none_is_left() -> None:
    experiment, state = second_task({"kind": "fedprotip"})
    full = {"feature_space": {"features": {"basis": torch.eye(20)[:, :10]}}}
    client = clients_of(experiment, state, {"spaces": state.server.state.spaces} | full)[0]
    assert experiment.method.send_bases(client).fields["bases"].value["features"].shape == (20, 0)


class AsFeatures:
    """A network whose features are its inputs."""

    @staticmethod
    def features(params: Any, x: torch.Tensor, fwd: Any) -> torch.Tensor:
        return x


def routes(x: list[list[float]], **options: Any) -> list[int]:
    """Tasks of features by a server with three blocks of one direction and one client."""
    blocks = {str(task): torch.eye(3)[:, task : task + 1] for task in range(3)}
    references = {"0": torch.tensor([[9.0, 0.0, 1.0], [0.0, 1.0, 0.0], [1.0, 0.0, 1.0]])}
    server = Server({}, {}, FedProTIPState(blocks=blocks, references=references))
    found = FedProTIP(**options).route(server, torch.tensor(x), AsFeatures())
    assert found is not None
    return best_tasks(found).tolist()


def test_route_leaves_the_first_block_out_if_it_is_to() -> None:
    """Cosines of (5, 1, 0.2) by hand: 0.98, 0.20, 0.72; of (1, 0.2) alone: 0.20, 0.98, 0.20."""
    assert routes([[5.0, 1.0, 0.2]]) == [0]
    assert routes([[5.0, 1.0, 0.2]], drop_first=True) == [1]


def test_route_of_a_batch_is_one_task() -> None:
    rows = [[9.0, 0.0, 1.0], [0.0, 3.0, 0.0], [0.0, 1.0, 0.0]]
    assert routes(rows) == [0, 1, 1]
    assert routes(rows, routing="batch", routing_batch=2) == [0, 0, 1]
    assert routes(rows, routing="batch", routing_batch=3) == [0, 0, 0]
