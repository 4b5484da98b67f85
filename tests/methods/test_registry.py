"""Methods by name and by dotted path, with their values checked."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import pytest
import yaml

import perdure
from perdure.config import dump, load, parse
from perdure.config.section import Fixed, Search
from perdure.contract import Method
from perdure.core.errors import UserError
from perdure.methods.fedavg import FedAvg
from perdure.methods.fedprox import FedProx
from perdure.methods.registry import (
    KINDS,
    build,
    describe_hyperparameters,
    drop_defaults,
    fill_defaults,
    find,
    hyperparameters,
    is_builtin,
)

OWN = """
from dataclasses import dataclass
from perdure import Method, Scalar, Train

@dataclass(frozen=True)
class Mine(Method):
    strength: float = 0.5

    def exchanges(self, context):
        return [Train(penalty=self.pull)]

    def pull(self, step):
        return Scalar(self.strength * step.params["head.bias"].square().sum())

NOT_A_METHOD = 3
"""


@pytest.fixture
def own_file(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A user's file with a name that no other test uses."""
    path = tmp_path / f"own_{abs(hash(request.node.nodeid))}.py"
    path.write_text(OWN)
    yield path
    sys.modules.pop(path.stem, None)


def refused(values: dict[str, Any], method_dir: Path | None = None) -> str:
    with pytest.raises(UserError) as refusal:
        build(values, method_dir)
    assert "\n" not in str(refusal.value)
    return str(refusal.value)


def test_the_kinds_that_are_there() -> None:
    assert build({"kind": "fedavg"}) == FedAvg()
    assert build({"kind": "fedprox"}) == FedProx(mu=0.01)
    assert build({"kind": "fedprox", "mu": 0.3}) == FedProx(mu=0.3)
    assert build({"kind": "fedprox", "mu": "1e-3"}) == FedProx(mu=0.001)  # as YAML reads 1e-3


def test_a_kind_by_its_dotted_path() -> None:
    assert build({"kind": "perdure.methods.fedprox.FedProx", "mu": 0}) == FedProx(mu=0)


@pytest.mark.parametrize("kind", KINDS)
def test_spelled_out_a_method_is_the_same_and_leaves_nothing_open(kind: str) -> None:
    values = fill_defaults({"kind": kind})
    assert yaml.safe_load(yaml.safe_dump(values)) == values
    assert set(values) == {"kind", *hyperparameters(kind)}
    assert build(values) == build({"kind": kind})
    assert fill_defaults(values) == values


def test_spelled_out_values_stand_under_the_names_that_a_config_has() -> None:
    assert fill_defaults({"kind": "lwf", "lambda": "3"}) == {
        "kind": "lwf", "lambda": 3.0, "temperature": 2.0,
    }  # fmt: skip
    assert fill_defaults({"kind": "fedprox", "with": [{"kind": "special-c"}]}) == {
        "kind": "fedprox", "mu": 0.01, "with": [{"kind": "special-c", "lambda": 0.1}],
    }  # fmt: skip


ODD = """
from dataclasses import dataclass, field
from typing import Annotated
from pydantic import Field
from perdure import Method

@dataclass(frozen=True)
class Derived(Method):
    scale: float = 2.0
    twice: float = field(init=False, default=4.0)

@dataclass(frozen=True)
class Renamed(Method):
    lambda_: Annotated[float, Field(validation_alias="lambda")] = 0.5

@dataclass(frozen=True)
class Loose(Method):
    limit: float = None

@dataclass(frozen=True)
class Parts(Method):
    parts: int = 4
"""


@pytest.mark.parametrize("name", ["Derived", "Renamed", "Loose", "Parts"])
def test_classes_that_cannot_be_spelled_out_stay_as_they_are_written(
    name: str, own_file: Path, tmp_path: Path
) -> None:
    own_file.write_text(ODD)
    values = {"kind": f"{own_file.stem}.{name}"}
    spelled = fill_defaults(values, tmp_path)
    assert spelled == values | ({"parts": 4} if name == "Parts" else {})
    assert build(spelled, tmp_path) == build(values, tmp_path)


