"""A whole config."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from perdure.config.base import ConfigSection, read_section
from perdure.config.clients import ClientsConfig
from perdure.config.data import DataConfig, DigitsData
from perdure.config.engine import AutoEngineConfig, EngineConfig, FederationConfig
from perdure.config.evaluate import EvaluateConfig
from perdure.config.extension import Extension
from perdure.config.model import MlpModel, ModelConfig
from perdure.config.overrides import override_key
from perdure.config.privacy import PrivacyConfig
from perdure.config.runs import RunsConfig
from perdure.config.stream import AnyStream, StreamConfig, default_stream
from perdure.config.train import TrainConfig
from perdure.config.types import NonNegativeInt
from perdure.core.errors import UserError
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
    extensions: list[Extension] = Field(default=[])
    """Tasks that `perdure extend` added to a run, in their order."""

    @model_validator(mode="before")
    @classmethod
    def _paths_of_classes(cls, values: Any) -> Any:
        return _with_paths_of_classes(values) if isinstance(values, dict) else values

    @model_validator(mode="after")
    def _method_has_a_kind(self) -> Config:
        if not isinstance(self.method.get("kind"), str):
            expected = "a name, a dotted path or a class"
            raise ValueError(f"method.kind: must be {expected}, got {self.method.get('kind')!r}")
        return self

    @model_validator(mode="after")
    def _extensions_follow_tasks(self) -> Config:
        return self._checked_extensions()

    def _checked_extensions(self) -> Config:
        if self.extensions and self.first_tasks < 1:
            more = sum(extension.tasks or 0 for extension in self.extensions)
            raise ValueError(
                f"stream.tasks: must be more than {more}, the number of further tasks in "
                f"extensions, got {self.stream.tasks}"
            )
        for task in self.extension_starts:
            self.at(task)
        return self

    def with_extensions(self, stream: StreamConfig, extensions: list[Extension]) -> Config:
        """Return the config with another stream and other extensions.

        Raises:
            UserError: They do not fit.
        """
        changed = self.model_copy(update={"stream": stream, "extensions": extensions})
        try:
            return changed._checked_extensions()
        except ValueError as error:
            raise UserError(str(error)) from None

    @property
    def task_total(self) -> int:
        """Number of tasks with those of extensions; a domain stream may have fewer."""
        return self.first_tasks + sum(extension.count for extension in self.extensions)

    @property
    def first_tasks(self) -> int:
        """Number of tasks before the first extension."""
        return self.stream.tasks - sum(extension.tasks or 0 for extension in self.extensions)

    @property
    def extension_starts(self) -> list[int]:
        """The first task of each extension, from 0."""
        counts = [extension.count for extension in self.extensions]
        return [self.first_tasks + sum(counts[:number]) for number in range(len(counts))]

    def at(self, task: int) -> Config:
        """Return the config as it holds in a task: with the settings of its extension."""
        for start, extension in zip(self.extension_starts, self.extensions, strict=True):
            if start <= task < start + extension.count and extension.settings:
                return self._with_settings(extension.settings)
        return self

    def _with_settings(self, settings: dict[str, Any]) -> Config:
        values = self.model_dump(mode="json", include={"train", "clients"})
        for key, value in settings.items():
            values = override_key(values, key, value)
        sections: dict[str, type[ConfigSection]] = {"train": TrainConfig, "clients": ClientsConfig}
        try:
            changed = {name: read_section(cls, values[name], {}) for name, cls in sections.items()}
        except ValueError as error:
            raise ValueError(f"extensions.settings: {error}") from None
        return self.model_copy(update=changed)

    @property
    def per_round(self) -> int:
        """Clients sampled per round."""
        return self.clients.per_round or self.clients.count

    def rounds(self, task: int) -> int:
        """Return the rounds of a task."""
        rounds = self.at(task).train.rounds
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
