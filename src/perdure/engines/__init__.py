"""Where client work runs: serial (the reference), vector (clients stacked), auto, flower."""

from __future__ import annotations

from typing import Any

from perdure.config import Config
from perdure.contract.engine import Engine
from perdure.core.registry import Registry
from perdure.engines.malloc import keep_freed_memory

ENGINES: Registry[Any] = Registry(
    key="engine.kind",
    base=object,
    base_name="perdure.contract.engine.Engine",
    builtin={
        "auto": "perdure.engines.auto.AutoEngine",
        "serial": "perdure.engines.serial.SerialEngine",
        "vector": "perdure.engines.vector.VectorEngine",
        "flower": "perdure.flower.engine.FlowerEngine",
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
