"""The `stream` section of a config: the base of all kinds, and the registry of kinds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import ConfigDict, SerializeAsAny, ValidationInfo, WrapValidator, model_validator

from perdure.config.section import ConfigSection, Fraction, PositiveInt, as_mapping, read_section
from perdure.core.errors import UserError
from perdure.core.registry import Registry

if TYPE_CHECKING:
    from perdure.config.root import Config
    from perdure.core.rng import Rng


class StreamConfig(ConfigSection):
    """The tasks and their order. A kind of stream is a subclass with its keys and `build`.

    The registry names the kind: `STREAMS`, an entry point, or the dotted path of the class.

    Example: `stream: {kind: permuted, tasks: 5}`
    """

    kind: str = ""
    """What makes a task: permuted, split, domains, pool or given, the name of an installed kind, or
    the dotted path of a custom one."""
    tasks: PositiveInt = 5
    """Number of tasks."""
    presence: Fraction = 1.0
    """Fraction of the clients that see a task, at least one of them, drawn for each task."""

    cumulative: bool = False
    """Train every task on the examples of all tasks so far: each client holds what it held in
    them. A reference, joint training; a growing head is then trained with all its outputs."""

    resembles: ClassVar[str] = "domains"
    """The built-in kind whose methods and default heads suit this one."""

    def build(self, config: Config, rng: Rng) -> Any:
        """Return the stream of a config, a `perdure.data.streams.Stream`.

        Args:
            config: The whole config; `config.stream` is this section.
            rng: Derives every random draw from the seed. A task must not depend on later ones.

        """
        raise NotImplementedError

    @property
    def distinct_tasks(self) -> bool:
        """Whether a task is one distribution, which can have its own outputs, unlike in a pool."""
        return self.resembles != "pool"

    @property
    def is_open(self) -> bool:
        """Whether something that the first tasks depend on is found from all tasks."""
        return False

    def fixed(self, stream: Any) -> StreamConfig:
        """Return the section with what it leaves open as a stream of it has it.

        With more tasks, the result still begins with the tasks of that stream.
        """
        return self

    @model_validator(mode="before")
    @classmethod
    def _kind_of_the_class(cls, values: Any) -> Any:
        if not isinstance(values, dict) or "kind" in values:
            return values
        return {"kind": STREAMS.name_of(cls), **values}


STREAMS: Registry[StreamConfig] = Registry(
    key="stream.kind",
    base=StreamConfig,
    base_name="perdure.StreamConfig",
    group="perdure.streams",
    builtin={
        "permuted": "perdure.data.streams.permuted.PermutedStream",
        "split": "perdure.data.streams.split.SplitStream",
        "domains": "perdure.data.streams.domains.DomainStream",
        "pool": "perdure.data.streams.pool.PoolStream",
        "given": "perdure.data.streams.given.GivenStream",
    },
)
DEFAULT_STREAM = "permuted"


def default_stream() -> StreamConfig:
    """Return the stream of a config that names none."""
    return STREAMS.find(DEFAULT_STREAM)()


class SavedStream(StreamConfig):
    """A custom stream of a run that is only read: its class is not imported."""

    model_config = ConfigDict(extra="allow")


def _read_stream(value: Any, _: Any, info: ValidationInfo) -> StreamConfig:
    if isinstance(value, StreamConfig):
        return value
    values = dict(as_mapping(value))
    kind = values.setdefault("kind", DEFAULT_STREAM)
    context = info.context or {}
    if not context.get("imports", True) and not STREAMS.is_builtin(kind):
        return read_section(SavedStream, values, context)
    try:
        stream_class = STREAMS.find(kind, context.get("folder"))
    except UserError as error:  # its sentence names the section, which is added to those here
        raise ValueError(str(error).removeprefix("stream.")) from error
    if isinstance(kind, type):
        values["kind"] = STREAMS.name_of(kind)
    return read_section(stream_class, values, context)


AnyStream = Annotated[SerializeAsAny[StreamConfig], WrapValidator(_read_stream)]
