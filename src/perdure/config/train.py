"""The `train` section of a config, with its optimizers, schedules and rules of aggregation."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    BeforeValidator,
    Field,
    GetJsonSchemaHandler,
    TypeAdapter,
    ValidationError,
    model_validator,
)
from pydantic_core import CoreSchema, PydanticCustomError

from perdure.config.section import (
    NOT_BOOL,
    ByKind,
    ConfigSection,
    NonNegativeFloat,
    PerTask,
    PositiveFloat,
    PositiveInt,
    Probability,
)
from perdure.config.sentences import describe

# ------------------------------------------------------------------------------------------------
# How the server turns the clients' updates of a round into one: `train.aggregation`.
# ------------------------------------------------------------------------------------------------


class MeanAggregation(ConfigSection):
    """The mean, weighted by `train.weighting`. One hostile client can move it anywhere.

    Example: `aggregation: mean`
    """

    kind: Literal["mean"] = "mean"
    """How the server turns the clients' updates of a round into one: mean, median, trimmed_mean or
    norm_bound. All but the mean give every client the same weight, keep the updates of a round's
    clients in memory at the same time, and need updates that the server sees."""


class MedianAggregation(ConfigSection):
    """The median of each parameter's changes.

    Example: `aggregation: median`
    """

    kind: Literal["median"] = "median"


class TrimmedMeanAggregation(ConfigSection):
    """The mean of each parameter's changes, without the smallest and the largest ones.

    Example: `aggregation: {kind: trimmed_mean, fraction: 0.3}`
    """

    kind: Literal["trimmed_mean"] = "trimmed_mean"
    fraction: Annotated[float, Field(gt=0, lt=0.5, allow_inf_nan=False), NOT_BOOL] = 0.2
    """Fraction of a round's clients left out at each end, rounded down: at least that of the
    hostile, and at least one client."""


class NormBoundAggregation(ConfigSection):
    """The mean of the updates, of which larger ones are scaled down to a norm.

    Example: `aggregation: {kind: norm_bound, norm: 1.0}`
    """

    kind: Literal["norm_bound"] = "norm_bound"
    norm: PositiveFloat | None = None
    """Largest norm of a client's update. If None, the median norm of the round's updates."""


AGGREGATIONS = ("mean", "median", "trimmed_mean", "norm_bound")


def _named(value: Any) -> Any:
    if isinstance(value, str) and value not in AGGREGATIONS:
        raise PydanticCustomError("must_be", "'mean', 'median', 'trimmed_mean' or 'norm_bound'")
    return {"kind": value} if isinstance(value, str) else value


AggregationConfig = Annotated[
    MeanAggregation | MedianAggregation | TrimmedMeanAggregation | NormBoundAggregation,
    ByKind(),
    BeforeValidator(_named),
]


# ------------------------------------------------------------------------------------------------
# The `train` section of a config.
# ------------------------------------------------------------------------------------------------


class _Optimizer(ConfigSection):
    """An optimizer."""

    kind: str
    sums_gradients: ClassVar[bool] = False
    """Whether a client's update is a weighted sum of its gradients."""


class SgdOptimizer(_Optimizer):
    """Stochastic gradient descent.

    Example: `optimizer: {kind: sgd, momentum: 0.9}`
    """

    sums_gradients: ClassVar[bool] = True

    kind: Literal["sgd"] = "sgd"
    """The clients' optimizer: sgd, adam or adamw. Its state lives for one round."""
    momentum: Probability = 0.0
    """Momentum in [0, 1). It may also be written as `train.momentum`."""


class AdamOptimizer(_Optimizer):
    """Adam with PyTorch's defaults; weight decay is added to the gradient.

    Example: `optimizer: adam`
    """

    kind: Literal["adam"] = "adam"


class AdamwOptimizer(_Optimizer):
    """Adam with PyTorch's defaults and decoupled weight decay.

    Example: `optimizer: adamw`
    """

    kind: Literal["adamw"] = "adamw"


OPTIMIZERS = ("sgd", "adam", "adamw")


def _named_kind(value: Any) -> Any:
    if isinstance(value, str) and value not in OPTIMIZERS:
        raise PydanticCustomError("must_be", "'sgd', 'adam' or 'adamw'")
    return {"kind": value} if isinstance(value, str) else value


