"""A whole config, with its smaller sections."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    SerializeAsAny,
    model_validator,
)
from pydantic_core import core_schema

from perdure.config.clients import ClientsConfig
from perdure.config.data import DataConfig, DomainConfig
from perdure.config.engine import EngineConfig, FederationConfig
from perdure.config.model import ModelConfig
from perdure.config.overrides import override_key
from perdure.config.section import (
    NOT_BOOL,
    ChosenByKind,
    ConfigSection,
    KindSection,
    NonNegativeInt,
    PositiveInt,
    Text,
    as_mapping,
    kind_sections,
    read_section,
)
from perdure.config.stream import StreamConfig
from perdure.config.train import TrainConfig
from perdure.core.errors import UserError
from perdure.core.registry import dotted_path, import_object, kind_of

# ---- The `evaluate` section of a config


def _with_path(value: Any) -> Any:
    return dotted_path(value) if isinstance(value, type) else value


MetricName = Annotated[Text, BeforeValidator(_with_path)]
"""A name or a dotted path; the class in Python."""


class EvaluateConfig(ConfigSection):
    """What is measured on test data.

    Example: `evaluate: {metrics: [accuracy, macro_f1, auroc]}`
    """

    metrics: Annotated[list[MetricName], Field(min_length=1)] | None = None
    """Metrics: accuracy, macro_f1, auroc, sensitivity, specificity, ece, worst_client; of numbers
    r2, mae, worst_client; the names of installed ones, or dotted paths of custom ones. Each has a
    matrix over tasks in result.json (`scores`); that of accuracy, or of r2, is always there
    (`matrix`). Default: accuracy; r2 and mae of numbers (`data.target: number`)."""

    @model_validator(mode="after")
    def _each_once(self) -> EvaluateConfig:
        if self.metrics is not None and len(set(self.metrics)) < len(self.metrics):
            raise ValueError(f"metrics: must be names that differ, got {self.metrics!r}")
        return self


# ---- The `runs` section of a config


class RunsConfig(ConfigSection):
    """What a run keeps on disk.

    Example: `runs: {checkpoint_every: 10, evaluate_every: 5}`
    """

    checkpoint_every: PositiveInt = 1
    """Rounds between checkpoints; the end of a task always has one."""
    keep_checkpoints: Annotated[int, Field(ge=2), NOT_BOOL] = 2
    """Number of checkpoints kept."""
    keep_tasks: NonNegativeInt = 3
    """Number of finished tasks, the last ones, whose checkpoints are kept for `perdure rewind`."""
    evaluate_every: PositiveInt | None = None
    """Rounds between evaluations on the current task. If None, only at the end of a task."""
    evaluate_all: bool = False
    """Evaluate on all tasks so far, not only on the current one, every `evaluate_every` rounds. The
    report then shows accuracy by round."""
    report: bool = True
    """Write report.html into the run directory at the end."""
    tensorboard: bool = False
    """Write metrics for TensorBoard into the run directory."""
    mlflow: bool | str = False
    """Log to MLflow: true for its default place (MLFLOW_TRACKING_URI), or a tracking URI."""

    @model_validator(mode="after")
    def _evaluated_at_times(self) -> RunsConfig:
        if self.evaluate_all and self.evaluate_every is None:
            raise ValueError("evaluate_every: must be a number with runs.evaluate_all, got None")
        return self


# ---- The `privacy` section of a config


class PrivacyConfig(ConfigSection):
    """What clients hide of their uploads (docs/privacy.md says from whom).

    Example: `privacy: {secagg: true, clip: 1.0, noise: 0.5}`
    """

    # A mechanism's keys stand in its own file in `perdure.privacy`, as a subclass of this class;
    # the section of a config has those of all mechanisms. Other packages read these keys:
    if TYPE_CHECKING:
        secagg: bool
        threshold: float
        clip: float | None
        task_end: bool
        min_rows: int | None

    @staticmethod
    def whole() -> type[PrivacyConfig]:
        """Return the section with the keys of all mechanisms, whose package is imported."""
        found: type[PrivacyConfig] = import_object("perdure.privacy.chain.PrivacySection")
        return found

    @classmethod
    def default(cls) -> PrivacyConfig:
        """Return the section of a config that does not have it."""
        return cls.whole().model_validate({})


@dataclass(frozen=True)
class WithAllMechanisms:
    """Reads the section `privacy` with the keys of all mechanisms."""

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> core_schema.CoreSchema:
        """Return a schema that finds the keys when a config is read, not when it is imported."""

        def read(value: Any, _: Any, info: core_schema.ValidationInfo) -> PrivacyConfig:
            if isinstance(value, PrivacyConfig):
                return value
            return read_section(PrivacyConfig.whole(), as_mapping(value), info.context)

        return core_schema.with_info_wrap_validator_function(read, handler(source))

    def __get_pydantic_json_schema__(
        self, _: core_schema.CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        """Return the schema of all keys."""
        return handler(PrivacyConfig.whole().__pydantic_core_schema__)


# ---- The `extensions` of a config: tasks that were added to a run after its start

_ALLOWED = ("clients.count", "clients.dropout", "clients.partition", "clients.per_round", "train")
"""Keys, and sections with their keys, that may change in the middle of a run."""
_FIXED = ("train.outputs", "train.server_schedule", "train.weighting")
"""Keys in these sections that may not."""


class Extension(ConfigSection):
    """Tasks that were added to a run: more of its stream, or new data.

    Example: `extensions: [{tasks: 2}, {data: [{source: npz, path: may.npz}]}]`
    """

    tasks: PositiveInt | None = None
    """Number of further tasks of `stream`, which `stream.tasks` includes."""
    data: (
        Annotated[
            list[Annotated[SerializeAsAny[DomainConfig], ChosenByKind()]], Field(min_length=1)
        ]
        | None
    ) = None
    """New data, one source per task, with the keys of `data` and a `name`."""
    labels: Literal["shared", "separate"] = "shared"
    """New data: classes of a known name are the known ones, or all its classes are new."""
    settings: dict[str, Any] = Field(default={})
    """Settings of these tasks alone, such as `train.lr: 0.05`."""
    added: Text | None = None
    """When the tasks were added."""

    @property
    def count(self) -> int:
        """Number of tasks."""
        return len(self.data) if self.data is not None else self.tasks or 0

    def cut(self, count: int) -> Extension:
        """Return the extension with its first `count` tasks."""
        if self.data is None:
            return self.model_copy(update={"tasks": count})
        return self.model_copy(update={"data": self.data[:count]})

    @model_validator(mode="after")
    def _tasks_or_data(self) -> Extension:
        if (self.tasks is None) == (self.data is None):
            given = "both" if self.tasks is not None else "neither"
            raise ValueError(f"tasks: must be given, or data, got {given}")
        return self

    @model_validator(mode="after")
    def _settings_of_a_task(self) -> Extension:
        for key in self.settings:
            is_allowed = any(key == name or key.startswith(f"{name}.") for name in _ALLOWED)
            if not is_allowed or key in _FIXED:
                expected = "keys of train, or clients.count, per_round, dropout or partition"
                raise ValueError(f"settings: must be {expected}, got {key!r}")
        return self


def read_extension(values: dict[str, Any]) -> Extension:
    """Return a checked extension from plain values; UserError if a value is not valid."""
    try:
        return read_section(Extension, values, {})
    except ValueError as error:
        raise UserError(f"extensions.{error}") from None


# ---- A whole config


class Config(ConfigSection):
    """A whole experiment. `load(path)` reads one; every section has defaults.

    Example: `perdure.run({"stream": {"tasks": 3}, "method": {"kind": "fot"}})`
    """

    seed: NonNegativeInt = 0
    """Seed from which every random draw of the run derives."""
    data: Annotated[SerializeAsAny[DataConfig], ChosenByKind()] = Field(
        default_factory=DataConfig.default
    )
    """Where examples come from and how they are read."""
    stream: Annotated[SerializeAsAny[StreamConfig], ChosenByKind()] = Field(
        default_factory=StreamConfig.default
    )
    """The tasks and their order."""
    clients: ClientsConfig = Field(default_factory=ClientsConfig)
    """The clients: how many there are, how many train per round, and what they hold."""
    model: Annotated[SerializeAsAny[ModelConfig], ChosenByKind()] = Field(
        default_factory=ModelConfig.default
    )
    """The network that is trained."""
    method: dict[str, Any] = Field(default={"kind": "fedavg"})
    """`kind` (a name, the name of an installed method, or the dotted path of a custom one), the
    method's hyperparameters, and `with`, a list of methods to combine it with."""
    train: TrainConfig = Field(default_factory=TrainConfig)
    """How a client trains and how the server averages."""
    engine: Annotated[SerializeAsAny[EngineConfig], ChosenByKind()] = Field(
        default_factory=EngineConfig.default
    )
    """Where local training runs."""
    federation: FederationConfig | None = None
    """What nodes agree on if they read local data instead of `data`. If None, they do not."""
    privacy: Annotated[SerializeAsAny[PrivacyConfig], WithAllMechanisms()] = Field(
        default_factory=PrivacyConfig.default
    )
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
            changed = {
                name: _with_classes_of(
                    read_section(cls, values[name], {"imports": False}), getattr(self, name)
                )
                for name, cls in sections.items()
            }
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


