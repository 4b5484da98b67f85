"""The `engine` and `federation` sections of a config."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import Discriminator, Field, Tag

from perdure.config.section import (
    ConfigSection,
    Fraction,
    KindSection,
    NonNegativeFloat,
    PositiveInt,
    one_or_several,
)

if TYPE_CHECKING:
    from perdure.config.root import Config


class EngineConfig(KindSection):
    """Where client work runs."""

    registry_path: ClassVar[str] = "perdure.training.engines:ENGINES"

    kind: str = ""
    """Where local training runs: auto, serial, vector or flower."""

    chooses: ClassVar[bool] = False
    """Whether a trial chooses one of several engines."""
    simulates: ClassVar[bool] = True
    """Whether clients are simulated in this process, so that a trial may choose it."""

    @property
    def is_open(self) -> bool:
        """Whether a trial chooses the engine, or how many clients it stacks."""
        stacks = "chunk" in type(self).model_fields
        return self.chooses or (stacks and self.chunk_size is None)

    @property
    def chunk_size(self) -> int | None:
        """Clients trained as one stack, if the section says so."""
        chunk: int | None = getattr(self, "chunk", None)
        return chunk

    def make(self, config: Config) -> Any:
        """Return the `perdure.training.engines.engine.Engine` of a config."""
        raise NotImplementedError

    def launch(self, *args: Any) -> tuple[dict[str, Any], Path | None]:
        """Run a whole config elsewhere, if it does not simulate; return its result and folder."""
        raise NotImplementedError

    def with_chunk(self, chunk: int | None) -> EngineConfig:
        """Return the section with another number of stacked clients, if it stacks any."""
        if chunk is None or "chunk" not in type(self).model_fields:
            return self
        return self.model_copy(update={"chunk": chunk})

    def chosen(self, kind: str | None, chunk: int | None) -> EngineConfig:
        """Return the section with what it leaves open as a trial has chosen it."""
        section = self
        if self.chooses and kind is not None:
            section = self.registry().find(kind)().with_chunk(self.chunk_size)
        return section.with_chunk(section.chunk_size or chunk)


NodeName = Annotated[str, Field(pattern=r"^node-(0|[1-9][0-9]{0,8})$")]
"""The name of a node's folder."""
Quorum = Annotated[
    Annotated[PositiveInt, Tag("<one>")]
    | Annotated[list[NodeName], Field(min_length=1), Tag("<several>")],
    Discriminator(one_or_several),
]
"""A number of nodes, or their names."""
DEFAULT_NODE_SHARE = 0.5
"""No node outweighs all others together."""


class FederationConfig(ConfigSection):
    """What the nodes of a federation agree on if they read local data (docs/federation.md).

    Example: `federation: {classes: [cat, dog], shape: [3, 32, 32]}`
    """

    classes: Annotated[list[str], Field(min_length=1)]
    """Names of all classes."""
    shape: Annotated[list[PositiveInt], Field(min_length=1, max_length=3)]
    """Shape of an example: channels, height and width."""
    tasks: list[Annotated[list[str], Field(min_length=1)]] | None = None
    """Classes of each task. If None, all classes in every task."""
    quorum: Quorum | None = None
    """How many nodes, or which (`[node-0, node-2]`), must take part in a round, an exchange, an
    evaluation and the start of a task, as far as they are asked. If None, all nodes at the start of
    a task, else one."""
    wait: NonNegativeFloat = 600.0
    """Seconds to wait for nodes that are missing for the quorum, which are asked again. After it
    the run stops at its last checkpoint and names them."""
    max_node_share: Fraction | None = None
    """Largest fraction of the total weight that one node has in a round and in an evaluation,
    however many examples it announces. Default: 0.5 where three nodes or more have examples; of two
    neither is capped."""

    @property
    def named_nodes(self) -> list[int]:
        """The nodes that `quorum` names; empty if it is a number or None."""
        names = self.quorum if isinstance(self.quorum, list) else []
        return [int(name.removeprefix("node-")) for name in names]

    def share_of(self, nodes: int) -> float | None:
        """Return the largest fraction of a node among this many, or None if it is not limited."""
        if self.max_node_share is None:
            return DEFAULT_NODE_SHARE if nodes >= 3 else None
        return self.max_node_share
