"""A whole config."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, ValidationInfo, model_validator

from perdure.config.aliases import with_new_keys
from perdure.config.base import ConfigSection
from perdure.config.clients import ClientsConfig
from perdure.config.data import DataConfig, DigitsData
from perdure.config.engine import AutoEngineConfig, EngineConfig, FederationConfig
from perdure.config.evaluate import EvaluateConfig
from perdure.config.model import MlpModel, ModelConfig
from perdure.config.privacy import PrivacyConfig
from perdure.config.runs import RunsConfig
from perdure.config.stream import AnyStream, default_stream
from perdure.config.train import TrainConfig
from perdure.config.types import NonNegativeInt
from perdure.core.given import dotted_path, kind_of


class Config(ConfigSection):
    """A whole experiment. `load(path)` reads one; every section has defaults.

    Example: `perdure.run({"stream": {"tasks": 3}, "method": {"kind": "fot"}})`
    """

    seed: NonNegativeInt = 0
    """Seed from which every random draw of the run derives."""
    data: DataConfig = DigitsData()
    """Where examples come from and how they are read."""
    stream: AnyStream = Field(default_factory=default_stream)
    """The tasks and their order."""
    clients: ClientsConfig = ClientsConfig()
    """The clients: how many there are, how many train per round, and what they hold."""
    model: ModelConfig = MlpModel()
    """The network that is trained."""
    method: dict[str, Any] = Field(default={"kind": "fedavg"})
    """`kind` (a name, the name of an installed method, or the dotted path of a custom one), the
    method's hyperparameters, and `with`, a list of methods to combine it with."""
    train: TrainConfig = TrainConfig()
    """How a client trains and how the server averages."""
    engine: EngineConfig = AutoEngineConfig()
    """Where local training runs."""
    federation: FederationConfig | None = None
    """What nodes agree on if they read local data instead of `data`. If None, they do not."""
    privacy: PrivacyConfig = PrivacyConfig()
    """What clients hide of their uploads."""
    evaluate: EvaluateConfig = EvaluateConfig()
    """What is measured on test data."""
    runs: RunsConfig = RunsConfig()
    """What a run keeps on disk."""
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """Device of all tensors; auto: the fastest that is available."""

    @model_validator(mode="before")
    @classmethod
    def _new_keys(cls, values: Any, info: ValidationInfo) -> Any:
        if not isinstance(values, dict):
            return values
        values = _with_paths_of_classes(values)
        return with_new_keys(values, warn=not (info.context or {}).get("saved"))

    @model_validator(mode="after")
    def _method_has_a_kind(self) -> Config:
        if not isinstance(self.method.get("kind"), str):
            expected = "a name, a dotted path or a class"
            raise ValueError(f"method.kind: must be {expected}, got {self.method.get('kind')!r}")
        return self

    @property
    def per_round(self) -> int:
        """Clients sampled per round."""
        return self.clients.per_round or self.clients.count

    def rounds(self, task: int) -> int:
        """Return the rounds of a task."""
        rounds = self.train.rounds
        return rounds[min(task, len(rounds) - 1)] if isinstance(rounds, list) else rounds

    def total_rounds(self, tasks: int) -> int:
        """Return the rounds of the first `tasks` tasks together."""
        return sum(self.rounds(task) for task in range(tasks))


def _with_paths_of_classes(values: dict[str, Any]) -> dict[str, Any]:
    """Return the values with classes and modules that are given in Python by their names."""
    model = values.get("model")
    if isinstance(model, dict) and "kind" in model:
        values = {**values, "model": {**model, "kind": kind_of(model["kind"])}}
    method = values.get("method")
    if not isinstance(method, dict):
        return values
    method = _with_path(method)
    if isinstance(method.get("with"), list):
        method = {**method, "with": [_with_path(other) for other in method["with"]]}
    return {**values, "method": method}


def _with_path(method: Any) -> Any:
    kind = method.get("kind") if isinstance(method, dict) else None
    return {**method, "kind": dotted_path(kind)} if isinstance(kind, type) else method
