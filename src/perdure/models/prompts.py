"""Prompts on a frozen transformer: trained tokens beside those that the backbone computes.

A pool holds prompts, each with a key. The query of an input is the backbone's feature of it without
any prompt; the cosine of query and key measures how well a prompt fits the input.

    DualPrompts   prefixes of keys and values in the attention of some blocks: a general prompt in
                  all cases, and one expert prompt of the pool (Wang et al., ECCV 2022)
    InputPrompts  tokens at the input, several prompts of the pool (L2P: Wang et al., CVPR 2022)

A prefix is used as keys and values as it is, after the block's own projections, as in the public
implementations of both papers. The number of prompts in a pool is the length of its parameters: a
pool of DualPrompts grows when a task comes for which it has no expert.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar, Protocol

import torch
from torch import Tensor
from torch.nn.functional import normalize, one_hot, pad

from perdure.core.trees import Tensors
from perdure.models.forward_pass import ForwardPass
from perdure.models.layers import Layer
from perdure.models.transformer import Encoder, Prefixes

KEYS, POOL, GENERAL = "prompt.keys", "prompt.pool", "prompt.general"


class PromptableBackbone(Protocol):
    """A transformer that takes prompts."""

    @property
    def feature_size(self) -> int:
        """Width of the tokens."""

    @property
    def encoder(self) -> Encoder:
        """Its blocks."""

    def frozen(self, device: torch.device | str = "cpu") -> Tensors:
        """Return its weights, as constants."""

    def embed(self, params: Tensors, x: Tensor, fwd: ForwardPass) -> Tensor:
        """Return the tokens [batch, N, width], the first of them CLS."""

    def padding(self, x: Tensor) -> Tensor | None:
        """Return the tokens that are padding, bool [batch, N]; None if there are none."""

    def encode(
        self,
        params: Tensors,
        tokens: Tensor,
        fwd: ForwardPass,
        prefixes: Prefixes = ...,
        padding: Tensor | None = None,
        first: int | None = None,
    ) -> Tensor:
        """Return the tokens after all blocks, or only the `first` ones."""

    @property
    def pooled(self) -> int | None:
        """Number of encoded tokens that `pool` needs, from the first on; None: all."""

    def pool(self, hidden: Tensor, padding: Tensor | None = None) -> Tensor:
        """Return the feature out of encoded tokens."""


class Pool(Protocol):
    """A kind of prompts, and how they enter a backbone."""

    by_task: ClassVar[bool]
    """Whether each prompt belongs to one task."""

    def init(self, width: int, generator: torch.Generator) -> Tensors:
        """Return the initial prompts and keys, uniform on (-1, 1)."""

    def grow(self, params: Tensors, task: int, generator: torch.Generator) -> Tensors:
        """Return the parameters with a prompt for a task; unchanged if it has one."""

    def take_over(self, params: Tensors, task: int) -> Tensors:
        """Return the parameters with which the training of a task begins."""

    def choose(self, similarity: Tensor, slot: Tensor | None = None) -> Tensor:
        """Return the prompts of each row, one-hot in the last dimension.

        Args:
            similarity: Cosine of each row's query with each key, [batch, slots].
            slot: float [slots], 1 at the prompt of the rows' task. If None, the task is not known.
        """

    def features(
        self, frozen: FrozenBackbone, params: Tensors, x: Tensor, choice: Tensor, fwd: ForwardPass
    ) -> Tensor:
        """Return the head's input with the chosen prompts, [batch, width]."""


