"""The `data` section of a config, and the sources of `stream.domains`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    ValidationInfo,
    field_validator,
    model_validator,
)

from perdure.config.data_sets import DATA_SETS
from perdure.config.section import (
    ByKind,
    Channels,
    ConfigSection,
    FiniteFloat,
    Fraction,
    OpenFraction,
    PositiveFloat,
    PositiveInt,
    Probability,
    Text,
    TextColumn,
    check_plain,
    with_arguments,
)
from perdure.core.registry import installed, is_object

# ------------------------------------------------------------------------------------------------
# The `data.augment` key: random changes of the images that clients train on.
# ------------------------------------------------------------------------------------------------


class CropAugment(ConfigSection):
    """A window of the image's size, anywhere in the image with a black border."""

    kind: Literal["crop"] = "crop"
    padding: PositiveInt = 4
    """Width of the border in pixels."""


class FlipAugment(ConfigSection):
    """The image mirrored from left to right."""

    kind: Literal["flip"] = "flip"
    probability: Fraction = 0.5
    """Fraction of the images that are mirrored."""


def _named(value: Any) -> Any:
    return {"kind": value} if isinstance(value, str) else value


AugmentConfig = Annotated[
    Annotated[CropAugment | FlipAugment, ByKind()],
    BeforeValidator(_named),
]
"""One change: its name, or a mapping with `kind` and options."""


# ------------------------------------------------------------------------------------------------
# The `data` section of a config: where examples come from and how they are read.
# ------------------------------------------------------------------------------------------------


class SourceKeys(ConfigSection):
    """Keys of every source."""

    source: str
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
    augment: list[AugmentConfig] = Field(default=[])
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
    is_custom: ClassVar[bool] = False
    """Whether it is the code of a user, or was given in Python."""

    _kept: dict[Any, Any] = PrivateAttr(default_factory=dict)

    def keep(self, key: Any, sources: Any) -> None:
        """Keep what was read to count clients, for the stream that is made next."""
        self._kept[key] = sources

    def take(self, key: Any) -> Any:
        """Return what was kept under a key, once; None if there is nothing."""
        return self._kept.pop(key, None)


class DigitsData(SourceKeys):
    """The 1,797 handwritten digits of 8x8 pixels that scikit-learn installs.

    Example: `data: {source: digits}`
    """

    source: Literal["digits"] = "digits"
    test_fraction: OpenFraction = 0.2
    """Fraction of the examples held out for testing."""


class NpzData(SourceKeys):
    """A NumPy file with x_train, y_train, x_test, y_test, or with x, y and more.

    Example: `data: {source: npz, path: mnist.npz}`
    """

    has_numbers: ClassVar[bool] = True
    source: Literal["npz"] = "npz"
    path: Text
    """The .npz file."""
    test_fraction: OpenFraction = 0.2
    """Fraction of the examples held out for testing, if the file has no test rows."""


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

    has_texts: ClassVar[bool] = True
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
    text_column: TextColumn = "text"
    """Column of the texts, or the two columns of pairs of texts, such as [question1, question2]."""
    features: PositiveInt = 1024
    """Size of the hashed bag of words of a text, for models other than `text`."""


class TextData(SourceKeys):
    """Texts in JSON lines, one object per text.

    Example: `data: {source: text, path: reviews.jsonl.gz, text_column: review}`
    """

    has_texts: ClassVar[bool] = True
    source: Literal["text"] = "text"
    path: Text
    """The .jsonl or .jsonl.gz file."""
    test_fraction: OpenFraction = 0.2
    """Fraction of the examples held out for testing, if no line has the field `split`."""
    label_column: str = "label"
    """Field of the labels."""
    text_column: TextColumn = "text"
    """Field of the texts, or the two fields of pairs of texts, such as [premise, hypothesis]."""
    features: PositiveInt = 1024
    """Size of the hashed bag of words of a text, for models other than `text`."""


class TableData(SourceKeys):
    """A CSV or Parquet file with one example per row.

    Example: `data: {source: table, path: patients.csv, label_column: diagnosis}`
    """

    has_numbers: ClassVar[bool] = True
    source: Literal["table"] = "table"
    path: Text
    """The .csv, .csv.gz or .parquet file. Parquet needs `pip install 'perdure[tables]'`."""
    label_column: Text = "label"
    """Column of the labels, strings or integers; of the numbers with `target: number`."""
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


