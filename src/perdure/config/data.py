"""The `data` section of a config: where examples come from and how they are read."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from perdure.config.base import ByKind, ConfigSection
from perdure.config.types import (
    Channels,
    FiniteFloat,
    OpenFraction,
    PositiveFloat,
    PositiveInt,
    Probability,
    Text,
)


class SourceKeys(ConfigSection):
    """Keys of every source."""

    source: str
    """Where examples come from: digits (bundled), npz, idx, folder, huggingface, text or table."""
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
    validation: Probability = 0.0
    """Fraction of the training examples of every class that clients hold out, in [0, 1). Accuracy
    on them is recorded apart, to select settings on (`perdure compare --select validation`)."""


class DigitsData(SourceKeys):
    """The 1,797 handwritten digits of 8x8 pixels that scikit-learn installs.

    Example: `data: {source: digits}`
    """

    source: Literal["digits"] = "digits"
    test_fraction: OpenFraction = 0.2
    """Fraction of the examples held out for testing."""


class NpzData(SourceKeys):
    """A NumPy file with x_train, y_train, x_test, y_test, or with x, y, domain, is_test.

    Example: `data: {source: npz, path: mnist.npz}`
    """

    source: Literal["npz"] = "npz"
    path: Text
    """The .npz file."""


class IdxData(SourceKeys):
    """The four idx files of MNIST and of data sets in its format.

    Example: `data: {source: idx, path: data/mnist}`
    """

    source: Literal["idx"] = "idx"
    path: Text
    """The folder with the four files."""


class FolderData(SourceKeys):
    """Image files in one folder per class.

    Example: `data: {source: folder, path: pacs, size: 224, channels: 3}`
    """

    source: Literal["folder"] = "folder"
    path: Text
    """The folder: class/image, train/class/image and test/class/image, or domain/class/image."""
    test_fraction: OpenFraction = 0.2
    """Fraction of the examples held out for testing, if there is no test/ folder."""


class HuggingfaceData(SourceKeys):
    """A Hugging Face data set of images or texts.

    Example: `data: {source: huggingface, path: cifar100, label_column: fine_label}`
    """

    source: Literal["huggingface"] = "huggingface"
    path: Text
    """Name of a data set on the hub, or a folder that holds a saved one."""
    subset: Text | None = None
    """Name of a part of the data set, such as sst2 of glue. If None, its default part."""
    test_fraction: OpenFraction = 0.2
    """Fraction of the examples held out for testing, if the data set has no test split."""
    image_column: str = "image"
    """Column of the images. If the data set does not have it, `text_column` is read."""
    label_column: str = "label"
    """Column of the labels."""
    text_column: str = "text"
    """Column of the texts."""
    features: PositiveInt = 1024
    """Size of the hashed bag of words of a text, for models other than `text`."""


class TextData(SourceKeys):
    """Texts in JSON lines, one object per text.

    Example: `data: {source: text, path: reviews.jsonl.gz, text_column: review}`
    """

    source: Literal["text"] = "text"
    path: Text
    """The .jsonl or .jsonl.gz file."""
    test_fraction: OpenFraction = 0.2
    """Fraction of the examples held out for testing, if no line has the field `split`."""
    label_column: str = "label"
    """Field of the labels."""
    text_column: str = "text"
    """Field of the texts."""
    features: PositiveInt = 1024
    """Size of the hashed bag of words of a text, for models other than `text`."""


class TableData(SourceKeys):
    """A CSV or Parquet file with one example per row.

    Example: `data: {source: table, path: patients.csv, label_column: diagnosis}`
    """

    source: Literal["table"] = "table"
    path: Text
    """The .csv, .csv.gz or .parquet file. Parquet needs `pip install 'perdure[tables]'`."""
    label_column: Text = "label"
    """Column of the labels, strings or integers."""
    feature_columns: Annotated[list[Text], Field(min_length=1)] | None = None
    """Columns of the features, which must be numbers. Default: all columns without another use."""
    split_column: Text | None = None
    """Column that is `train` or `test` (rows of `validation` are not used). If None, the rows are
    split with the seed."""
    test_fraction: OpenFraction = 0.2
    """Fraction of the examples held out for testing, if there is no `split_column`."""
    domain_column: Text | None = None
    """Column that names the domain of a row, for domain streams."""
    delimiter: Annotated[str, Field(min_length=1, max_length=1)] = ","
    """Character between the values of a line in a CSV file."""


DataConfig = Annotated[
    DigitsData | NpzData | IdxData | FolderData | HuggingfaceData | TextData | TableData,
    ByKind("source"),
]


class DomainKeys(SourceKeys):
    """Keys of a source in `stream.domains`."""

    name: str | None = None
    """Name of the domain in reports. Default: the name of its file or source."""

    @model_validator(mode="after")
    def _normalized_alike(self) -> DomainKeys:
        """Refuse normalization: without a task label, prediction cannot know which domain's."""
        for key in ("mean", "std", "normalize"):
            if getattr(self, key) is not None:
                expected = f"null, since all domains are normalized alike, by data.{key}"
                raise ValueError(f"{key}: must be {expected}, got {getattr(self, key)!r}")
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


DomainConfig = Annotated[
    DigitsDomain
    | NpzDomain
    | IdxDomain
    | FolderDomain
    | HuggingfaceDomain
    | TextDomain
    | TableDomain,
    ByKind("source"),
]


def change_source(data: DataConfig, source: DataConfig) -> DataConfig:
    """Return `source`, read as `data` is: with the keys that both have, except the path."""
    shared = set(type(source).model_fields) & set(type(data).model_fields) - {"source", "path"}
    return source.model_copy(update={key: getattr(data, key) for key in shared})
