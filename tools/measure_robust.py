"""Measure the rules of train.aggregation with hostile clients, and print the table.

    python -m tools.measure_robust [METHOD ...] [--jobs N] [--table]

20 clients learn three tasks of permuted digits, 0, 2 or 6 of them hostile: they work as the others
do, and multiply what they send by a factor: their updates, or also what they send at a task's end.
What is measured goes to docs/measured/robust.json, beside what the same code measured before;
`--table` prints the table of the figures that are there.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from itertools import product
from typing import Any

import torch

import perdure
from perdure.config import parse
from perdure.contract.context import Client
from perdure.contract.exchanges import Exchange
from perdure.contract.uploads import ClientResult, Field, StackedUploads
from perdure.training.engines import make_engine
from perdure.training.engines.engine import Engine, ExchangeResult
from perdure.training.local_training import LocalTraining, SaveClient
from tools.results import MEASURED, kept_results, write_results

FILE = MEASURED / "robust.json"
CLIENTS, SEEDS = 20, (0, 1, 2)
METHODS = ("fedavg", "fot", "fot, task end")
"""Method, and whether hostile clients change what they send at a task's end, too."""
RULES: dict[str, Any] = {
    "mean": "mean",
    "median": "median",
    "trimmed_mean 0.3": {"kind": "trimmed_mean", "fraction": 0.3},
    "norm_bound": "norm_bound",
}
ATTACKS = {"sign flip": -1.0, "scaling x10": 10.0, "sign flip x10": -10.0}
"""Factor on everything that a hostile client sends."""
HOSTILE = (2, 6)
CONFIG: dict[str, Any] = {
    "stream": {"kind": "permuted", "tasks": 3},
    "clients": {"count": CLIENTS},
    "model": {"kind": "mlp", "hidden": [64]},
    "train": {"rounds": 15, "local_epochs": 2, "batch_size": 16, "lr": 0.1},
    "device": "cpu",
}


class HostileEngine:
    """An engine in which some clients multiply what they send."""

    def __init__(
        self, engine: Engine, hostile: Iterable[int], factor: float, task_end: bool = False
    ) -> None:
        """Wrap an engine of simulated clients.

        Args:
            engine: The engine.
            hostile: Indices of the hostile clients.
            factor: Their factor.
            task_end: Whether they use it in exchanges other than training, too.

        """
        self._engine, self._hostile = engine, frozenset(hostile)
        self._factor, self._task_end = factor, task_end

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def train(
        self, training: LocalTraining, clients: list[Client], keep: SaveClient
    ) -> Iterator[StackedUploads]:
        """Train all clients, and change the uploads of the hostile ones."""
        for uploads in self._engine.train(training, clients, keep):
            assert isinstance(uploads, StackedUploads)
            factors = torch.tensor([self._factor_of(client) for client in uploads.clients])
            fields = {name: _multiplied(field, factors) for name, field in uploads.fields.items()}
            yield replace(uploads, fields=fields)

    def exchange(
        self, exchange: Exchange, per_client_fields: tuple[str, ...], clients: Iterable[Client]
    ) -> Iterator[tuple[Client, ExchangeResult]]:
        """Run an exchange, and change what hostile clients send."""
        for client, result in self._engine.exchange(exchange, per_client_fields, clients):
            assert isinstance(result, ClientResult)
            factor = torch.tensor(self._factor_of(client.id) if self._task_end else 1.0)
            fields = {name: _multiplied(field, factor) for name, field in result.fields.items()}
            yield client, replace(result, fields=fields)

    def _factor_of(self, client: int) -> float:
        return self._factor if client in self._hostile else 1.0


def _multiplied(field: Field, factors: torch.Tensor) -> Field:
    """Multiply the tensors of a field by one factor, or by one per client."""
    shaped = {
        name: tensor * factors.reshape(-1, *[1] * (tensor.dim() - 1)).to(tensor)
        if factors.dim()
        else tensor * factors.to(tensor)
        for name, tensor in field.value.items()
    }
    return replace(field, value=shaped)


def hostile_run(
    config: dict[str, Any], hostile: Iterable[int], factor: float, task_end: bool = False
) -> dict[str, Any]:
    """Return the result of a run with hostile clients; arguments as of `HostileEngine`."""
    engine: Any = HostileEngine(make_engine(parse(config)), hostile, factor, task_end)
    return perdure.run(config, engine=engine).values


def accuracy(method: str, rule: str, attack: str | None, hostile: int, seed: int) -> float | None:
    """Return the accuracy of one run in points, or None if its model did not stay finite."""
    torch.set_num_threads(1)
    train = {**CONFIG["train"], "aggregation": RULES[rule]}
    kind, _, task_end = method.partition(", ")
    config = {**CONFIG, "train": train, "method": {"kind": kind}, "seed": seed}
    factor = 1.0 if attack is None else ATTACKS[attack]
    try:
        values = hostile_run(config, range(hostile), factor, bool(task_end))
    except perdure.RunError:
        return None
    return round(100 * values["metrics"]["task_agnostic"]["ACC"], 2)


def cases(methods: Iterable[str]) -> Iterator[tuple[str, str, str | None, int]]:
    """Yield method, rule, attack and number of hostile clients."""
    for method, rule in product(methods, RULES):
        yield method, rule, None, 0
        for hostile, attack in product(HOSTILE, ATTACKS):
            yield method, rule, attack, hostile


def measure(methods: Iterable[str], jobs: int) -> dict[str, dict[str, float | None]]:
    """Return the accuracies by case and seed."""
    every = [(*case, seed) for case in cases(methods) for seed in SEEDS]
    with ProcessPoolExecutor(jobs) as pool:
        found = list(pool.map(accuracy, *zip(*every, strict=True)))
    runs: dict[str, dict[str, float | None]] = {}
    for (*case, seed), value in zip(every, found, strict=True):
        runs.setdefault(label(*case), {})[str(seed)] = value
    return runs


def label(method: str, rule: str, attack: str | None, hostile: int) -> str:
    """Return the name of a case."""
    return f"{method} / {rule} / {attack or 'none'} / {hostile}"


def table(runs: dict[str, dict[str, float | None]]) -> str:
    """Return the Markdown table: mean accuracy over the seeds, with the standard deviation."""
    columns: list[tuple[str | None, int]] = [(None, 0), *product(ATTACKS, HOSTILE)]
    heads = [
        f"{attack}, {hostile} of {CLIENTS}" if attack else "none" for attack, hostile in columns
    ]
    lines = [["method", "aggregation", *heads], ["---"] * (2 + len(heads))]
    measured = [method for method in METHODS if label(method, "mean", None, 0) in runs]
    for method, rule in product(measured, RULES):
        cells = [_cell(runs[label(method, rule, *column)].values()) for column in columns]
        lines.append([method, rule, *cells])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(values: Iterable[float | None]) -> str:
    known = [value for value in values if value is not None]
    if not known or len(known) < len(SEEDS):
        return f"stopped ({len(SEEDS) - len(known)} of {len(SEEDS)})"
    return f"{statistics.mean(known):.1f} ± {statistics.stdev(known):.1f}"


def main() -> None:
    """Measure, unless the table alone is asked for, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("methods", nargs="*", metavar="METHOD", help=", ".join(METHODS))
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--table", action="store_true")
    given = parser.parse_args()
    if not given.table:
        runs = kept_results(FILE).get("runs", {}) | measure(given.methods or METHODS, given.jobs)
        write_results(FILE, {"config": CONFIG, "runs": runs})
    print(table(json.loads(FILE.read_text(encoding="utf-8"))["runs"]))


if __name__ == "__main__":
    main()
