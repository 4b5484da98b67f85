"""What a run may claim at its end: which sums, whose noise, how much, against whom."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from perdure.contract.context import Context
from perdure.privacy.renyi import RoundGroup, epsilon, sampled_epsilon
from perdure.privacy.secagg.transport import min_survivors
from perdure.training.exchange import participants
from perdure.training.sampling import clients_with_data, sample_clients

if TYPE_CHECKING:
    from perdure.training.experiment import Experiment
    from perdure.training.state import RunState

PrivacySummary = dict[str, Any]


def privacy_summary(experiment: Experiment, state: RunState) -> PrivacySummary | None:
    """Return the `privacy` section of result.json so far, or None if the config asks for nothing.

    `epsilon` holds for the client with most uploads, against an observer who knows the sampled
    clients; `epsilon_sampled` against one who does not (None if all clients are sampled or the
    noise is local).
    """
    said = experiment.config.privacy
    if not (said.secagg or said.clip):
        return None
    found: PrivacySummary = {"secagg": said.secagg}
    if said.secagg:
        found |= {
            "threshold": said.threshold, "bits": said.bits, "precision": said.precision,
            "at_once": said.single_message, "covers": _secagg_words(experiment),
        }  # fmt: skip
    if said.clip is not None:
        found |= {"clip": said.clip, "noise": said.noise, "mode": said.mode}
        found |= _noise(experiment, state)
    return found


def privacy_spent(experiment: Experiment, state: RunState) -> PrivacySummary:
    """Epsilon and delta so far, for events; nothing without noise."""
    said = experiment.config.privacy
    if said.noise is None:
        return {}
    part = max_uploads_per_client(experiment, state)
    # two uploads of one client differ by up to twice the bound, two sums with and without it by one
    scale = said.noise / 2 if said.mode == "local" else said.noise
    return {"epsilon": epsilon(scale, part, said.delta), "delta": said.delta}


def _noise(experiment: Experiment, state: RunState) -> PrivacySummary:
    said = experiment.config.privacy
    if said.noise is None:
        return {"epsilon": None, "claim": "uploads are clipped; without noise nothing is claimed"}
    groups = _rounds(experiment, state)
    some = said.mode == "central" and any(group.sampled < group.clients for group in groups)
    found = {
        **privacy_spent(experiment, state),
        "epsilon_sampled": sampled_epsilon(said.noise, groups, said.delta) if some else None,
        "sums": sum(group.rounds for group in groups),
        "sums_of_one_client": max_uploads_per_client(experiment, state),
    }
    return found | {"claim": _noise_words(experiment, found)}


def max_uploads_per_client(experiment: Experiment, state: RunState) -> int:
    """Return the number of noisy uploads of the client that sent most of them."""
    again = {(at["task"], at["round"]): at["attempt"] for at in state.counters.repeated}
    sent: Counter[int] = Counter()
    for context, rounds in _task_ends(experiment, state):
        task = experiment.task(context.task)
        for number in range(rounds):
            attempt = again.get((context.task, number), 0)
            here = replace(context, round=number, attempt=attempt)
            sent.update(sample_clients(experiment.config, task, here))
        for clients in _extra(experiment, state, context):
            sent.update(clients)
    return max(sent.values(), default=0)


def _rounds(experiment: Experiment, state: RunState) -> list[RoundGroup]:
    """All rounds under noise, those with equal samples together."""
    found: Counter[tuple[int, int]] = Counter()
    for context, rounds in _task_ends(experiment, state):
        there = len(clients_with_data(experiment.task(context.task)))
        found[there, min(experiment.config.per_round, there)] += rounds
        for clients in _extra(experiment, state, context):
            found[len(clients), len(clients)] += 1
    return [RoundGroup(*sample, rounds) for sample, rounds in found.items() if rounds]


def _task_ends(experiment: Experiment, state: RunState) -> Iterator[tuple[Context, int]]:
    """Return the end of each task so far, and the number of its trained rounds."""
    for task in range(min(state.task + 1, experiment.task_count)):
        rounds = experiment.rounds(replace(state, task=task))
        context = experiment.context(replace(state, task=task, round=rounds))
        yield context, rounds if task < state.task else state.round


def _extra(experiment: Experiment, state: RunState, context: Context) -> list[list[int]]:
    """Return the clients of each exchange other than training that sent something under noise."""
    if not experiment.config.privacy.task_end:
        return []
    exchanges = experiment.exchanges(replace(state, task=context.task))
    done = context.task < state.task or state.round >= context.rounds
    held = [*exchanges.opening, *(exchanges.ending if done else ())]
    summed = [each for each in held if each.communicates and each.aggregate is not None]
    return [participants(experiment, exchange, context) for exchange in summed]


def _secagg_words(experiment: Experiment) -> str:
    said = experiment.config.privacy
    fewest = min_survivors(experiment.config.per_round, said.threshold)
    return (
        "secure aggregation: of the uploads the server learned only sums, each over at least "
        f"{fewest} of {experiment.config.per_round} sampled clients (as far as that many hold data "
        "of the task), who took part and who declined; it is taken to follow the protocol and to "
        "collude with fewer clients than the threshold"
        + (" and not to use uploads that arrive after their round" if said.single_message else "")
    )


def _noise_words(experiment: Experiment, found: PrivacySummary) -> str:
    said = experiment.config.privacy
    who = {
        "local": "each client to its own upload, so that it holds against the server too",
        "central": "the server to the sum, so that it holds against all who see the models but "
        "not against the server",
    }[said.mode]
    if said.secagg and said.mode == "central":
        who = (
            "the clients, each a part, so that it holds against the server too as long as the "
            "threshold's number of clients keep their part secret"
        )
    unit = "any change of" if said.mode == "local" else "leaving out"
    text = (
        f"({found['epsilon']:.4g}, {said.delta:g})-differential privacy for {unit} all that one "
        f"client sent (not for single examples), at most {found['sums_of_one_client']} uploads, by "
        f"Renyi accounting; noise of {said.noise:g} times the clipping norm {said.clip:g} was "
        f"added by {who}; "
    )
    if found["epsilon_sampled"] is not None:
        text += (
            f"{found['epsilon_sampled']:.4g} for replacing a client by another, against those who "
            "do not know who was sampled (uniform samples without replacement); "
        )
    return text + _not_covered(experiment)


def _not_covered(experiment: Experiment) -> str:
    """Return what else was released."""
    rest = ["how many clients reported", "tests on held-out data"]
    if not experiment.config.privacy.task_end:
        rest.insert(0, "what is sent in exchanges other than training")
    text = f"not covered: {', '.join(rest)}"
    if experiment.privacy.simulated:
        return f"{text}; noise drawn from the run's seed is for simulation only"
    return f"{text}, rounds that were repeated after the server was restarted"