class NamedData(SourceKeys):
    """A known data set by its name; see `perdure data list`.

    Its files are looked for in the folder that the environment variable PERDURE_DATA names (or else
    in data/) and in the cache; else it is downloaded once, with Hugging Face's datasets or with
    torchvision.

    Example: `data: {source: cifar100}`
    """

    kind_names: ClassVar[tuple[str, ...]] = tuple(DATA_SETS)
    has_name: ClassVar[bool] = True
    source: Annotated[str, Field(json_schema_extra={"enum": list(DATA_SETS)})]
    path: Text | None = None
    """A file (.npz or .jsonl.gz) or a folder that holds the set. Default: it is looked for."""
    test_fraction: OpenFraction = 0.2
    """Fraction of the examples held out for testing, if the set has no test split."""
    features: PositiveInt = 1024
    """Size of the hashed bag of words of a text, for models other than `text`."""


class CustomData(SourceKeys):
    """A function by its dotted path, which returns data; or data that was given in Python.

    Keys that are not listed here are arguments of the function.

    Example: `data: {source: mydata.load, root: ./images}`
    """

    model_config = ConfigDict(json_schema_extra={"additionalProperties": True})

    has_numbers: ClassVar[bool] = True
    is_custom: ClassVar[bool] = True
    source: str = Field(json_schema_extra={"pattern": r"[.:]"})
    test_fraction: OpenFraction = 0.2
    """Fraction of the examples held out for testing, if there is no test data."""
    label_column: Text = "label"
    """Column of the labels in a pandas DataFrame or Hugging Face data set."""
    feature_columns: Annotated[list[Text], Field(min_length=1)] | None = None
    """Columns of the features in a DataFrame. Default: all columns without another use."""
    split_column: Text | None = None
    """Column of a DataFrame that is `train` or `test`. If None, the rows are split with the
    seed."""
    domain_column: Text | None = None
    """Column of a DataFrame that names the domain of a row, for domain streams."""
    image_column: Text = "image"
    """Column of the images in a Hugging Face data set. If it does not have it, `text_column` is
    read."""
    text_column: TextColumn = "text"
    """Column of the texts in a Hugging Face data set or DataFrame, or two of pairs of texts."""
    features: PositiveInt = 1024
    """Size of the hashed bag of words of a text, for models other than `text`."""
    arguments: dict[str, Any] = Field(default={})
    """Arguments that have the name of a key, such as `size`; others may be given as keys."""

    _folder: Path | None = PrivateAttr(default=None)

    @model_validator(mode="before")
    @classmethod
    def _other_keys_are_arguments(cls, values: Any) -> Any:
        return with_arguments(values, cls.model_fields)

    @field_validator("arguments")
    @classmethod
    def _plain(cls, arguments: dict[str, Any]) -> dict[str, Any]:
        return check_plain(arguments)

    @model_validator(mode="after")
    def _no_arguments_of_objects(self, info: ValidationInfo) -> CustomData:
        if self.arguments and is_object(self.source):
            key = next(iter(self.arguments))
            expected = "a key of data, since data that is given in Python takes no arguments"
            raise ValueError(f"{key}: must be {expected}, got {self.arguments[key]!r}")
        self._folder = (info.context or {}).get("folder")
        return self

    @property
    def folder(self) -> Path | None:
        """Where the file of the function is looked up before the working folder."""
        return self._folder


SOURCE_GROUP = "perdure.data"
"""Entry-point group of packages that add names of functions that return data."""


def installed_sources() -> dict[str, str]:
    """Return the dotted paths of functions of installed packages, by name."""
    points = installed(SOURCE_GROUP)
    return {name: each[0].value.replace(":", ".") for name, each in points.items()}


DataConfig = Annotated[
    DigitsData
    | NpzData
    | IdxData
    | FolderData
    | HuggingfaceData
    | TextData
    | TableData
    | NamedData
    | CustomData,
    ByKind("source", others=installed_sources),
]


def change_source(data: DataConfig, source: DataConfig) -> DataConfig:
    """Return `source`, read as `data` is: with the keys that both have, except the path."""
    shared = set(type(source).model_fields) & set(type(data).model_fields) - {"source", "path"}
    return source.model_copy(update={key: getattr(data, key) for key in shared})


# ------------------------------------------------------------------------------------------------
# The sources of `stream.domains`: those of `data`, each with a name.
# ------------------------------------------------------------------------------------------------


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
