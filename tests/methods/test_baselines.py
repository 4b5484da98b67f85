"""EWC, ER, LwF and FLwF-2T against computations that share no code with them."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

import perdure
from perdure.config import parse
from perdure.contract import Batch, Client, Method, Train, Transform
from perdure.contract.local_training import LocalTraining
from perdure.core.errors import UserError
from perdure.methods.er import Er
from perdure.methods.ewc import Ewc, FisherSums
from perdure.methods.flwf_2t import Flwf2T
from perdure.methods.lwf import Lwf
from perdure.methods.parts.distillation import distillation_loss
from perdure.methods.parts.replay import ReplayMemory, StoredExamples, past_active_outputs
from perdure.models.forward_pass import ForwardPass
from perdure.training.experiment import Experiment, build_experiment
from perdure.training.loop import run_stream

TINY = {
    "data": {"limit": 240},
    "stream": {"kind": "permuted", "tasks": 3},
    "clients": {"count": 4, "per_round": 3, "partition": {"kind": "dirichlet", "alpha": 0.5}},
    "model": {"hidden": [8]},
    "train": {"rounds": 2, "batch_size": 16, "lr": 0.1},
}


def config(method: dict[str, Any], engine: str = "serial", **more: Any) -> dict[str, Any]:
    return {**TINY, **more, "method": method, "engine": {"kind": engine}}


def client_of(experiment: Experiment, task: int = 0, number: int = 0, **more: Any) -> Client:
    server = experiment.initial_state().server
    context = experiment.task_context(task, server.params)
    found = experiment.client(number, context, server, {"params": server.params})
    return replace(found, **more)


def experiment(method: dict[str, Any] | None = None, **more: Any) -> Experiment:
    return build_experiment(parse(config(method or {"kind": "fedavg"}, **more)))


def train_of(method: Method, client: Client) -> Train:
    (train,) = (x for x in method.exchanges(client.context) if isinstance(x, Train))
    return train


def loss_of(
    made: Experiment, method: Method, client: Client, batch: Batch, params: Any = None
) -> torch.Tensor:
    """The loss of one local step of a client, by default of the model that it received."""
    training = LocalTraining(
        train_of(method, client), client.context, made.config.train, client.params, client.buffers,
        client.broadcast,
    )  # fmt: skip
    local, key = training.prepare_client(client), torch.tensor(7)
    params = client.params if params is None else params
    found, _ = training.loss(params, client.buffers, batch, key, client.broadcast, local)
    return found


def final_models(method: dict[str, Any], **more: Any) -> list[dict[str, torch.Tensor]]:
    """The final models of a short run on the serial and on the vector engine."""
    models = []
    for engine in ("serial", "vector"):
        made = build_experiment(parse(config(method, engine, **more)))
        models.append(run_stream(made, made.initial_state(), lambda *_: None).server.params)
    return models


@pytest.mark.parametrize(
    "method",
    [
        {"kind": "ewc", "samples": 20},
        {"kind": "ewc", "lambda": 1.0, "step": "gradient", "samples": 20},
        {"kind": "er", "budget": 20, "replay_batch": 4},
        {"kind": "lwf"},
        {"kind": "flwf-2t"},
    ],
)
@pytest.mark.parametrize(
    "more",
    [
        {"stream": {"kind": "split", "tasks": 2}, "model": {"hidden": [8], "head": "growing"}},
        {
            "stream": {"kind": "split", "tasks": 2, "presence": 0.5},
            "clients": TINY["clients"] | {"count": 8, "per_round": 8},
            "model": {"hidden": [8], "dropout": 0.2},
            "train": TINY["train"] | {"outputs": "seen"},
        },
    ],
    ids=["growing", "presence"],
)
def test_engines_agree(
    method: dict[str, Any], more: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    train = {**more.get("train", TINY["train"]), "rounds": 1, "max_steps": 3}
    one, two = final_models(method, **{**more, "train": train})
    for name, value in one.items():
        torch.testing.assert_close(value, two[name], rtol=0, atol=1e-5, msg=name)
    assert "cannot be stacked" not in caplog.text


@pytest.mark.parametrize("method", [{"kind": "ewc", "samples": 8}, {"kind": "lwf"}], ids=str)
def test_convolutions_too_on_both_engines(
    method: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    few = {
        "data": {"limit": 60, "test_limit": 40},
        "stream": {"kind": "split", "tasks": 2},
        "model": {"kind": "conv", "width": 4},
        "train": {"rounds": 1, "lr": 0.1, "max_steps": 2},
    }
    one, two = final_models(method, **few)
    for name, value in one.items():
        torch.testing.assert_close(value, two[name], rtol=0, atol=1e-5, msg=name)
    assert "cannot be stacked" not in caplog.text


# ---- EWC


def test_statistics_of_a_single_example_are_refused() -> None:
    model = {"hidden": [8], "norm": "batch", "running_stats": False}
    with pytest.raises(
        UserError, match=r"^model\.running_stats: must be true with ewc and batch norm, got False"
    ):
        experiment({"kind": "ewc"}, model=model)
    experiment({"kind": "ewc"}, model=model | {"norm": "group"})


def test_empirical_fisher_is_the_mean_of_squared_gradients() -> None:
    client = client_of(experiment())
    found = Ewc(fisher="empirical", samples=None).fisher_information(client)
    squares = {name: np.zeros(value.shape) for name, value in client.params.items()}
    for row in client.data.index:
        leaves = {n: v.clone().requires_grad_() for n, v in client.params.items()}
        x = client.data.inputs.gather(row.reshape(1)).flatten(1)
        hidden = torch.relu(x @ leaves["fc1.weight"].T + leaves["fc1.bias"])
        logits = hidden @ leaves["head.weight"].T + leaves["head.bias"]
        loss = torch.nn.functional.cross_entropy(logits, client.data.targets[row].reshape(1))
        loss.backward()
        for name, leaf in leaves.items():
            squares[name] += leaf.grad.numpy() ** 2  # type: ignore[union-attr]
    for name, value in squares.items():
        np.testing.assert_allclose(found[name], value / len(client.data), rtol=1e-3, atol=1e-7)


def test_labels_for_the_fisher_come_from_the_model() -> None:
    made = experiment()
    client = client_of(made)
    sharp = client.params | {"head.weight": torch.zeros_like(client.params["head.weight"])}
    bias = torch.full_like(client.params["head.bias"], -50.0)
    bias[3] = 50.0  # certain of output 3: its own labels carry no surprise, the data's do
    client = replace(client, params=sharp | {"head.bias": bias})
    assert max(float(v.max()) for v in Ewc().fisher_information(client).values()) < 1e-12
    assert float(Ewc(fisher="empirical").fisher_information(client)["head.bias"].max()) > 0.1


def penalty_of(method: Ewc, fisher: Any, pull: Any) -> Transform:
    """What a client that has kept these sums is held by."""
    state = FisherSums({"w": torch.as_tensor(fisher)}, {"w": torch.as_tensor(pull)})
    client = client_of(experiment(), 1, state=state)
    prepared = train_of(method, client).prepare(client)  # type: ignore[misc]
    (transform,) = prepared.transforms
    return transform


def test_stored_sums_give_the_gradient_of_the_whole_penalty() -> None:
    rng = np.random.default_rng(0)
    fishers, models = rng.uniform(size=(3, 5)), rng.normal(size=(3, 5))
    w, g = rng.normal(size=5), rng.normal(size=5)
    method = Ewc(lambda_=2.0, step="gradient")
    transform = penalty_of(method, fishers.sum(0), (fishers * models).sum(0))
    assert transform.acts_on_gradient()
    assert not transform.acts_on_step("sgd")
    found = transform.on_gradient({"w": torch.tensor(g)}, {"w": torch.tensor(w)})["w"]
    expected = g + 2.0 * sum(f * (w - m) for f, m in zip(fishers, models, strict=True))
    np.testing.assert_allclose(found, expected)


def test_implicit_step_solves_its_equation_and_never_runs_away() -> None:
    fisher, target, w = (torch.tensor(v).double() for v in ([0, 1, 1e6], [1, 2, 3], [0, 0, 0]))
    transform = penalty_of(Ewc(lambda_=10.0), fisher, fisher * target)
    assert transform.acts_on_step("sgd")
    assert not transform.acts_on_gradient()
    new = transform.on_step({"w": w}, {}, 0.1)["w"]
    torch.testing.assert_close(new, w - 0.1 * 10.0 * fisher * (new - target))
    torch.testing.assert_close(new, torch.tensor([0.0, 1.0, 3.0]).double(), atol=1e-5, rtol=0)


def test_fisher_is_added_up_over_tasks_and_not_sent() -> None:
    client = client_of(experiment({"kind": "ewc"}))
    method = Ewc(fisher="empirical", samples=None)
    _, ending = method.exchanges(client.context)
    assert not ending.communicates
    first = method.add_information(client)
    assert not first.fields
    assert first.state is not None
    second = method.add_information(replace(client, state=first.state)).state
    assert second is not None
    for name, value in first.state.fisher.items():
        torch.testing.assert_close(second.fisher[name], 2 * value)
        torch.testing.assert_close(second.pull[name], 2 * value * client.params[name])


def test_information_of_outputs_of_earlier_tasks_is_kept() -> None:
    client = client_of(experiment())
    old = {"head.0.weight": torch.ones(2)}
    kept = Ewc(samples=4).add_information(replace(client, state=FisherSums(old, old))).state
    assert kept is not None
    assert set(kept.fisher) == set(kept.pull) == {*client.params, "head.0.weight"}
    assert kept.fisher["head.0.weight"].tolist() == [1.0, 1.0]


# ---- ER


def remembered(
    made: Experiment, budget: int, tasks: int = 3, seed: int | None = None
) -> StoredExamples:
    """A client's memory at the end of some tasks."""
    memory = ReplayMemory()
    for task in range(tasks):
        client = client_of(made, task, state=memory)
        if seed is not None:
            drawn = replace(client.context, rng=type(client.context.rng)(seed))
            client = replace(client, context=drawn)
        result = Er(budget=budget).refill_memory(client)
        assert not result.fields
        assert result.state is not None
        memory = result.state
    assert memory.examples is not None
    return memory.examples


