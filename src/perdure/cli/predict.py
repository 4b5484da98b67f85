"""perdure predict: the classes that a trained model gives."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from perdure.cli.console import setup_logging, stdout_console
from perdure.core.errors import UserError, bad_value
from perdure.core.files import write_atomic
from perdure.runs.prediction_input import read_input
from perdure.runs.trained_model import load_model

Labels = np.ndarray[Any, Any]


def predict(
    run: Annotated[Path, typer.Argument(help="A run directory.", metavar="RUN")],
    source: Annotated[
        Path,
        typer.Argument(
            help="npy, npz, an image, a folder of images, txt or jsonl.", metavar="INPUT"
        ),
    ],
    out: Annotated[
        Path | None, typer.Option(help="Write .csv or .npy instead of printing.", metavar="FILE")
    ] = None,
) -> None:
    """Name the class of every input, with no task label."""
    setup_logging()
    if out is not None and out.suffix not in (".csv", ".npy"):
        raise bad_value("--out", str(out), "a name that ends in .csv or .npy")
    model = load_model(run)
    names, rows = read_input(source, model)
    labels = model.predict(rows)
    if out is None:
        for name, label in zip(names, labels, strict=True):
            stdout_console().print(f"{name}: {model.class_names[label]}")
    else:
        _write(out, names, labels, model.class_names)


def _write(out: Path, names: Sequence[str], labels: Labels, classes: Sequence[str]) -> None:
    data = _npy(labels) if out.suffix == ".npy" else _csv(names, labels, classes)
    try:
        write_atomic(out, data)
    except OSError as error:
        raise UserError(f"--out {out}: cannot be written ({error.strerror})") from None
    stdout_console().print(f"{len(labels)} predictions in {out}")


def _npy(labels: Labels) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, labels)
    return buffer.getvalue()


def _csv(names: Sequence[str], labels: Labels, classes: Sequence[str]) -> bytes:
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(["input", "label", "class"])
    writer.writerows(
        [name, int(label), classes[label]] for name, label in zip(names, labels, strict=True)
    )
    return buffer.getvalue().encode()
