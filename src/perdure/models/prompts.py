"""Prompts on a frozen transformer: what is learned is put beside what the backbone computes.

A pool holds prompts, each with a key. The query of an input is the feature that the backbone gives
for it without any prompt; the cosine of query and key says which prompts suit the input.

    DualPrompts   prefixes of keys and values in the attention of some blocks: a general prompt in
                  all cases, and one expert prompt of the pool (Wang et al., ECCV 2022)
    InputPrompts  tokens at the input, several prompts of the pool (L2P: Wang et al., CVPR 2022)

A prefix is used as keys and values as it is, after the block's own projections: that is how the
public implementations read the papers' formula.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import normalize, one_hot, pad

from perdure.models.layers import Layer
from perdure.models.passes import Pass
from perdure.models.transformer import Encoder, Prefixes
from perdure.trees import Tensors

KEYS, POOL, GENERAL = "prompt.keys", "prompt.pool", "prompt.general"


class Backbone(Protocol):
    """A transformer that takes prompts."""

    @property
    def feature_size(self) -> int:
        """Width of the tokens."""

    @property
    def encoder(self) -> Encoder:
        """Its blocks."""

    def frozen(self, device: torch.device | str = "cpu") -> Tensors:
        """Its weights, as constants."""

    def embed(self, params: Tensors, x: Tensor, run: Pass) -> Tensor:
        """Tokens [batch, N, width], the first of them CLS."""

    def padding(self, x: Tensor) -> Tensor | None:
        """Bool [batch, N]: tokens that only fill the row up; None: there are none."""

    def encode(
        self,
        params: Tensors,
        tokens: Tensor,
        run: Pass,
        prefixes: Prefixes = ...,
        padding: Tensor | None = None,
        first: int | None = None,
    ) -> Tensor:
        """Tokens after all blocks; the `first` ones alone."""

    @property
    def pooled(self) -> int | None:
        """Encoded tokens that `pool` needs, from the first on; None: all."""

    def pool(self, hidden: Tensor, padding: Tensor | None = None) -> Tensor:
        """The feature among encoded tokens."""


class Pool(Protocol):
    """A way in which prompts meet a backbone."""

    @property
    def slots(self) -> int:
        """Prompts in the pool."""

    def init(self, width: int, generator: torch.Generator) -> Tensors:
        """First prompts and keys: uniform on (-1, 1)."""

    def begin_task(self, params: Tensors, task: int) -> Tensors:
        """The prompts when a task arrives."""

    def for_training(self, similarity: Tensor, slot: Tensor) -> Tensor:
        """Which prompts train on each row. `slot`: float [slots], 1 at the task's own place."""

    def for_test(self, similarity: Tensor) -> Tensor:
        """Which prompts each row gets when nobody knows its task."""

    def features(
        self, frozen: Frozen, params: Tensors, x: Tensor, choice: Tensor, run: Pass
    ) -> Tensor:
        """The input of the head: [batch, width]."""


@dataclass(frozen=True)
class DualPrompts:
    """General and expert prefixes; the head gets the backbone's own feature (CLS of a ViT)."""

    slots: int = 10
    length: int = 5
    general: tuple[int, ...] = (0, 1)
    """Blocks with the general prompt."""
    expert: tuple[int, ...] = (2, 3, 4)
    """Blocks with an expert prompt."""

    def init(self, width: int, generator: torch.Generator) -> Tensors:
        """General [blocks, 2, length, width]; experts [slots, blocks, 2, length, width]; keys."""
        each = (2, self.length, width)
        shapes = {
            GENERAL: (len(self.general), *each),
            POOL: (self.slots, len(self.expert), *each),
            KEYS: (self.slots, width),
        }
        return {name: uniform(shape, generator) for name, shape in shapes.items()}

    def begin_task(self, params: Tensors, task: int) -> Tensors:
        """A task's expert begins as the one before was left; its key begins anew."""
        if task == 0:
            return params
        pool = params[POOL].clone()
        pool[task] = pool[task - 1]
        return params | {POOL: pool}

    def for_training(self, similarity: Tensor, slot: Tensor) -> Tensor:
        """The task's own expert, for all rows: [slots]."""
        return slot

    def for_test(self, similarity: Tensor) -> Tensor:
        """The expert with the nearest key: [batch, slots]."""
        return one_hot(similarity.argmax(1), self.slots).to(similarity.dtype)

    def features(
        self, frozen: Frozen, params: Tensors, x: Tensor, choice: Tensor, run: Pass
    ) -> Tensor:
        """The backbone's feature with prefixes in its blocks."""
        pool = params[POOL]
        mixed = choice @ pool.flatten(1)
        experts = side_by_side(mixed.reshape(*mixed.shape[:-1], *pool.shape[1:]))
        general = side_by_side(params[GENERAL])
        rows = (len(x), *general.shape[1:])
        prefixes = {block: general[place].expand(rows) for place, block in enumerate(self.general)}
        prefixes |= {
            block: experts[..., place, :, :].expand(rows) for place, block in enumerate(self.expert)
        }
        return frozen.pooled(x, prefixes, run)


