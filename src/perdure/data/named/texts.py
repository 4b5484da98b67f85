"""Official files of texts, as rows with the fields of JSON lines."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path

from perdure.config import DataSet

Rows = list[dict[str, str]]
"""Texts: `text`, `label` and `split` or `domain`."""
_REVIEW = re.compile(r"<review_text>\s*(.*?)\s*</review_text>", re.DOTALL)
_CLINC_SPLITS = ("train", "val", "test")


def read_clinc(folder: Path, _: DataSet) -> Rows:
    """Return the rows of data_full.json: lists of a text and its intent, by split."""
    path = folder / "data_full.json"
    try:
        splits = json.loads(path.read_text(encoding="utf-8"))
        return [
            {"text": str(text), "label": str(label), "split": split}
            for split in _CLINC_SPLITS
            for text, label in splits[split]
        ]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"data_full.json is damaged: {error!r}") from None


def read_banking(folder: Path, _: DataSet) -> Rows:
    """Return the rows of train.csv and test.csv, with the columns text and category."""
    rows: Rows = []
    for split in ("train", "test"):
        path = folder / f"{split}.csv"
        if not path.is_file():
            raise ValueError(f"{path.name} is missing")
        try:
            with path.open(encoding="utf-8", newline="") as file:
                read = list(csv.DictReader(file, strict=True))
            rows += [{"text": r["text"], "label": r["category"], "split": split} for r in read]
        except (OSError, ValueError, csv.Error, KeyError) as error:
            raise ValueError(f"{path.name} has no columns text and category: {error}") from None
        if not read or any(None in (row["text"], row["category"]) for row in read):
            raise ValueError(f"{path.name} is truncated")
    return rows


def read_amazon(folder: Path, _: DataSet) -> Rows:
    """Return the rows of DOMAIN/positive.review and DOMAIN/negative.review."""
    rows: Rows = []
    for path in sorted(folder.glob("*/positive.review")):
        for label in ("negative", "positive"):
            file = path.with_name(f"{label}.review")
            if not file.is_file():
                raise ValueError(f"{path.parent.name}/{file.name} is missing")
            texts = _REVIEW.findall(file.read_text(encoding="latin-1"))
            if not texts:
                raise ValueError(f"{path.parent.name}/{file.name} holds no reviews")
            rows += [{"domain": path.parent.name, "text": t, "label": label} for t in texts]
    return rows
