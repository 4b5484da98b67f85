"""Where client work runs: serial (the reference), vector (clients stacked), auto, flower."""

from __future__ import annotations

from perdure.config import Config
from perdure.engines.auto import AutoEngine
from perdure.engines.memory import keep_freed_memory
from perdure.engines.serial import SerialEngine
from perdure.engines.vector import VectorEngine
from perdure.engines.work import Engine


def make_engine(config: Config) -> Engine:
    """The engine of a config."""
    keep_freed_memory()
    said = config.engine
    if said.kind == "serial":
        return SerialEngine()
    if said.kind == "vector":
        return VectorEngine(said.chunk)
    if said.kind == "flower":
        from perdure.engines.flower.engine import FlowerEngine

        return FlowerEngine.of(config)
    return AutoEngine(said.chunk)
