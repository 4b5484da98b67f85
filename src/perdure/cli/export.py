"""perdure export: write a trained model as one file for other runtimes."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from perdure.cli.console import print_json, setup_logging, stdout_console
from perdure.cli.options import Json, TrustCode
from perdure.core.errors import UserError
from perdure.deploy.model_files import load_model
from perdure.deploy.portable_model import SUFFIXES, export_file, parity_rows


class Format(StrEnum):
    """Formats of exported models."""

    STATE_DICT = "state_dict"
    TORCH_EXPORT = "torch-export"
    ONNX = "onnx"


def export(
    run: Annotated[Path, typer.Argument(help="A run directory.", metavar="RUN")],
    kind: Annotated[
        Format,
        typer.Option("--format", help="PyTorch weights, a torch.export program, or ONNX."),
    ],
    out: Annotated[
        Path | None,
        typer.Option(help="The file. Default: the name of RUN, in this folder.", metavar="FILE"),
    ] = None,
    trust_code: TrustCode = False,
    as_json: Json = False,
) -> None:
    """Write the trained model as one file that needs no perdure to run.

    Before it is written, its predictions are compared with those of `perdure predict` on test rows.
    """
    setup_logging(quiet=as_json)
    model = load_model(run, trust=trust_code)
    path = out or Path(run.resolve().name).with_suffix(SUFFIXES[kind.value])
    if not path.resolve().parent.is_dir():
        raise UserError(f"--out {path}: the folder does not exist")
    rows, what = parity_rows(model, run, trust_code)
    parity = export_file(model, kind.value, path, rows)
    if as_json:
        print_json(
            {"file": str(path), "format": kind.value, "bytes": path.stat().st_size,
             "compared": {"rows": parity.rows, "what": what,
                          "max_difference": parity.max_difference}}
        )  # fmt: skip
        return
    stdout_console().print(
        f"{path}: {path.stat().st_size} bytes; predicts as perdure predict on {parity.rows} {what}"
    )
