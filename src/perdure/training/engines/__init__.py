"""Where client work runs: serial (the reference), vector (clients stacked), auto, flower."""

from __future__ import annotations

from perdure.config import Config
from perdure.config.engine import EngineConfig
from perdure.core.registry import Registry
from perdure.training.engines.engine import Engine, keep_freed_memory

ENGINES: Registry[EngineConfig] = Registry(
    key="engine.kind",
    base=EngineConfig,
    base_name="perdure.config.engine.EngineConfig",
    group="perdure.engines",
    builtin={
        "auto": "perdure.training.engines.auto.AutoEngineConfig",
        "serial": "perdure.training.engines.serial.SerialEngineConfig",
        "vector": "perdure.training.engines.vector.VectorEngineConfig",
        "flower": "perdure.federation.settings.FlowerEngineConfig",
    },
)


def make_engine(config: Config) -> Engine:
    """Return the engine of a config."""
    keep_freed_memory()
    engine: Engine = config.engine.make(config)
    return engine
