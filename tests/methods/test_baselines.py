"""EWC, ER, LwF and FLwF-2T against computations that share no code with them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import perdure
from perdure.config import parse
from perdure.errors import UserError
from perdure.federation.experiment import Experiment, prepare
from perdure.federation.loop import run_stream
from perdure.methods.base import Batch, Client, Net
from perdure.methods.er import Er, competitors
from perdure.methods.ewc import Ewc
from perdure.methods.flwf_2t import Flwf2T
from perdure.methods.lwf import Lwf, distillation
from perdure.models.passes import Pass

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
    state = experiment.start()
    place = replace(experiment.place(state), task=task)
    found = experiment.client(number, place, state.server, {"params": state.server.params})
    return replace(found, **more)


def experiment(method: dict[str, Any] | None = None, **more: Any) -> Experiment:
    return prepare(parse(config(method or {"kind": "fedavg"}, **more)))


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
            "model": {"hidden": [8], "dropout": 0.2},
            "train": TINY["train"] | {"outputs": "seen"},
        },
    ],
    ids=["growing", "presence"],
)
def test_engines_agree(method: dict[str, Any], more: dict[str, Any]) -> None:
    runs = [perdure.run(config(method, engine, **more)) for engine in ("serial", "vector")]
    one, two = (np.array(r.values["matrix"]["task_aware"][-1], dtype=float) for r in runs)
    np.testing.assert_allclose(one, two, atol=0.01)


@pytest.mark.parametrize("method", [{"kind": "ewc", "samples": 8}, {"kind": "lwf"}], ids=str)
def test_convolutions_too_on_both_engines(
    method: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    few = {
        "data": {"limit": 60, "test_limit": 40},
        "stream": {"kind": "split", "tasks": 2},
        "model": {"kind": "conv", "width": 4},
        "train": {"rounds": 1, "lr": 0.1},
    }
    found = []
    for engine in ("serial", "vector"):
        made = prepare(parse(config(method, engine, **few)))
        found.append(run_stream(made, made.start(), lambda *_: None).server.params)
    for name, value in found[0].items():
        torch.testing.assert_close(value, found[1][name], rtol=1e-3, atol=1e-4, msg=name)
    assert "cannot be vectorised" not in caplog.text


# ---- EWC


def test_statistics_of_a_single_example_are_refused() -> None:
    model = {"hidden": [8], "norm": "batch", "running_stats": False}
    with pytest.raises(
        UserError, match=r"^model\.running_stats: got False, allowed with ewc: true"
    ):
        experiment({"kind": "ewc"}, model=model)
    experiment({"kind": "ewc"}, model=model | {"norm": "group"})


def test_empirical_fisher_is_the_mean_of_squared_gradients() -> None:
    client = client_of(experiment())
    found = Ewc(fisher="empirical", samples=None).information(client)
    squares = {name: np.zeros(value.shape) for name, value in client.params.items()}
    for row in client.shard.index:
        leaves = {n: v.clone().requires_grad_() for n, v in client.params.items()}
        x = client.shard.inputs.gather(row.reshape(1)).flatten(1)
        hidden = torch.relu(x @ leaves["fc1.weight"].T + leaves["fc1.bias"])
        logits = hidden @ leaves["head.weight"].T + leaves["head.bias"]
        loss = torch.nn.functional.cross_entropy(logits, client.shard.targets[row].reshape(1))
        loss.backward()
        for name, leaf in leaves.items():
            squares[name] += leaf.grad.numpy() ** 2  # type: ignore[union-attr]
    for name, value in squares.items():
        np.testing.assert_allclose(found[name], value / len(client.shard), rtol=1e-3, atol=1e-7)


def test_labels_for_the_fisher_come_from_the_model() -> None:
    made = experiment()
    client = client_of(made)
    sharp = client.params | {"head.weight": torch.zeros_like(client.params["head.weight"])}
    bias = torch.full_like(client.params["head.bias"], -50.0)
    bias[3] = 50.0  # certain of output 3: its own labels carry no surprise, the data's do
    client = replace(client, params=sharp | {"head.bias": bias})
    assert max(float(v.max()) for v in Ewc().information(client).values()) < 1e-12
    assert float(Ewc(fisher="empirical").information(client)["head.bias"].max()) > 0.1


def test_kept_sums_give_the_gradient_of_the_whole_penalty() -> None:
    rng = np.random.default_rng(0)
    fishers, models = rng.uniform(size=(3, 5)), rng.normal(size=(3, 5))
    w, g = rng.normal(size=5), rng.normal(size=5)
    own = {
        "fisher.w": torch.tensor(fishers.sum(0)),
        "pull.w": torch.tensor((fishers * models).sum(0)),
    }
    method = Ewc(lambda_=2.0, step="gradient")
    found = method.gradient({"w": torch.tensor(g)}, {"w": torch.tensor(w)}, {}, own)["w"]
    expected = g + 2.0 * sum(f * (w - m) for f, m in zip(fishers, models, strict=True))
    np.testing.assert_allclose(found, expected)


def test_implicit_step_solves_its_equation_and_never_runs_away() -> None:
    fisher, target, w = (torch.tensor(v).double() for v in ([0, 1, 1e6], [1, 2, 3], [0, 0, 0]))
    own = {"fisher.w": fisher, "pull.w": fisher * target}
    new = Ewc(lambda_=10.0).settle({"w": w}, {}, {}, own, 0.1)["w"]
    torch.testing.assert_close(new, w - 0.1 * 10.0 * fisher * (new - target))
    torch.testing.assert_close(new, torch.tensor([0.0, 1.0, 3.0]).double(), atol=1e-5, rtol=0)


def test_fisher_is_added_up_over_tasks_and_not_sent() -> None:
    client = client_of(experiment())
    method = Ewc(fisher="empirical", samples=None)
    first = method.extract(client)
    assert not first.upload
    assert first.kept is not None
    second = method.extract(replace(client, kept=first.kept)).kept
    assert second is not None
    for name, value in first.kept["fisher"].items():
        torch.testing.assert_close(second["fisher"][name], 2 * value)
        torch.testing.assert_close(second["pull"][name], 2 * value * client.params[name])


# ---- ER


def grown(made: Experiment, budget: int, tasks: int = 3) -> tuple[Client, dict[str, Any]]:
    """A client whose memory has gone through some tasks."""
    kept: dict[str, Any] = {}
    for task in range(tasks):
        client = client_of(made, task, kept=kept)
        kept = dict(Er(budget=budget).extract(client).kept or {})
    return client, kept


def test_memory_keeps_to_its_budget_and_gives_the_images_back() -> None:
    made = experiment()
    _, kept = grown(made, 25)
    assert kept["rows"].shape == (25, 64)
    assert kept["rows"].dtype == torch.uint8
    assert set(kept["of"].tolist()) == {0, 1, 2}
    row = int((kept["of"] == 1).nonzero()[0])
    x = kept["rows"][row] * kept["scale"][1] + kept["shift"][1]
    task = made.task(1)
    every = task.train.gather(torch.arange(len(task.train))).flatten(1)
    same = ((every - x).abs().amax(1) < 1e-5).nonzero().flatten()
    assert kept["targets"][row] in task.train_labels[same]


def test_every_example_stays_with_equal_probability() -> None:
    made = experiment()
    counts = np.zeros(3)
    for seed in range(60):
        kept: dict[str, Any] = {}
        for task in range(3):
            client = client_of(made, task, kept=kept)
            drawn = replace(client.place, draws=type(client.place.draws)(seed))
            kept = dict(Er(budget=20).extract(replace(client, place=drawn)).kept or {})
        counts += np.bincount(kept["of"].numpy(), minlength=3)
    expected = 60 * 20 / 3  # the three tasks have the same number of examples
    deviation = np.sqrt(60 * 20 * (1 / 3) * (2 / 3))
    assert np.abs(counts - expected).max() < 4 * deviation


def test_replay_loss_is_the_mean_over_both_batches() -> None:
    made = experiment()
    client, kept = grown(made, 1, tasks=1)
    client = client_of(made, 1, kept=kept)
    method, own = Er(replay_batch=3), Er().prepare(client)
    batch = client.shard.batch(client.shard.index[:5])
    net = Net(made.network, Pass(train=True, key=torch.tensor(7)))
    found = method.loss(net, client.params, batch, {}, own)
    x = kept["rows"] * kept["scale"][0] + kept["shift"][0]  # the one row of the memory, three times
    both = torch.cat([x.reshape(1, 1, 8, 8).expand(3, -1, -1, -1), batch.x])
    y = torch.cat([kept["targets"].expand(3), batch.y])
    logits = made.network.logits(client.params, both, Pass())
    torch.testing.assert_close(found, torch.nn.functional.cross_entropy(logits, y))


def test_empty_memory_adds_nothing() -> None:
    made = experiment()
    client = client_of(made, 1)
    batch = client.shard.batch(client.shard.index[:5])
    net = Net(made.network, Pass(train=True, key=torch.tensor(7)))
    found = Er().loss(net, client.params, batch, {}, Er().prepare(client))
    logits = made.network.logits(client.params, batch.x, Pass())
    torch.testing.assert_close(found, torch.nn.functional.cross_entropy(logits, batch.y))


def test_replayed_rows_compete_as_their_task_did_or_as_today() -> None:
    own_task = torch.tensor([[True, True, False]])
    seen, task = torch.tensor([True, True, True, True]), torch.tensor([False, False, True, True])
    assert competitors(own_task, seen, 4).tolist() == [[True, True, True, True]]
    assert competitors(own_task, task, 4).tolist() == [[True, True, False, False]]


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
    mask = np.array([1.0, 1.0, 0.0, 1.0])
    batch = Batch(torch.zeros(4), torch.zeros(4), torch.tensor(mask))
    found = distillation(
        batch, torch.tensor(student), torch.tensor(teacher), torch.tensor([*among, True, True]), 2.0
    )
    assert float(found) == pytest.approx((expected * mask).sum() / 3)


def losses(method: Lwf | Flwf2T) -> tuple[float, float, float, float]:
    """The method's loss with a teacher, and cross-entropy and both distillations by themselves."""
    made = experiment()
    client = client_of(made, 1)
    batch = client.shard.batch(client.shard.index[:6])
    teacher = {n: v + 0.3 * torch.sin(torch.arange(v.numel())).reshape(v.shape)
               for n, v in client.params.items()}  # fmt: skip
    mine = {n: v * 1.5 for n, v in client.params.items()}
    received = {"params": client.params, "teacher": teacher}
    net = Net(made.network, Pass())
    found = method.loss(net, mine, batch, received, method.prepare(client))

    def logits(params: dict[str, torch.Tensor]) -> torch.Tensor:
        return made.network.logits(params, batch.x, Pass())

    def distilled(params: dict[str, torch.Tensor]) -> float:
        aim = (logits(params) / 2).softmax(1)
        return float(torch.nn.functional.cross_entropy(logits(mine) / 2, aim))

    new = float(torch.nn.functional.cross_entropy(logits(mine), batch.y))
    return float(found), new, distilled(teacher), distilled(client.params)


def test_lwf_loss() -> None:
    found, new, past, _ = losses(Lwf(lambda_=0.7))
    assert found == pytest.approx(new + 0.7 * past, rel=1e-5)


def test_flwf_2t_loss() -> None:
    found, new, past, server = losses(Flwf2T(alpha=0.5, beta=0.3))
    assert found == pytest.approx(0.5 * new + 0.3 * past + 0.2 * server, rel=1e-5)


def test_weights_that_leave_nothing_for_the_server_are_refused() -> None:
    with pytest.raises(
        perdure.errors.UserError, match=r"method.beta: got 0.7, allowed: at most 0.5"
    ):
        perdure.run(config({"kind": "flwf-2t", "alpha": 0.5, "beta": 0.7}))


def test_teacher_travels_once_a_task() -> None:
    plain, taught = (
        perdure.run(config({"kind": kind})).values["bytes"]["by_field"]
        for kind in ("fedavg", "lwf")
    )
    assert plain["down/params"] == taught["down/params"]
    # at most once for each of 4 clients in each of 2 tasks
    assert 0 < taught["down/teacher"] <= 8 * plain["down/params"] / 18 * 1.05
