"""FOT: server projection, GPSE with sums only, its options."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from dp_accounting import GaussianDpEvent
from dp_accounting.rdp import RdpAccountant
from subspace_runs import (
    SMALL,
    clients_of,
    experiment_of,
    interference,
    next_task,
    second_task,
    train_task,
)

import perdure
from perdure.contract import Change, Client, ClientResult, CollectedUploads, Context, Server, Sum
from perdure.contract.exchanges import split_exchanges
from perdure.contract.uploads import Upload
from perdure.core.errors import UserError
from perdure.core.trees import subtract
from perdure.methods.fot import FOT, ProtectedState
from perdure.methods.parts.protected_layers import (
    layer_subspace,
    layers_shared_by_tasks,
)
from perdure.methods.registry import build
from perdure.training.loop import begin_task, end_task
from perdure.training.round import train_round


def test_update_of_a_round_has_nothing_in_the_protected_space() -> None:
    experiment, state = second_task({"kind": "fot", "threshold": 0.9})
    before = state.server.params
    train_round(experiment, state)
    change = subtract(state.server.params, before)
    spaces = state.server.state.spaces
    assert set(spaces) == {"fc1.weight", "fc2.weight", "head.weight"}
    assert interference(change, spaces) < 1e-5
    assert float(change["fc1.weight"].norm()) > 1e-3
    assert all(float(change[name].abs().max()) == 0 for name in change if name.endswith("bias"))


def test_the_first_task_is_the_plain_mean_of_unequal_clients() -> None:
    def trained(method: dict[str, object], **sections: object) -> dict[str, torch.Tensor]:
        experiment = experiment_of(method, **sections)
        state = experiment.initial_state()
        train_task(experiment, state, ended=False)
        return state.server.params

    fot = trained({"kind": "fot"})
    plain = trained({"kind": "fedavg"}, train={"weighting": "uniform"})
    by_samples = trained({"kind": "fedavg"})
    assert all(torch.equal(value, plain[name]) for name, value in fot.items())
    assert not any(torch.equal(value, by_samples[name]) for name, value in fot.items())


def test_fed_project_is_the_projection_of_the_mean_by_numpy() -> None:
    experiment = experiment_of({"kind": "fot"})
    state = experiment.initial_state()
    basis = np.linalg.qr(np.random.default_rng(0).normal(size=(64, 5)))[0]
    space = {"fc1.weight": {"basis": torch.tensor(basis, dtype=torch.float32)}}
    server = Server(state.server.params, {}, ProtectedState(space))
    update = {"fc1.weight": torch.randn(30, 64)}
    adjust = experiment.exchanges(state).train.adjust
    assert adjust is not None
    before = Change(update, {}, server.state)
    change = adjust(server, before, CollectedUploads(), experiment.context(state)).params
    expected = update["fc1.weight"].double().numpy() @ (np.eye(64) - basis @ basis.T)
    np.testing.assert_allclose(change["fc1.weight"], expected, atol=1e-5)


def inputs_by_hand(experiment: object, state: object, layer: str) -> list[np.ndarray]:
    """Each client's layer inputs, by plain numpy products with the global weights."""
    found = []
    for client in clients_of(experiment, state, {}):  # type: ignore[arg-type]
        x = np.concatenate([batch.x.flatten(1).numpy() for batch in client.data.batches()])
        for name in ("fc1", "fc2"):
            if layer.startswith(name):
                break
            weight, bias = client.params[f"{name}.weight"], client.params[f"{name}.bias"]
            x = np.maximum(x @ weight.numpy().T + bias.numpy(), 0)
        found.append(x.T)
    return found


@pytest.mark.parametrize("rule", ["paper", "energy"])
def test_the_subspace_covers_the_threshold(rule: str) -> None:
    """After the first task the share of squared norms in the space is th, up to the sketch."""
    method = {"kind": "fot", "threshold": 0.9, "rank_rule": rule, "sketch_ratio": 40.0}
    experiment = experiment_of(method)
    state = experiment.initial_state()
    train_task(experiment, state)
    for layer in layers_shared_by_tasks(experiment.network):
        inputs = np.concatenate(inputs_by_hand(experiment, state, layer.name), axis=1)
        values = np.linalg.svd(inputs, compute_uv=False) ** 2
        best = int(np.argmax(np.cumsum(values) / values.sum() > 0.9)) + 1
        space = layer_subspace(state.server.state.spaces, layer)
        outside = (
            space.project_out_columns(torch.tensor(inputs)).norm().square() / (inputs**2).sum()
        )
        assert abs(space.rank - best) <= 1
        assert 1 - float(outside) > 0.87