def test_memory_keeps_to_its_budget_and_gives_the_images_back() -> None:
    made = experiment()
    memory = remembered(made, 25)
    assert memory.rows.shape == (25, 64)
    assert memory.rows.dtype == torch.uint8
    assert set(memory.tasks.tolist()) == {0, 1, 2}
    row = int((memory.tasks == 1).nonzero()[0])
    x = memory.rows[row] * memory.scale[1] + memory.shift[1]
    task = made.task(1)
    every = task.train.gather(torch.arange(len(task.train))).flatten(1)
    same = ((every - x).abs().amax(1) < 1e-5).nonzero().flatten()
    assert memory.targets[row] in task.train_labels[same]


def test_memory_never_leaves_the_client() -> None:
    client = client_of(experiment())
    _, ending = Er().exchanges(client.context)
    assert not ending.communicates


def test_every_example_stays_with_equal_probability() -> None:
    made = experiment()
    counts = np.zeros(3)
    for seed in range(60):
        memory = remembered(made, 20, seed=seed)
        counts += np.bincount(memory.tasks.numpy(), minlength=3)
    expected = 60 * 20 / 3  # the three tasks have the same number of examples
    deviation = np.sqrt(60 * 20 * (1 / 3) * (2 / 3))
    assert np.abs(counts - expected).max() < 4 * deviation


