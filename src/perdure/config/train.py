"""The `train` section of a config, and the bases of its optimizers, schedules and rules."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import (
    Field,
    GetJsonSchemaHandler,
    SerializeAsAny,
    TypeAdapter,
    ValidationError,
    model_validator,
)
from pydantic_core import CoreSchema

from perdure.config.section import (
    NOT_BOOL,
    ChosenByKind,
    ConfigSection,
    KindSection,
    NonNegativeFloat,
    PerTask,
    PositiveFloat,
    PositiveInt,
    Probability,
)
from perdure.config.sentences import describe

if TYPE_CHECKING:
    from perdure.core.trees import Tensors

# ---- Bases of the sections with several kinds. The kinds are classes of perdure.training


class Aggregation(KindSection):
    """How the server turns the clients' updates of a round into one."""

    registry_path: ClassVar[str] = "perdure.training.aggregation:AGGREGATIONS"

    kind: str = ""
    """How the server turns the clients' updates of a round into one: mean, median, trimmed_mean or
    norm_bound. All but the mean give every client the same weight, keep the updates of a round's
    clients in memory at the same time, and need updates that the server sees."""

    is_sum: ClassVar[bool] = False
    """Whether it is the weighted mean, whose sums need no single update."""

    def check(self, clients: int) -> None:
        """Refuse a rule that has no effect among this many clients of a round, by a UserError."""

    def combine(self, stacked: Tensors) -> Tensors:
        """Return tensors without the leading client axis of `stacked`; all clients count alike."""
        raise NotImplementedError


class OptimizerConfig(KindSection):
    """The clients' optimizer. Its state lives for one round."""

    registry_path: ClassVar[str] = "perdure.training.optimizers:OPTIMIZERS"

    kind: str = ""
    """The clients' optimizer: sgd, adam or adamw. Its state lives for one round."""

    sums_gradients: ClassVar[bool] = False
    """Whether a client's update is a weighted sum of its gradients."""
    decouples_decay: ClassVar[bool] = False
    """Whether weight decay changes the parameters themselves and not the gradient."""

    def make(self, decay: float) -> Any:
        """Return a new `perdure.training.optimizers.Optimizer`, with this decoupled decay."""
        raise NotImplementedError


class Schedule(KindSection):
    """How the learning rate changes over a task's rounds."""

    registry_path: ClassVar[str] = "perdure.training.optimizers:SCHEDULES"

    kind: str = ""
    """How the learning rate changes over a task's rounds: constant, cosine, exponential, step."""

    def factor(self, round_: int, rounds: int) -> float:
        """Return the factor on the learning rate in a round, from 0, of a task of `rounds`."""
        raise NotImplementedError


FLAT_OPTIMIZER_KEYS = {"momentum": ("sgd", Probability)}
"""Keys of an optimizer that may be written in the train section: its kind and the key's type."""


# ---- The `train` section of a config


