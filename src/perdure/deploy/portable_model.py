"""A trained model as one file for other runtimes, compared with the original on rows."""

from __future__ import annotations

import io
import json
import re
import warnings
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from perdure.config import Config
from perdure.core.errors import PerdureError, RunError, UserError
from perdure.core.files import write_atomic
from perdure.core.registry import require
from perdure.data.examples import Array, Examples
from perdure.deploy.custom_code import code_folder, data_sections, foreign_kinds
from perdure.deploy.trained_model import TrainedModel
from perdure.training.experiment import build_experiment

# ---- Rows on which an exported model is compared: test rows of the run, or random ones

_WORDS = ("the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog")


def parity_rows(
    model: TrainedModel, run: Path, trust: bool = False, count: int = 256
) -> tuple[Tensor, str]:
    """Return rows to compare an exported model on, and what they are.

    Returns:
        [rows, *shape] in the model's type, evenly from the tasks so far; and "test rows", or
        "random rows" with the reason why the data cannot be read.

    """
    if not trust and _names_others(model.config):
        reason = "the data is read only with trust=True (--trust-code)"
        return random_rows(model, count), f"random rows, since {reason}"
    try:
        rows = _test_rows(model, run, count)
    except (PerdureError, OSError) as error:
        return random_rows(model, count), f"random rows, since the data cannot be read ({error})"
    if rows is None or len(rows) < 2:
        return random_rows(model, count), "random rows, since there are no test rows"
    return rows, "test rows"


def _names_others(config: Config) -> bool:
    """Return whether the data is in files, or made by code, that the author of a run has chosen."""
    sections = data_sections(config)
    has_files = any(getattr(section, "path", None) is not None for section in sections)
    has_code = any(section.is_custom for section in sections)
    weights = getattr(config.model, "init", None)
    return has_files or has_code or bool(weights) or bool(foreign_kinds(config, stream=True))


