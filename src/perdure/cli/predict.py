"""perdure predict: predict classes with a trained model."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from perdure.cli.console import print_json, setup_logging, stdout_console
from perdure.cli.options import Json, TrustCode
from perdure.core.errors import UserError, bad_value
from perdure.core.files import write_atomic
from perdure.core.text import csv_text
from perdure.data.examples import Array
from perdure.deploy.model_files import load_model
from perdure.deploy.prediction_input import read_input
from perdure.deploy.predictions import Prediction
from perdure.deploy.trained_model import TrainedModel

_COLUMNS = ("input", "label", "class")
_DETAILS = ("probability", "task", "margin", "known")


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
    proba: Annotated[
        bool,
        typer.Option("--proba", help="Add probabilities of all classes, the task and its margin."),
    ] = False,
    skip_bad: Annotated[
        bool,
        typer.Option("--skip-bad", help="Leave out inputs that cannot be read; name each."),
    ] = False,
    same_task: Annotated[
        bool,
        typer.Option("--same-task", help="All inputs are of one task: route them in batches."),
    ] = False,
    trust_code: TrustCode = False,
    as_json: Json = False,
) -> None:
    """Predict the class or the number of every input, without a task label."""
    setup_logging(quiet=as_json)
    if out is not None and out.suffix not in (".csv", ".npy"):
        raise bad_value("--out", str(out), "a name that ends in .csv or .npy")
    model = load_model(run, trust=trust_code)
    if proba and model.numbers is not None:
        raise bad_value("--proba", True, "omitted, since the model predicts numbers")
    names, inputs = read_input(source, model, skip_bad)
    columns, array = _predicted(model, inputs, proba, same_task)
    table = array if proba else None
    rows = [{"input": name, **row} for name, row in zip(names, columns, strict=True)]
    if out is not None:
        _write(out, _npy(array) if out.suffix == ".npy" else _csv(rows, table, model))
    if as_json:
        print_json(_with_probabilities(rows, table, model.class_names))
    elif out is not None:
        stdout_console().print(f"{len(rows)} predictions in {out}")
    else:
        for row in rows:
            shown = f"{row['number']:.6g}" if "number" in row else row["class"]
            stdout_console().print(f"{row['input']}: {shown}{_remark(row)}")


def _predicted(
    model: TrainedModel, inputs: Any, proba: bool, same_task: bool
) -> tuple[list[dict[str, Any]], Array]:
    """Return the columns of each row, and all labels, numbers or probabilities as an array."""
    if model.numbers is not None:
        numbers = model.predict(inputs)
        return [{"number": float(number)} for number in numbers], numbers
    predictions = model.predict(inputs, details=True, same_task=same_task)
    columns = [_columns(prediction, proba) for prediction in predictions]
    if proba:
        return columns, model.probabilities(inputs, same_task=same_task)
    return columns, np.array([prediction.label for prediction in predictions], dtype=np.int64)


def _columns(prediction: Prediction, proba: bool) -> dict[str, Any]:
    details = {name: getattr(prediction, name) for name in _DETAILS if proba}
    return {"label": prediction.label, "class": prediction.class_name, **details}


def _remark(row: dict[str, Any]) -> str:
    """Return probability and task of a printed row, if it has them."""
    if "probability" not in row:
        return ""
    task = "" if row["task"] is None else f", task {row['task'] + 1}"
    unknown = "" if row["known"] else ", of no known task"
    return f" (probability {row['probability']:.3f}{task}{unknown})"


def _with_probabilities(
    rows: list[dict[str, Any]], table: Array | None, names: Sequence[str]
) -> list[dict[str, Any]]:
    if table is None:
        return rows
    pairs = zip(rows, table.tolist(), strict=True)
    return [row | {"probabilities": dict(zip(names, p, strict=True))} for row, p in pairs]


def _write(out: Path, content: bytes) -> None:
    try:
        write_atomic(out, content)
    except OSError as error:
        raise UserError(f"--out {out}: cannot be written ({error.strerror})") from None


def _npy(array: Array) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


def _csv(rows: list[dict[str, Any]], table: Array | None, model: TrainedModel) -> bytes:
    """Return rows as CSV, with one column of probabilities per class if there are any.

    A name that a spreadsheet would take for a formula gets a leading '.
    """
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    columns = _COLUMNS if model.numbers is None else ("input", "number")
    more = [] if table is None else [*_DETAILS, *_headings(model.class_names)]
    writer.writerow([*columns, *more])
    for number, row in enumerate(rows):
        cells = [csv_text(value) if isinstance(value, str) else value for value in row.values()]
        writer.writerow([*cells, *(table[number].tolist() if table is not None else ())])
    return buffer.getvalue().encode()


def _headings(names: Sequence[str]) -> list[str]:
    return [csv_text(f"P({name})") for name in names]
