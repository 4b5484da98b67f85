"""Task identity prediction against plain numpy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from subspace_runs import experiment_of

from perdure.methods.parts import routing
from perdure.methods.parts.gaussian_router import alike_tasks
from perdure.training.loop import run_stream


def blocks_of(sizes: list[int], size: int = 8) -> list[torch.Tensor]:
    basis = np.linalg.qr(np.random.default_rng(0).normal(size=(size, sum(sizes))))[0]
    return list(torch.tensor(basis, dtype=torch.float32).split(sizes, dim=1))


def test_relevance_is_the_length_of_the_projection() -> None:
    blocks, features = blocks_of([2, 3]), torch.randn(5, 8)
    expected = [
        [np.linalg.norm((u @ u.T).numpy() @ row.numpy()) for u in blocks] for row in features
    ]
    np.testing.assert_allclose(routing.relevance(features, blocks), expected, rtol=1e-5)


def test_moment_gives_the_relevance_of_the_batch_it_came_from() -> None:
    """||A U U^T||_F / sqrt(n), without A."""
    blocks, features = blocks_of([2, 3, 1]), torch.randn(7, 8)
    moment = features.T @ features / 7
    expected = [np.linalg.norm(features.numpy() @ (u @ u.T).numpy()) / np.sqrt(7) for u in blocks]
    np.testing.assert_allclose(routing.moment_relevance(moment, blocks), expected, rtol=1e-5)
    pooled = routing.pool_by_batch(routing.relevance(features, blocks), 7)
    np.testing.assert_allclose(pooled, np.tile(expected, (7, 1)), rtol=1e-5)


def test_batches_are_pooled_apart() -> None:
    pooled = routing.pool_by_batch(torch.tensor([[3.0], [4.0], [1.0]]), 2)
    np.testing.assert_allclose(pooled.flatten(), [np.sqrt(12.5), np.sqrt(12.5), 1.0], rtol=1e-6)


def test_references_of_blocks_that_came_later() -> None:
    blocks, old = blocks_of([2, 2]), torch.eye(8)
    rows = routing.reference_vectors({"0": old}, blocks)
    assert rows.shape == (2, 2)
    assert not rows[1].any()
    np.testing.assert_allclose(rows[0], [np.sqrt(2)] * 2, rtol=1e-5)


def test_merged_keeps_old_rows_where_there_is_no_new_one() -> None:
    old = torch.tensor([[1.0]])
    new = torch.tensor([[0.0, 0.0], [2.0, 3.0]])
    assert routing.update_references(old, new).tolist() == [[1.0, 0.0], [2.0, 3.0]]
    assert routing.update_references(None, new) is new
    assert routing.update_references(old, torch.ones(2, 2)).tolist() == [[1.0, 1.0], [1.0, 1.0]]


def test_majority_then_mean_similarity() -> None:
    """Two of three clients see the row as task 1; with two clients that differ, the surer wins."""
    row = torch.tensor([[1.0, 0.2]])
    first, second = [[1.0, 0.2], [0.0, 1.0]], [[0.0, 1.0], [1.0, 0.2]]
    three = torch.tensor([first, second, second])
    narrow = [[0.6, 1.0], [0.7, 1.0]]  # barely for task 1, where the mean is for task 0
    assert routing.task_scores(row, torch.tensor([first, narrow, narrow])).argmax(1).tolist() == [1]
    assert routing.task_scores(row, three).argmax(1).tolist() == [1]
    blunt = [[0.6, 1.0], [0.5, 1.0]]
    assert routing.task_scores(row, torch.tensor([second, blunt])).argmax(1).tolist() == [1]


def test_cosine_against_numpy() -> None:
    rng = np.random.default_rng(3)
    rows, references = rng.uniform(size=(20, 4)), rng.uniform(size=(1, 4, 4))
    cosine = rows @ references[0].T
    cosine /= np.linalg.norm(rows, axis=1)[:, None] * np.linalg.norm(references[0], axis=1)
    ours = routing.task_scores(torch.tensor(rows), torch.tensor(references)).argmax(1)
    assert ours.tolist() == cosine.argmax(1).tolist()


def test_a_task_that_a_client_never_saw_gets_no_vote() -> None:
    references = torch.tensor([[[1.0, 0.0], [0.0, 0.0]]])
    assert routing.task_scores(torch.tensor([[0.0, 1.0]]), references).argmax(1).tolist() == [0]


def test_first_block_dropped() -> None:
    """With two tasks one number is left: the nearer magnitude wins."""
    references = torch.tensor([[[9.0, 1.0], [9.0, 4.0]]])
    rows = torch.tensor([[5.0, 1.5], [5.0, 3.6]])
    assert routing.task_scores(rows, references, drop_first=True).argmax(1).tolist() == [0, 1]
    one = torch.tensor([[[2.0]]])
    assert routing.task_scores(torch.tensor([[3.0]]), one, drop_first=True).argmax(1) == 0


def test_stacked_pads_clients_that_stayed_away() -> None:
    references = {"0": torch.ones(1, 1), "10": torch.ones(2, 2)}
    stack = routing.stack_references(references, 2)
    assert stack.shape == (2, 2, 2)
    assert stack[0].tolist() == [[1.0, 0.0], [0.0, 0.0]]


def test_a_task_like_an_earlier_one_is_found() -> None:
    tasks = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 0.05]])
    assert alike_tasks(tasks, 0.1) == (0, 2)
    assert alike_tasks(tasks[:2], 0.1) is None


@pytest.mark.parametrize("labels", ["others", "permuted"])
def test_the_same_inputs_with_other_labels_are_recognized(labels: str, tmp_path: Path) -> None:
    """The stated limit of task prediction; another permutation of the pixels is no such case."""
    stream: dict[str, Any] = {"kind": "permuted", "tasks": 2}
    if labels == "others":
        x, y = load_digits(return_X_y=True)
        x, domains = (x * 15).astype(np.uint8).reshape(-1, 8, 8)[:400], []
        for shift in (0, 1):
            y_shifted = (y[:400] + shift) % 10
            files = {"x_train": x, "y_train": y_shifted, "x_test": x, "y_test": y_shifted}
            np.savez(tmp_path / f"{shift}.npz", **files)
            domains.append({"name": f"{shift}", "path": str(tmp_path / f"{shift}.npz")})
        stream = {"kind": "domains", "domains": [{"source": "npz", **domain} for domain in domains]}
    method = {"kind": "fedprotip", "router": "gaussian", "bases": "pooled", "threshold": 0.95}
    sections = {"data": {"limit": 400}, "stream": stream, "model": {"head": "growing"}}
    experiment = experiment_of(method, **sections)
    state = run_stream(experiment, experiment.initial_state(), lambda state, event: None)
    named = [w["text"] for w in state.counters.warnings if w["key"] == "alike"]
    sentence = (
        "fedprotip: the features of task 2 are hardly different from those of task 1; tasks with "
        "the same inputs and other labels cannot be distinguished"
    )
    assert named == ([sentence] if labels == "others" else [])
