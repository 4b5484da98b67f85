"""Data sets that a config can name: what they hold, and where they come from.

A new set is one new entry. Nothing here is read at import time but this table.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

_DIGITS = tuple("0123456789")
_FASHION = ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker",
            "Bag", "Ankle boot")  # fmt: skip
_CIFAR10 = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship",
            "truck")  # fmt: skip


@dataclass(frozen=True)
class Hub:
    """A data set on the Hugging Face hub."""

    path: str
    subset: str | None = None
    image: str = "image"
    """Column of the images."""
    label: str = "label"
    """Column of the labels."""
    text: str | None = None
    """Column of the texts. If None, the set holds images."""
    domain: str | None = None
    """Column of the domains. If None, there are none."""
    without: str | None = None
    """Class whose rows are left out."""


@dataclass(frozen=True)
class Torchvision:
    """A class of torchvision.datasets."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    """Further arguments of the class."""
    train: dict[str, Any] = field(default_factory=lambda: {"train": True})
    """Arguments that choose the training set."""
    test: dict[str, Any] = field(default_factory=lambda: {"train": False})
    """Arguments that choose the test set."""
    first_label: int = 0
    transposed: bool = False
    """Whether rows and columns of pixels are exchanged."""


@dataclass(frozen=True)
class Official:
    """The files that the authors of a data set publish."""

    format: str
    """Reader in `perdure.data.named.official`."""
    files: str
    """The files in words."""
    url: str
    """Where they are described or downloaded."""
    marks: tuple[str, ...] = ()
    """Patterns of files, any of which shows that they are there."""
    prefix: str = ""
    """What the names of the files begin with, where one folder holds several sets."""
    folders: tuple[str, ...] = ()
    """Further folders below the given one in which the files may lie."""
    first_label: int = 0
    transposed: bool = False
    """Whether rows and columns of pixels are exchanged."""
    is_distinct: bool = False
    """Whether the names of the files tell the set, so that they may lie among others."""


@dataclass(frozen=True)
class DataSet:
    """One data set that a config can name."""

    title: str
    contents: str
    license: str
    official: Official
    hub: Hub | None = None
    torchvision: Torchvision | None = None
    classes: tuple[str, ...] | None = None
    """Names of the classes by label, the same from every origin. If None, those of the files."""
    other_names: tuple[str, ...] = ()
    """Names of files, without suffix, that are accepted besides the name of the set."""

    @property
    def is_text(self) -> bool:
        """Whether the set holds texts; else it holds images."""
        return self.official.format in ("clinc", "banking", "amazon")


def _mnist(title: str, contents: str, license: str, url: str, folder: str, *,
           classes: tuple[str, ...], hub: Hub) -> DataSet:  # fmt: skip
    """Return the entry of a set in the file format of MNIST."""
    files = "the four files train-images-idx3-ubyte.gz to t10k-labels-idx1-ubyte.gz"
    marks = ("train-images[-.]idx3-ubyte*",)
    official = Official("idx", files, url, marks, folders=(f"{folder}/raw",))
    return DataSet(title, contents, license, official, hub, Torchvision(folder), classes)


def _emnist(split: str, contents: str, classes: tuple[str, ...], first: int) -> DataSet:
    official = Official(
        "idx", f"emnist-{split}-train-images-idx3-ubyte.gz and the three beside it",
        "https://www.nist.gov/itl/products-and-services/emnist-dataset",
        (f"emnist-{split}-train-images[-.]idx3-ubyte*",), f"emnist-{split}-",
        ("gzip", "EMNIST/raw"), first, transposed=True, is_distinct=True,
    )  # fmt: skip
    origin = Torchvision("EMNIST", {"split": split}, first_label=first, transposed=True)
    return DataSet(
        f"EMNIST {split}", contents, "public domain (NIST)", official, None, origin, classes
    )


_DOMAIN_FILES = "a folder per domain with a folder of images per class"
_CLASS_FILES = "a folder of images per class, below train/ and test/ or not"
_RESEARCH = "research use"

DATA_SETS: dict[str, DataSet] = {
    "mnist": _mnist(
        "MNIST", "70,000 gray digits of 28 pixels", "CC BY-SA 3.0",
        "https://yann.lecun.com/exdb/mnist", "MNIST", classes=_DIGITS, hub=Hub("ylecun/mnist"),
    ),
    "fashion-mnist": _mnist(
        "Fashion-MNIST", "70,000 gray clothes of 28 pixels, 10 classes", "MIT",
        "https://github.com/zalandoresearch/fashion-mnist", "FashionMNIST",
        classes=_FASHION, hub=Hub("zalando-datasets/fashion_mnist"),
    ),
    "kmnist": _mnist(
        "Kuzushiji-MNIST", "70,000 gray characters of 28 pixels, 10 classes", "CC BY-SA 4.0",
        "https://github.com/rois-codh/kmnist", "KMNIST", classes=_DIGITS,
        hub=Hub("tanganke/kmnist"),
    ),
    "emnist-letters": _emnist(
        "letters", "145,600 gray letters of 28 pixels", tuple("abcdefghijklmnopqrstuvwxyz"), 1
    ),
    "emnist-digits": _emnist("digits", "280,000 gray digits of 28 pixels", _DIGITS, 0),
    "notmnist": DataSet(
        "notMNIST", "18,724 gray letters A to J of 28 pixels", "by the author's permission",
        Official(
            "classes", "notMNIST_small, unpacked",
            "https://yaroslavvb.blogspot.com/2011/09/notmnist-dataset.html",
            folders=("notMNIST_small",),
        ),
        classes=tuple("ABCDEFGHIJ"),
    ),
    "usps": DataSet(
        "USPS", "9,298 gray digits of 16 pixels", "none stated",
        Official(
            "usps", "usps.bz2 and usps.t.bz2",
            "https://www.csie.ntu.edu.tw/~cjlin/libsvmtools/datasets/multiclass.html#usps",
            ("usps.bz2",), is_distinct=True,
        ),
        Hub("flwrlabs/usps"), Torchvision("USPS"), _DIGITS,
    ),
    "mnist-m": DataSet(
        "MNIST-M", "68,002 color digits of 32 pixels", "none stated",
        Official(
            "listed", "mnist_m_train, mnist_m_test and their _labels.txt, unpacked",
            "https://github.com/fungtion/DANN", ("mnist_m_train_labels.txt",), "mnist_m_",
            ("mnist_m",), is_distinct=True,
        ),
        Hub("Mike0307/MNIST-M"), classes=_DIGITS,
    ),
    "svhn": DataSet(
        "SVHN", "99,289 color digits of 32 pixels", "non-commercial use",
        Official(
            "svhn", "train_32x32.mat and test_32x32.mat",
            "http://ufldl.stanford.edu/housenumbers", ("train_32x32.mat",), is_distinct=True,
        ),
        Hub("ufldl-stanford/svhn", "cropped_digits"),
        Torchvision("SVHN", {}, {"split": "train"}, {"split": "test"}), _DIGITS,
    ),
    "cifar10": DataSet(
        "CIFAR-10", "60,000 color images of 32 pixels, 10 classes", _RESEARCH,
        Official(
            "cifar", "cifar-10-binary.tar.gz or cifar-10-python.tar.gz",
            "https://www.cs.toronto.edu/~kriz/cifar.html",
            ("cifar-10-binary.tar.gz", "cifar-10-python.tar.gz", "data_batch_1*"),
            "cifar-10-",
            ("cifar-10-batches-bin", "cifar-10-batches-py"), is_distinct=True,
        ),
        Hub("uoft-cs/cifar10", image="img"), Torchvision("CIFAR10"), _CIFAR10,
    ),
    "cifar100": DataSet(
        "CIFAR-100", "60,000 color images of 32 pixels, 100 classes", _RESEARCH,
        Official(
            "cifar", "cifar-100-binary.tar.gz or cifar-100-python.tar.gz",
            "https://www.cs.toronto.edu/~kriz/cifar.html",
            ("cifar-100-binary.tar.gz", "cifar-100-python.tar.gz", "train.bin", "train"),
            "cifar-100-",
            ("cifar-100-binary", "cifar-100-python"), is_distinct=True,
        ),
        Hub("uoft-cs/cifar100", image="img", label="fine_label"), Torchvision("CIFAR100"),
    ),
    "mini-imagenet": DataSet(
        "mini-ImageNet", "60,000 color images, 100 classes", "terms of ImageNet",
        Official("classes", _CLASS_FILES, "https://www.image-net.org"),
        Hub("timm/mini-imagenet"),
    ),
    "tiny-imagenet": DataSet(
        "Tiny ImageNet", "110,000 color images of 64 pixels, 200 classes", "terms of ImageNet",
        Official("classes", _CLASS_FILES, "http://cs231n.stanford.edu/tiny-imagenet-200.zip"),
        Hub("zh-plus/tiny-imagenet"),
    ),
    "imagenet-r": DataSet(
        "ImageNet-R", "30,000 color images, 200 classes", "MIT (code); images of many owners",
        Official("classes", _CLASS_FILES, "https://github.com/hendrycks/imagenet-r"),
        Hub("axiong/imagenet-r", label="class_name"),
    ),
    "pacs": DataSet(
        "PACS", "9,991 color images, 4 domains, 7 classes", _RESEARCH,
        Official("domains", _DOMAIN_FILES, "https://domaingeneralization.github.io"),
        Hub("flwrlabs/pacs", domain="domain"),
    ),
    "office31": DataSet(
        "Office-31", "4,110 color images, 3 domains, 31 classes", _RESEARCH,
        Official(
            "domains", _DOMAIN_FILES, "https://faculty.cc.gatech.edu/~judy/domainadapt"
        ),
    ),
    "vlcs": DataSet(
        "VLCS", "10,729 color images, 4 domains, 5 classes", _RESEARCH,
        Official("domains", _DOMAIN_FILES, "https://github.com/belaalb/G2DM"),
    ),
    "domainnet": DataSet(
        "DomainNet", "586,575 color images, 6 domains, 345 classes", _RESEARCH,
        Official("domains", _DOMAIN_FILES, "http://ai.bu.edu/M3SDA"),
        Hub("wltjr1007/DomainNet", domain="domain"),
    ),
    "dn4il": DataSet(
        "DN4IL", "a part of DomainNet, 6 domains, 100 classes", _RESEARCH,
        Official("domains", _DOMAIN_FILES, "https://github.com/NeurAI-Lab/DN4IL-dataset"),
    ),
    "clinc150": DataSet(
        "CLINC150", "22,500 texts, 150 classes", "CC BY 3.0",
        Official(
            "clinc", "data_full.json", "https://github.com/clinc/oos-eval", ("data_full.json",),
            folders=("data",),
        ),
        Hub("clinc/clinc_oos", "plus", label="intent", text="text", without="oos"),
        other_names=("text_clinc150",),
    ),
    "banking77": DataSet(
        "BANKING77", "13,083 texts, 77 classes", "CC BY 4.0",
        Official(
            "banking", "train.csv and test.csv",
            "https://github.com/PolyAI-LDN/task-specific-datasets", ("train.csv",),
            folders=("banking_data",),
        ),
        Hub("mteb/banking77", label="label_text", text="text"),
        other_names=("text_banking77",),
    ),
    "amazon": DataSet(
        "Amazon reviews", "8,000 texts, 4 domains, 2 classes", _RESEARCH,
        Official(
            "amazon", "books, dvd, electronics and kitchen with their .review files, unpacked",
            "https://www.cs.jhu.edu/~mdredze/datasets/sentiment", ("*/positive.review",),
            folders=("sorted_data_acl", "sorted_data"),
        ),
        other_names=("text_amazon4", "amazon4"),
    ),
}  # fmt: skip
"""All data sets by the name that `data.source` takes."""
