"""What a user may say, with defaults and checks. A mistake becomes one sentence (UserError)."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import Field, ValidationError, model_validator

from perdure.config.base import ConfigSection
from perdure.config.messages import describe, keys_beside
from perdure.config.privacy import PrivacyConfig
from perdure.config.types import (
    Channels,
    FiniteFloat,
    Fraction,
    Integer,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Probabilities,
    Probability,
)
from perdure.core.errors import UserError, bad_value

ModelKind = Literal[
    "mlp",
    "conv",
    "alexnet",
    "resnet18-reduced",
    "resnet18",
    "resnet20",
    "resnet32",
    "vit",
    "text",
]


ROUNDING = 1e-9
"""0.7 of 10 clients is 7 of them, though the product is a little less."""


class DataConfig(ConfigSection):
    """What is read."""

    source: Literal["digits", "npz", "idx", "folder", "huggingface", "text"] = "digits"
    path: str | None = None
    """A file or a folder; for huggingface also a dataset's name."""
    mean: Annotated[list[FiniteFloat], Field(min_length=1)] | None = None
    """Per channel, on the 0-1 scale. Without it, computed on the training data."""
    std: Annotated[list[PositiveFloat], Field(min_length=1)] | None = None
    normalize: bool | None = None
    """By mean and std. Without it: yes, save for model.kind vit, whose inputs are then 0 to 1."""
    size: PositiveInt | None = None
    """Bring images to this many pixels a side. Without it they keep their own size."""
    channels: Channels | None = None
    test_fraction: Annotated[FiniteFloat, Field(gt=0, lt=1)] = 0.2
    """Held out for testing where a source has no split of its own (digits, folder)."""
    limit: PositiveInt | None = None
    """Use at most this many training images (drawn from the seed)."""
    test_limit: PositiveInt | None = None
    """Use at most this many test images (drawn from the seed)."""
    image_column: str = "image"
    label_column: str = "label"
    text_column: str = "text"
    features: PositiveInt = 1024
    """Text without a text model: size of the hashed bag of words."""

    @model_validator(mode="after")
    def _path_where_needed(self) -> DataConfig:
        if self.source != "digits" and not self.path:
            raise ValueError(f"path: must be a path, since source is {self.source!r}, got None")
        if self.source == "digits" and self.path:
            allowed = "null, since source is 'digits', which come with scikit-learn"
            raise ValueError(f"path: must be {allowed}, got {self.path!r}")
        return self


class DomainConfig(DataConfig):
    """One domain of a domain stream: a source of its own, with a name."""

    name: str | None = None

    @model_validator(mode="after")
    def _normalised_like_the_others(self) -> DomainConfig:
        """Who predicts without a task label cannot know which domain's constants to use."""
        for key in ("mean", "std", "normalize"):
            if getattr(self, key) is not None:
                allowed = f"null, since domains are normalised alike, by data.{key}"
                raise ValueError(f"{key}: must be {allowed}, got {getattr(self, key)!r}")
        return self


class StreamConfig(ConfigSection):
    """What arrives when."""

    kind: Literal["permuted", "split", "domains", "pool"] = "permuted"
    tasks: PositiveInt = 5
    classes_per_task: PositiveInt | None = None
    overlap: NonNegativeInt = 0
    """Classes that neighbouring tasks share (split)."""
    presence: Fraction = 1.0
    """The share of the clients that see a task, at least one, drawn anew for each task; hence, on
    average, the share of the tasks that a client sees."""
    domains: Annotated[list[DomainConfig], Field(min_length=1)] | None = None
    """One source a task (split: sources whose classes are put together and divided over the tasks).
    Without it, the domains inside data (PACS, domain folders)."""
    labels: Literal["shared", "separate"] = "shared"
    """Sources in domains: one label space, or one a source (as in 5-Datasets)."""
    order: list[NonNegativeInt] | None = None
    """Order of the domains; without it as listed."""


class PartitionConfig(ConfigSection):
    """Who holds what."""

    kind: Literal["iid", "dirichlet", "shards", "classes"] = "iid"
    alpha: PositiveFloat = 0.5
    per_client: PositiveInt = 2
    """Shards for each client."""
    fraction: Fraction = 0.6
    """Share of a task's classes that a client gets."""
    disjoint: bool = False
    """Classes: clients that share a class divide its images, instead of each holding all."""


