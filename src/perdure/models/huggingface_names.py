"""Hugging Face's names for the parameters of ViTModel and BertModel, and ours."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from perdure.core.trees import Tensors

Names = dict[str, tuple[str, ...]]
"""Our name -> the tensors that are put one after another to make it up."""
_PREFIXES = ("vit.", "bert.")
_UNUSED = ("pooler.", "classifier.", "cls.", "embeddings.position_ids")
"""What a checkpoint may have besides: heads, and what other uses of the model need."""
_RENAMED = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}
"""Names that older checkpoints have, bert-base-uncased among them."""

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
    """The table for a model type (vit or bert) with that many blocks."""
    single, block = (_VIT, _VIT_BLOCK) if kind == "vit" else (_BERT, _BERT_BLOCK)
    names: Names = {ours: (theirs,) for ours, theirs in single.items()}
    for number in range(depth):
        for ours, parts in block.items():
            for end in ("weight", "bias"):
                theirs = tuple(f"encoder.layer.{number}.{part}.{end}" for part in parts)
                names[f"block{number}.{ours}.{end}"] = theirs
    return names


def from_huggingface(
    values: Tensors, shapes: Mapping[str, tuple[int, ...]], kind: str, depth: int
) -> Tensors:
    """A checkpoint by our names, float32; ValueError: what is missing, too much or misshapen."""
    found = {_bare(name): value for name, value in values.items()}
    names = huggingface_names(kind, depth)
    known = {part for parts in names.values() for part in parts}
    _complain("lacks", sorted(known - found.keys()))
    rest = sorted(name for name in found.keys() - known if not name.startswith(_UNUSED))
    _complain("has besides the model's", rest)
    result = {}
    for ours, shape in shapes.items():
        parts = [found[part] for part in names[ours]]
        wanted = (shape[0] // len(parts), *shape[1:])
        for name, part in zip(names[ours], parts, strict=True):
            if not _fits(part.shape, wanted):
                raise ValueError(f"{name} has shape {tuple(part.shape)}")
        value = torch.cat([part.reshape(wanted) for part in parts])
        result[ours] = value.to(torch.float32).contiguous()
    return result


def _fits(theirs: tuple[int, ...], ours: tuple[int, ...]) -> bool:
    """Whether a tensor is one of ours, but for axes of one in front, or as filters of patches."""
    while len(theirs) > len(ours) and theirs[0] == 1:
        theirs = theirs[1:]
    if len(theirs) == 4 and theirs[2] == theirs[3]:  # width, channels and the two sides of a patch
        theirs = (theirs[0], math.prod(theirs[1:]))
    return tuple(theirs) == tuple(ours)


def to_huggingface(
    params: Tensors, theirs: Mapping[str, tuple[int, ...]], kind: str, depth: int
) -> Tensors:
    """Our parameters by Hugging Face's names; `theirs`: shapes that differ from ours."""
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


def _complain(what: str, names: list[str]) -> None:
    if names:
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        raise ValueError(f"it {what} {names[0]}{more}")
