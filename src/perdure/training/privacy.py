"""What left the clients of a run so far, for the accounting of its privacy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from perdure.contract.context import Context
from perdure.privacy.accounting import RoundGroup
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


def origin_of_draws(experiment: Experiment) -> str:
    """Return a sentence about who can repeat the draws of a run: `draws` of result.json."""
    return SIMULATED_DRAWS if experiment.privacy.simulated else SECRET_DRAWS


def privacy_summary(experiment: Experiment, state: RunState) -> dict[str, Any] | None:
    """Return the section `privacy` of result.json for everything that was trained so far."""
    return experiment.privacy.summary(Releases(experiment, state))


def privacy_spent(experiment: Experiment, state: RunState) -> dict[str, Any]:
    """Return epsilon and delta so far, or {} if there is no noise."""
    return experiment.privacy.spent(Releases(experiment, state))


@dataclass(frozen=True)
class Releases:
    """The uploads of a run so far in which noise is accounted."""

    experiment: Experiment
    """The objects of the run."""
    state: RunState
    """How far it is."""

    @cached_property
    def most_uploads(self) -> int:
        """The number of noisy uploads of the client that sent the most."""
        experiment, state = self.experiment, self.state
        repeated = {(at["task"], at["round"]): at for at in state.counters.repeated}
        uploads: Counter[int] = Counter()
        for context, rounds in self._task_ends():
            task, config = experiment.task(context.task), experiment.config_at(context.task)
            for number in range(rounds):
                again = repeated.get((context.task, number), {})
                clients = again.get("clients")  # a client uploads once, in whichever attempt
                if clients is None:
                    at = replace(context, round=number, attempt=again.get("attempt", 0))
                    clients = sample_clients(config, task, at)
                uploads.update(clients)
            for clients in self._noisy_exchanges(context):
                uploads.update(clients)
        drawn_again = experiment.privacy.repeated_draws
        if drawn_again is not None:  # by the server after a restart; else nodes do it
            return max(uploads.values(), default=0) + drawn_again
        extra = experiment.engine.choice().get("releases", {})
        uploads.update({int(client): count for client, count in extra.items()})
        return max(uploads.values(), default=0)

    @cached_property
    def groups(self) -> list[RoundGroup]:
        """The rounds with noise, grouped by the numbers of clients and sampled clients."""
        experiment = self.experiment
        rounds_by_size: Counter[tuple[int, int]] = Counter()
        for context, rounds in self._task_ends():
            count = len(clients_with_data(experiment.task(context.task)))
            per_round = experiment.config_at(context.task).per_round
            rounds_by_size[count, min(per_round, count)] += rounds
            for clients in self._noisy_exchanges(context):
                rounds_by_size[len(clients), len(clients)] += 1
        return [RoundGroup(*sample, rounds) for sample, rounds in rounds_by_size.items() if rounds]

    def _task_ends(self) -> Iterator[tuple[Context, int]]:
        """Yield the context at the end of each task so far, and its number of finished rounds."""
        experiment, state = self.experiment, self.state
        for task in range(min(state.task + 1, experiment.task_count)):
            rounds = experiment.plan(replace(state, task=task)).rounds
            context = experiment.context(replace(state, task=task, round=rounds))
            yield context, rounds if task < state.task else state.round

    def _noisy_exchanges(self, context: Context) -> list[list[int]]:
        """Return the clients of each opening and task-end exchange whose uploads have noise."""
        experiment, state = self.experiment, self.state
        if not experiment.config.privacy.task_end:
            return []
        exchanges = experiment.exchanges(replace(state, task=context.task))
        done = context.task < state.task or state.round >= context.rounds
        went_on = context.task < min(state.task, experiment.task_count - 1)
        ending = [e for e in exchanges.ending if (went_on if e.deferred else done)]
        finished = [*exchanges.opening, *ending]
        uploading = [e for e in finished if e.communicates and e.aggregate is not None]
        return [participants(experiment, exchange, context) for exchange in uploading]
