"""A round of federated averaging by hand, from the pieces that perdure's loop is made of.

    python examples/the_loop.py

perdure has one loop over tasks and rounds (src/perdure/training/loop.py). This file takes its inner
part apart: it samples clients, lets each take its local steps, adds up what they send and changes
the model, then asks the library for the same round and compares. docs/how-it-works.md names the
files. Nothing here is needed to use perdure: `perdure.run(config)` does all of it.
"""

from __future__ import annotations

import torch

from perdure.config import parse
from perdure.core.trees import Tensors
from perdure.training.experiment import Experiment, build_experiment
from perdure.training.local_training import LocalTraining
from perdure.training.loop import begin_task
from perdure.training.round import train_round
from perdure.training.sampling import sample_clients
from perdure.training.state import RunState

CONFIG = {
    "method": {"kind": "fedavg"},
    "data": {"source": "digits", "limit": 300},
    "stream": {"kind": "permuted", "tasks": 2},
    "clients": {"count": 6, "per_round": 4, "partition": {"kind": "dirichlet", "alpha": 0.5}},
    "model": {"kind": "mlp", "hidden": [32]},
    "train": {"rounds": 3, "batch_size": 16, "lr": 0.1},
    "engine": {"kind": "serial"},
}


def round_by_hand(experiment: Experiment, state: RunState) -> Tensors:
    """Return the parameters of the model after the next round."""
    plan, server = experiment.plan(state), state.server  # facts of the task; params, buffers, state
    context = plan.at(state.round)  # task, round, learning rate, and where draws come from

    # Clients are drawn from the seed, the task and the round, and from nothing else.
    sampled = sample_clients(plan.config, plan.task, context)

    # What the server sends; a method adds fields by `Train.broadcast`.
    sent = {"params": server.params}
    clients = [experiment.client(index, context, server, sent) for index in sampled]

    # Local steps: an engine trains the clients and yields uploads, here one client at a time.
    work = LocalTraining(
        plan.train, context, plan.config.train, server.params, server.buffers, sent
    )
    total: Tensors = {}
    weights = 0.0
    for upload in experiment.engine.train(work, clients, lambda *_: None):
        update, (weight,) = upload.fields["update"], upload.weights
        for name, change in update.value.items():  # stacked: one row per client of the upload
            total[name] = total.get(name, 0) + weight * change[0].double()
        weights += weight

    # The server sees sums alone: the mean change, weighted by the clients' examples.
    means = {name: (value / weights).float() for name, value in total.items()}
    return {name: value + means[name] for name, value in server.params.items()}


def main() -> None:
    """Compare rounds by hand with those of the library."""
    experiment = build_experiment(parse(CONFIG))
    state = experiment.initial_state()  # all that a checkpoint would hold
    begin_task(experiment, state)  # the opening exchanges, of which FedAvg has none
    for number in range(3):
        expected = round_by_hand(experiment, state)
        event = train_round(experiment, state)  # changes `state`, and says what happened
        for name, value in state.server.params.items():
            torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-6)
        print(f"round {number + 1}: {event['clients']} clients, loss {event['loss']:.3f}, equal")


if __name__ == "__main__":
    main()
