"""A whole config, with its smaller sections."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    Field,
    SerializeAsAny,
    model_validator,
)

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
    OpenFraction,
    PositiveFloat,
    PositiveInt,
    Text,
    kind_sections,
    read_section,
)
from perdure.config.stream import StreamConfig
from perdure.config.train import TrainConfig
from perdure.core.errors import UserError
from perdure.core.registry import dotted_path, kind_of

# ------------------------------------------------------------------------------------------------
# The `evaluate` section of a config.
# ------------------------------------------------------------------------------------------------


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


# ------------------------------------------------------------------------------------------------
# The `runs` section of a config.
# ------------------------------------------------------------------------------------------------


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


# ------------------------------------------------------------------------------------------------
# The `privacy` section of a config.
# ------------------------------------------------------------------------------------------------


class PrivacyConfig(ConfigSection):
    """What clients hide of their uploads (docs/privacy.md says from whom).

    Example: `privacy: {secagg: true, clip: 1.0, noise: 0.5}`
    """

    secagg: bool = False
    """Secure aggregation: the server learns sums and nothing of a single client."""
    threshold: Annotated[float, Field(gt=0.5, le=1, allow_inf_nan=False), NOT_BOOL] = 0.66
    """Secagg: fraction of a round's clients that must be left for its sum to be opened."""
    bits: Annotated[Literal[32, 64], NOT_BOOL] = 64
    """Secagg: bits per number of a masked upload. 32 halves the bytes and needs a smaller
    `precision`."""
    precision: Annotated[int, Field(ge=0, le=52), NOT_BOOL] = 30
    """Secagg: values times weights are rounded to multiples of 2^-precision."""
    single_message: bool = True
    """Secagg: a round without dropouts takes one message per client. If false, it always takes two,
    and the server cannot gain by lying about dropouts."""
    attempts: PositiveInt = 3
    """Secagg: attempts at a round before the run stops. No client takes part in two sums of a
    round: another attempt has other clients, or waits for those that are missing."""
    clip: PositiveFloat | None = None
    """Maximum norm of each field of a client's upload; larger ones are scaled down. Fields whose
    bound the method knows have that one instead. If None, uploads are not clipped."""
    noise: PositiveFloat | None = None
    """Standard deviation of the Gaussian noise on a sum, as a multiple of `clip`; with k fields in
    an upload, sqrt(k) times as much on each. If None, no noise."""
    mode: Literal["central", "local"] = "central"
    """Noise once per sum (central; under secagg each client adds a part), or on every upload
    (local)."""
    delta: OpenFraction = 1e-5
    """Noise: the delta of the (epsilon, delta) guarantee."""
    task_end: bool = True
    """Clip and noise also the uploads of exchanges other than training."""
    min_rows: NonNegativeInt | None = None
    """Rows of a task that a client must have to send anything in it, and rows of a class that it
    must have to send anything about the class. Default: 0 in a simulation, 8 on real nodes, whose
    owners may set more or less (`policy.min_rows` of node.yaml); a config can only ask for
    more."""

    @model_validator(mode="after")
    def _noise_needs_a_bound(self) -> PrivacyConfig:
        if self.noise is not None and self.clip is None:
            raise ValueError("clip: must be a number, since privacy.noise is given, got None")
        return self


# ------------------------------------------------------------------------------------------------
# The `extensions` of a config: tasks that were added to a run after its start.
# ------------------------------------------------------------------------------------------------

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


# ------------------------------------------------------------------------------------------------
# A whole config.
# ------------------------------------------------------------------------------------------------


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
