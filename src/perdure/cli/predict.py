"""perdure predict: predict classes with a trained model."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from perdure.cli.arguments import Json
from perdure.cli.console import print_json, setup_logging, stdout_console
from perdure.core.errors import UserError, bad_value
from perdure.core.files import write_atomic
from perdure.runs.model_files import load_model
from perdure.runs.prediction_input import read_input

Labels = np.ndarray[Any, Any]


def predict(
    run: Annotated[Path, typer.Argument(help="A run directory.", metavar="RUN")],
    source: Annotated[
        Path,
        typer.Argument(
            help="A file (npy, npz, image, txt, jsonl, csv or parquet) or a folder of images.",
            metavar="INPUT",
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(help="Write a .csv or .npy file instead of printing.", metavar="FILE"),
    ] = None,
    trust_code: Annotated[
        bool,
        typer.Option("--trust-code", help="Execute the code of custom methods and models in RUN."),
    ] = False,
    as_json: Json = False,
) -> None:
    """Predict the class of every input, without a task label."""
    setup_logging(quiet=as_json)
    if out is not None and out.suffix not in (".csv", ".npy"):
        raise bad_value("--out", str(out), "a name that ends in .csv or .npy")
    model = load_model(run, trust=trust_code)
    names, inputs = read_input(source, model)
    labels = model.predict(inputs)
    rows = [
        {"input": name, "label": int(label), "class": model.class_names[label]}
        for name, label in zip(names, labels, strict=True)
    ]
    if out is not None:
        _write(out, _npy(labels) if out.suffix == ".npy" else _csv(rows))
    if as_json:
        print_json(rows)
    elif out is not None:
        stdout_console().print(f"{len(rows)} predictions in {out}")
    else:
        for row in rows:
            stdout_console().print(f"{row['input']}: {row['class']}")


def _write(out: Path, content: bytes) -> None:
    try:
        write_atomic(out, content)
    except OSError as error:
        raise UserError(f"--out {out}: cannot be written ({error.strerror})") from None


def _npy(labels: Labels) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, labels)
    return buffer.getvalue()


def _csv(rows: list[dict[str, Any]]) -> bytes:
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, ["input", "label", "class"], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return buffer.getvalue().encode()
