"""Where client work runs: serial (the reference), vector (clients stacked), auto, flower."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from perdure.config import Config
from perdure.contract.engine import Engine
from perdure.engines.malloc import keep_freed_memory

KINDS = {
    "auto": "perdure.engines.auto.AutoEngine",
    "serial": "perdure.engines.serial.SerialEngine",
    "vector": "perdure.engines.vector.VectorEngine",
    "flower": "perdure.flower.engine.FlowerEngine",
}
"""Classes by name, so that an engine may lie in a layer above this one."""


def find_engine(kind: str) -> Any:
    """Return the engine class of a kind."""
    module, _, name = KINDS[kind].rpartition(".")
    return getattr(import_module(module), name)


def make_engine(config: Config) -> Engine:
    """Return the engine of a config."""
    keep_freed_memory()
    engine: Engine = find_engine(config.engine.kind).from_config(config)
    return engine
