"""Rows on which an exported model is compared: test rows of the run, or random ones."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from perdure.config import Config, CustomData
from perdure.core.errors import PerdureError
from perdure.data.inputs import Inputs
from perdure.runs.custom_code import code_folder, data_sections, foreign_kinds
from perdure.runs.trained_model import TrainedModel
from perdure.training.experiment import build_experiment

_WORDS = ("the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog")


def parity_rows(
    model: TrainedModel, run: Path, trust: bool = False, count: int = 256
) -> tuple[Tensor, str]:
    """Return rows to compare an exported model on, and what they are.

    Args:
        model: The trained model, whose code is trusted if it has any.
        run: Its run directory.
        trust: Whether files and code that the config names may be read and executed for the data.
        count: Number of rows; fewer if the data has fewer.

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
    has_code = any(isinstance(section, CustomData) for section in sections)
    weights = getattr(config.model, "init", None)
    return has_files or has_code or bool(weights) or bool(foreign_kinds(config, stream=True))


def _test_rows(model: TrainedModel, run: Path, count: int) -> Tensor | None:
    experiment = build_experiment(model.config, method_dir=code_folder(run))
    tests = [experiment.task(task).test for task in range(model.last_task + 1)]
    share = -(-count // len(tests))
    parts = [test.rows[:: max(1, len(test) // share)] for test in tests if isinstance(test, Inputs)]
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
