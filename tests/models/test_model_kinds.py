"""Models that are not built in: by dotted path, as class, object, entry point or registry line."""

from __future__ import annotations

import re
import sys
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import torch
import user_modules
from torch import nn

import perdure
from perdure.config import override, parse
from perdure.core.errors import UserError
from perdure.methods.registry import config_schema
from perdure.models.adapter.build import ModuleModel, find_maker
from perdure.models.kinds import MODELS
from perdure.runs.trial import dry_run
from perdure.training.experiment import build_experiment

GUIDE = Path(__file__).resolve().parents[2] / "CONTRIBUTING.md"
BASE: dict[str, Any] = {
    "data": {"limit": 160},
    "stream": {"kind": "permuted", "tasks": 2},
    "clients": {"count": 3},
    "train": {"rounds": 1, "max_steps": 2, "batch_size": 16},
    "engine": {"kind": "serial"},
}


def perceptron(hidden: int, num_classes: int) -> nn.Module:
    """Make a module: a function can be a kind, too."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, hidden), nn.ReLU(),
                         nn.Linear(hidden, num_classes))  # fmt: skip


PATH = f"{perceptron.__module__}.perceptron"


def initial(model: dict[str, Any], **changes: Any) -> dict[str, torch.Tensor]:
    experiment = build_experiment(parse({**BASE, "model": model, **changes}))
    return dict(experiment.initial_state().server.params)


def test_keys_are_arguments_and_auto_is_the_number_of_classes() -> None:
    config = parse({**BASE, "model": {"kind": PATH, "hidden": 7, "num_classes": "auto"}})
    assert isinstance(config.model, ModuleModel)
    assert config.model.arguments == {"hidden": 7, "num_classes": "auto"}
    params = initial({"kind": perceptron, "hidden": 7, "num_classes": "auto"})
    assert {n: tuple(p.shape) for n, p in params.items()} == {
        "1.weight": (7, 64), "1.bias": (7,), "head.weight": (10, 7), "head.bias": (10,),
    }  # fmt: skip


def test_a_config_survives_being_written_and_read() -> None:
    config = parse({"model": {"kind": PATH, "hidden": 7, "frozen": ["1"], "head_layer": "3"}})
    assert parse(config.model_dump(mode="json")) == config


def test_another_kind_drops_the_keys_of_the_kind_before() -> None:
    values = override({"model": {"kind": "mlp", "hidden": [3], "head": "shared"}},
                      [f"model.kind={PATH}", "model.hidden=5"])  # fmt: skip
    assert values["model"] == {"kind": PATH, "head": "shared", "hidden": 5}
    back = override({"model": {"kind": PATH, "hidden": 5}}, ["model.kind=conv"])
    assert back["model"] == {"kind": "conv"}


def test_an_argument_is_given_once() -> None:
    with pytest.raises(UserError, match=r"model\.hidden: must be given once"):
        parse({"model": {"kind": PATH, "hidden": 5, "arguments": {"hidden": 6}}})


def test_weights_derive_from_the_seed_and_the_global_generator_stays() -> None:
    model = {"kind": perceptron, "hidden": 7, "num_classes": 10}
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = initial(model)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    assert torch.equal(initial(model)["1.weight"], first["1.weight"])
    assert not torch.equal(initial(model, seed=1)["1.weight"], first["1.weight"])


def test_an_object_keeps_its_weights_and_its_head_if_it_fits() -> None:
    net = perceptron(6, 10)
    params = initial({"kind": net})
    assert torch.equal(params["1.weight"], net[1].weight)  # type: ignore[index]
    assert torch.equal(params["head.weight"], net[3].weight)  # type: ignore[index]
    growing = initial({"kind": net, "head": "growing"}, stream={"kind": "split", "tasks": 2})
    assert growing["head.0.weight"].shape == (5, 6)


def test_initial_weights_are_read_from_a_file(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    saved = perceptron(6, 10)
    save_file(dict(saved.state_dict()), tmp_path / "w.safetensors")
    model = {"kind": perceptron, "hidden": 6, "num_classes": 10, "frozen": ["1"],
             "init": str(tmp_path / "w.safetensors")}  # fmt: skip
    experiment = build_experiment(parse({**BASE, "model": model}))
    assert torch.equal(experiment.network.body.constants["1.weight"], saved[1].weight)  # type: ignore[index]
    params = experiment.initial_state().server.params
    assert torch.equal(params["head.weight"], saved[3].weight)  # type: ignore[index]


def test_a_name_of_an_installed_package(monkeypatch: pytest.MonkeyPatch) -> None:
    point = EntryPoint("tiny", PATH.replace(".perceptron", ":perceptron"), "perdure.models")
    for module in ("perdure.core.registry", "perdure.models.adapter.build"):
        monkeypatch.setattr(f"{module}.installed", lambda group: {"tiny": (point,)})
    assert find_maker("tiny") is perceptron
    assert "1.weight" in initial({"kind": "tiny", "hidden": 4, "num_classes": "auto"})


def test_a_registry_line_and_the_file_that_the_guide_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    section = GUIDE.read_text().partition("## Add a model kind")[2].partition("\n## ")[0]
    file, line = re.findall(r"```python\n(.*?)```", section, re.S)
    (tmp_path / "lenet.py").write_text(file)
    monkeypatch.syspath_prepend(str(tmp_path))
    name, path = re.match(r'"(\w+)": "(.*)",', line).groups()  # type: ignore[union-attr]
    assert path == "perdure.models.modules.lenet.LenetModel"
    monkeypatch.setitem(MODELS.builtin, name, path.removeprefix("perdure.models.modules."))
    values = {**BASE, "model": {"kind": name, "width": 4}, "method": {"kind": "gpm"}}
    assert perdure.run(values, out=tmp_path / "run").values["rounds"] == 2
    assert not (tmp_path / "run" / "method").exists()
    assert perdure.load(tmp_path / "run").predict(torch.zeros(2, 8, 8, dtype=torch.uint8)).shape
    sys.modules.pop("lenet")


def test_the_schema_accepts_dotted_paths_with_any_keys() -> None:
    custom = config_schema()["properties"]["model"]["anyOf"][-1]
    assert custom["title"] == "ModuleModel"
    assert custom["additionalProperties"] is True
    assert custom["properties"]["kind"]["pattern"] == r"\."


METHODS = ["fedavg", "fot", "fedprotip", "gpm", "stamp", "special", "er", "ewc", "lwf", "scaffold"]


@pytest.mark.parametrize("method", METHODS)
def test_methods_train_a_module_alike_on_both_engines(method: str) -> None:
    """Functions, attention and recorded inputs, with dropout."""
    for net in (user_modules.Functional(0.2), user_modules.Encoder(0.1)):
        trial = dry_run(parse({**BASE, "model": {"kind": net}, "method": {"kind": method}}))
        assert trial.stacked
        assert trial.difference < 1e-5, trial.parameter


def test_an_lstm_is_trained_serially_with_a_sentence_and_fixed_after_the_first_task(
    caplog: pytest.LogCaptureFixture,
) -> None:
    net, states = user_modules.Recurrent(), []
    values = {**BASE, "model": {"kind": net}, "method": {"kind": "fot"}}

    def keep(state: Any, event: dict[str, Any]) -> None:
        if event["event"] == "task":
            states.append(state.server.params["lstm.weight_ih_l0"].clone())

    perdure.run(values | {"engine": {"kind": "vector"}}, watch=keep)
    assert (
        caplog.text.count("the clients cannot be stacked and are trained serially: Batching") == 1
    )
    fixed = "not protected, so fixed after the first task: lstm.weight_ih_l0, lstm.weight_hh_l0"
    assert caplog.text.count(fixed) == 1
    assert not torch.equal(states[0], net.lstm.weight_ih_l0)
    assert torch.equal(states[0], states[1])


def test_a_network_of_transformers() -> None:
    pytest.importorskip("transformers")
    config = {
        "kind": "transformers.ViTConfig", "image_size": 8, "patch_size": 4, "num_channels": 1,
        "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
        "intermediate_size": 32, "num_labels": "auto",
    }  # fmt: skip
    model = {"kind": "transformers.ViTForImageClassification", "config": config}
    trial = dry_run(parse({**BASE, "model": model, "method": {"kind": "fot"}}))
    assert trial.stacked
    assert trial.difference < 1e-5, trial.parameter
