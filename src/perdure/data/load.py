"""What is read: one source from a config, or the domains inside one."""

from __future__ import annotations

from perdure.config import Config, DataConfig
from perdure.core.rng import Draws
from perdure.data.readers.huggingface import load_huggingface
from perdure.data.readers.idx import load_idx
from perdure.data.readers.image_folder import load_folder, load_folder_domains
from perdure.data.readers.npz import load_digits, load_npz, load_npz_domains
from perdure.data.readers.text import load_text, load_text_domains
from perdure.data.resize import fit_source
from perdure.data.source import Examples, Place, Source, limited, limited_test
from perdure.data.tokenization import as_the_model_reads

__all__ = ["Examples", "Place", "Source", "load_domains", "load_source", "model_source"]


def load_source(config: DataConfig, draws: Draws, place: Place | None = None) -> Source:
    """Read a source, cut it to data.limit and bring it to data.size and data.channels."""
    place = place or Place()
    source = _read(config, draws, place)
    return fit_source(_limited(source, config, draws, place.number), config.size, config.channels)


def model_source(config: Config, draws: Draws) -> Source:
    """The source of a config, as its model reads it."""
    return as_the_model_reads([load_source(config.data, draws)], config)[0]


def load_domains(config: DataConfig, draws: Draws) -> list[Source]:
    """Read the domains inside one source (npz with domains, folders domain/class, text)."""
    place = Place()
    sources = _read_domains(config, draws, place)
    return [
        fit_source(_limited(source, config, draws, number), config.size, config.channels)
        for number, source in enumerate(sources)
    ]


def _limited(source: Source, config: DataConfig, draws: Draws, number: int) -> Source:
    source = limited(source, config.limit, draws.numpy("limit", number))
    return limited_test(source, config.test_limit, draws.numpy("test limit", number))


def _read(config: DataConfig, draws: Draws, place: Place) -> Source:
    match config.source:
        case "digits":
            return load_digits(config, draws, place)
        case "npz":
            return load_npz(config, place)
        case "idx":
            return load_idx(config, place)
        case "folder":
            return load_folder(config, draws, place)
        case "text":
            return load_text(config, draws, place)
        case "huggingface":
            return load_huggingface(config, draws, place)


def _read_domains(config: DataConfig, draws: Draws, place: Place) -> list[Source]:
    match config.source:
        case "npz":
            return load_npz_domains(config, place)
        case "folder":
            return load_folder_domains(config, draws, place)
        case "text":
            return load_text_domains(config, draws, place)
        case _:
            raise place.error("source", config.source, "npz, folder or text; or stream.domains")