class ClientsConfig(ConfigSection):
    """Who takes part."""

    count: PositiveInt = 10
    per_round: PositiveInt | None = None
    partition: PartitionConfig = PartitionConfig()
    dropout: Probability = 0.0
    """Share of the sampled clients that never report; on average, if it is no whole number."""

    def max_dropouts(self, sampled: int) -> int:
        """Return how many of `sampled` clients may drop out of a round."""
        return math.ceil(self.dropout * sampled - ROUNDING)

    @model_validator(mode="after")
    def _no_more_than_there_are(self) -> ClientsConfig:
        if self.per_round is not None and self.per_round > self.count:
            allowed = f"1 to {self.count} (clients.count)"
            raise ValueError(f"per_round: must be {allowed}, got {self.per_round}")
        return self


class ModelConfig(ConfigSection):
    """What is trained."""

    kind: ModelKind = "mlp"
    hidden: list[PositiveInt] = Field(default=[100, 100])
    dropout: Probabilities = 0.0
    """One value, or one for each place where the model drops (mlp: input and hidden layers)."""
    norm: Literal["batch", "group", "none"] | None = None
    """Without it: batch for residual nets, none for the others."""
    running_stats: bool = True
    """Batch norm keeps running statistics; false: batch statistics at test too."""
    bias: bool = True
    width: PositiveInt | None = None
    """Channels of the first convolution (vit with a random start: of the tokens)."""
    depth: PositiveInt | None = None
    """Blocks of a vit with a random start (6 without it)."""
    heads: PositiveInt | None = None
    """Heads of a vit with a random start (4 without it)."""
    patch: PositiveInt | None = None
    """Pixels a side of the patches of a vit with a random start (7 without it)."""
    train_layers: NonNegativeInt | None = None
    """vit, text: train the last blocks only, this many; the rest is frozen and never travels."""
    max_tokens: PositiveInt = 64
    """text: longer texts are cut to this many tokens."""
    head: Literal["shared", "growing"] | None = None
    """One output a class, or one slice of outputs a task. Without it, what the method prefers."""
    init: str | None = None
    """Initial weights: a safetensors file; for vit and text a folder with a Hugging Face checkpoint
    or a name of its hub. Without it, vit and text begin pretrained; `random`: vit without that."""

    @property
    def weights_file(self) -> str | None:
        """The file of initial weights; None for backbones, which have checkpoints of their own."""
        return None if self.kind in ("vit", "text") else self.init


class ScheduleConfig(ConfigSection):
    """How the learning rate changes over a task's rounds."""

    kind: Literal["constant", "cosine", "exponential", "step"] = "constant"
    gamma: PositiveFloat = 0.99
    """Exponential: factor a round. Step: factor at each step."""
    every: PositiveInt = 10
    """Step: rounds between two steps."""
    floor: NonNegativeFloat = 0.0
    """Cosine: share of the learning rate that is left at the end."""


class TrainConfig(ConfigSection):
    """How a client trains and how the server averages."""

    rounds: PositiveInt = 20
    local_epochs: PositiveInt = 1
    max_steps: PositiveInt | None = None
    """Cap on a client's steps in a round."""
    batch_size: PositiveInt = 32
    lr: Annotated[PositiveFloat, Field(le=1e30)] = 0.1
    optimizer: Literal["sgd", "adam", "adamw"] = "sgd"
    momentum: Probability = 0.0
    weight_decay: NonNegativeFloat = 0.0
    clip: PositiveFloat | None = None
    """Largest norm of a client's gradient."""
    schedule: ScheduleConfig = ScheduleConfig()
    task_decay: PositiveFloat = 1.0
    """Factor on the learning rate for each task after the first."""
    weighting: Literal["samples", "uniform"] | None = None
    """Weights of the server's average; without it what the method prefers, mostly samples."""
    server_lr: PositiveFloat | None = None
    """Step size of the server: factor on the aggregated update. Default: the method's, mostly 1."""
    server_schedule: Literal["constant", "1/k", "1/sqrt(k)"] | None = None
    """Factor on server_lr in task k = 1, 2, ... Default: the method's, mostly constant."""
    outputs: Literal["task", "seen", "all"] | None = None
    """Outputs in the loss; without it: task for a growing head, all for a shared one."""
    first_task_rounds: PositiveInt | None = None
    """Rounds of the first task where they differ from the rest."""

    @property
    def coupled_decay(self) -> float:
        """Weight decay that is added to the gradient before a method sees it."""
        return 0.0 if self.optimizer == "adamw" else self.weight_decay

    @property
    def decoupled_decay(self) -> float:
        """Weight decay that the optimizer applies to the parameters itself."""
        return self.weight_decay if self.optimizer == "adamw" else 0.0


