"""The kinds of sources by name: each reads its files into a `perdure.data.examples.Source`."""

from __future__ import annotations

from perdure.config import DataConfig
from perdure.core.registry import Registry
from perdure.data.named.sets import DATA_SETS

SOURCES: Registry[DataConfig] = Registry(
    key="data.source",
    base=DataConfig,
    base_name="perdure.config.DataConfig",
    group="perdure.data",
    others="perdure.data.sources.custom.CustomData",
    named="function",
    builtin={
        "digits": "perdure.data.sources.arrays.DigitsData",
        "npz": "perdure.data.sources.arrays.NpzData",
        "idx": "perdure.data.sources.arrays.IdxData",
        "folder": "perdure.data.sources.image_folder.FolderData",
        "huggingface": "perdure.data.sources.huggingface.HuggingfaceData",
        "text": "perdure.data.sources.text.TextData",
        "table": "perdure.data.sources.table.TableData",
        **dict.fromkeys(DATA_SETS, "perdure.data.named.load.NamedData"),
    },
)
"""All other kinds are dotted paths of functions that return data, or names that installed packages
give them."""
