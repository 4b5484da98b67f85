"""Seconds of a text encoder's step without padding, relative to the same step with padding.

    python -m benchmarks padding --out padding.json

An encoder of MiniLM's size, random weights that are frozen, prefixes in all blocks, 16 texts of 5
to 16 tokens in rows of 16. `query` is the pass without a gradient. The padded contender is a pass
that records layer inputs, which keeps its padding.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.turns import median_ratio, timed_turns
from perdure.models.ops import ForwardPass
from perdure.models.transformer import Encoder, random_params

ROWS, LENGTH, PREFIX = 16, 16, 5
MINILM = Encoder(width=384, depth=6, heads=12, hidden=1536, pre_norm=False)
BOUND = 0.85  # about two thirds of the tokens are real


class Work:
    """A batch of texts and an encoder."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        layers = tuple(layer for block in MINILM.blocks for layer in block)
        self.weights = random_params(MINILM.shapes, layers, generator)
        self.tokens = torch.randn(ROWS, LENGTH, MINILM.width, generator=generator)
        lengths = torch.linspace(5, LENGTH, ROWS).round()
        self.padding = torch.arange(LENGTH) >= lengths.unsqueeze(1)
        shape = (ROWS, PREFIX, 2 * MINILM.width)
        self.prefixes = {n: torch.randn(shape, generator=generator) for n in range(MINILM.depth)}

    def query(self, packed: bool) -> Tensor:
        """One pass without prompts."""
        with torch.no_grad():
            return self._encode({}, packed)

    def step(self, packed: bool) -> tuple[Tensor, ...]:
        """One pass with prefixes, and their gradients."""
        leaves = {n: prefix.clone().requires_grad_() for n, prefix in self.prefixes.items()}
        return torch.autograd.grad(self._encode(leaves, packed).sum(), list(leaves.values()))

    def _encode(self, prefixes: dict[int, Tensor], packed: bool) -> Tensor:
        fwd = ForwardPass() if packed else ForwardPass(layer_inputs={})
        return MINILM(self.weights, self.tokens, fwd, prefixes, self.padding)


def main(repeats: int = 30) -> dict[str, Any]:
    """Both ratios."""
    training, ratios = Work(), {}
    for name, function in {"query": training.query, "step": training.step}.items():
        seconds = timed_turns(
            {"packed": partial(function, True), "padded": partial(function, False)}, repeats
        )
        ratios[name] = round(median_ratio(seconds["packed"], seconds["padded"]), 3)
    return {
        "benchmark": "padding",
        "statistic": f"median over {repeats} turns of the ratio within a turn",
        "real_tokens": round(float((~training.padding).float().mean()), 3),
        "ratios": ratios,
        "bound": BOUND,
        "met": {name: ratio <= BOUND for name, ratio in ratios.items()},
    }