class TrainConfig(ConfigSection):
    """How a client trains and how the server averages.

    Example: `train: {rounds: 20, local_epochs: 2, batch_size: 16, lr: 0.1, momentum: 0.9}`
    """

    rounds: PerTask = 20
    """Rounds per task. A list has one entry per task, and its last entry repeats: `[1000, 100]`
    trains the first task for 1,000 rounds and every later one for 100."""
    local_epochs: PositiveInt = 1
    """Passes of a client over its data per round."""
    max_steps: PositiveInt | None = None
    """Maximum number of local steps per round. If None, `local_epochs` alone determines them."""
    batch_size: PositiveInt = 32
    """Examples per local step."""
    lr: Annotated[float, Field(gt=0, le=1e30, allow_inf_nan=False), NOT_BOOL] = 0.1
    """Learning rate of the clients."""
    optimizer: Annotated[SerializeAsAny[OptimizerConfig], ChosenByKind()] = Field(
        default_factory=OptimizerConfig.default
    )
    """The clients' optimizer: a name, or a mapping with `kind` and its keys."""
    weight_decay: NonNegativeFloat = 0.0
    """Weight decay: added to the gradient; decoupled in adamw."""
    clip: PositiveFloat | None = None
    """Maximum norm of a client's gradient. If None, gradients are not clipped."""
    schedule: Annotated[SerializeAsAny[Schedule], ChosenByKind()] = Field(
        default_factory=Schedule.default
    )
    """How the learning rate changes over a task's rounds."""
    task_decay: PositiveFloat = 1.0
    """Factor on the learning rate for each task after the first."""
    weighting: Literal["samples", "uniform"] | None = None
    """Weights of the server's average: a client's number of examples (samples), or equal (uniform).
    Default: chosen by the method, mostly samples; one for all methods of a comparison."""
    aggregation: Annotated[SerializeAsAny[Aggregation], ChosenByKind()] = Field(
        default_factory=Aggregation.default
    )
    """How the server turns the clients' updates into one: a name, or a mapping with `kind` and its
    keys. All but mean resist a minority of hostile clients."""
    server_lr: PositiveFloat | None = None
    """Step size of the server: factor on the aggregated update. Default: chosen by the method,
    mostly 1."""
    server_schedule: Literal["constant", "1/k", "1/sqrt(k)"] | None = None
    """Factor on `server_lr` in task k = 1, 2, ... Default: the method's, mostly constant."""
    outputs: Literal["task", "seen", "all"] | None = None
    """Outputs in the loss: those of the task, of all tasks so far, or all. Default: chosen by the
    method, mostly task for a growing head and all for a shared one."""

    @property
    def momentum(self) -> float:
        """The optimizer's momentum; 0 if it has none."""
        momentum: float = getattr(self.optimizer, "momentum", 0.0)
        return momentum

    @model_validator(mode="before")
    @classmethod
    def _flat_optimizer_keys(cls, values: Any) -> Any:
        """Move the keys of an optimizer that are written in the train section to the optimizer."""
        if not isinstance(values, dict) or not FLAT_OPTIMIZER_KEYS.keys() & values.keys():
            return values
        rest = {key: v for key, v in values.items() if key not in FLAT_OPTIMIZER_KEYS}
        optimizer = values.get("optimizer", "sgd")
        if isinstance(optimizer, str):
            optimizer = {"kind": optimizer}
        if not isinstance(optimizer, dict) or not _is_optimizer(optimizer.get("kind", "sgd")):
            return rest  # refused by its own sentence
        for key in FLAT_OPTIMIZER_KEYS.keys() & values.keys():
            optimizer = _with_flat_key(optimizer, key, values[key])
        return rest | {"optimizer": optimizer}

    @classmethod
    def __get_pydantic_json_schema__(
        cls, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        """Return the schema with another place of the momentum."""
        json_schema = handler(schema)
        properties = handler.resolve_ref_schema(json_schema)["properties"]
        properties["momentum"] = {
            "type": "number", "minimum": 0, "exclusiveMaximum": 1,
            "description": "Momentum of sgd: another place for optimizer.momentum.",
        }  # fmt: skip
        return json_schema


def _is_optimizer(kind: Any) -> bool:
    return OptimizerConfig.registry().is_installed(kind)


def _with_flat_key(optimizer: dict[str, Any], key: str, value: Any) -> dict[str, Any]:
    owner, annotation = FLAT_OPTIMIZER_KEYS[key]
    kind = optimizer.get("kind", "sgd")
    if kind != owner:
        raise ValueError(
            f"{key}: unknown key for optimizer {kind!r}, got {value!r}; allowed for {owner!r}"
        )
    try:
        number = TypeAdapter(annotation).validate_python(value)
    except ValidationError as error:
        raise ValueError(describe(error.errors()[0], prefix=key)) from None
    if optimizer.get(key, number) != number:
        expected = f"{optimizer[key]!r} as in train.optimizer.{key}"
        raise ValueError(f"{key}: must be {expected}, got {value!r}")
    return {**optimizer, key: number}