@dataclass(frozen=True)
class DualPrompts:
    """General and expert prefixes; the head gets the backbone's own feature (CLS of a ViT)."""

    slots: int = 10
    """Expert prompts at first; `grow` adds one per task that has none."""
    length: int = 5
    general: tuple[int, ...] = (0, 1)
    """Blocks with the general prompt."""
    expert: tuple[int, ...] = (2, 3, 4)
    """Blocks with an expert prompt."""

    by_task: ClassVar[bool] = True

    def init(self, width: int, generator: torch.Generator) -> Tensors:
        """Return general [blocks, 2, length, width], experts [slots, blocks, ...] and keys."""
        each = (2, self.length, width)
        shapes = {
            GENERAL: (len(self.general), *each),
            POOL: (self.slots, len(self.expert), *each),
            KEYS: (self.slots, width),
        }
        return {name: draw_uniform(shape, generator) for name, shape in shapes.items()}

    def grow(self, params: Tensors, task: int, generator: torch.Generator) -> Tensors:
        """Return the parameters with an expert and a key for a task; unchanged if it has them."""
        missing = task + 1 - len(params[KEYS])
        if missing <= 0:
            return params
        new = {n: draw_uniform((missing, *params[n].shape[1:]), generator) for n in (POOL, KEYS)}
        return params | {n: torch.cat([params[n], value.to(params[n])]) for n, value in new.items()}

    def take_over(self, params: Tensors, task: int) -> Tensors:
        """Return the parameters with a copy of the previous task's expert; the key stays."""
        if task == 0:
            return params
        pool = params[POOL].clone()
        pool[task] = pool[task - 1]
        return params | {POOL: pool}

    def choose(self, similarity: Tensor, slot: Tensor | None = None) -> Tensor:
        """Return the task's expert for all rows, [slots]; else that of the nearest key."""
        if slot is not None:
            return slot
        return one_hot(similarity.argmax(1), similarity.shape[1]).to(similarity.dtype)

    def features(
        self, frozen: FrozenBackbone, params: Tensors, x: Tensor, choice: Tensor, fwd: ForwardPass
    ) -> Tensor:
        """Return the backbone's feature with prefixes in its blocks."""
        pool = params[POOL]
        mixed = choice @ pool.flatten(1)
        experts = join_keys_and_values(mixed.reshape(*mixed.shape[:-1], *pool.shape[1:]))
        general = join_keys_and_values(params[GENERAL])
        rows = (len(x), *general.shape[1:])
        prefixes = {block: general[place].expand(rows) for place, block in enumerate(self.general)}
        prefixes |= {
            block: experts[..., place, :, :].expand(rows) for place, block in enumerate(self.expert)
        }
        return frozen.pooled(x, prefixes, fwd)


@dataclass(frozen=True)
class InputPrompts:
    """Several prompts as tokens at the input; the head gets the mean of their encodings."""

    slots: int = 10
    """Prompts, shared by all tasks."""
    length: int = 5
    top: int = 5
    """Prompts per row."""

    by_task: ClassVar[bool] = False

    def init(self, width: int, generator: torch.Generator) -> Tensors:
        """Return prompts [slots, length, width] and keys."""
        shapes = {POOL: (self.slots, self.length, width), KEYS: (self.slots, width)}
        return {name: draw_uniform(shape, generator) for name, shape in shapes.items()}

    def grow(self, params: Tensors, task: int, generator: torch.Generator) -> Tensors:
        """Return the parameters unchanged: all tasks share the prompts."""
        return params

    def take_over(self, params: Tensors, task: int) -> Tensors:
        """Return the parameters unchanged: no prompt belongs to a task."""
        return params

    def choose(self, similarity: Tensor, slot: Tensor | None = None) -> Tensor:
        """Return the prompts with the nearest keys, [batch, top, slots]."""
        best = similarity.detach().topk(self.top, dim=1).indices
        return one_hot(best, similarity.shape[1]).to(similarity.dtype)

    def features(
        self, frozen: FrozenBackbone, params: Tensors, x: Tensor, choice: Tensor, fwd: ForwardPass
    ) -> Tensor:
        """Return the mean over the prompt tokens after the last block."""
        pool = params[POOL]
        prompts = (choice @ pool.flatten(1)).reshape(len(x), -1, pool.shape[2])
        hidden = frozen.with_tokens(x, prompts, fwd)
        return hidden[:, 1 : 1 + prompts.shape[1]].mean(1)


