"""Measure how much the serial and vector engines differ after one round of two steps, per seed.

    python tools/engine_gap.py [--model resnet20] [--partition dirichlet] [--seeds 12] [--double]

In double precision the engines agree up to rounding. In float32, a deep network with batch norm
amplifies the last bits of units close to zero, for some seeds.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

from torch import Tensor

from perdure.config import Config, parse
from perdure.data.examples import Examples
from perdure.runs.trial import dry_run
from perdure.training.experiment import Experiment
from perdure.training.state import RunState


def config(model: str, partition: str, seed: int) -> Config:
    """Return the config of a small experiment with batch norm."""
    values: dict[str, Any] = {
        "seed": seed,
        "data": {"limit": 200},
        "stream": {"tasks": 1},
        "clients": {"count": 4, "partition": {"kind": partition}},
        "model": {"kind": model, "norm": "batch", "width": 8},
        "train": {"batch_size": 16, "lr": 0.05},
    }
    return parse(values)


def in_double() -> None:
    """Use double precision for all inputs and models of this process."""
    gather, initial_state = Examples.gather, Experiment.initial_state

    def double_rows(self: Examples, rows: Tensor) -> Tensor:
        return gather(self, rows).double()

    def double_model(self: Experiment) -> RunState:
        state = initial_state(self)
        parts = (state.server.params, state.server.buffers)
        params, buffers = ({n: v.double() for n, v in part.items()} for part in parts)
        state.server = replace(state.server, params=params, buffers=buffers)
        return state

    Examples.gather = double_rows  # type: ignore[method-assign]
    Experiment.initial_state = double_model  # type: ignore[method-assign]


def main() -> None:
    """Measure the differences, and print them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="resnet20")
    parser.add_argument("--partition", default="dirichlet")
    parser.add_argument("--seeds", type=int, default=12)
    parser.add_argument("--double", action="store_true")
    given = parser.parse_args()
    if given.double:
        in_double()
    seeds = range(given.seeds)
    gaps = [dry_run(config(given.model, given.partition, seed)).difference for seed in seeds]
    print(" ".join(f"{gap:.0e}" for gap in sorted(gaps)))
    print(f"{sum(gap > 1e-5 for gap in gaps)} of {len(gaps)} above 1e-5, largest {max(gaps):.1e}")


if __name__ == "__main__":
    main()
