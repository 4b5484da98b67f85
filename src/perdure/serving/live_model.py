"""The newest trained model of a run directory, which may be extended while it is served."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from perdure.core.errors import PerdureError, UserError
from perdure.core.json_text import json_value
from perdure.runs.model_files import load_model
from perdure.runs.trained_model import TrainedModel
from perdure.serving.requests import takes_texts

log = logging.getLogger(__name__)

_CARD_KEYS = ("class_names", "shape", "dtype", "input", "features", "tasks_seen", "sha256")
Stamp = tuple[int, int, int]
"""Identifies a version of a file without reading it."""


class LiveModel:
    """Loads a model, and loads it again when its card has changed.

    Args:
        run: A run directory, or its folder model/.
        trust: Whether code of the run may be executed.
        seconds: How long a model is taken for the newest before its card is looked at again.
        clock: Returns the time in seconds.
    """

    def __init__(
        self,
        run: Path,
        trust: bool = False,
        seconds: float = 0.2,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Load the model; UserError if there is none, or one that predicts numbers."""
        folder = run / "model" if (run / "model").is_dir() else run
        self._run, self._trust, self._path = run, trust, folder / "card.json"
        self._seconds, self._clock, self._stamp = seconds, clock, _stamp(self._path)
        self.model: TrainedModel = load_model(run, trust=trust)
        if self.model.numbers is not None:
            raise UserError(f"{run}: must be a run that predicts classes, got data.target 'number'")
        self.card = self._read_card()
        self._looked = clock()

    def newest(self) -> TrainedModel:
        """Return the newest model; the earlier one if the newest cannot be loaded."""
        now = self._clock()
        if now - self._looked >= self._seconds:
            self._looked = now
            stamp = _stamp(self._path)
            if stamp is not None and stamp != self._stamp:
                self._stamp = stamp
                self._load()
        return self.model

    def _load(self) -> None:
        try:
            model = load_model(self._run, trust=self._trust)
            if (model.shape, model.dtype) != (self.model.shape, self.model.dtype):
                raise UserError(f"{self._path}: describes a model of other inputs")
            self.card, self.model = self._read_card(), model
            log.info("%s: took up a model of %d tasks", self._run, model.last_task + 1)
        except (PerdureError, OSError) as error:
            self._stamp = None  # it may be complete the next time
            log.warning("%s; the earlier model is kept", error)

    def _read_card(self) -> dict[str, Any]:
        """Return what the card says about the model, without the paths of its config."""
        card = json_value(self._path.read_bytes())
        task_classes = card["outputs"]["task_classes"][: card["tasks_seen"]]
        known = {key: card.get(key) for key in _CARD_KEYS}
        texts = takes_texts(self.model)
        return known | {
            "task_classes": task_classes,
            "method": self.model.config.method["kind"],
            "texts": texts,
        }


def _stamp(path: Path) -> Stamp | None:
    """Return what changes when a file is replaced; None if there is none."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ino, found.st_size