@dataclass(frozen=True)
class InputPrompts:
    """Several prompts as tokens at the input; the head gets the mean of what becomes of them."""

    slots: int = 10
    length: int = 5
    top: int = 5
    """Prompts that each row gets."""

    def init(self, width: int, generator: torch.Generator) -> Tensors:
        """Prompts [slots, length, width] and keys."""
        shapes = {POOL: (self.slots, self.length, width), KEYS: (self.slots, width)}
        return {name: uniform(shape, generator) for name, shape in shapes.items()}

    def begin_task(self, params: Tensors, task: int) -> Tensors:
        """Nothing changes: no prompt belongs to a task."""
        return params

    def for_training(self, similarity: Tensor, slot: Tensor) -> Tensor:
        """As at test: the prompts with the nearest keys, [batch, top, slots]."""
        return self.for_test(similarity)

    def for_test(self, similarity: Tensor) -> Tensor:
        """The prompts with the nearest keys: [batch, top, slots]."""
        best = similarity.detach().topk(self.top, dim=1).indices
        return one_hot(best, self.slots).to(similarity.dtype)

    def features(
        self, frozen: Frozen, params: Tensors, x: Tensor, choice: Tensor, run: Pass
    ) -> Tensor:
        """The mean over the prompt tokens after the last block."""
        pool = params[POOL]
        prompts = (choice @ pool.flatten(1)).reshape(len(x), -1, pool.shape[2])
        hidden = frozen.with_tokens(x, prompts, run)
        return hidden[:, 1 : 1 + prompts.shape[1]].mean(1)


@dataclass(frozen=True)
class Frozen:
    """A backbone with its weights, which nobody trains."""

    backbone: Backbone
    weights: Tensors = field(repr=False, compare=False)

    def pooled(self, x: Tensor, prefixes: Prefixes, run: Pass) -> Tensor:
        """The feature of each row with prefixes in some blocks."""
        padding = self.backbone.padding(x)
        tokens = self.backbone.embed(self.weights, x, run)
        first = self.backbone.pooled
        hidden = self.backbone.encode(self.weights, tokens, run, prefixes, padding, first)
        return self.backbone.pool(hidden, padding)

    def with_tokens(self, x: Tensor, more: Tensor, run: Pass) -> Tensor:
        """What becomes of CLS and of more tokens that are put in after it."""
        padding = self.backbone.padding(x)
        tokens = self.backbone.embed(self.weights, x, run)
        tokens = torch.cat([tokens[:, :1], more, tokens[:, 1:]], dim=1)
        if padding is not None:  # CLS is never padding, and neither are prompts
            padding = pad(padding, (more.shape[1], 0), value=False)
        first = 1 + more.shape[1]
        return self.backbone.encode(self.weights, tokens, run, {}, padding, first)


@dataclass(frozen=True)
class Prompted:
    """A frozen backbone with a pool of prompts, as a body: its parameters are prompts and keys."""

    frozen: Frozen
    prompts: Pool
    remembers: bool = True
    """Queries are computed once a row and kept."""
    known: Tensor | None = field(default=None, repr=False, compare=False)
    """Queries of the rows that come next; None: they are computed."""

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
        """Tensors that are no parameters."""
        return self.frozen.weights

    def init(self, generator: torch.Generator) -> tuple[Tensors, Tensors]:
        """First prompts and keys."""
        return self.prompts.init(self.feature_size, generator), {}

    def grow(self, params: Tensors, task: int, generator: torch.Generator) -> Tensors:
        """The parameters with a prompt for a task."""
        return self.prompts.grow(params, task, generator)

    def to(self, device: torch.device) -> Prompted:
        """The same with its constants on a device."""
        backbone = self.frozen.backbone
        return replace(self, frozen=Frozen(backbone, backbone.frozen(device)))

    def knowing(self, queries: Tensor) -> Prompted:
        """The same, for rows whose queries are these."""
        return replace(self, known=queries)

    def query(self, x: Tensor, run: Pass) -> Tensor:
        """The feature of each row without a prompt, a constant: [batch, width]."""
        if self.known is not None:
            return self.known
        with torch.no_grad():
            return self.frozen.pooled(x, {}, run)

    def similarity(self, params: Tensors, x: Tensor, run: Pass) -> Tensor:
        """The cosine of each row's query with each key: [batch, slots]."""
        return normalize(self.query(x, run), dim=1) @ normalize(params[KEYS], dim=1).T

    def chosen(self, params: Tensors, x: Tensor, choice: Tensor, run: Pass) -> Tensor:
        """The input of the head with the chosen prompts: [batch, width]."""
        return self.prompts.features(self.frozen, params, x, choice, run)

    def features(self, params: Tensors, x: Tensor, run: Pass) -> Tensor:
        """The input of the head when nobody knows the task: keys choose among all prompts."""
        choice = self.prompts.for_test(self.similarity(params, x, run))
        return self.chosen(params, x, choice, run)


def side_by_side(prompts: Tensor) -> Tensor:
    """Keys and values [..., 2, length, width] in the encoder's form, [..., length, 2 * width]."""
    return prompts.transpose(-3, -2).flatten(-2)


def uniform(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Values on (-1, 1)."""
    return torch.empty(shape).uniform_(-1, 1, generator=generator)