@pytest.mark.parametrize("rule", ["paper", "energy"])
def test_shares_by_numpy(rule: str) -> None:
    experiment = experiment_of({"kind": "fot", "threshold": 0.8, "rank_rule": rule})
    state = experiment.initial_state()
    train_task(experiment, state)
    spaces = state.server.state.spaces
    inputs = inputs_by_hand(experiment, state, "fc2.weight")
    layer = layers_shared_by_tasks(experiment.network)[1]
    for client, x in zip(clients_of(experiment, state, {"spaces": spaces}), inputs, strict=True):
        share = experiment.method.send_sketches(client).fields["shares"]
        outside = (
            layer_subspace(spaces, layer).project_out_columns(torch.tensor(x)).double().numpy()
        )
        ratio = np.linalg.norm(outside) / np.linalg.norm(x)
        value = share.value["fc2.weight"].numpy()
        assert isinstance(share, Sum)
        if rule == "paper":
            assert share.weight == x.shape[1]
            np.testing.assert_allclose(value, ratio, rtol=1e-4)
        else:
            np.testing.assert_allclose(value[0] / value[1], ratio**2, rtol=1e-4)


def test_only_sums_leave_a_client() -> None:
    experiment = experiment_of({"kind": "fot", "sketch_ratio": 2.0})
    state = experiment.initial_state()
    begin_task(experiment, state)
    for client in clients_of(experiment, state, {}):
        done = experiment.method.send_sketches(client)
        assert done.state is None
        assert all(isinstance(part, Sum) for part in done.fields.values())
        assert done.fields["sketch"].value["fc1.weight"].shape == (64, 128)


class Gpse(NamedTuple):
    """What a run of one task was about in GPSE."""

    sent: list[tuple[Client, Upload]]
    uploads: list[CollectedUploads]
    event: dict[str, Any]


def watch(**sections: Any) -> Gpse:
    """Run one task and note what clients send in GPSE and what the server gets."""
    sent: list[tuple[Client, Upload]] = []
    uploads: list[CollectedUploads] = []

    class Watched(FOT):
        def send_sketches(self, client: Client) -> ClientResult:
            result = super().send_sketches(client)
            sent.append((client, result.fields))
            return result

        def extend_subspaces(
            self, server: Server, got: CollectedUploads, context: Context
        ) -> Server:
            uploads.append(got)
            return super().extend_subspaces(server, got, context)

    experiment = experiment_of({"kind": "fot"}, **sections)
    object.__setattr__(experiment, "method", Watched(threshold=0.95, sketch_ratio=5.0))
    return Gpse(sent, uploads, train_task(experiment, experiment.initial_state()))


def test_all_holders_take_part_also_when_few_are_sampled() -> None:
    gpse = watch(clients={"count": 4, "per_round": 1})
    assert [client.id for client, _ in gpse.sent] == [0, 1, 2, 3]
    assert 0 < gpse.event["method"]["used_mean"] < 1
    assert gpse.event["method"]["sketch_bytes"] == 4 * 5 * (64**2 + 30**2 + 20**2)


@pytest.mark.parametrize("weighting", ["uniform", "samples"])
def test_sketches_are_summed_as_they_are_and_shares_averaged_over_rows(weighting: str) -> None:
    """Eq. 10, whatever the weights of the updates: clients have unequal numbers of rows."""
    sent, (uploads,), _ = watch(train={"weighting": weighting})
    rows = [len(client.data) for client, _ in sent]
    assert len(set(rows)) > 1
    for name, total in uploads.total("sketch").items():
        expected = sum(fields["sketch"].value[name].double() for _, fields in sent)
        torch.testing.assert_close(total.double(), expected, rtol=1e-5, atol=1e-4)
    for name, mean in uploads.mean("shares").items():
        each = [float(fields["shares"].value[name]) for _, fields in sent]
        assert float(mean) == pytest.approx(np.average(each, weights=rows), rel=1e-6)


