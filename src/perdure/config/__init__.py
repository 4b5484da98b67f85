"""What a config may hold: one class per section and kind, with defaults and checks."""

from perdure.config.clients import (
    ROUNDING,
    ClientsConfig,
    PartitionConfig,
)
from perdure.config.data import (
    AugmentConfig,
    DataConfig,
    DomainConfig,
    change_source,
)
from perdure.config.engine import EngineConfig, FederationConfig
from perdure.config.load import (
    RUN_FORMAT,
    check_run_format,
    dump,
    dump_saved,
    load,
    load_saved,
    override,
    parse,
    read_saved,
    read_settings,
    read_yaml,
)
from perdure.config.model import ModelConfig
from perdure.config.overrides import override_key
from perdure.config.root import Config, EvaluateConfig, Extension, PrivacyConfig, RunsConfig
from perdure.config.section import ConfigSection
from perdure.config.stream import StreamConfig
from perdure.config.train import Aggregation, OptimizerConfig, Schedule, TrainConfig
from perdure.core.documents import yaml_value

__all__ = [
    "ROUNDING",
    "RUN_FORMAT",
    "Aggregation",
    "AugmentConfig",
    "ClientsConfig",
    "Config",
    "ConfigSection",
    "DataConfig",
    "DomainConfig",
    "EngineConfig",
    "EvaluateConfig",
    "Extension",
    "FederationConfig",
    "ModelConfig",
    "OptimizerConfig",
    "PartitionConfig",
    "PrivacyConfig",
    "RunsConfig",
    "Schedule",
    "StreamConfig",
    "TrainConfig",
    "change_source",
    "check_run_format",
    "dump",
    "dump_saved",
    "load",
    "load_saved",
    "override",
    "override_key",
    "parse",
    "read_saved",
    "read_settings",
    "read_yaml",
    "yaml_value",
]
