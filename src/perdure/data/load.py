"""Loading the sources of a config: one source, or one per domain, limited and resized."""

from __future__ import annotations

from perdure.config import Config, DataConfig
from perdure.core.rng import Rng
from perdure.data.clients import check_clients, config_location
from perdure.data.examples import Examples, Source
from perdure.data.images import resize_source
from perdure.data.rows import limit_test, limit_train
from perdure.data.source import ConfigLocation
from perdure.data.text import tokenize_if_text

__all__ = [
    "ConfigLocation",
    "Examples",
    "Source",
    "limit_and_resize",
    "load_domains",
    "load_model_source",
    "load_source",
]


def load_source(config: DataConfig, rng: Rng, location: ConfigLocation | None = None) -> Source:
    """Load a source, limited and resized as its section asks.

    Raises:
        UserError: A file is missing or damaged.

    """
    location = location or ConfigLocation()
    _check_target(config, location)
    kept: Source | None = config.take(("source", _content(config), rng.seed, location))
    if kept is not None:
        return kept
    return limit_and_resize(config.load(rng, location), config, rng, location.number)


def load_and_keep(config: DataConfig, rng: Rng, location: ConfigLocation) -> Source:
    """Load a source that the same call of `load_source` returns again, once, without reading."""
    source = load_source(config, rng, location)
    config.keep(("source", _content(config), rng.seed, location), source)
    return source


def load_and_keep_domains(config: DataConfig, rng: Rng, location: ConfigLocation) -> list[Source]:
    """Load domains that the same call of `load_domains` returns again, once, without reading."""
    sources = load_domains(config, rng, location)
    config.keep(("domains", _content(config), rng.seed, location), sources)
    return sources


def _content(config: DataConfig) -> str:
    return config.model_dump_json(exclude={"normalize", "mean", "std"})


def load_model_source(config: Config, rng: Rng) -> Source:
    """Load the source of a config, tokenized if its model reads text."""
    source = load_source(config.data, rng, config_location(config))
    check_clients(config, source)
    return tokenize_if_text([source], config)[0]


def load_domains(
    config: DataConfig, rng: Rng, location: ConfigLocation | None = None
) -> list[Source]:
    """Load one source per domain from an npz file, folders domain/class, text or a table.

    The arguments are those of `load_source`.
    """
    location = location or ConfigLocation()
    _check_target(config, location)
    kept: list[Source] | None = config.take(("domains", _content(config), rng.seed, location))
    if kept is not None:
        return kept
    sources = config.load_domains(rng, location)
    return [limit_and_resize(source, config, rng, number) for number, source in enumerate(sources)]


def _check_target(config: DataConfig, location: ConfigLocation) -> None:
    """Refuse numbers as targets of a source that has classes."""
    if location.numbers and not config.has_numbers:
        expected = "npz, table or data in Python with data.target 'number'"
        raise location.error("source", config.source, expected)


def limit_and_resize(source: Source, config: DataConfig, rng: Rng, number: int) -> Source:
    """Return a source with as many examples, of the size, that its section asks for."""
    source = limit_train(source, config.limit, rng.numpy_generator("limit", number))
    source = limit_test(source, config.test_limit, rng.numpy_generator("test limit", number))
    return resize_source(source, config.size, config.channels)