class EngineConfig(ConfigSection):
    """Where client work runs."""

    kind: Literal["auto", "serial", "vector", "flower"] = "auto"
    chunk: PositiveInt | None = None
    """Clients stacked at a time (vector); without it sized for the cache."""
    nodes: PositiveInt | None = None
    """Node processes of a trial (flower); without it one for each client."""
    timeout: PositiveFloat = 600.0
    """Seconds that nodes have to answer (flower); who is later is left out of the round."""


class FederationConfig(ConfigSection):
    """What nodes that bring data of their own agree on (flower)."""

    classes: Annotated[list[str], Field(min_length=1)]
    """The names of all classes."""
    shape: Annotated[list[PositiveInt], Field(min_length=1, max_length=3)]
    """Of one row: channels, height and width."""
    tasks: list[Annotated[list[str], Field(min_length=1)]] | None = None
    """The classes of each task; without it all classes in every task."""


class RunsConfig(ConfigSection):
    """What a run keeps on disk."""

    checkpoint_every: PositiveInt = 1
    """Rounds between checkpoints (a task's end always has one)."""
    keep: Annotated[Integer, Field(ge=2)] = 2
    """Checkpoints kept."""
    evaluate_every: PositiveInt | None = None
    """Rounds between looks at the current task's accuracy; without it, only at a task's end."""
    report: bool = True
    """Leave report.html in the run directory at the end."""
    tensorboard: bool = False
    """Write points for TensorBoard into the run directory."""
    mlflow: bool | str = False
    """Log to MLflow: true for its usual place (MLFLOW_TRACKING_URI), or a tracking URI."""


ALIASES: dict[Any, dict[str, str]] = {
    "special": {"global_lr": "server_lr", "schedule": "server_schedule"},
    "fot": {"mu": "server_lr"},
    "fedomg": {"global_lr": "server_lr"},
    "stamp": {"global_lr": "server_lr"},
}
"""Keys of methods that are other names of keys of the train section."""


class Config(ConfigSection):
    """A whole experiment. `load(path)` reads one; every section has defaults."""

    seed: NonNegativeInt = 0
    data: DataConfig = DataConfig()
    stream: StreamConfig = StreamConfig()
    clients: ClientsConfig = ClientsConfig()
    model: ModelConfig = ModelConfig()
    method: dict[str, Any] = Field(default={"kind": "fedavg"})
    """`kind` and the method's own hyper-parameters, checked by the method (methods.build)."""
    train: TrainConfig = TrainConfig()
    engine: EngineConfig = EngineConfig()
    federation: FederationConfig | None = None
    """Given where nodes read data of their own, instead of `data`'s source."""
    privacy: PrivacyConfig = PrivacyConfig()
    runs: RunsConfig = RunsConfig()
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"

    @model_validator(mode="before")
    @classmethod
    def _old_server_step(cls, values: Any) -> Any:
        return with_server_step(values) if isinstance(values, dict) else values

    @model_validator(mode="after")
    def _method_has_a_kind(self) -> Config:
        if not isinstance(self.method.get("kind"), str):
            raise ValueError(f"method.kind: must be a name, got {self.method.get('kind')!r}")
        return self

    @property
    def per_round(self) -> int:
        """Clients sampled in a round."""
        return self.clients.per_round or self.clients.count

    def rounds(self, task: int) -> int:
        """Rounds of a task."""
        first = self.train.first_task_rounds
        return first if task == 0 and first else self.train.rounds

    def total_rounds(self, tasks: int) -> int:
        """Rounds of the first `tasks` tasks together."""
        return sum(self.rounds(task) for task in range(tasks))