@dataclass(frozen=True)
class FrozenBackbone:
    """A backbone with its weights, which are not trained."""

    backbone: PromptableBackbone
    weights: Tensors = field(repr=False, compare=False)

    def pooled(self, x: Tensor, prefixes: Prefixes, fwd: ForwardPass) -> Tensor:
        """Return the feature of each row with prefixes in some blocks."""
        padding = self.backbone.padding(x)
        tokens = self.backbone.embed(self.weights, x, fwd)
        first = self.backbone.pooled
        hidden = self.backbone.encode(self.weights, tokens, fwd, prefixes, padding, first)
        return self.backbone.pool(hidden, padding)

    def with_tokens(self, x: Tensor, more: Tensor, fwd: ForwardPass) -> Tensor:
        """Return the encodings of CLS and of further tokens that are inserted after it."""
        padding = self.backbone.padding(x)
        tokens = self.backbone.embed(self.weights, x, fwd)
        tokens = torch.cat([tokens[:, :1], more, tokens[:, 1:]], dim=1)
        if padding is not None:  # CLS is never padding, and neither are prompts
            padding = pad(padding, (more.shape[1], 0), value=False)
        first = 1 + more.shape[1]
        return self.backbone.encode(self.weights, tokens, fwd, {}, padding, first)


@dataclass(frozen=True)
class Prompted:
    """A frozen backbone with a pool of prompts, as a body: its parameters are prompts and keys."""

    frozen: FrozenBackbone
    prompts: Pool
    remembers: bool = True
    """Whether queries are computed once per row and kept."""
    known: Tensor | None = field(default=None, repr=False, compare=False)
    """Queries of the rows of the next pass. If None, they are computed."""

    @property
    def feature_size(self) -> int:
        """Width of the tokens."""
        return self.frozen.backbone.feature_size

    @property
    def layers(self) -> tuple[Layer, ...]:
        """None: no weight matrix of the backbone is trained."""
        return ()

    @property
    def constants(self) -> Tensors:
        """Tensors that are not parameters."""
        return self.frozen.weights

    def init(self, generator: torch.Generator) -> tuple[Tensors, Tensors]:
        """Return the initial prompts and keys, and no buffers."""
        return self.prompts.init(self.feature_size, generator), {}

    def grow(self, params: Tensors, task: int, generator: torch.Generator) -> Tensors:
        """Return the parameters with a prompt for a task."""
        return self.prompts.grow(params, task, generator)

    def to(self, device: torch.device) -> Prompted:
        """Return a copy with its constants on a device."""
        backbone = self.frozen.backbone
        return replace(self, frozen=FrozenBackbone(backbone, backbone.frozen(device)))

    def with_cached_features(self, queries: Tensor) -> Prompted:
        """Return a copy for rows with these queries."""
        return replace(self, known=queries)

    def query(self, x: Tensor, fwd: ForwardPass) -> Tensor:
        """Return the feature of each row without a prompt, a constant: [batch, width]."""
        if self.known is not None:
            return self.known
        with torch.no_grad():
            return self.frozen.pooled(x, {}, fwd)

    def similarity(self, params: Tensors, x: Tensor, fwd: ForwardPass) -> Tensor:
        """Return the cosine of each row's query with each key: [batch, slots]."""
        return normalize(self.query(x, fwd), dim=1) @ normalize(params[KEYS], dim=1).T

    def chosen(self, params: Tensors, x: Tensor, choice: Tensor, fwd: ForwardPass) -> Tensor:
        """Return the head's input with the chosen prompts: [batch, width]."""
        return self.prompts.features(self.frozen, params, x, choice, fwd)

    def features(self, params: Tensors, x: Tensor, fwd: ForwardPass) -> Tensor:
        """Return the head's input with the prompts that the keys choose, among all of them."""
        choice = self.prompts.choose(self.similarity(params, x, fwd))
        return self.chosen(params, x, choice, fwd)


def join_keys_and_values(prompts: Tensor) -> Tensor:
    """Return keys and values [..., 2, length, width] as the encoder has them, [..., 2 * width]."""
    return prompts.transpose(-3, -2).flatten(-2)


def draw_uniform(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Return values drawn uniformly from (-1, 1)."""
    return torch.empty(shape).uniform_(-1, 1, generator=generator)
