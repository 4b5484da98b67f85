"""Participation in the rounds of a federation: the quorum, and the counts for the report."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from perdure.config import FederationConfig
from perdure.contract.context import Context
from perdure.contract.upload_collector import UploadCollector
from perdure.core.errors import RunError
from perdure.training.experiment import Experiment
from perdure.training.state import RunState


def missing_nodes(
    federation: FederationConfig | None, asked: Collection[int], failed: Collection[int]
) -> list[int]:
    """Return the nodes that are missing for the quorum; empty if it is reached.

    Args:
        federation: The `federation` section. If None, one node is enough.
        asked: The nodes that were asked.
        failed: Those without a valid reply; they count as asked.
    """
    everyone, missing = {*asked, *failed}, sorted(set(failed))
    named = federation.named_nodes if federation is not None else []
    if named:
        return [node for node in missing if node in named]
    quorum = federation.quorum if federation is not None else None
    needed = quorum if isinstance(quorum, int) else 1
    return missing if len(everyone) - len(missing) < min(needed, len(everyone)) else []


def below_quorum(where: str, missing: Collection[int], reasons: Mapping[int, str]) -> RunError:
    """Return the error of a run that stops because nodes are missing, which it names.

    Args:
        where: What they are missing in, such as "task 1 round 2".
        missing: The nodes that are missing.
        reasons: Why, by node.
    """
    named = "; ".join(f"node-{n}: {reasons[n].removeprefix(f'node-{n}: ')}" for n in missing)
    return RunError(
        f"{where}: nodes are missing ({named}), and fewer than federation.quorum are left; the run "
        "stops at its last checkpoint, and the server resumes it when it is started again"
    )


def check_quorum(
    experiment: Experiment, context: Context, asked: Collection[int], collector: UploadCollector
) -> None:
    """Stop a federation whose nodes hold the data if too few of them took part in an exchange.

    Args:
        experiment: The experiment.
        context: The context of the exchange.
        asked: The clients that were asked, each of which is one node.
        collector: Their uploads.

    Raises:
        RunError: Nodes are missing for the quorum, or nobody was asked to train.
    """
    federation = experiment.config.federation
    if federation is None:
        return
    where = f"task {context.task + 1} round {context.round + 1}"
    reasons = _reasons(collector)
    missing = missing_nodes(federation, asked, reasons)
    if missing:
        raise below_quorum(where, missing, reasons)
    if context.exchange == 0 and not collector.collected.clients:
        raise RunError(f"{where}: no node took part; the run stops at its last checkpoint")


def count_participation(
    experiment: Experiment, state: RunState, sampled: list[int], collector: UploadCollector
) -> None:
    """Count for each client of a federation the rounds in which it was sampled, took part, failed.

    Args:
        experiment: The experiment. Nothing is counted in a simulation.
        state: The state of the run, whose counters are updated.
        sampled: The clients that were sampled in the round.
        collector: Their uploads.
    """
    if experiment.privacy.simulated:
        return
    counted, failed = collector.collected.clients, list(_reasons(collector))
    groups = {"sampled": sampled, "counted": counted, "failed": failed}
    for name, clients in groups.items():
        for client in clients:
            counts = state.counters.participation.setdefault(str(client), dict.fromkeys(groups, 0))
            counts[name] += 1


def _reasons(collector: UploadCollector) -> dict[int, str]:
    """Return why clients do not count. A client may fail in one attempt and count in the next."""
    reasons = {client: "its update is not finite" for client in collector.rejected}
    reasons |= {failure.client: failure.reason for failure in collector.failures}
    counted = set(collector.collected.clients)
    return {client: reason for client, reason in reasons.items() if client not in counted}
