"""Prompts on a frozen transformer: trained tokens besides those that the backbone computes.

A pool holds prompts, each with a key. The query of an input is the backbone's feature of it without
any prompt; the cosine of query and key measures how well a prompt fits the input.

    DualPrompts   prefixes of keys and values in the attention of some blocks: a general prompt for
                  all inputs, and one expert prompt of the pool (Wang et al., ECCV 2022)
    InputPrompts  tokens at the input, several prompts of the pool (L2P: Wang et al., CVPR 2022)

A prefix is added after the block's projections, directly as keys and values, as in the public
implementations of both papers; with `projected` it goes through the projections. The number of
prompts in a pool is the length of its parameters: a pool of `DualPrompts` grows when a task arrives
for which it has no expert.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor
from torch.nn.functional import normalize, one_hot

from perdure.core.rng import Rng
from perdure.core.trees import Tensors
from perdure.models.backbones import FrozenBackbone
from perdure.models.layers import Body, set_facts
from perdure.models.ops import ForwardPass

KEYS, POOL, GENERAL = "prompt.keys", "prompt.pool", "prompt.general"


class Pool(Protocol):
    """A kind of prompts, and the way in which a backbone uses them."""

    by_task: ClassVar[bool]
    """Whether each prompt belongs to one task."""

    def init(self, width: int, generator: torch.Generator) -> Tensors:
        """Return the initial prompts and keys, uniform on (-1, 1)."""

    def grow(self, params: Tensors, task: int, generator: torch.Generator) -> Tensors:
        """Return the parameters with a prompt for a task; unchanged if it has one."""

    def start_task(self, params: Tensors, task: int) -> Tensors:
        """Return the parameters at the start of a task's training."""

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
    """General and expert prefixes; the head gets the backbone's feature (CLS of a ViT)."""

    slots: int = 10
    """Initial number of expert prompts; `grow` adds one per task that has none."""
    length: int = 5
    """Tokens per prompt."""
    general: tuple[int, ...] = (0, 1)
    """Blocks with the general prompt."""
    expert: tuple[int, ...] = (2, 3, 4)
    """Blocks with an expert prompt."""
    projected: bool = False
    """Whether prefixes are projected like a block's tokens. If not, they are keys and values."""

    by_task: ClassVar[bool] = True

    def init(self, width: int, generator: torch.Generator) -> Tensors:
        """Return general [blocks, 2, length, width], experts [slots, blocks, ...] and keys."""
        prefix = (2, self.length, width)
        shapes = {
            GENERAL: (len(self.general), *prefix),
            POOL: (self.slots, len(self.expert), *prefix),
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

    def start_task(self, params: Tensors, task: int) -> Tensors:
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
        rows = (x.shape[0], *general.shape[1:])
        prefixes = {block: general[i].expand(rows) for i, block in enumerate(self.general)}
        prefixes |= {
            block: experts[..., i, :, :].expand(rows) for i, block in enumerate(self.expert)
        }
        if self.projected:
            prefixes = {block: frozen.project(block, prefix) for block, prefix in prefixes.items()}
        return frozen.features(x, prefixes, fwd)


@dataclass(frozen=True)
class InputPrompts:
    """Several prompts as tokens at the input; the head gets the mean of their encodings."""

    slots: int = 10
    """Number of prompts, shared by all tasks."""
    length: int = 5
    """Tokens per prompt."""
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

    def start_task(self, params: Tensors, task: int) -> Tensors:
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
        prompts = (choice @ pool.flatten(1)).reshape(x.shape[0], -1, pool.shape[2])
        hidden = frozen.with_tokens(x, prompts, fwd)
        return hidden[:, 1 : 1 + prompts.shape[1]].mean(1)


@dataclass(frozen=True)
class Prompted(Body):
    """A frozen backbone with a pool of prompts, as a body: its parameters are prompts and keys."""

    frozen: FrozenBackbone
    """The backbone."""
    prompts: Pool
    """The kind of prompts."""
    caches_queries: bool = True
    """Whether queries are computed once per row and cached."""
    cached_queries: Tensor | None = field(default=None, repr=False, compare=False)
    """Queries of the rows of the next pass. If None, they are computed."""

    def __post_init__(self) -> None:
        """Take the facts of a body from the backbone, none of whose layers is trained."""
        backbone, weights = self.frozen.backbone, self.frozen.weights
        set_facts(self, feature_size=backbone.feature_size, layers=(), constants=weights)

    @property
    def card(self) -> dict[str, Any] | None:
        """Name, kind, config and SHA-256 of the backbone's weights, or None if it has none."""
        return self.frozen.backbone.card

    def init(self, generator: torch.Generator) -> tuple[Tensors, Tensors]:
        """Return the initial prompts and keys, and no buffers."""
        return self.prompts.init(self.feature_size, generator), {}

    def grow(self, params: Tensors, task: int, rng: Rng) -> Tensors:
        """Return the parameters with a prompt for a task; unchanged if it has one."""
        return self.prompts.grow(params, task, rng.torch_generator("prompt", task))

    def to(self, device: torch.device) -> Prompted:
        """Return a copy with its constants on a device."""
        backbone = self.frozen.backbone
        return replace(self, frozen=FrozenBackbone(backbone, backbone.frozen(device)))

    def with_constants(self, constants: Tensors) -> Prompted:
        """Return a copy with other values of its constants."""
        return replace(self, frozen=FrozenBackbone(self.frozen.backbone, constants))

    def with_cached_features(self, queries: Tensor) -> Prompted:
        """Return a copy that uses cached queries of the next batch, [batch, width]."""
        return replace(self, cached_queries=queries)

    def query(self, x: Tensor, fwd: ForwardPass) -> Tensor:
        """Return the feature of each row without a prompt, a constant: [batch, width]."""
        if self.cached_queries is not None:
            return self.cached_queries
        with torch.no_grad():
            return self.frozen.features(x, {}, fwd)

    def similarity(self, params: Tensors, x: Tensor, fwd: ForwardPass) -> Tensor:
        """Return the cosine of each row's query with each key: [batch, slots]."""
        return normalize(self.query(x, fwd), dim=1) @ normalize(params[KEYS], dim=1).T

    def features_with(self, params: Tensors, x: Tensor, choice: Tensor, fwd: ForwardPass) -> Tensor:
        """Return the head's input with the chosen prompts: [batch, width]."""
        return self.prompts.features(self.frozen, params, x, choice, fwd)

    def seen_similarity(self, params: Tensors, x: Tensor, tasks: int, fwd: ForwardPass) -> Tensor:
        """Return `similarity`, with -inf for prompts that belong to later tasks than `tasks`."""
        similarity = self.similarity(params, x, fwd)
        if not self.prompts.by_task:
            return similarity
        unseen = torch.arange(similarity.shape[1], device=x.device) >= tasks
        return similarity.masked_fill(unseen, -torch.inf)

    def features(
        self, params: Tensors, x: Tensor, fwd: ForwardPass, tasks: int | None = None
    ) -> Tensor:
        """Return the head's input with the prompts that the keys choose.

        Those of later tasks than `tasks` may not be chosen; if it is None, all may.
        """
        tasks = len(params[KEYS]) if tasks is None else tasks
        choice = self.prompts.choose(self.seen_similarity(params, x, tasks, fwd))
        return self.features_with(params, x, choice, fwd)


def join_keys_and_values(prompts: Tensor) -> Tensor:
    """Return keys and values [..., 2, length, width] as [..., length, 2 * width]."""
    return prompts.transpose(-3, -2).flatten(-2)


def draw_uniform(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Return values drawn uniformly from (-1, 1)."""
    return torch.empty(shape).uniform_(-1, 1, generator=generator)
