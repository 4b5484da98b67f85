"""Convert parameters of Hugging Face's ViTModel and BertModel to our names, and back."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from perdure.core.trees import Tensors

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


def huggingface_names(kind: str, depth: int) -> Names:
    """Return the names of all parameters.

    Args:
        kind: Model type, vit or bert.
        depth: Number of blocks.
    """
    outside, block = (_VIT, _VIT_BLOCK) if kind == "vit" else (_BERT, _BERT_BLOCK)
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

    Args:
        values: Tensors of the file, by Hugging Face's names.
        shapes: Shape of each parameter, by our name.
        kind: Model type, vit or bert.
        depth: Number of blocks.

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
    """Return our parameters by Hugging Face's names.

    Args:
        params: Parameters by our names.
        theirs: Shapes of Hugging Face's tensors that differ from ours, by their names.
        kind: Model type, vit or bert.
        depth: Number of blocks.
    """
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
