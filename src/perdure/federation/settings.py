"""The section `engine: {kind: flower}`, which can be read where no extra is installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from perdure.config import Config
from perdure.config.engine import EngineConfig
from perdure.config.section import PositiveFloat, PositiveInt


class FlowerEngineConfig(EngineConfig):
    """Clients train on the nodes of a federation; `perdure run` starts a local one.

    Example: `engine: {kind: flower, nodes: 2}`
    """

    nodes: PositiveInt | None = None
    """Node processes of a local trial. Default: one per client."""
    timeout: PositiveFloat = 600.0
    """Seconds to wait for a node's reply. Nodes that reply later are left out of the round."""

    simulates: ClassVar[bool] = False

    def make(self, config: Config) -> Any:
        """Return an engine without a way to the nodes, to check a config outside a federation."""
        from perdure.federation.server.engine import FlowerEngine

        return FlowerEngine.with_transport(config, None)

    def launch(self, *args: Any) -> tuple[dict[str, Any], Path | None]:
        """Run a whole federation as processes of this machine."""
        from perdure.federation.admin.trial import run_trial

        return run_trial(*args)


def node_count(config: Config) -> int:
    """Return the number of nodes of a run: one per client, or `engine.nodes` in a trial."""
    if config.federation is not None:
        return config.clients.count
    return getattr(config.engine, "nodes", None) or config.clients.count


def reply_timeout(config: Config) -> float:
    """Return the seconds to wait for a node's reply."""
    engine = config.engine
    return (
        engine.timeout if isinstance(engine, FlowerEngineConfig) else FlowerEngineConfig().timeout
    )
