"""ER: experience replay on every client."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from perdure.config.types import PositiveInt
from perdure.contract import Client, ClientResult, Context, Exchange, Method, Prepared, Train
from perdure.contract.step import Rows, Step
from perdure.methods.parts.replay import (
    ReplayMemory,
    join_examples,
    replay_tensors,
    replayed_rows,
    store_examples,
)


@dataclass(frozen=True)
class Er(Method):
    """Experience replay: each client rehearses a small memory of its own earlier examples.

    Every local step takes the batch B_n of the current task and a batch B_M of `replay_batch`
    examples drawn from the client's replay memory, and descends the mean loss over both. At a
    task's end the client refills the memory by reservoir sampling: every example seen so far is
    stored with equal probability. Uploads are those of FedAvg; the memory never leaves the client.

    Client state: a `ReplayMemory` (N <= budget stored examples of D values, T earlier tasks):
        examples.rows: uint8 [N, D] (int32 for tokens). Inputs before normalization.
        examples.targets, examples.tasks: int64 [N]. Output index, and index into the next three.
        examples.scale, examples.shift: float32 [T, D]. Normalization of each earlier task.
        examples.active_outputs: bool [T, outputs], or None if all outputs are active.
        seen: int. Examples seen so far, stored or not.

    Differs from the paper: the memory is refilled once per task, which gives the same distribution.

    Reference: Chaudhry, Rohrbach, Elhoseiny, Ajanthan, Dokania, Torr, Ranzato: On Tiny Episodic
    Memories in Continual Learning, 2019.

    Example: `method: {kind: er, budget: 50}`
    """

    budget: PositiveInt = 200
    """Examples that each client stores, over all tasks."""
    replay_batch: PositiveInt = 32
    """Stored examples in every local step (the paper's |B_M|)."""

    paper: ClassVar[str] = "Chaudhry et al., 2019"
    ClientState: ClassVar[type] = ReplayMemory

    def exchanges(self, context: Context) -> list[Exchange | Train]:
        """Train on B_M and B_n together, then refill the memory, for which nothing is sent."""
        train = Train()
        if context.task > 0:
            train = Train(prepare=self.prepare_memory, extra_rows=self.replay)
        return [train, Exchange("memory", client_work=self.refill_memory)]

    def prepare_memory(self, client: Client[ReplayMemory]) -> Prepared:
        """Return the memory as tensors for this round's steps."""
        return Prepared(tensors=replay_tensors(client.state, client.data))

    def replay(self, step: Step) -> Rows:
        """Return B_M, drawn from the memory; the loss is the mean over B_M and B_n."""
        return replayed_rows(step, self.replay_batch)

    def refill_memory(self, client: Client[ReplayMemory]) -> ClientResult[ReplayMemory]:
        """Return the memory after reservoir sampling over this task's examples."""
        stored, seen, data = client.state.examples, client.state.seen, client.data
        generator, total = client.draw("memory"), seen + len(data)
        chosen = torch.randperm(total, generator=generator)[: self.budget]
        new = chosen[chosen >= seen] - seen
        examples = store_examples(data, data.index[new.to(data.index.device)])
        if stored is not None:
            remaining = torch.randperm(len(stored), generator=generator)[: len(chosen) - len(new)]
            examples = join_examples(stored, remaining, examples)
        return ClientResult(state=ReplayMemory(examples, total))
