"""Methods that a real federation cannot run are refused before training."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from in_process import in_process_engine

from perdure.config import parse
from perdure.contract import Method, Needs, Train
from perdure.core.errors import UserError
from perdure.runs.run import run
from perdure.training.experiment import build_experiment

CONFIG = {
    "stream": {"kind": "split", "tasks": 2},
    "clients": {"count": 4},
    "model": {"kind": "mlp", "hidden": [4]},
    "train": {"rounds": 1, "max_steps": 1},
    "data": {"limit": 80},
    "engine": {"kind": "flower"},
    "device": "cpu",
}


@dataclass(frozen=True)
class Personal(Method):
    """FedAvg that predicts with client states."""

    @property
    def needs(self):
        return Needs(personal=True)


@dataclass(frozen=True)
class OwnHead(Method):
    """FedAvg whose clients keep their head, from the second task on."""

    def exchanges(self, context):
        head = context.network.head_names(dict(context.parameters), context.task)
        return [Train(private=head if context.task else ())]


@dataclass(frozen=True)
class Buffered(Method):
    """FedAvg that closes a round after two uploads."""

    def exchanges(self, context):
        return [Train(buffer_size=2)]


@pytest.mark.parametrize("head", ["shared", "growing"])
@pytest.mark.parametrize(
    ("method", "reason"),
    [
        (Personal, "has a personal model per client"),
        (OwnHead, "has a personal model per client"),
        (Buffered, "closes a round after 2 uploads"),
    ],
)
def test_personal_models_and_buffered_rounds_are_refused(method, reason, head, tmp_path):
    model = {**CONFIG["model"], "head": head}
    config = {**CONFIG, "model": model, "method": {"kind": f"{__name__}.{method.__name__}"}}
    engine, transport = in_process_engine(config, tmp_path)
    sentence = f"^engine.kind: must be auto, serial or vector, since .* {reason}.*, got 'flower'"
    with pytest.raises(UserError, match=sentence):
        run(config, out=tmp_path / "run", engine=engine)
    assert transport.log == []  # no node was asked for anything
    assert not (tmp_path / "run").exists()
    build_experiment(parse({**config, "engine": {"kind": "serial"}})).initial_state()


@pytest.mark.parametrize("privacy", [{"secagg": True}, {"clip": 1.0}], ids=["secagg", "clip"])
def test_privacy_refuses_buffered_rounds(privacy):
    (key,) = privacy
    method = {"kind": f"{__name__}.Buffered"}
    config = {**CONFIG, "engine": {"kind": "serial"}, "method": method, "privacy": privacy}
    with pytest.raises(
        UserError, match=rf"^privacy.{key}: must be off, .*Buffered' closes a round after 2"
    ):
        build_experiment(parse(config)).initial_state()
    build_experiment(parse({**config, "method": {"kind": "fedavg"}})).initial_state()
