"""ER: experience replay on every client."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field

from perdure.config.section import Fixed, PositiveInt, Search
from perdure.contract.context import Client, Context
from perdure.contract.exchanges import Exchange, Prepared, Train
from perdure.contract.method import Method
from perdure.contract.needs import Needs, Preferences
from perdure.contract.step import Rows, Step
from perdure.contract.uploads import ClientResult
from perdure.methods.parts.replay import (
    ReplayMemory,
    join_examples,
    replay_tensors,
    replayed_rows,
    store_examples,
    with_share,
)


@dataclass(frozen=True)
class Er(Method):
    """Experience replay: each client rehearses a small memory of its own earlier examples.

    Every local step takes the batch B_n of the current task and a batch B_M of `replay_batch`
    examples drawn from the client's replay memory. The memory counts as much as the new examples,
    whatever the sizes of the two batches:
        L = (1 - w) (mean loss of B_n) + w (mean loss of B_M), w = `replay_weight` (1/2).
    At a task's end the client refills the memory by reservoir sampling: every example seen so far
    is stored with equal probability. New and replayed examples compete among the outputs of all
    tasks so far (`train.outputs: seen` unless set), and of a growing head all outputs are trained;
    else nothing would tell a replayed example from new classes. Uploads are those of FedAvg; the
    memory never leaves the client.

    Client state: a `ReplayMemory` (N stored examples of D values, T earlier tasks):
        examples.rows: uint8 [N, D] (float32 for floats, int32 for tokens). Inputs before
            normalization.
        examples.targets, examples.tasks: int64 [N]. Output index, and index into the next three.
        examples.scale, examples.shift: float32 [T, D]. Normalization of each earlier task.
        examples.active_outputs: bool [T, outputs], or None if all outputs are active.
        seen: int. Examples seen so far, stored or not.

    Differs from the paper: the memory is refilled once per task, which gives the same distribution.
    The paper takes the mean over both batches together, which is the same if their sizes are.

    Reference: Chaudhry, Rohrbach, Elhoseiny, Ajanthan, Dokania, Torr, Ranzato: On Tiny Episodic
    Memories in Continual Learning, 2019.

    Example: `method: {kind: er, budget: 50}`
    """

    budget: Annotated[PositiveInt, Fixed()] = 200
    """Examples that are stored, over all tasks: by each client, or in total (`budget_scope`)."""
    budget_scope: Literal["client", "total"] = "client"
    """Whether `budget` is that of every client (client), or divided over all clients (total)."""
    replay_batch: Annotated[PositiveInt | None, Fixed()] = None
    """Stored examples in every local step (the paper's |B_M|). If None, `train.batch_size`."""
    replay_weight: Annotated[float, Field(gt=0, lt=1), Search(0.1, 0.9)] = 0.5
    """Fraction of the loss that is the memory's (w)."""

    title: ClassVar[str] = "ER"
    family: ClassVar[str] = "Replay"
    idea: ClassVar[str] = "Every local step rehearses a few of the client's earlier examples."
    paper: ClassVar[str] = "Chaudhry et al., 2019"
    ClientState: ClassVar[type] = ReplayMemory
    needs: ClassVar[Needs] = Needs(
        prefers=Preferences(
            head={"split": "shared"},
            active_outputs="seen",
            demanded={"active_outputs": "its replayed examples compete with new classes"},
        ),
        stored_examples=True,
    )

    def exchanges(self, context: Context) -> list[Exchange | Train]:
        """Train on B_M and B_n together, then refill the memory, for which nothing is sent."""
        train = Train()
        if context.task > 0:
            outputs_of_all_tasks = tuple(context.parameters)
            train = Train(
                prepare=self.prepare_memory,
                extra_rows=self.replay,
                trainable=outputs_of_all_tasks,
            )
        return [train, Exchange("memory", client_work=self.refill_memory)]

    def prepare_memory(self, client: Client[ReplayMemory]) -> Prepared:
        """Return the memory as tensors for this round's steps."""
        count = self.replay_batch or client.batch_size
        return Prepared(tensors=replay_tensors(client.state, client.data, count))

    def replay(self, step: Step) -> Rows:
        """Return B_M, drawn from the memory, which has the fraction `replay_weight` of the loss."""
        return with_share(replayed_rows(step), step, self.replay_weight)

    def budget_of(self, client: Client) -> int:
        """Return the number of examples that a client may store."""
        if self.budget_scope == "client":
            return self.budget
        share, rest = divmod(self.budget, client.context.clients_total)
        return share + (client.id < rest)

    def refill_memory(self, client: Client[ReplayMemory]) -> ClientResult[ReplayMemory]:
        """Return the memory after reservoir sampling over this task's examples."""
        stored, seen, data = client.state.examples, client.state.seen, client.data
        generator, total = client.draw("memory"), seen + len(data)
        chosen = torch.randperm(total, generator=generator)[: self.budget_of(client)]
        if not len(chosen):
            return ClientResult(state=ReplayMemory(None, total, client.context.task))
        new = chosen[chosen >= seen] - seen
        examples = store_examples(data, data.index[new.to(data.index.device)])
        if stored is not None:
            remaining = torch.randperm(len(stored), generator=generator)[: len(chosen) - len(new)]
            examples = join_examples(stored, remaining, examples)
        return ClientResult(state=ReplayMemory(examples, total, client.context.task))