def test_as_short_as_it_can_be() -> None:
    for kind in KINDS:
        assert drop_defaults(fill_defaults({"kind": kind})) == {"kind": kind}
    odd = {"kind": "fedprox", "mu": 0.2, "with": [{"kind": "lwf", "lambda": 1.0}]}
    assert drop_defaults(odd) == {"kind": "fedprox", "mu": 0.2, "with": [{"kind": "lwf"}]}
    own = {"kind": "mine.Mine", "strength": 0.5}
    assert drop_defaults(own) == own
    assert is_builtin(odd)
    assert not is_builtin(own)
    assert not is_builtin({"kind": "lwf", "with": [own]})
    assert not is_builtin({"kind": "lwf", "with": "fedprox"})


def test_an_unknown_kind_is_refused_with_those_there_are() -> None:
    message = refused({"kind": "fedavgg"})
    assert message.startswith("method.kind: must be fedavg, fedprox, ")
    assert message.endswith(", or a dotted path to a class, got 'fedavgg'")


@pytest.mark.parametrize("mu", [-1, "much", None, [1], True, float("inf"), float("nan")])
def test_a_bad_value_is_refused_by_key(mu: Any) -> None:
    message = refused({"kind": "fedprox", "mu": mu})
    assert re.fullmatch(rf"method\.mu: must be (a|at) [\w ]+, got {re.escape(repr(mu))}", message)


def test_an_unknown_key_is_refused() -> None:
    wrong = "method.mu: unknown key for kind 'fedavg', got 1; its keys: kind"
    assert refused({"kind": "fedavg", "mu": 1}) == wrong
    wrong = wrong.replace("fedavg", "special")
    assert refused({"kind": "special", "mu": 1}).startswith(f"{wrong}, lambda")


def test_what_is_fixed_by_the_class_cannot_be_set() -> None:
    assert refused({"kind": "fedprox", "paper": "mine"}).startswith("method.paper")
    assert refused({"kind": "fedprox", "streams": ["split"]}).startswith("method.streams")


def test_a_method_beside_the_config(own_file: Path, tmp_path: Path) -> None:
    before = list(sys.path)
    method = build({"kind": f"{own_file.stem}.Mine", "strength": 2}, tmp_path)
    assert (type(method).__name__, method) == ("Mine", type(method)(strength=2.0))
    assert type(method).exchanges is not Method.exchanges
    assert sys.path == before
    assert refused({"kind": f"{own_file.stem}.Mine", "strength": "x"}, tmp_path).startswith(
        "method.strength: must be a number, got 'x'"
    )


