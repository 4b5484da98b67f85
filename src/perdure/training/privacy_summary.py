"""The privacy guarantees of a run: what the server learned, and how much noise was added."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from perdure.config.root import PrivacyConfig
from perdure.contract.context import Context
from perdure.privacy.noise import RoundGroup, epsilon, sampled_epsilon
from perdure.privacy.secagg.journal import MIN_CLIENTS, min_survivors
from perdure.training.sampling import clients_with_data, participants, sample_clients

if TYPE_CHECKING:
    from perdure.training.experiment import Experiment
    from perdure.training.state import RunState

SIMULATED_DRAWS = (
    "in a simulation all draws derive from the run's seed, so that the run can be repeated "
    "exactly; its keys, noise and sketches protect nobody from those who know the seed"
)
SECRET_DRAWS = (
    "on real nodes keys, noise and sketches that protect clients come from the operating system, "
    "so that a run with any of them cannot be repeated bit for bit"
)
PrivacySummary = dict[str, Any]
"""The section `privacy` of result.json, or some of its keys."""


def privacy_summary(experiment: Experiment, state: RunState) -> PrivacySummary | None:
    """Return the section `privacy` of result.json for everything that was trained so far."""
    privacy = experiment.config.privacy
    if not (privacy.secagg or privacy.clip):
        return None
    summary: PrivacySummary = {"secagg": privacy.secagg}
    if privacy.secagg:
        summary |= {
            "threshold": privacy.threshold, "bits": privacy.bits, "precision": privacy.precision,
            "single_message": privacy.single_message, "covers": _secagg_guarantee(experiment),
        }  # fmt: skip
    if privacy.clip is not None:
        summary |= {"clip": privacy.clip, "noise": privacy.noise, "mode": privacy.mode}
        summary |= _noise(experiment, state)
    return summary


def origin_of_draws(experiment: Experiment) -> str:
    """Return a sentence about who can repeat the draws of a run: `draws` of result.json."""
    return SIMULATED_DRAWS if experiment.privacy.simulated else SECRET_DRAWS


def privacy_spent(experiment: Experiment, state: RunState) -> PrivacySummary:
    """Return epsilon and delta so far, or {} if there is no noise."""
    privacy = experiment.config.privacy
    if privacy.noise is None:
        return {}
    uploads = max_uploads_per_client(experiment, state)
    # two uploads of a client differ by up to twice the bound; sums with and without one, by once
    scale = privacy.noise / 2 if privacy.mode == "local" else privacy.noise
    return {"epsilon": epsilon(scale, uploads, privacy.delta), "delta": privacy.delta}


def _noise(experiment: Experiment, state: RunState) -> PrivacySummary:
    privacy = experiment.config.privacy
    if privacy.noise is None:
        return {"epsilon": None, "claim": "uploads are clipped; without noise nothing is claimed"}
    groups = _rounds(experiment, state)
    is_sampled = privacy.mode == "central" and any(g.sampled < g.clients for g in groups)
    sampled = sampled_epsilon(privacy.noise, groups, privacy.delta) if is_sampled else None
    values = {
        **privacy_spent(experiment, state),
        "epsilon_sampled": sampled,
        "sums": sum(group.rounds for group in groups),
        "sums_of_one_client": max_uploads_per_client(experiment, state),
    }
    return values | {"claim": _noise_guarantee(experiment, values)}


def max_uploads_per_client(experiment: Experiment, state: RunState) -> int:
    """Return the number of noisy uploads of the client that sent the most."""
    repeated = {(at["task"], at["round"]): at for at in state.counters.repeated}
    uploads: Counter[int] = Counter()
    for context, rounds in _task_ends(experiment, state):
        task, config = experiment.task(context.task), experiment.config_at(context.task)
        for number in range(rounds):
            again = repeated.get((context.task, number), {})
            clients = again.get("clients")  # a client uploads once, in whichever attempt
            if clients is None:
                at = replace(context, round=number, attempt=again.get("attempt", 0))
                clients = sample_clients(config, task, at)
            uploads.update(clients)
        for clients in _noisy_exchanges(experiment, state, context):
            uploads.update(clients)
    if experiment.privacy.server_adds_noise:  # again after a restart, as nodes do otherwise
        return max(uploads.values(), default=0) + experiment.privacy.draws.repeated
    extra = experiment.engine.choice().get("releases", {})
    uploads.update({int(client): count for client, count in extra.items()})
    return max(uploads.values(), default=0)


def _rounds(experiment: Experiment, state: RunState) -> list[RoundGroup]:
    """Return all rounds with noise, grouped by the numbers of clients and sampled clients."""
    rounds_by_size: Counter[tuple[int, int]] = Counter()
    for context, rounds in _task_ends(experiment, state):
        count = len(clients_with_data(experiment.task(context.task)))
        per_round = experiment.config_at(context.task).per_round
        rounds_by_size[count, min(per_round, count)] += rounds
        for clients in _noisy_exchanges(experiment, state, context):
            rounds_by_size[len(clients), len(clients)] += 1
    return [RoundGroup(*sample, rounds) for sample, rounds in rounds_by_size.items() if rounds]


def _task_ends(experiment: Experiment, state: RunState) -> Iterator[tuple[Context, int]]:
    """Yield the context at the end of each task so far, and its number of finished rounds."""
    for task in range(min(state.task + 1, experiment.task_count)):
        rounds = experiment.plan(replace(state, task=task)).rounds
        context = experiment.context(replace(state, task=task, round=rounds))
        yield context, rounds if task < state.task else state.round


def _noisy_exchanges(experiment: Experiment, state: RunState, context: Context) -> list[list[int]]:
    """Return the clients of each opening and task-end exchange whose uploads have noise."""
    if not experiment.config.privacy.task_end:
        return []
    exchanges = experiment.exchanges(replace(state, task=context.task))
    done = context.task < state.task or state.round >= context.rounds
    went_on = context.task < min(state.task, experiment.task_count - 1)
    ending = [e for e in exchanges.ending if (went_on if e.deferred else done)]
    finished = [*exchanges.opening, *ending]
    uploading = [e for e in finished if e.communicates and e.aggregate is not None]
    return [participants(experiment, exchange, context) for exchange in uploading]


def _secagg_guarantee(experiment: Experiment) -> str:
    privacy, sampled = experiment.config.privacy, experiment.config.per_round
    simulated = ""
    if experiment.privacy.simulated:
        simulated = "; all of it in a simulation, whose keys derive from the run's seed"
    late = " and not to use uploads that arrive after their round" if privacy.single_message else ""
    least = min_survivors(sampled, privacy.threshold)
    fewer = f" (fewer, but at least {MIN_CLIENTS}, if fewer have data of the task)"
    return (
        "secure aggregation: the server learned which clients took part, which declined, and sums "
        f"of uploads, each over at least {least} of {sampled} sampled clients"
        f"{fewer if least > MIN_CLIENTS else ''}; the server is assumed to follow "
        f"the protocol and to collude with fewer clients than the threshold{late}{simulated}"
    )


def _noise_guarantee(experiment: Experiment, values: PrivacySummary) -> str:
    privacy = experiment.config.privacy
    unit = "any change of" if privacy.mode == "local" else "leaving out"
    text = (
        f"({values['epsilon']:.4g}, {privacy.delta:g})-differential privacy for {unit} everything "
        "that one client sent (not for single examples), at most "
        f"{values['sums_of_one_client']} uploads, by Renyi accounting; noise of "
        f"{privacy.noise:g} times the clipping norm of each field ({privacy.clip:g} unless the "
        "method knows its bound), times the square root of the number of an upload's fields, was "
        f"added by {_noise_source(privacy)}; "
    )
    if values["epsilon_sampled"] is not None:
        text += (
            f"{values['epsilon_sampled']:.4g} for replacing a client by another, against observers "
            "who do not know who was sampled (uniform samples without replacement); "
        )
    return text + _not_covered(experiment)


def _noise_source(privacy: PrivacyConfig) -> str:
    if privacy.mode == "local":
        return "each client to its upload, so the guarantee holds against the server too"
    if privacy.secagg:
        return (
            "the clients, a part of it each, so the guarantee holds against the server too if as "
            "many clients as the threshold keep their part secret"
        )
    return (
        "the server to the sum, so the guarantee holds against observers of the models but not "
        "against the server"
    )


def _not_covered(experiment: Experiment) -> str:
    """Return a sentence about everything that the guarantee does not cover."""
    released = ["the number of uploads", "tests on held-out data"]
    if not experiment.config.privacy.task_end:
        released.insert(0, "uploads of exchanges other than training")
    text = f"not covered: {', '.join(released)}"
    if experiment.privacy.simulated:
        return f"{text}; noise drawn from the run's seed is for simulation only"
    return text