def with_server_step(values: dict[str, Any]) -> dict[str, Any]:
    """Return the values with a method's old keys of the server's step as those of `train`."""
    method, train = values.get("method"), values.get("train")
    others = method.get("with") or [] if isinstance(method, dict) else []
    if not isinstance(method, dict) or not isinstance(others, list):
        return values
    moved = dict(train) if isinstance(train, dict) else {} if train is None else None
    parts = [_without_server_step(part, moved) for part in ({**method, "with": None}, *others)]
    if moved is None or parts == [{**method, "with": None}, *others]:
        return values
    rest = {key: value for key, value in parts[0].items() if key != "with"}
    return {**values, "train": moved, "method": {**rest, "with": parts[1:]} if others else rest}


def _without_server_step(part: Any, train: dict[str, Any] | None) -> Any:
    """Return a method's section without its aliases, which are entered in the train section."""
    aliases = ALIASES.get(part.get("kind"), {}) if isinstance(part, dict) else {}
    if train is None or not aliases:
        return part
    for old, new in aliases.items():
        if old in part and train.get(new) not in (None, part[old]):
            raise ValueError(
                f"method.{old}: got {part[old]!r}, allowed: {train[new]!r} or nothing, since it is "
                f"another name of train.{new}"
            )
        if old in part:
            train[new] = part[old]
    return {key: value for key, value in part.items() if key not in aliases}


def parse(values: dict[str, Any]) -> Config:
    """A checked config from plain values."""
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        raise UserError(_sentence(error)) from None


def load(path: str | Path, overrides: list[str] | None = None) -> Config:
    """Read a YAML file, apply `key=value` overrides, and check the result."""
    return parse(override(read_yaml(path), overrides or []))


def read_yaml(path: str | Path) -> dict[str, Any]:
    """The values of a YAML file, which must be a mapping."""
    path = Path(path)
    if not path.is_file():
        raise UserError(f"{path}: {'a folder, not a' if path.is_dir() else 'no such'} config file")
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    except (yaml.YAMLError, ValueError) as error:  # ValueError: not UTF-8, or no such date
        raise UserError(f"{path}: not a YAML file ({_first_line(error)})") from None
    values = {} if values is None else values
    if not isinstance(values, dict):
        raise UserError(f"{path}: must be a mapping of sections, got {type(values).__name__}")
    return values


def override(values: dict[str, Any], overrides: list[str]) -> dict[str, Any]:
    """Apply `section.key=value` settings; values are read as YAML."""
    for text in overrides:
        key, sign, raw = text.partition("=")
        if not sign or not key:
            raise UserError(f"--set {text}: allowed: key=value, such as train.lr=0.05")
        values = override_key(values, key, _yaml_value(key, raw))
    return values


def override_key(values: dict[str, Any], key: str, value: Any) -> dict[str, Any]:
    """The values with `section.key` changed."""
    return _set(values, key.split("."), value, key)


def _yaml_value(key: str, raw: str) -> Any:
    try:
        return yaml.safe_load(raw)
    except (yaml.YAMLError, ValueError):
        raise bad_value(f"--set {key}", raw, "a YAML value") from None


def _set(values: Any, path: list[str], value: Any, key: str) -> dict[str, Any]:
    if not isinstance(values, dict):
        raise UserError(f"--set {key}: {path[0]!r} lies below a value that is not a section")
    if len(path) == 1:
        return values | {path[0]: value}
    return values | {path[0]: _set(values.get(path[0]) or {}, path[1:], value, key)}


def dump(config: Config) -> str:
    """The complete config as YAML, as a run directory keeps it."""
    text: str = yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)
    return text


def _sentence(error: ValidationError) -> str:
    first = error.errors()[0]
    return describe(first, known=keys_beside(Config, first["loc"]))


def _first_line(error: Exception) -> str:
    mark = getattr(error, "problem_mark", None)
    if mark is not None:
        return f"line {mark.line + 1}: {getattr(error, 'problem', None) or 'syntax'}"
    return str(error).splitlines()[0] if str(error) else type(error).__name__
