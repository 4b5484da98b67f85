"""Where client work runs: serial (the reference), vector (clients stacked), auto, flower."""

from __future__ import annotations

from typing import Any

from perdure.config import Config
from perdure.core.registry import Registry
from perdure.training.engines.engine import Engine, keep_freed_memory

ENGINES: Registry[Any] = Registry(
    key="engine.kind",
    base=object,
    base_name="perdure.training.engines.engine.Engine",
    builtin={
        "auto": "perdure.training.engines.auto.AutoEngine",
        "serial": "perdure.training.engines.serial.SerialEngine",
        "vector": "perdure.training.engines.vector.VectorEngine",
        "flower": "perdure.federation.server.engine.FlowerEngine",
    },
)


def find_engine(kind: str) -> Any:
    """Return the engine class of a kind."""
    return ENGINES.find(kind)


def make_engine(config: Config) -> Engine:
    """Return the engine of a config."""
    keep_freed_memory()
    engine: Engine = find_engine(config.engine.kind).from_config(config)
    return engine
