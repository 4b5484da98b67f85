"""What is read: one source from a config, or the domains inside one."""

from __future__ import annotations

from perdure.config import Config, DataConfig
from perdure.core.rng import Rng
from perdure.data.readers.huggingface import load_huggingface
from perdure.data.readers.idx import load_idx
from perdure.data.readers.image_folder import load_folder, load_folder_domains
from perdure.data.readers.npz import load_digits, load_npz, load_npz_domains
from perdure.data.readers.text import load_text, load_text_domains
from perdure.data.resize import fit_source
from perdure.data.source import ConfigLocation, Examples, Source, limited, limited_test
from perdure.data.tokenization import tokenize_if_text

__all__ = ["ConfigLocation", "Examples", "Source", "load_domains", "load_source", "model_source"]


def load_source(config: DataConfig, rng: Rng, place: ConfigLocation | None = None) -> Source:
    """Read a source, cut it to data.limit and bring it to data.size and data.channels."""
    place = place or ConfigLocation()
    source = _read(config, rng, place)
    return fit_source(_limited(source, config, rng, place.number), config.size, config.channels)


def model_source(config: Config, rng: Rng) -> Source:
    """The source of a config, as its model reads it."""
    return tokenize_if_text([load_source(config.data, rng)], config)[0]


def load_domains(config: DataConfig, rng: Rng) -> list[Source]:
    """Read the domains inside one source (npz with domains, folders domain/class, text)."""
    place = ConfigLocation()
    sources = _read_domains(config, rng, place)
    return [
        fit_source(_limited(source, config, rng, number), config.size, config.channels)
        for number, source in enumerate(sources)
    ]


def _limited(source: Source, config: DataConfig, rng: Rng, number: int) -> Source:
    source = limited(source, config.limit, rng.numpy_generator("limit", number))
    return limited_test(source, config.test_limit, rng.numpy_generator("test limit", number))


def _read(config: DataConfig, rng: Rng, place: ConfigLocation) -> Source:
    match config.source:
        case "digits":
            return load_digits(config, rng, place)
        case "npz":
            return load_npz(config, place)
        case "idx":
            return load_idx(config, place)
        case "folder":
            return load_folder(config, rng, place)
        case "text":
            return load_text(config, rng, place)
        case "huggingface":
            return load_huggingface(config, rng, place)


def _read_domains(config: DataConfig, rng: Rng, place: ConfigLocation) -> list[Source]:
    match config.source:
        case "npz":
            return load_npz_domains(config, place)
        case "folder":
            return load_folder_domains(config, rng, place)
        case "text":
            return load_text_domains(config, rng, place)
        case _:
            raise place.error("source", config.source, "npz, folder or text; or stream.domains")
