"""Modules that cannot be trained: one sentence, exit code 2, nothing written."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor, nn

import perdure
from perdure.cli.main import main
from perdure.config import parse
from perdure.core.errors import UserError
from perdure.training.experiment import build_experiment

BASE: dict[str, Any] = {
    "data": {"limit": 100},
    "stream": {"kind": "permuted", "tasks": 2},
    "clients": {"count": 2},
    "train": {"rounds": 1},
}


class Flat(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.fc = nn.Linear(64, 8), nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Any:
        return self.fc(self.a(x.flatten(1)))


class NoLinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 10, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x).mean((2, 3))


class HeadNotLast(Flat):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


class TokenHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x.squeeze(1)).mean(1)


class HeadTwice(Flat):
    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x.flatten(1))
        return self.fc(x) + self.fc(x)


class TwoInputs(Flat):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x)


class GivesDict(Flat):
    def forward(self, x: Tensor) -> Any:
        return {"logits": super().forward(x)}


class GivesLabels(Flat):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).argmax(1)


class CountsCalls(Flat):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


class MovesBuffer(Flat):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("ema", torch.zeros(64))

    def forward(self, x: Tensor) -> Tensor:
        self.ema.mul_(0.9).add_(x.detach().flatten(1).mean(0))
        return super().forward(x)


class Noisy(Flat):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + torch.randn_like(x))


class Mixes(Flat):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - x.mean(0))


class Cumulative(Flat):
    def __init__(self) -> None:
        super().__init__()
        self.bn = nn.BatchNorm1d(8, momentum=None)


class WrongShape(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Flatten(), nn.Linear(63, 10))


class Fails(nn.Module):
    def __init__(self) -> None:
        raise RuntimeError("no weights here")


def not_a_module() -> int:
    return 3


MUST_BE = {
    NoLinear: "a module that calls a Linear layer, or one with model.head_layer: none, if its "
    "output is the features",
    HeadNotLast: "a module whose output is that of its last Linear layer 'fc', or one with "
    "model.head_layer: the name of a layer, or none",
    TokenHead: "a module whose head 'fc' gets one row of features per example (it gets [4, 8, 8])",
    HeadTwice: "a module whose head 'fc' is used once and shares no weight",
    TwoInputs: "a module whose forward needs one input (it needs x, y)",
    GivesDict: "a module that returns a tensor (it returns a dict)",
    GivesLabels: "a module that returns one row of floats per example (it returns int64 [4] for 4 "
    "rows)",
    CountsCalls: "a module whose forward changes nothing but batch norm statistics (it changes "
    "'calls')",
    MovesBuffer: "a module whose forward changes nothing but batch norm statistics (it changes "
    "'ema')",
    Noisy: "a module whose only noise is dropout (its forward calls aten.randn_like.default)",
    Mixes: "a module whose rows influence each other by batch norm alone",
    Cumulative: "a module whose batch norms have a number as momentum (bn has None)",
    WrongShape: "a module that takes inputs of 1x8x8 (mat1 and mat2 shapes cannot be multiplied "
    "(4x64 and 63x10))",
    Fails: "made with other arguments (RuntimeError: no weights here)",
    not_a_module: "a class or function that makes an nn.Module (it makes a int)",
}


def sentence(model: dict[str, Any]) -> str:
    with pytest.raises(UserError) as error:
        build_experiment(parse({**BASE, "model": model}))
    return str(error.value)


@pytest.mark.parametrize("kind", MUST_BE, ids=lambda kind: kind.__name__)
def test_a_module_that_cannot_be_trained(kind: Any) -> None:
    path = f"{kind.__module__}.{kind.__qualname__}"
    assert sentence({"kind": kind}) == f"model.kind: must be {MUST_BE[kind]}, got {path!r}"


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ({"kind": "nonsense"}, "model.kind: must be mlp, conv,"),
        ({"kind": 3}, "model.kind: must be mlp, conv,"),
        (
            {"kind": "no_such_file.Net"},
            "model.kind: must be a module that can be imported (ModuleNotFoundError: No module "
            "named 'no_such_file'), got 'no_such_file.Net'",
        ),
        (
            {"kind": "torch.nn.Linear", "in_features": 64},
            "model.kind: must be made with other arguments (missing a required argument: "
            "'out_features'), got 'torch.nn.Linear'",
        ),
        ({"kind": Flat, "hiden": 3}, "model.hiden: unknown argument of"),
        ({"kind": Flat, "hidden": object()}, "model.arguments.hidden: must be a value that YAML"),
        (
            {"kind": Flat(), "hidden": 3},
            "model.arguments: must be empty for a module that was made",
        ),
        ({"kind": Flat, "head_layer": "fd"}, "(it has a, fc)"),
        ({"kind": Flat, "frozen": ["conv*"]}, "a module with parameters that model.frozen 'conv*'"),
        (
            {"kind": Flat, "init": "none.safetensors"},
            "model.init: must be a safetensors file or a run",
        ),
        ({"kind": torch.jit.script(Flat())}, "a plain nn.Module (it is compiled)"),
    ],
)
def test_a_model_section_that_names_no_module(model: dict[str, Any], expected: str) -> None:
    assert expected in sentence(model)


def test_the_command_line_exits_with_2_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "lonely.py").write_text(
        "from torch import nn\nclass Net(nn.Conv2d):\n"
        "    def __init__(self): super().__init__(1, 2, 3)\n"
    )
    (tmp_path / "c.yaml").write_text(yaml.safe_dump({**BASE, "model": {"kind": "lonely.Net"}}))
    monkeypatch.chdir(tmp_path)
    assert main(["run", "c.yaml", "--out", "run"]) == 2
    shown = re.sub(r"\s+", " ", capsys.readouterr().err)
    assert "model.kind: must be a module that calls a Linear layer" in shown
    assert not (tmp_path / "run").exists()


def test_a_body_without_a_head_is_trained_with_a_new_one() -> None:
    values = {**BASE, "model": {"kind": NoLinear, "head_layer": "none"}}
    params = build_experiment(parse(values)).initial_state().server.params
    assert params["head.weight"].shape == (10, 10)
    assert perdure.run(values).values["rounds"] == 2


def test_a_named_head_ends_the_module() -> None:
    values = {**BASE, "model": {"kind": HeadNotLast, "head_layer": "a"}}
    params = build_experiment(parse(values)).initial_state().server.params
    assert {n: tuple(p.shape) for n, p in params.items() if n.startswith("head")} == {
        "head.weight": (10, 64),
        "head.bias": (10,),
    }
