"""LwF and FLwF-2T against computations that share no code with them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from baseline_runs import client_of, config, experiment, loss_of

import perdure
from perdure.contract import Train
from perdure.methods.flwf_2t import Flwf2T
from perdure.methods.lwf import Lwf
from perdure.methods.parts.previous_model import distillation_loss
from perdure.models.ops import ForwardPass


def test_distillation_by_hand() -> None:
    rng = np.random.default_rng(0)
    student, teacher = rng.normal(size=(4, 5)), rng.normal(size=(4, 3))
    among = np.array([True, False, True])

    def soft(z: np.ndarray) -> np.ndarray:
        e = np.exp(z[:, among] / 2.0)
        return e / e.sum(1, keepdims=True)

    expected = -(soft(teacher) * np.log(soft(student[:, :3]))).sum(1)
    found = distillation_loss(
        torch.tensor(student), torch.tensor(teacher), torch.tensor([*among, True, True]), 2.0
    )
    np.testing.assert_allclose(found, expected)


def losses(method: Lwf | Flwf2T) -> tuple[float, float, float, float]:
    """The method's loss with a teacher, and cross-entropy and both distillations by themselves."""
    made = experiment()
    client = client_of(made, 1)
    batch = client.data.batch(client.data.index[:6])
    teacher = {n: v + 0.3 * torch.sin(torch.arange(v.numel())).reshape(v.shape)
               for n, v in client.params.items()}  # fmt: skip
    mine = {n: v * 1.5 for n, v in client.params.items()}
    client = replace(client, broadcast={"params": client.params, "teacher": teacher})
    found = loss_of(made, method, client, batch, mine)

    def logits(params: dict[str, torch.Tensor]) -> torch.Tensor:
        return made.network.logits(params, batch.x, ForwardPass())

    def distilled(params: dict[str, torch.Tensor]) -> float:
        aim = (logits(params) / 2).softmax(1)
        return float(torch.nn.functional.cross_entropy(logits(mine) / 2, aim))

    new = float(torch.nn.functional.cross_entropy(logits(mine), batch.y))
    return float(found), new, distilled(teacher), distilled(client.params)


@pytest.mark.parametrize("method", [Lwf(), Flwf2T()], ids=["lwf", "flwf-2t"])
def test_first_task_has_no_teacher(method: Lwf | Flwf2T) -> None:
    client = client_of(experiment())
    assert method.exchanges(client.context) == [Train()]


@pytest.mark.parametrize("method", [Lwf(), Flwf2T()], ids=["lwf", "flwf-2t"])
def test_teacher_is_the_model_with_which_the_task_began(method: Lwf | Flwf2T) -> None:
    model = {"kind": "conv", "width": 4, "norm": "batch", "head": "growing"}
    made = experiment(stream={"kind": "split", "tasks": 2}, model=model)
    server = made.initial_state().server
    grown = replace(server, params=made.grow(server.params, 1))
    context = made.task_context(1, grown.params)
    opening, train = method.exchanges(context)
    teacher_logits = opening.aggregate(grown, None, context)
    sent = train.broadcast(teacher_logits, context)
    assert set(sent) == {"teacher", "teacher_buffers"}
    assert set(sent["teacher"].value) == set(server.params)
    assert set(sent["teacher_buffers"].value) == set(server.buffers)


def test_lwf_loss() -> None:
    found, new, past, _ = losses(Lwf(lambda_=0.7))
    assert found == pytest.approx(new + 0.7 * past, rel=1e-5)


def test_flwf_2t_loss() -> None:
    found, new, past, server = losses(Flwf2T(alpha=0.5, beta=0.3))
    assert found == pytest.approx(0.5 * new + 0.3 * past + 0.2 * server, rel=1e-5)


def test_weights_that_leave_nothing_for_the_server_are_refused() -> None:
    with pytest.raises(
        perdure.core.errors.UserError,
        match=r"method.beta: must be at most 0.5 .1 - alpha., got 0.7",
    ):
        perdure.run(config({"kind": "flwf-2t", "alpha": 0.5, "beta": 0.7}))


def test_teacher_travels_once_per_task() -> None:
    plain, teacher_logits = (
        perdure.run(config({"kind": kind})).values["bytes"]["by_field"]
        for kind in ("fedavg", "lwf")
    )
    assert plain["down/params"] == teacher_logits["down/params"]
    # at most once for each of 4 clients in each of 2 tasks
    assert 0 < teacher_logits["down/teacher"] <= 8 * plain["down/params"] / 18 * 1.05


@pytest.mark.parametrize("method", [Lwf(), Flwf2T()], ids=["lwf", "flwf-2t"])
def test_old_outputs_of_a_growing_head_are_trained(method: Lwf | Flwf2T) -> None:
    values = {"stream": {"kind": "split", "tasks": 2}, "model": {"hidden": [8], "head": "growing"}}
    made = experiment({"kind": "lwf" if isinstance(method, Lwf) else "flwf-2t"}, **values)
    params = made.grow(made.initial_state().server.params, 1)
    plan = made.plan_task(1, params)
    assert set(plan.trainable) == set(params)
    assert "head.0.weight" in plan.sent


def test_distillation_does_not_notice_a_shift_of_all_old_logits() -> None:
    """Why the cross-entropy must leave old outputs alone."""
    student, teacher = torch.randn(4, 5), torch.randn(4, 3)
    shifted = student - torch.tensor([7.0, 7.0, 7.0, 0.0, 0.0])
    old = torch.tensor([True, True, True, False, False])
    found = [distillation_loss(logits, teacher, old, 2.0) for logits in (student, shifted)]
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("kind", ["lwf", "flwf-2t"])
@pytest.mark.parametrize("head", ["shared", "growing"])
def test_the_cross_entropy_is_over_the_outputs_of_the_new_task(kind: str, head: str) -> None:
    values = {"stream": {"kind": "split", "tasks": 2}, "model": {"hidden": [8], "head": head}}
    made = experiment({"kind": kind}, **values)
    params = made.grow(made.initial_state().server.params, 1)
    active = made.plan_task(1, params).active_outputs
    assert active is not None
    expected = made.network.outputs.task_mask(1, 1)
    assert torch.equal(active, expected)


def test_with_a_shared_head_old_classes_are_still_predicted() -> None:
    values = {
        "data": {"limit": 500},
        "stream": {"kind": "split", "tasks": 2},
        "model": {"hidden": [24], "head": "shared"},
        "train": {"rounds": 6, "batch_size": 16, "lr": 0.1},
    }
    run = perdure.run(config({"kind": "lwf"}, **values))
    everything = values | {"train": values["train"] | {"outputs": "all"}}
    before = perdure.run(config({"kind": "lwf"}, **everything))
    old, old_before = (r.matrix["task_agnostic"][1][0] for r in (run, before))
    assert old > old_before + 0.1