def test_a_method_in_the_working_folder(own_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(own_file.parent)
    assert issubclass(find(f"{own_file.stem}.Mine"), Method)


def test_a_config_file_runs_the_method_beside_it(own_file: Path, tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    text = (
        "data: {limit: 60}\nstream: {tasks: 1}\nclients: {count: 2}\nmodel: {hidden: [4]}\n"
        "train: {rounds: 1}\nengine: {kind: serial}\n"
    )
    config.write_text(text + f"method: {{kind: {own_file.stem}.Mine, strength: 0.0}}\n")
    nothing = perdure.run(config)
    config.write_text(text + f"method: {{kind: {own_file.stem}.Mine, strength: 1.0}}\n")
    pulled = perdure.run(config)
    config.write_text(text)
    plain = perdure.run(config)
    assert nothing.values["method"] == f"{own_file.stem}.Mine"
    assert nothing.values["model_sha256"] == plain.values["model_sha256"]
    assert pulled.values["model_sha256"] != plain.values["model_sha256"]


@pytest.mark.parametrize(
    "kind",
    ["no_such_module.Mine", "perdure.methods.NoSuch", "..Mine", ".Mine", "a..b", "."],
)
def test_a_path_that_leads_nowhere(kind: str) -> None:
    message = refused({"kind": kind})
    assert message.startswith("method.kind: must be ")
    assert "a class" in message
    assert message.endswith(f", got {kind!r}")


def test_something_that_is_no_method(own_file: Path, tmp_path: Path) -> None:
    message = refused({"kind": f"{own_file.stem}.NOT_A_METHOD"}, tmp_path)
    assert "must be a subclass of perdure.Method, got" in message
    assert "must be a subclass of perdure.Method, got" in refused({"kind": "pathlib.Path"})


@pytest.mark.parametrize("text", ["def broken(:\n", "1 / 0\n", "import no_such_module\n"])
def test_a_file_that_cannot_be_imported(own_file: Path, tmp_path: Path, text: str) -> None:
    own_file.write_text(text)
    message = refused({"kind": f"{own_file.stem}.Mine"}, tmp_path)
    assert message.startswith("method.kind: must be a class that can be imported (")
    assert message.endswith(f"), got '{own_file.stem}.Mine'")


def test_a_run_keeps_the_file_of_an_own_method(own_file: Path, tmp_path: Path) -> None:
    """So that it can be resumed and used where the file is not to be found."""
    folder = own_file.parent
    values = {
        "stream": {"tasks": 1},
        "train": {"rounds": 1},
        "method": {"kind": f"{own_file.stem}.Mine"},
        "engine": {"kind": "serial"},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(values))
    out = tmp_path / "out"
    perdure.run(folder / "config.yaml", out=out)
    assert load(out / "config.yaml").method["strength"] == 0.5
    own_file.unlink()
    del sys.modules[own_file.stem]
    with pytest.raises(UserError, match="executes code that is not part of perdure"):
        perdure.resume(out)
    assert own_file.stem not in sys.modules
    assert perdure.resume(out, trust=True).values["rounds"] == 1
    assert Path(sys.modules[own_file.stem].__file__ or "").is_relative_to(out)
    del sys.modules[own_file.stem]
    with pytest.raises(UserError, match="executes code that is not part of perdure"):
        perdure.load(out)
    assert own_file.stem not in sys.modules
    images = np.zeros((2, 8, 8), dtype=np.uint8)
    assert len(perdure.load(out, trust=True).predict(images)) == 2


def test_defaults_are_those_that_are_written_down() -> None:
    """A default that changes does so on purpose: defaults.yaml is changed with it."""
    written = yaml.safe_load((Path(__file__).parent / "defaults.yaml").read_text())
    assert {kind: fill_defaults({"kind": kind}) for kind in KINDS} == written


class Plain(Method):
    """A method that is given as a class."""


def test_a_class_is_a_kind() -> None:
    values = {"stream": {"tasks": 1}, "train": {"rounds": 1}, "engine": {"kind": "serial"}}
    given = perdure.run({**values, "method": {"kind": FedProx, "mu": 0.5}})
    named = perdure.run({**values, "method": {"kind": "fedprox", "mu": 0.5}})
    assert given.values["model_sha256"] == named.values["model_sha256"]
    assert given.values["method"] == "perdure.methods.fedprox.FedProx"
    config = parse({"method": {"kind": "er", "with": [{"kind": Plain}]}})
    assert config.method["with"] == [{"kind": f"{__name__}.Plain"}]
    assert parse(yaml.safe_load(dump(config))) == config


@pytest.mark.parametrize("kind", KINDS)
def test_every_hyperparameter_is_described(kind: str) -> None:
    described = describe_hyperparameters(kind)
    assert [each.name for each in described] == list(hyperparameters(kind))
    for each in described:
        assert len(each.meaning) > 10, f"{kind}.{each.name}"
        assert each.type


NUMBERS = ("integer", "number")


@pytest.mark.parametrize("kind", KINDS)
def test_every_number_says_what_tuning_may_do_with_it(kind: str) -> None:
    """A range that holds the default and that the bounds allow, or `Fixed`."""
    types = get_type_hints(find(kind), include_extras=True)
    described = describe_hyperparameters(kind)
    for name, each in zip((f.name for f in fields(find(kind))), described, strict=True):
        marks = [
            m for m in getattr(types[name], "__metadata__", ()) if isinstance(m, Search | Fixed)
        ]
        is_number = any(word in each.type for word in NUMBERS)
        assert len(marks) == int(is_number), f"{kind}.{name}"
        for mark in marks:
            if isinstance(mark, Search):
                for value in (mark.low, mark.high):
                    build({"kind": kind, each.name: type(each.default or 0.0)(value)})
                assert each.default is None or mark.low <= each.default <= mark.high
