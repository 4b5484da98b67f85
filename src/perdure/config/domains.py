"""The sources of `stream.domains`: those of `data`, each with a name."""

from __future__ import annotations

from typing import Annotated

from pydantic import model_validator

from perdure.config.base import ByKind
from perdure.config.data import (
    CustomData,
    DigitsData,
    FolderData,
    HuggingfaceData,
    IdxData,
    NamedData,
    NpzData,
    SourceKeys,
    TableData,
    TextData,
    installed_sources,
)


class DomainKeys(SourceKeys):
    """Keys of a source in `stream.domains`."""

    name: str | None = None
    """Name of the domain in reports. Default: the name of its file or source."""

    @model_validator(mode="after")
    def _normalized_alike(self) -> DomainKeys:
        """Refuse normalization: without a task label, prediction cannot know which domain's."""
        for key in ("mean", "std", "normalize", "target_mean", "target_std"):
            if getattr(self, key) is not None:
                expected = f"null, since all domains are normalized alike, by data.{key}"
                raise ValueError(f"{key}: must be {expected}, got {getattr(self, key)!r}")
        if self.augment:
            raise ValueError("augment: must be empty, since data.augment holds for all domains")
        if self.target != "class":
            expected = "omitted, since data.target holds for all domains"
            raise ValueError(f"target: must be {expected}, got {self.target!r}")
        if self.validation:
            expected = "0, since data.validation holds for all domains"
            raise ValueError(f"validation: must be {expected}, got {self.validation!r}")
        return self


class DigitsDomain(DigitsData, DomainKeys):
    """The digits as a domain."""


class NpzDomain(NpzData, DomainKeys):
    """A NumPy file as a domain."""


class IdxDomain(IdxData, DomainKeys):
    """Idx files as a domain."""


class FolderDomain(FolderData, DomainKeys):
    """A folder of images as a domain."""


class HuggingfaceDomain(HuggingfaceData, DomainKeys):
    """A Hugging Face data set as a domain."""


class TextDomain(TextData, DomainKeys):
    """Texts as a domain."""


class TableDomain(TableData, DomainKeys):
    """A table as a domain."""


class NamedDomain(NamedData, DomainKeys):
    """A known data set as a domain."""


class CustomDomain(CustomData, DomainKeys):
    """What a function returns as a domain."""


DomainConfig = Annotated[
    DigitsDomain
    | NpzDomain
    | IdxDomain
    | FolderDomain
    | HuggingfaceDomain
    | TextDomain
    | TableDomain
    | NamedDomain
    | CustomDomain,
    ByKind("source", others=installed_sources),
]
