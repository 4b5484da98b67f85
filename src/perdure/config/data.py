"""The `data` section of a config, and the sources of `stream.domains`: the bases of all kinds."""

from __future__ import annotations

from functools import cache
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, PrivateAttr, SerializeAsAny, create_model, model_validator

from perdure.config.section import (
    Channels,
    ChosenByKind,
    FiniteFloat,
    KindSection,
    PositiveFloat,
    PositiveInt,
    Probability,
)

# ---- The `data.augment` key: random changes of the images that clients train on


class AugmentConfig(KindSection):
    """One random change of the images that clients train on. A kind is a subclass.

    `AUGMENTATIONS` of perdure.data.images names those of this library.

    Example: `augment: [crop, {kind: flip, probability: 0.3}]`
    """

    registry_path: ClassVar[str] = "perdure.data.images:AUGMENTATIONS"

    kind: str = ""
    """The change: crop or flip, or the dotted path of a custom one."""

    draws: ClassVar[int] = 0
    """Random numbers per image."""

    def apply(self, images: Any, draws: Any, black: Any) -> Any:
        """Return the changed images.

        Args:
            images: float [N, C, H, W].
            draws: float [N, `draws`], uniform in [0, 1).
            black: float [C]: value of a black pixel, which a border has.

        """
        raise NotImplementedError


# ---- The `data` section of a config: where examples come from and how they are read


class DataConfig(KindSection):
    """Where examples come from and how they are read. A kind of source is a subclass.

    `SOURCES` of perdure.data.sources names those of this library. A function that returns data is
    a source, too: by its dotted path, or by the name that an installed package gives it.

    Example: `data: {source: npz, path: mnist.npz}`
    """

    registry_path: ClassVar[str] = "perdure.data.sources:SOURCES"
    kind_key: ClassVar[str] = "source"

    source: str = ""
    """Where examples come from: digits (bundled), files (npz, idx, folder, text, table), any
    huggingface data set, a data set by its name (`perdure data list`), or the dotted path of a
    function that returns data, such as mydata.load."""
    mean: Annotated[list[FiniteFloat], Field(min_length=1)] | None = None
    """Mean per channel (of vectors: per feature) for normalization, with pixels of integer images
    in [0, 1]. Default: of the training data."""
    std: Annotated[list[PositiveFloat], Field(min_length=1)] | None = None
    """Standard deviation per channel or feature for normalization. Default: of the training
    data."""
    normalize: bool | None = None
    """Normalize by mean and std. Default: true, except for `model.kind: vit`, whose inputs stay in
    [0, 1]."""
    size: PositiveInt | None = None
    """Resize images to this height and width in pixels. Default: their size in the source."""
    channels: Channels | None = None
    """Convert images to gray (1) or color (3). Default: as in the source."""
    limit: PositiveInt | None = None
    """Maximum number of training examples, drawn from the seed. Default: all."""
    test_limit: PositiveInt | None = None
    """Maximum number of test examples, drawn from the seed. Default: all."""
    augment: list[Annotated[SerializeAsAny[AugmentConfig], ChosenByKind()]] = Field(default=[])
    """Random changes of the images that clients train on, in this order: crop (padding), flip
    (probability); a name, or a mapping with `kind` and options. Methods record features, stored
    examples and subspaces of unchanged images."""
    target: Literal["class", "number"] = "class"
    """What is predicted: a class, or a number (regression; of npz files, tables and Python
    objects), which is trained by its squared error and measured by `r2` and `mae`."""
    target_mean: FiniteFloat | None = None
    """Mean by which numbers are standardized for training. Default: of the training data."""
    target_std: PositiveFloat | None = None
    """Standard deviation by which numbers are standardized for training. Default: of the training
    data."""
    validation: Probability = 0.0
    """Fraction of the training examples of every class that clients hold out, in [0, 1). Accuracy
    on them is recorded apart, to select settings on (`perdure compare --select validation`)."""

    has_numbers: ClassVar[bool] = False
    """Whether targets can be numbers."""
    has_texts: ClassVar[bool] = False
    """Whether its rows may be texts, which nodes count the words of."""
    has_name: ClassVar[bool] = False
    """Whether the source is the name of a data set."""
    reads_data: ClassVar[bool] = True
    is_custom: ClassVar[bool] = False
    """Whether it is the code of a user, or was given in Python."""

    _kept: dict[Any, Any] = PrivateAttr(default_factory=dict)

    def keep(self, key: Any, sources: Any) -> None:
        """Keep what was read to count clients, for the stream that is made next."""
        self._kept[key] = sources

    def take(self, key: Any) -> Any:
        """Return what was kept under a key, once; None if there is nothing."""
        return self._kept.pop(key, None)

    def load(self, rng: Any, location: Any) -> Any:
        """Return the examples, a `perdure.data.examples.Source`.

        Args:
            rng: Derives every random draw from the seed, a `perdure.core.rng.Rng`.
            location: Where the section stands in the config and what the config asks of its rows,
                a `perdure.data.source.ConfigLocation`, which makes the error for a bad value.

        Raises:
            UserError: A file is missing or damaged.

        """
        raise NotImplementedError

    def load_domains(self, rng: Any, location: Any) -> list[Any]:
        """Return one source per domain that the files name; UserError if this kind has none."""
        expected = "npz, folder, text or table; or stream.domains"
        raise location.error("source", self.source, expected)

    def rows(self, location: Any) -> Any:
        """Return what code returns or Python was given, before it is split; None for files."""
        return None


def change_source(data: DataConfig, source: DataConfig) -> DataConfig:
    """Return `source`, read as `data` is: with the keys that both have, except the path."""
    shared = set(type(source).model_fields) & set(type(data).model_fields) - {"source", "path"}
    return source.model_copy(update={key: getattr(data, key) for key in shared})


# ---- The sources of `stream.domains`: those of `data`, each with a name


class DomainConfig(DataConfig):
    """A source in `stream.domains`: of any kind, with a name."""

    name: str | None = None
    """Name of the domain in reports. Default: the name of its file or source."""

    @model_validator(mode="after")
    def _normalized_alike(self) -> DomainConfig:
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

    @classmethod
    def class_of(cls, found: type[KindSection]) -> type[KindSection]:
        """Return the class of a source with the keys of a domain."""
        return _domain_class(found)


@cache
def _domain_class(found: type[KindSection]) -> type[KindSection]:
    name = f"{found.__name__.removesuffix('Data')}Domain"
    return create_model(name, __base__=(found, DomainConfig), __doc__=found.__doc__)
