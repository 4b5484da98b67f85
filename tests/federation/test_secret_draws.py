"""Draws that protect a client: on a node they do not come from the run's seed."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from in_process import in_process_engine, no_secrets

from perdure.contract import ClientResult, Each, Exchange, Method, Needs, Train
from perdure.core.rng import Rng
from perdure.federation.node.uploads import SecretDraws
from perdure.runs.run import run

CONFIG = {
    "stream": {"kind": "permuted", "tasks": 1},
    "clients": {"count": 3},
    "model": {"kind": "mlp", "hidden": [4]},
    "train": {"rounds": 1, "max_steps": 1},
    "data": {"limit": 90},
    "method": {"kind": f"{__name__}.Revealing"},
    "engine": {"kind": "flower"},
    "device": "cpu",
}
SEEN = {}


@dataclass(frozen=True)
class Revealing(Method):
    """FedAvg whose clients show their draws at the task's end."""

    @property
    def needs(self):
        return Needs(per_client_fields=("secret", "again", "other", "public"))

    def exchanges(self, context):
        return [Train(), Exchange("tell", client_work=self.tell, aggregate=self.listen)]

    def tell(self, client):
        sources = {
            "secret": client.secret("sketch"),
            "again": client.secret("sketch"),
            "other": client.secret("noise"),
            "public": client.draw("sketch"),
        }
        drawn = {name: torch.rand(8, generator=source) for name, source in sources.items()}
        return ClientResult({name: Each({"x": value}) for name, value in drawn.items()})

    def listen(self, server, uploads, context):
        found = uploads.per_client
        SEEN.update({n: {c: v["x"] for c, v in each.items()} for n, each in found.items()})
        return server


def result_of(tmp_path, **changes):
    config = {**CONFIG, "method": {"kind": "fot"}, **changes}
    engine = (
        in_process_engine(config, tmp_path)[0] if config["engine"]["kind"] == "flower" else None
    )
    return run(config, engine=engine).values


def shown(tmp_path, secrets=SecretDraws, engine="flower"):
    config = {**CONFIG, "engine": {"kind": engine}}
    made, transport = in_process_engine(config, tmp_path)
    transport.make_secret_source = secrets
    run(config, engine=made if engine == "flower" else None)
    return dict(SEEN)


def from_the_seed(client):
    return torch.rand(8, generator=Rng(0).torch_generator("sketch", 0, 1, client))


def test_secret_draws_of_nodes_are_not_those_of_the_seed(tmp_path):
    found = shown(tmp_path)
    for client in range(3):
        assert torch.equal(found["public"][client], from_the_seed(client))
        assert not torch.isclose(found["secret"][client], from_the_seed(client)).any()
        assert torch.equal(found["secret"][client], found["again"][client])
        assert not torch.isclose(found["secret"][client], found["other"][client]).any()
    assert not torch.isclose(found["secret"][0], found["secret"][1]).any()
    again = shown(tmp_path / "again")
    assert not torch.isclose(found["secret"][0], again["secret"][0]).any()


def test_the_source_of_secret_draws_can_be_replaced(tmp_path):
    found = shown(tmp_path, lambda: lambda purpose: torch.Generator().manual_seed(len(purpose)))
    for client in range(3):
        wanted = torch.rand(8, generator=torch.Generator().manual_seed(6))
        assert torch.equal(found["secret"][client], wanted)


def test_a_simulation_draws_from_the_seed(tmp_path):
    for name, change in {"a": {"engine": "serial"}, "b": {"secrets": no_secrets}}.items():
        found = shown(tmp_path / name, **change)
        assert all(torch.equal(found["secret"][c], from_the_seed(c)) for c in range(3))


def test_a_simulation_says_that_it_is_one(tmp_path):
    """Also where only sketches are drawn, and the section privacy is empty."""
    for kind in ("serial", "vector"):
        values = result_of(tmp_path, engine={"kind": kind})
        assert values["privacy"] is None
        assert values["draws"].startswith("in a simulation all draws derive from the run's seed")


def test_a_federation_says_that_it_cannot_be_repeated(tmp_path):
    said, weights = set(), set()
    for name in ("a", "b"):
        values = result_of(tmp_path / name, stream={"kind": "permuted", "tasks": 2})
        said.add(values["draws"])
        weights.add(values["model_sha256"])
    assert len(weights) == 2
    assert "cannot be repeated bit for bit" in said.pop()