def _with_classes_of(section: ConfigSection, before: ConfigSection) -> ConfigSection:
    """Return a section that was read without imports, with the custom classes that it had before.

    Settings come from files of runs, whose code must not be executed by reading them.
    """
    same = {}
    for key, value in kind_sections(section):
        earlier = getattr(before, key, None)
        if type(value).registry().is_builtin(value.kind_name):
            continue
        if not isinstance(earlier, KindSection) or value.model_dump() != earlier.model_dump():
            expected = "built in, since settings of an extension name no custom classes"
            raise ValueError(f"{key}.kind: must be {expected}, got {value.kind_name!r}")
        same[key] = earlier
    return section.model_copy(update=same) if same else section


def _with_paths_of_classes(values: dict[str, Any]) -> dict[str, Any]:
    """Return the values with classes and modules that are given in Python by their names."""
    model = values.get("model")
    if isinstance(model, dict) and "kind" in model:
        values = {**values, "model": {**model, "kind": kind_of(model["kind"])}}
    method = values.get("method")
    if not isinstance(method, dict):
        return values
    method = _with_path_of_class(method)
    if isinstance(method.get("with"), list):
        method = {**method, "with": [_with_path_of_class(other) for other in method["with"]]}
    return {**values, "method": method}


def _with_path_of_class(method: Any) -> Any:
    kind = method.get("kind") if isinstance(method, dict) else None
    return {**method, "kind": dotted_path(kind)} if isinstance(kind, type) else method
