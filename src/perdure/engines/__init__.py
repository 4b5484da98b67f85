"""Where client work runs: serial (the reference), vector (clients stacked), auto."""

from __future__ import annotations

from perdure.config import EngineConfig
from perdure.engines.auto import AutoEngine
from perdure.engines.serial import SerialEngine
from perdure.engines.vector import VectorEngine
from perdure.engines.work import Engine


def make_engine(config: EngineConfig) -> Engine:
    """The engine of a config."""
    if config.kind == "serial":
        return SerialEngine()
    if config.kind == "vector":
        return VectorEngine(config.chunk)
    return AutoEngine(config.chunk)
