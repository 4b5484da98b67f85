"""ER + FL: clients replay a small memory of their earlier examples.

Chaudhry, Rohrbach, Elhoseiny, Ajanthan, Dokania, Torr, Ranzato: On Tiny Episodic Memories in
Continual Learning, 2019. A step takes the batch B_n of the current task together with a batch B_M
from the memory and descends the mean loss over both. The memory is filled by reservoir sampling:
every example that a client has had in earlier tasks is in it with equal probability. It is filled
at a task's end, all at once (the same distribution as example by example), never leaves the client
and holds at most `budget` examples over all tasks, as bytes.
"""

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
    """A replay memory on every client."""

    budget: PositiveInt = 200
    """Examples that each client stores, over all tasks."""
    replay_batch: PositiveInt = 32
    """Stored examples in every local step (the paper's |B_M|)."""

    paper: ClassVar[str] = "Chaudhry et al., 2019"
    ClientState: ClassVar[type] = ReplayMemory

    def exchanges(self, context: Context) -> list[Exchange | Train]:
        """Train on B_M and B_n together, then fill the memory; nothing is sent for it."""
        first = context.task == 0
        replay = Train() if first else Train(prepare=self.recall, extra_rows=self.replay)
        return [replay, Exchange("memory", client_work=self.remember)]

    def recall(self, client: Client[ReplayMemory]) -> Prepared:
        """Return the memory for this round's steps."""
        return Prepared(tensors=replay_tensors(client.state, client.data))

    def replay(self, step: Step) -> Rows:
        """Draw B_M; the loss is the mean over B_M and B_n."""
        return replayed_rows(step, self.replay_batch)

    def remember(self, client: Client[ReplayMemory]) -> ClientResult[ReplayMemory]:
        """Let this task's examples into the memory by reservoir sampling."""
        kept, seen, data = client.state.examples, client.state.seen, client.data
        generator, total = client.draw("memory"), seen + len(data)
        chosen = torch.randperm(total, generator=generator)[: self.budget]
        new = chosen[chosen >= seen] - seen
        examples = store_examples(data, data.index[new.to(data.index.device)])
        if kept is not None:
            stay = torch.randperm(len(kept), generator=generator)[: len(chosen) - len(new)]
            examples = join_examples(kept, stay, examples)
        return ClientResult(state=ReplayMemory(examples, total))
