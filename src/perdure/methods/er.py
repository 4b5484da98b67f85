"""ER + FL: clients replay a small memory of their own earlier examples.

Chaudhry, Rohrbach, Elhoseiny, Ajanthan, Dokania, Torr, Ranzato: On Tiny Episodic Memories in
Continual Learning, 2019. A step takes the batch B_n of the current task together with a batch B_M
from the memory and descends the mean loss over both. The memory is filled by reservoir sampling:
every example that a client has had in earlier tasks is in it with equal probability. It is filled
at a task's end, all at once (the same distribution as example by example), never leaves the client
and holds at most `budget` examples over all tasks, as bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from perdure.methods.base import Batch, Client, Finish, Method, Net, Place, Shard
from perdure.models.ops import uniform_bits
from perdure.trees import Tensors, Tree

_PLACE = 1 << 20
"""Where the draws from the memory are hashed, far from the model's places of dropout."""
_SPARE = 53 - 32
"""Bits of a hash that are not needed: 32 of its 53 tell a row of the memory."""


@dataclass(frozen=True)
class Er(Method):
    """A replay memory on every client.

    budget: examples that a client keeps, over all tasks.
    replay_batch: examples from the memory in every step (the paper's |B_M|).
    """

    budget: Annotated[int, Field(ge=1)] = 200
    replay_batch: Annotated[int, Field(ge=1)] = 32

    paper: ClassVar[str] = "Chaudhry et al., 2019"

    def prepare(self, client: Client) -> Tensors:
        """The memory as tensors; a client without one gives a single empty row."""
        if client.place.task == 0:
            return {}
        kept, width = client.kept, client.shard.inputs.rows.shape[1]
        outputs = client.place.network.outputs.count(client.place.task)
        device = client.shard.index.device
        if not kept:
            rows = torch.zeros(1, width, dtype=client.shard.inputs.rows.dtype, device=device)
            own = {"rows": rows, "targets": torch.zeros(1, dtype=torch.int64, device=device)}
            own |= {"scale": torch.zeros(1, width, device=device), "of": own["targets"]}
            own |= {"shift": own["scale"], "count": torch.zeros((), dtype=torch.int64)}
        else:
            own = {name: kept[name] for name in ("rows", "targets", "of", "scale", "shift")}
            own["count"] = torch.tensor(len(kept["rows"]))
        if client.shard.allowed is not None:
            own["allowed"] = competitors(kept.get("allowed"), client.shard.allowed, outputs)
        return own | {"count": own["count"].to(device)}

    def loss(self, net: Net, params: Tensors, batch: Batch, received: Tree, own: Tensors) -> Tensor:
        """The mean cross-entropy over B_M and B_n."""
        if not own:
            return batch.cross_entropy(net.logits(params, batch.x))
        joined = self._joined(net, batch, own)
        # one pass for both, memory first: a row's dropout noise depends on its place, and padding
        # may follow the current batch
        both = Net(net.network, replace(net.run, mask=joined.mask))
        return joined.cross_entropy(both.logits(params, joined.x))

    def _joined(self, net: Net, batch: Batch, own: Tensors) -> Batch:
        """B_M and B_n as one batch; nothing of B_M counts while the memory is empty."""
        assert net.run.key is not None
        bits = uniform_bits(net.run.key, _PLACE, self.replay_batch, batch.x.device)
        pick = ((bits >> _SPARE) * own["count"]) >> 32  # uniform on 0 ... count - 1
        kind = own["of"][pick]
        rows = own["rows"][pick]
        if batch.x.is_floating_point():  # not the numbers of tokens
            rows = rows.to(torch.float32) * own["scale"][kind] + own["shift"][kind]
        x = torch.cat([rows.reshape(-1, *batch.x.shape[1:]), batch.x])
        mask = batch.mask
        if mask is None:
            mask = torch.ones_like(batch.y, dtype=torch.float32)
        there = (own["count"] > 0).to(mask.dtype).expand(self.replay_batch)
        allowed = None
        if batch.allowed is not None:
            today = batch.allowed.expand(len(batch.y), -1)
            allowed = torch.cat([own["allowed"][kind], today])
        y = torch.cat([own["targets"][pick], batch.y])
        return Batch(x, y, torch.cat([there, mask]), allowed)

    def consolidates(self, place: Place) -> bool:
        """After every task but the last."""
        return place.task < place.tasks - 1

    def consolidates_alone(self) -> bool:
        """Nothing travels for it."""
        return True

    def extract(self, client: Client) -> Finish:
        """Let this task's examples into the memory; nothing is sent."""
        kept, shard = client.kept, client.shard
        seen, generator = int(kept.get("seen", 0)), client.draw("memory")
        chosen = torch.randperm(seen + len(shard), generator=generator)[: self.budget]
        old, new = chosen[chosen < seen], chosen[chosen >= seen] - seen
        stay = torch.randperm(len(kept["rows"]) if kept else 0, generator=generator)[: len(old)]
        fresh = remembered(shard, shard.index[new.to(shard.index.device)], kept)
        return Finish({}, merged(kept, stay, fresh) | {"seen": seen + len(shard)})


def remembered(shard: Shard, index: Tensor, kept: Tree) -> Tree:
    """Examples as bytes, in the order in which the model sees them, and how to scale them."""
    inputs = shard.inputs
    order = inputs.permutation
    if order is None:
        order = torch.arange(inputs.rows.shape[1], device=index.device)
    kinds = len(kept["scale"]) if kept else 0
    return {
        "rows": inputs.rows[index][:, order],
        "targets": shard.targets[index],
        "of": torch.full_like(index, kinds),
        "scale": inputs.scale[order].unsqueeze(0),
        "shift": inputs.shift[order].unsqueeze(0),
        "allowed": None if shard.allowed is None else shard.allowed.unsqueeze(0),
    }


def merged(kept: Tree, stay: Tensor, fresh: Tree) -> Tree:
    """What stays of the memory, followed by what is new."""
    if not kept:
        return fresh
    stay = stay.to(fresh["rows"].device)
    tree: Tree = {
        name: torch.cat([kept[name][stay], fresh[name]]) for name in ("rows", "targets", "of")
    }
    tree |= {name: torch.cat([kept[name], fresh[name]]) for name in ("scale", "shift")}
    masks = fresh["allowed"]
    if masks is not None:
        masks = torch.cat([widened(kept["allowed"], masks.shape[1]), masks])
    return tree | {"allowed": masks}


def competitors(kept: Tensor | None, today: Tensor, outputs: int) -> Tensor:
    """For each task in the memory the outputs that compete: its own, or today's if among them.

    So replayed examples compete with all outputs seen so far where the current ones do, and among
    their own task's where a loss is kept within the task.
    """
    if kept is None:
        return today.unsqueeze(0)
    masks = widened(kept, outputs)
    inside = (masks & ~today).any(1, keepdim=True).logical_not()
    return torch.where(inside, today, masks)


def widened(masks: Tensor, outputs: int) -> Tensor:
    """Masks of [tasks, outputs] with the outputs that came later, which were not there."""
    return torch.nn.functional.pad(masks, (0, outputs - masks.shape[1]))