def test_replay_loss_is_the_mean_over_both_batches() -> None:
    made = experiment()
    memory = remembered(made, 1, tasks=1)
    client = client_of(made, 1, state=ReplayMemory(memory, 1))
    batch = client.data.batch(client.data.index[:5])
    found = loss_of(made, Er(replay_batch=3), client, batch)
    x = memory.rows * memory.scale[0] + memory.shift[0]  # the one row of the memory, three times
    both = torch.cat([x.reshape(1, 1, 8, 8).expand(3, -1, -1, -1), batch.x])
    y = torch.cat([memory.targets.expand(3), batch.y])
    logits = made.network.logits(client.params, both, ForwardPass())
    torch.testing.assert_close(found, torch.nn.functional.cross_entropy(logits, y))


def test_empty_memory_adds_nothing() -> None:
    made = experiment({"kind": "er"})
    client = client_of(made, 1)
    batch = client.data.batch(client.data.index[:5])
    found = loss_of(made, Er(), client, batch)
    logits = made.network.logits(client.params, batch.x, ForwardPass())
    torch.testing.assert_close(found, torch.nn.functional.cross_entropy(logits, batch.y))


def test_replayed_rows_compete_as_their_task_did_or_as_today() -> None:
    own_task = torch.tensor([[True, True, False]])
    seen, task = torch.tensor([True, True, True, True]), torch.tensor([False, False, True, True])
    assert past_active_outputs(own_task, seen).tolist() == [[True, True, True, True]]
    assert past_active_outputs(own_task, task).tolist() == [[True, True, False, False]]
    both = past_active_outputs(own_task.expand(2, 1, 3), torch.stack([seen, task]).unsqueeze(1))
    assert both.tolist() == [[[True] * 4], [[True, True, False, False]]]


def test_a_longer_memory_knows_the_outputs_of_each_task() -> None:
    made = experiment(
        stream={"kind": "split", "tasks": 3}, model={"hidden": [8], "head": "growing"}
    )
    memory = remembered(made, 30)
    assert memory.active_outputs is not None
    outputs = [mask.nonzero().flatten().tolist() for mask in memory.active_outputs]
    firsts = [made.network.outputs.first_output(task) for task in range(4)]
    assert outputs == [list(range(a, b)) for a, b in pairwise(firsts)]
    allowed = memory.active_outputs[memory.tasks, memory.targets]
    assert allowed.all()


def test_replay_prevents_forgetting() -> None:
    more = {"train": TINY["train"] | {"rounds": 6}, "data": {"limit": 400}}
    plain, replayed = (
        perdure.run(config({"kind": kind}, **more)).metrics["task_agnostic"]["BWT"]
        for kind in ("fedavg", "er")
    )
    assert replayed > plain


# ---- distillation


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
