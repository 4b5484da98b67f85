"""A server that follows the protocol and knows the run's seed tries to read examples from sketches.

The server opens nothing but secure sums: of FOT's sketches that is S = R_1 G_1 + ... + R_C G_C. If
it can repeat the draws of G_1, ..., G_C, that is a linear system. Tried for every purpose, round
and client for which anything could be drawn:

    columns   R_i are the client's examples: solves for all examples of all clients
    roots     R_i are symmetric roots: solves for every client's second moment, and its one example
              if it has one
    noise     repeats the noise of appendix H, and subtracts it from the sum
"""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch
from in_process import in_process_engine, no_secrets

from perdure.algebra.sketches import GramAccumulator
from perdure.core.rng import Rng
from perdure.federation.node.uploads import SecretDraws
from perdure.methods.fot import FOT
from perdure.runs.run import run

SEED, CLIENTS, HIDDEN, LAYER = 7, 4, 4, "fc1.weight"
CONFIG = {
    "seed": SEED,
    "stream": {"kind": "permuted", "tasks": 1},
    "clients": {"count": CLIENTS},
    "model": {"kind": "mlp", "hidden": [HIDDEN]},
    "train": {"rounds": 1, "max_steps": 1},
    "data": {"limit": 120},
    "method": {"kind": "fot", "sketch_ratio": 4.5},
    "privacy": {"secagg": True, "precision": 40},
    "engine": {"kind": "flower"},
    "device": "cpu",
}
PURPOSES = ("gpse", "sketch", "bases", "noise", "secret")


def opened_sum(tmp_path, monkeypatch, secrets, **method):
    """Return the sum of sketches that the server opens, and each client's examples as columns."""
    seen, extend = {}, FOT.extend_subspaces

    def curious(self, server, uploads, context):
        seen.update(uploads.total("sketch"))
        return extend(self, server, uploads, context)

    monkeypatch.setattr(FOT, "extend_subspaces", curious)
    config = {**CONFIG, "method": {**CONFIG["method"], **method}}
    engine, transport = in_process_engine(config, tmp_path)
    transport.make_secret_source = secrets
    run(config, engine=engine)
    return seen[LAYER].double().numpy(), [rows_of(transport, c) for c in range(CLIENTS)]


def rows_of(transport, client):
    task = transport.nodes[client].experiment.task(0)
    rows = task.partition.index(client)
    return task.train.gather(rows).flatten(1).T.double().numpy()


SYMMETRIC_ROOT = GramAccumulator.root


def raw_columns(accumulator):
    """The root of perdure 0.3: of few examples, the examples themselves."""
    if accumulator.gram is not None:
        return SYMMETRIC_ROOT(accumulator)
    return torch.cat(accumulator.blocks, dim=1)


def derived_generators():
    """Yield a generator per client, for every purpose and round, from the run's seed."""
    for purpose, number in product(PURPOSES, range(3)):
        yield [Rng(SEED).torch_generator(purpose, 0, number, c) for c in range(CLIENTS)]


def solve(total, sizes):
    """Yield the solutions [R_1 ... R_C] of the linear system, one per guess of all G_i."""
    for generators in derived_generators():
        drawn = [
            torch.randn(n, total.shape[1], generator=g)
            for n, g in zip(sizes, generators, strict=True)
        ]
        mixing = torch.cat(drawn).double().numpy()
        yield np.linalg.lstsq(mixing.T, total.T, rcond=None)[0].T


def recovered(found, wanted):
    """Return the fraction of columns that were found to four digits."""
    return np.mean(np.abs(found - wanted).max(0) < 1e-4 * np.abs(wanted).max())


CASES = pytest.mark.parametrize(
    ("source", "is_open"), [(no_secrets, True), (SecretDraws, False)], ids=["derived", "secret"]
)
"""The attack is real: it succeeds where draws derive from the seed, as in a simulation."""


@CASES
def test_solving_the_sum_for_all_examples(source, is_open, tmp_path, monkeypatch):
    monkeypatch.setattr(GramAccumulator, "root", raw_columns)
    total, examples = opened_sum(tmp_path, monkeypatch, source)
    wanted, sizes = np.concatenate(examples, 1), [rows.shape[1] for rows in examples]
    found = max(recovered(x, wanted) for x in solve(total, sizes))
    assert found == (1.0 if is_open else 0.0)


@CASES
def test_examples_are_not_in_the_sum_even_where_draws_derive_from_the_seed(
    source, is_open, tmp_path, monkeypatch
):
    """The sketch is of the symmetric root: the same system has no example as a solution."""
    total, examples = opened_sum(tmp_path, monkeypatch, source)
    wanted, sizes = np.concatenate(examples, 1), [rows.shape[1] for rows in examples]
    assert max(recovered(x, wanted) for x in solve(total, sizes)) == 0.0


@CASES
def test_solving_the_sum_for_second_moments(source, is_open, tmp_path, monkeypatch):
    """The sum itself tells the mean second moment, so what counts is how clients differ from it."""
    total, examples = opened_sum(tmp_path, monkeypatch, source)
    wanted = differences([rows @ rows.T for rows in examples])
    best = 0.0
    for solution in solve(total, [len(total)] * CLIENTS):
        roots = np.split(solution, CLIENTS, axis=1)
        found = differences([root @ root.T for root in roots])
        best = max(best, *(np.corrcoef(f, w)[0, 1] for f, w in zip(found, wanted, strict=True)))
    assert best > 0.9999 if is_open else best < 0.5


def differences(moments):
    return [(moment - sum(moments) / CLIENTS).ravel() for moment in moments]


@CASES
def test_subtracting_the_noise_of_appendix_h(source, is_open, tmp_path, monkeypatch):
    noise = {"sketch_noise": "standard", "epsilon": 0.9, "clip": 1.0, "sketch_ratio": 1.0}
    total, _ = opened_sum(tmp_path, monkeypatch, source, **noise)
    sigma = FOT(**noise).noise.sigma(CLIENTS, 1.0)
    rest = min(np.linalg.norm(total - sigma * draws) for draws in repeated_noise(total.shape))
    assert rest < CLIENTS * 1.01 if is_open else rest > np.linalg.norm(total)


def repeated_noise(shape, hidden=HIDDEN):
    """Yield the sum of all clients' noise: in each generator it follows the sketches' matrices."""
    for generators in derived_generators():
        for generator in generators:
            for size in (shape[0], hidden):
                torch.randn(size, size, generator=generator)
        drawn = [torch.randn(shape, generator=g) for g in generators]
        yield sum(drawn).double().numpy()
