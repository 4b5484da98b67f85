"""The `engine` and `federation` sections of a config."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Discriminator, Field, Tag

from perdure.config.section import (
    ByKind,
    ConfigSection,
    Fraction,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    one_or_several,
)


class AutoEngineConfig(ConfigSection):
    """Serial or vector, whichever a short trial finds faster.

    Example: `engine: {kind: auto}`
    """

    kind: Literal["auto"] = "auto"
    """Where local training runs: auto, serial, vector or flower."""
    chunk: PositiveInt | None = None
    """Clients trained as one stack, if vector is chosen. Default: found by the trial."""


class SerialEngineConfig(ConfigSection):
    """Clients train one after another.

    Example: `engine: {kind: serial}`
    """

    kind: Literal["serial"] = "serial"


class VectorEngineConfig(ConfigSection):
    """Clients are stacked and train at the same time.

    Example: `engine: {kind: vector, chunk: 10}`
    """

    kind: Literal["vector"] = "vector"
    chunk: PositiveInt | None = None
    """Clients trained as one stack. Default: as many as fit in the cache."""


class FlowerEngineConfig(ConfigSection):
    """Clients train on the nodes of a federation; `perdure run` starts a local one.

    Example: `engine: {kind: flower, nodes: 2}`
    """

    kind: Literal["flower"] = "flower"
    nodes: PositiveInt | None = None
    """Node processes of a local trial. Default: one per client."""
    timeout: PositiveFloat = 600.0
    """Seconds to wait for a node's reply. Nodes that reply later are left out of the round."""


EngineConfig = Annotated[
    AutoEngineConfig | SerialEngineConfig | VectorEngineConfig | FlowerEngineConfig, ByKind()
]


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
