"""The `stream` section of a config: the base of all kinds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from perdure.config.section import Fraction, KindSection, PositiveInt

if TYPE_CHECKING:
    from perdure.config.root import Config
    from perdure.core.rng import Rng


class StreamConfig(KindSection):
    """The tasks and their order. A kind of stream is a subclass with its keys and `build`.

    A registry names the kind: `STREAMS` of perdure.data.streams, an entry point, or the dotted
    path of the class.

    Example: `stream: {kind: permuted, tasks: 5}`
    """

    registry_path: ClassVar[str] = "perdure.data.streams:STREAMS"

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
    separates_classes: ClassVar[bool] = False
    """Whether tasks differ in their classes. A custom kind is like the one that it resembles."""
    mixes_tasks: ClassVar[bool] = False
    """Whether clients see the classes of a task each in another order, also as it resembles."""
    in_federation: ClassVar[bool] = False
    """Whether nodes with local data can have its tasks."""
    keeps_pixels: ClassVar[bool] = True
    """Whether images stay images, so that they can be augmented."""
    unites_shapes: ClassVar[bool] = False
    """Whether images of several sources come to one size, which further sources may change."""

    @property
    def needs_classes(self) -> bool:
        """Whether tasks differ in their classes, so that numbers cannot be divided into them."""
        return self.registry().find(self.resembles).separates_classes

    @property
    def expected_tasks(self) -> int | None:
        """Number of tasks without extensions, or None if only the data can tell it."""
        return self.tasks

    def first_sources(self, config: Config, rng: Rng) -> list[Any] | None:
        """Return the sources known before training; None if `config.data` is the only one."""
        return None

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
        return not self.registry().find(self.resembles).mixes_tasks

    @property
    def is_open(self) -> bool:
        """Whether something that the first tasks depend on is found from all tasks."""
        return False

    def fixed(self, stream: Any) -> StreamConfig:
        """Return the section with what it leaves open as a stream of it has it.

        With more tasks, the result still begins with the tasks of that stream.
        """
        return self
