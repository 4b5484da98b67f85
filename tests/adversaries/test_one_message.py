"""One message of one node: it costs that client its place in the round, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from in_process import in_process_engine
from safetensors.torch import load_file
from torch import Tensor

from perdure.contract import ClientResult, Each, Exchange, Method, Needs, Sum, Train
from perdure.contract.uploads import FailedUpload
from perdure.core.errors import RunError
from perdure.core.trees import Tensors
from perdure.evaluation.counts import is_possible
from perdure.federation.messages import pack, to_tensor, unpack
from perdure.privacy.secagg.messages import MaskedRow, decode, encode
from perdure.runs.run import run

CONFIG: dict[str, Any] = {
    "stream": {"kind": "split", "tasks": 2},
    "clients": {"count": 4},
    "model": {"kind": "mlp", "hidden": [8]},
    "train": {"rounds": 1, "batch_size": 64},
    "data": {"limit": 160},
    "engine": {"kind": "flower"},
    "device": "cpu",
}
HOSTILE = 2
Spoil = Callable[[Any], None]


def spoiled_run(tmp_path: Path, config: dict[str, Any], kind: str, spoil: Spoil) -> Any:
    """Run a federation in which one node changes its replies of one kind."""
    engine, transport = in_process_engine(config, tmp_path)

    def change(node: int, request: Any, reply: Any) -> Any:
        if node != HOSTILE or request.kind != kind:
            return reply
        tree = unpack(reply)
        spoil(tree)
        return pack(tree)

    transport.spoil = change
    return run(config, out=tmp_path / "run", engine=engine)


def expect_one_left_out(result: Any) -> list[str]:
    """Check that the hostile client alone was left out, and return the reasons."""
    values = result.values
    left_out = {entry["client"] for entry in values["failures"] + values["rejected_updates"]}
    assert left_out <= {HOSTILE}
    assert values["client_updates"] >= 6
    model = load_file(Path(result.path) / "model" / "model.safetensors")
    assert all(bool(torch.isfinite(v).all()) for v in model.values() if v.is_floating_point())
    return [failure["reason"] for failure in values["failures"]]


def upload_of(tree: Any) -> Any:
    return tree["uploads"][str(HOSTILE)]


# ---- weights and values


@pytest.mark.parametrize("weight", [1e308, 3e38, 1e39, 10**300, 10**400, 1e31])
def test_a_weight_that_overflows_sums(weight: float, tmp_path: Path) -> None:
    def spoil(tree: Any) -> None:
        upload_of(tree)["update"]["weight"] = weight

    expect_one_left_out(spoiled_run(tmp_path, CONFIG, "train", spoil))


@pytest.mark.parametrize(
    ("kind", "size"), [("fedavg", 1e20), ("fedavg", 1e29), ("fedavg", 3e38), ("fedomg", 3e38)]
)
def test_values_that_overflow_the_mean(kind: str, size: float, tmp_path: Path) -> None:
    def spoil(tree: Any) -> None:
        for value in upload_of(tree)["update"]["value"].values():
            value.fill_(size)

    result = spoiled_run(tmp_path, {**CONFIG, "method": {"kind": kind}}, "train", spoil)
    reasons = expect_one_left_out(result)
    assert reasons or result.values["rejected_updates"] or kind == "fedomg"  # it normalizes


@dataclass(frozen=True)
class Kept:
    """State of the method below."""

    value: Tensors = field(default_factory=dict)


@dataclass(frozen=True)
class Divides(Method):
    """FedAvg with a task-end exchange whose server divides by what clients send."""

    ServerState = Kept

    @property
    def needs(self) -> Needs:
        return Needs(per_client_fields=("x",))

    def exchanges(self, context: Any) -> list[Any]:
        return [Train(), Exchange("divide", client_work=self.send, aggregate=self.divide)]

    def send(self, client: Any) -> ClientResult:
        fields = {"x": Each({"x": torch.ones(2)}), "y": Sum({"y": torch.ones(2)}, 1.0)}
        return ClientResult(fields)

    def divide(self, server: Any, uploads: Any, context: Any) -> Any:
        means = [1 / value["x"] for value in uploads.per_client["x"].values()]
        total = uploads.total("y")["y"]
        assert total.tolist() == [float(len(means))] * 2  # sums are of the same clients
        return replace(server, state=Kept({"mean": sum(means, torch.zeros(2))}))


DIVIDES = {**CONFIG, "method": {"kind": f"{__name__}.Divides"}}


def test_a_state_that_would_not_be_finite(tmp_path: Path) -> None:
    def spoil(tree: Any) -> None:
        upload_of(tree)["x"]["value"]["x"].zero_()

    reasons = expect_one_left_out(spoiled_run(tmp_path, DIVIDES, "exchange", spoil))
    assert len(reasons) == 2
    assert all("state/value/mean of the server would not be finite" in text for text in reasons)


def test_nothing_that_is_not_finite_is_saved(tmp_path: Path) -> None:
    """If all clients send it, nobody can be left out: the run stops, and can be resumed."""
    engine, transport = in_process_engine(DIVIDES, tmp_path)

    def spoil(node: int, request: Any, reply: Any) -> Any:
        if request.kind != "exchange" or request.position.task == 0:
            return reply
        tree = unpack(reply)
        tree["uploads"][str(node)]["x"]["value"]["x"].zero_()
        return pack(tree)

    transport.spoil = spoil
    with pytest.raises(RunError, match="would not be finite"):
        run(DIVIDES, out=tmp_path / "run", engine=engine)
    transport.spoil = lambda node, request, reply: reply
    values = run(DIVIDES, out=tmp_path / "run", resume=True, engine=engine).values
    assert values["rounds"] == 2


# ---- fields that only the method can check


def taller(basis: Tensor) -> Tensor:
    return torch.cat([basis, basis[:1]])


def empty_and_taller(basis: Tensor) -> Tensor:
    return basis.new_zeros(len(basis) + 1, 0)


def huge(basis: Tensor) -> Tensor:
    return torch.full_like(basis, 3e38)


@pytest.mark.parametrize("change", [taller, empty_and_taller, huge])
@pytest.mark.parametrize("bases", ["union", "pooled", "sequential"])
def test_a_basis_of_another_space(
    bases: str, change: Callable[[Tensor], Tensor], tmp_path: Path
) -> None:
    def spoil(tree: Any) -> None:
        upload = upload_of(tree)
        name = "bases" if bases == "union" else "directions"
        for key, value in upload.get(name, {"value": {}})["value"].items():
            if value.dim() == 2:
                upload[name]["value"][key] = change(value)

    config = {**CONFIG, "method": {"kind": "fedprotip", "bases": bases}}
    values = spoiled_run(tmp_path, config, "exchange", spoil).values
    left_out = {entry["client"] for entry in values["failures"] + values["rejected_updates"]}
    assert left_out <= {HOSTILE}
    assert left_out or change is huge


def test_references_of_another_number_of_tasks(tmp_path: Path) -> None:
    def spoil(tree: Any) -> None:
        upload = upload_of(tree)
        if "references" in upload:
            upload["references"]["value"]["rows"] = torch.ones(5, 5)

    config = {**CONFIG, "method": {"kind": "fedprotip"}}
    reasons = expect_one_left_out(spoiled_run(tmp_path, config, "exchange", spoil))
    assert any("references of client 2: must be of shape" in reason for reason in reasons)


def test_a_form_that_only_the_first_to_reply_has(tmp_path: Path) -> None:
    """A field too many, in a round without the others, does not shut them out of later rounds."""
    config = {**CONFIG, "train": {"rounds": 3, "max_steps": 1}}
    engine, transport = in_process_engine(config, tmp_path)

    def change(node: int, request: Any, reply: Any) -> Any:
        if request.kind != "train" or isinstance(reply, FailedUpload):
            return reply
        if node != HOSTILE:
            return FailedUpload(node, "late") if request.position.round == 0 else reply
        tree = unpack(reply)
        more = {"type": "Sum", "weight": None, "value": {"x": torch.zeros(2)}}
        upload_of(tree)["more"] = more
        return pack(tree)

    transport.spoil = change
    failures = run(config, engine=engine).values["failures"]
    left_out = [each["client"] for each in failures if each["reason"] != "late"]
    assert left_out == [HOSTILE] * 4  # two rounds in each of two tasks


# ---- secure sums

SECURE = {**CONFIG, "clients": {"count": 5}, "privacy": {"secagg": True}}


@pytest.mark.parametrize(
    "key",
    [b"", b"short", bytes(32), b"\x01" + bytes(31), bytes(33)],
    ids=["none", "short", "zero", "low order", "long"],
)
def test_a_public_key_that_nobody_can_use(key: bytes, tmp_path: Path) -> None:
    def spoil(tree: Any) -> None:
        tree["public_keys"][str(HOSTILE)] = to_tensor(key)

    reasons = expect_one_left_out(spoiled_run(tmp_path, SECURE, "public_keys", spoil))
    assert set(reasons) == {"its public key is not valid"}
    assert len(reasons) == 2  # once per round


@pytest.mark.parametrize("change", [{"padded_seed": b""}, {"self_commitment": b"x" * 15}])
def test_a_masked_upload_with_fields_of_another_length(change: Any, tmp_path: Path) -> None:
    def spoil(tree: Any) -> None:
        message = decode(bytes(tree["masked"][str(HOSTILE)].numpy()), MaskedRow)
        tree["masked"][str(HOSTILE)] = to_tensor(encode(replace(message, **change)))

    expect_one_left_out(spoiled_run(tmp_path, SECURE, "train", spoil))


# ---- counts


@pytest.mark.parametrize("size", [1e160, 1e308])
def test_sums_of_errors_whose_squares_overflow_are_impossible(size: float) -> None:
    errors = torch.tensor([3.0, size, size, size, size], dtype=torch.float64)
    assert not is_possible("errors", errors, 1, 10.0)


# ---- numbers of uploads

NOISY = {**CONFIG, "privacy": {"clip": 1.0, "noise": 1.0, "mode": "local"}}
CLAIMS: dict[str, dict[str, Any]] = {
    "a client of 5000 digits": {"9" * 5000: 3},
    "clients of other nodes": {"0": 900, "1": 900},
    "clients that do not exist": {str(number): 2 for number in range(4, 10_000)},
    "other types": {str(HOSTILE): "2"},
    "a count of many digits": {str(HOSTILE): 10**400},
    "a list": {"list": []},
    "too many": {str(HOSTILE): 10**6},
    "no number": {str(HOSTILE): True},
}


@pytest.mark.parametrize("claim", CLAIMS)
def test_uploads_that_no_client_repeated(claim: str, tmp_path: Path) -> None:
    """What a node says of its own client alone is added to the accounting of noise."""

    def spoil(tree: Any) -> None:
        tree["releases"] = CLAIMS[claim].get("list", CLAIMS[claim])

    values = spoiled_run(tmp_path, NOISY, "train", spoil).values
    engine, _ = in_process_engine(NOISY, tmp_path / "honest")
    honest = run(NOISY, engine=engine).values
    assert values["privacy"]["epsilon"] == honest["privacy"]["epsilon"]


def test_uploads_that_a_client_says_it_repeated(tmp_path: Path) -> None:
    def spoil(tree: Any) -> None:
        tree["releases"] = {str(HOSTILE): 3}

    values = spoiled_run(tmp_path, NOISY, "train", spoil).values
    engine, _ = in_process_engine(NOISY, tmp_path / "honest")
    honest = run(NOISY, engine=engine).values
    assert values["privacy"]["epsilon"] > honest["privacy"]["epsilon"]