OptimizerConfig = Annotated[
    SgdOptimizer | AdamOptimizer | AdamwOptimizer, ByKind(), BeforeValidator(_named_kind)
]
FLAT_OPTIMIZER_KEYS = {"momentum": ("sgd", Probability)}
"""Keys of an optimizer that may be written in the train section: its kind and the key's type."""


class ConstantSchedule(ConfigSection):
    """The learning rate does not change.

    Example: `schedule: {kind: constant}`
    """

    kind: Literal["constant"] = "constant"
    """How the learning rate changes over a task's rounds: constant, cosine, exponential, step."""


class CosineSchedule(ConfigSection):
    """Half a period of a cosine, from the learning rate to `floor` times it.

    Example: `schedule: {kind: cosine, floor: 0.01}`
    """

    kind: Literal["cosine"] = "cosine"
    floor: NonNegativeFloat = 0.0
    """Fraction of the learning rate that is left at the end of a task."""


class ExponentialSchedule(ConfigSection):
    """The learning rate is multiplied by `gamma` after every round.

    Example: `schedule: {kind: exponential, gamma: 0.95}`
    """

    kind: Literal["exponential"] = "exponential"
    gamma: PositiveFloat = 0.99
    """Factor per round (exponential) or per step (step)."""


class StepSchedule(ConfigSection):
    """The learning rate is multiplied by `gamma` after every `every` rounds.

    Example: `schedule: {kind: step, gamma: 0.1, every: 10}`
    """

    kind: Literal["step"] = "step"
    gamma: PositiveFloat = 0.99
    """Factor per round (exponential) or per step (step)."""
    every: PositiveInt = 10
    """Rounds between two steps."""


ScheduleConfig = Annotated[
    ConstantSchedule | CosineSchedule | ExponentialSchedule | StepSchedule, ByKind()
]


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
    optimizer: OptimizerConfig = SgdOptimizer()
    """The clients' optimizer: a name, or a mapping with `kind` and its keys."""
    weight_decay: NonNegativeFloat = 0.0
    """Weight decay: added to the gradient; decoupled in adamw."""
    clip: PositiveFloat | None = None
    """Maximum norm of a client's gradient. If None, gradients are not clipped."""
    schedule: ScheduleConfig = ConstantSchedule()
    """How the learning rate changes over a task's rounds."""
    task_decay: PositiveFloat = 1.0
    """Factor on the learning rate for each task after the first."""
    weighting: Literal["samples", "uniform"] | None = None
    """Weights of the server's average: a client's number of examples (samples), or equal (uniform).
    Default: chosen by the method, mostly samples; one for all methods of a comparison."""
    aggregation: AggregationConfig = MeanAggregation()
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
        return self.optimizer.momentum if isinstance(self.optimizer, SgdOptimizer) else 0.0

    @property
    def coupled_decay(self) -> float:
        """Weight decay that is added to the gradient before a method sees it."""
        return 0.0 if self.optimizer.kind == "adamw" else self.weight_decay

    @property
    def decoupled_decay(self) -> float:
        """Weight decay that the optimizer applies to the parameters itself."""
        return self.weight_decay if self.optimizer.kind == "adamw" else 0.0

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
        if not isinstance(optimizer, dict) or optimizer.get("kind", "sgd") not in OPTIMIZERS:
            return rest  # refused by its own sentence
        for key in FLAT_OPTIMIZER_KEYS.keys() & values.keys():
            optimizer = _with_flat_key(optimizer, key, values[key])
        return rest | {"optimizer": optimizer}

    @classmethod
    def __get_pydantic_json_schema__(
        cls, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        """Return the schema with the ways to write a mapping that has a kind in short."""
        json_schema = handler(schema)
        properties = handler.resolve_ref_schema(json_schema)["properties"]
        for key, names in (("optimizer", OPTIMIZERS), ("aggregation", AGGREGATIONS)):
            properties[key].setdefault("anyOf", []).insert(0, {"enum": list(names)})
        properties["momentum"] = {
            "type": "number", "minimum": 0, "exclusiveMaximum": 1,
            "description": "Momentum of sgd: another place for optimizer.momentum.",
        }  # fmt: skip
        return json_schema


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