def _test_rows(model: TrainedModel, run: Path, count: int) -> Tensor | None:
    experiment = build_experiment(model.config, method_dir=code_folder(run))
    tests = [experiment.task(task).test for task in range(model.last_task + 1)]
    share = -(-count // len(tests))
    parts = [
        test.rows[:: max(1, len(test) // share)] for test in tests if isinstance(test, Examples)
    ]
    if not parts or parts[0].dtype != model.dtype:
        return None
    return torch.cat(parts)[:count].reshape(-1, *model.shape).cpu()


def random_rows(model: TrainedModel, count: int) -> Tensor:
    """Return random inputs of a model: pixels, numbers of the training data's scale, or texts."""
    generator = torch.Generator().manual_seed(0)
    if model.dtype == torch.uint8:
        return torch.randint(0, 256, (count, *model.shape), generator=generator, dtype=torch.uint8)
    if model.dtype == torch.int32:
        words = torch.randint(0, len(_WORDS), (count, 6), generator=generator).tolist()
        return model.text_rows([" ".join(_WORDS[w] for w in row) for row in words])
    normal = torch.randn(count, len(model.scale), generator=generator)
    return ((normal - model.shift) / model.scale).reshape(count, *model.shape)


# ---- A trained model as one file for other runtimes: PyTorch weights, torch.export and ONNX
#
# A file is written only if it predicts as the model does, on rows that are compared first.

Format = Literal["state_dict", "torch-export", "onnx"]
SUFFIXES: dict[Format, str] = {"state_dict": ".pt", "torch-export": ".pt2", "onnx": ".onnx"}
"""File name endings of the formats."""
ClassScores = Callable[[Tensor], Array]
"""Class scores [N, classes] of rows [N, *shape]."""
_TOLERANCE = 1e-4
_TRACED_ROWS = 2  # torch.export takes a batch of one row for a constant


@dataclass(frozen=True)
class Parity:
    """How a file's predictions compare with those of the model."""

    rows: int
    """Number of rows that were compared."""
    max_difference: float
    """Largest difference of a probability."""


def export_file(model: TrainedModel, kind: Format, path: Path, rows: Tensor) -> Parity:
    """Write a model to a file, after comparing its predictions with those of the model.

    Args:
        model: The trained model.
        kind: The format. `state_dict`: the tensors of `TrainedModel.module`, for
            `load_state_dict`. `torch-export`: a program for `torch.export.load`. `onnx`: for any
            runtime of ONNX. The last two take any number of rows and give the class scores.
        path: The file to create or replace.
        rows: Rows to compare, at least two: [N, *shape] in the model's type.

    Raises:
        UserError: An operator of the model cannot be exported, or an extra is not installed.
        RunError: The exported model predicts otherwise.

    """
    data, scores = WRITERS[kind](model, rows[:_TRACED_ROWS])
    parity = compare(model, scores, rows, kind)
    write_atomic(path, data)
    return parity


def compare(model: TrainedModel, scores: ClassScores, rows: Tensor, kind: str) -> Parity:
    """Return how the class scores of an exported model compare; RunError if they differ."""
    expected = model.probabilities(rows)
    parts = [torch.from_numpy(scores(part)) for part in torch.split(rows, 64)]  # uneven at the end
    found = torch.cat(parts).double().softmax(1).numpy()
    differences = np.abs(found - expected).max(1)
    wrong = int((~(differences <= _TOLERANCE)).sum())
    if wrong:
        raise RunError(
            f"--format {kind}: the exported model differs from predict on {wrong} of {len(rows)} "
            f"rows (a probability by {np.nanmax(differences):.2g}); nothing was written"
        )
    return Parity(len(rows), float(differences.max()))


def _state_dict(model: TrainedModel, rows: Tensor) -> tuple[bytes, ClassScores]:
    buffer = io.BytesIO()
    torch.save(model.module.state_dict(), buffer)
    buffer.seek(0)
    copy = replace(model).module
    for value in copy.state_dict().values():
        value.zero_()
    copy.load_state_dict(torch.load(buffer, weights_only=True))
    return buffer.getvalue(), lambda x: _run(copy, x)


def _torch_export(model: TrainedModel, rows: Tensor) -> tuple[bytes, ClassScores]:
    buffer = io.BytesIO()
    torch.export.save(_program(model, rows), buffer, extra_files={"card.json": _card(model)})
    buffer.seek(0)
    program = torch.export.load(buffer).module()
    return buffer.getvalue(), lambda x: _run(program, x)


def _onnx(model: TrainedModel, rows: Tensor) -> tuple[bytes, ClassScores]:
    for package in ("onnx", "onnxscript"):
        require(package, "--format onnx", "export")
    runtime = require("onnxruntime", "--format onnx", "export")
    program = _program(model, rows)
    with warnings.catch_warnings(), redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        try:
            made = torch.onnx.export(
                program, dynamo=True, verbose=False, input_names=["x"], output_names=["scores"]
            )
        except Exception as error:
            raise _not_exportable("onnx", error) from None
    assert made is not None
    made.model.metadata_props["card"] = _card(model)
    data: bytes = made.model_proto.SerializeToString()
    session = runtime.InferenceSession(data, providers=["CPUExecutionProvider"])
    return data, lambda x: np.asarray(session.run(None, {"x": x.numpy()})[0])


WRITERS: dict[Format, Callable[[TrainedModel, Tensor], tuple[bytes, ClassScores]]] = {
    "state_dict": _state_dict,
    "torch-export": _torch_export,
    "onnx": _onnx,
}


def _program(model: TrainedModel, rows: Tensor) -> torch.export.ExportedProgram:
    """Return the model as a program of any number of rows."""
    shapes = ({0: torch.export.Dim("rows")},)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return torch.export.export(model.module, (rows,), dynamic_shapes=shapes, strict=False)
        except Exception as error:
            raise _not_exportable("torch-export", error) from None


def _not_exportable(kind: str, error: BaseException) -> UserError:
    """Return the one sentence about a model that cannot be exported, with the operator's name."""
    reasons = []
    cause: BaseException | None = error
    while cause is not None:
        reasons.append(str(cause))
        cause = cause.__cause__ or cause.__context__
    found = re.search(r"(?:target=torch\.ops\.|op=')([\w.]+)", "\n".join(reversed(reasons)))
    first = next(iter(reasons[-1].splitlines()), "") or type(error).__name__
    operator = f"the operator {found[1].removesuffix('.default')}" if found else None
    reason = operator or f"the model ({first})"
    other = "; torch-export may" if kind == "onnx" else ""
    return UserError(f"--format {kind}: {reason} cannot be exported{other}")


def _card(model: TrainedModel) -> str:
    """Return what a user of the file must know besides its inputs and outputs, as JSON."""
    return json.dumps(
        {
            "class_names": list(model.class_names),
            "tasks_seen": model.last_task + 1,
            "input": f"{str(model.dtype).removeprefix('torch.')} rows of shape {list(model.shape)}",
        }
    )


def _run(module: torch.nn.Module, x: Tensor) -> Array:
    with torch.no_grad():
        return np.asarray(module(x))