def test_nothing_is_added_where_enough_is_covered() -> None:
    method = {"kind": "fot", "threshold": 0.6, "rank_rule": "energy", "sketch_ratio": 200.0}
    experiment = experiment_of(method)
    state = experiment.initial_state()
    first = train_task(experiment, state)["method"]["used"]
    end_task(experiment, state)  # the same task again
    found = experiment.method.diagnose(state.server, experiment.context(state))
    again = found.numbers["used"]
    assert again == first


def test_subset_of_layers() -> None:
    """Table 14: other layers are frozen after the first task, or trained without protection."""
    for others, expected in (("frozen", {"fc2.weight"}), ("finetune", None)):
        experiment = experiment_of({"kind": "fot", "layers": ["fc2.weight"], "unprotected": others})
        state = experiment.initial_state()
        train_task(experiment, state)
        next_task(state)
        names = set(experiment.exchanges(state).train.trainable or ())
        if expected:
            assert names == expected
        else:
            assert names == {"fc1.weight", "fc1.bias", "fc2.weight", "head.weight", "head.bias"}
        assert set(state.server.state.spaces) == {"fc2.weight"}
    half = FOT(layers="second_half")
    assert [x.name for x in half.protected_layers(experiment.network)] == [
        "fc2.weight",
        "head.weight",
    ]


def test_frozen_first_layer() -> None:
    experiment = experiment_of({"kind": "fot", "freeze_first": True, "unprotected": "finetune"})
    state = experiment.initial_state()
    train_task(experiment, state)
    next_task(state)
    names = experiment.exchanges(state).train.trainable
    assert names == ("fc2.weight", "head.weight")
    assert "fc1.weight" not in state.server.state.spaces


def test_noise_of_appendix_h() -> None:
    method = FOT(sketch_noise="standard", epsilon=0.5, clip=2.0)
    assert method.noise is not None
    sketches, shares = {"a": torch.full((40, 50), 9.0)}, {"a": torch.tensor(0.7)}
    generator = torch.Generator().manual_seed(0)
    noisy, told = method.noise.add_noise(sketches, shares, 10, generator)
    clipped = 9.0 * 2.0 / float(torch.full((40, 50), 9.0).norm())
    sigma = 2.0 * np.sqrt(2 * np.log(1.25e5) / 10) / 0.5
    assert abs(float(noisy["a"].std()) / sigma - 1) < 0.1
    assert abs(float(noisy["a"].mean()) - clipped) < 5 * sigma / np.sqrt(2000)
    assert float(told["a"]) != pytest.approx(0.7)
    assert "no (epsilon, delta) guarantee" in FOT(sketch_noise="paper").noise.describe_guarantee(
        3, 5
    )  # type: ignore[union-attr]
    assert "not a proved guarantee" in FOT(sketch_noise="standard").noise.describe_guarantee(3, 5)  # type: ignore[union-attr]
    assert "(15, 0.0003)" in method.noise.describe_guarantee(3, 5)
    accountant = RdpAccountant()  # 30 sums, each with the noise of one Gaussian mechanism
    accountant.compose(GaussianDpEvent(np.sqrt(2 * np.log(1.25e5)) / 0.5), 30)
    said = f"Renyi accounting of the same noise ({accountant.get_epsilon(method.delta):.4g}"
    assert said in method.noise.describe_guarantee(3, 5)
    assert "in a simulation the noise derives from the run's seed" in (
        method.noise.describe_guarantee(3, 5)
    )


def test_a_claim_per_task_is_that_of_one_task() -> None:
    noise = FOT(sketch_noise="standard", epsilon=0.5).noise
    assert noise is not None
    assert "3 layers (per task) basic composition gives (3, 6e-05)" in noise.describe_guarantee(3)
    assert (
        noise.describe_guarantee(3).partition("basic")[2]
        == noise.describe_guarantee(3, 1).partition("basic")[2]
    )


def test_a_run_with_noise_reports_its_guarantee_for_the_tasks_so_far(
    caplog: pytest.LogCaptureFixture,
) -> None:
    experiment = experiment_of({"kind": "fot", "sketch_noise": "standard", "epsilon": 0.5})
    state = experiment.initial_state()
    with caplog.at_level("INFO", logger="perdure.methods.fot"):
        first = train_task(experiment, state)["method"]["privacy"]
        next_task(state)
        second = train_task(experiment, state)["method"]["privacy"]
    logged = [record.message for record in caplog.records if "privacy" in record.message]
    assert len(logged) == 1  # once, before the first task
    assert "per task" in logged[0]
    assert "tasks so far: 1" in first
    assert "(3, 6e-05)" in first
    assert "tasks so far: 2" in second
    assert "(6, 0.00012)" in second


def test_noise_as_printed_claims_no_guarantee() -> None:
    experiment = experiment_of({"kind": "fot", "sketch_noise": "paper"})
    event = train_task(experiment, experiment.initial_state())
    assert "no (epsilon, delta) guarantee" in event["method"]["privacy"]


@pytest.mark.parametrize(
    "options",
    [
        {"threshold": 0},
        {"threshold": 1.2},
        {"threshold_increment": -0.1},
        {"sketch_ratio": 0},
        {"sketch_ratio": {"fc1.weight": 0}},
        {"rank_rule": "best"},
        {"epsilon": 0},
        {"delta": 1},
        {"sketch": 3},
    ],
    ids=str,
)
def test_bad_values_are_refused_by_name(options: dict[str, object]) -> None:
    with pytest.raises(UserError, match=f"method.{next(iter(options))}"):
        build({"kind": "fot", **options})


def test_bad_layer_names_and_pairs_are_refused() -> None:
    with pytest.raises(UserError, match=r"method.layers: must be one of fc1.weight, .*, got 'fc9'"):
        experiment_of({"kind": "fot", "layers": ["fc9"]}).initial_state()
    with pytest.raises(UserError, match=r"method.rank_rule"):
        experiment_of({"kind": "fot", "sketch_noise": "standard", "rank_rule": "energy"})


@pytest.mark.parametrize("stream", ["permuted", "split"])
def test_bad_layer_names_are_refused_before_anything_is_written(
    stream: str, tmp_path: Path
) -> None:
    method = {"kind": "fot", "layers": ["fc9"]}
    values = {**SMALL, "stream": {"kind": stream, "tasks": 2}, "method": method}
    with pytest.raises(UserError, match=r"method.layers.*fc9"):
        perdure.run(values, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_task_with_nothing_left_to_train_is_refused_before_training() -> None:
    experiment = experiment_of({"kind": "fot", "layers": []})
    with pytest.raises(UserError, match=r"^method: freezes every parameter in task 2"):
        experiment.initial_state()


def test_thresholds_grow_by_task_up_to_one() -> None:
    method = FOT(threshold=0.9, threshold_increment=0.06)
    assert [round(method.threshold_at(task), 2) for task in range(3)] == [0.9, 0.96, 1.0]
    assert (
        FOT(sketch_ratio={"a": 2.0}).sketch_size(
            layers_shared_by_tasks(experiment_of({"kind": "fot"}).network)[0]
        )
        == 64  # layers that are not named have the default, 1 column per input
    )


def test_growing_heads_are_not_protected() -> None:
    sections = {"stream": {"kind": "split", "tasks": 2}, "model": {"head": "growing"}}
    experiment = experiment_of({"kind": "fot"}, **sections)
    state = experiment.initial_state()
    train_task(experiment, state)
    assert set(state.server.state.spaces) == {"fc1.weight", "fc2.weight"}
    next_task(state)
    begin_task(experiment, state)
    names = experiment.exchanges(state).train.trainable
    assert set(names or ()) == {"fc1.weight", "fc2.weight", "head.1.weight", "head.1.bias"}


@pytest.mark.parametrize("noise", ["none", "standard"])
def test_the_guarantee_is_logged_once_and_only_with_noise(
    noise: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="perdure.methods.fot")
    experiment = experiment_of({"kind": "fot", "sketch_noise": noise})
    state = experiment.initial_state()
    for _ in range(2):
        context = experiment.task_context(state.task, state.server.params)
        opening, _, ending = split_exchanges(experiment.method.exchanges(context))
        assert [exchange.name for exchange in (*opening, *ending)] == ["gpse"]
        train_task(experiment, state)
        next_task(state)
    assert sum("differentially private" in text for text in caplog.messages) == (
        noise == "standard"
    )


def test_the_noise_of_nobody_is_that_of_one_client() -> None:
    noise = FOT(sketch_noise="standard", epsilon=1.0, delta=1e-5).noise
    assert noise is not None
    assert noise.sigma(0, 1.0) == noise.sigma(1, 1.0) > noise.sigma(2, 1.0)
