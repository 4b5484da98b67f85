"""A node dies before or after each file that it writes for a request, and serves it again.

Its draws come from the operating system, so the second life would make another upload.
"""

from __future__ import annotations

import json
import os
from collections import Counter

import pytest
from in_process import InProcessTransport

from perdure.config import parse
from perdure.federation.server.engine import FlowerEngine
from perdure.runs.run import run
from perdure.training.settings import with_method_defaults

CONFIG = {
    "stream": {"kind": "permuted", "tasks": 1},
    "clients": {"count": 3},
    "model": {"kind": "mlp", "hidden": [4]},
    "train": {"rounds": 1, "max_steps": 1},
    "data": {"limit": 90},
    "engine": {"kind": "flower"},
    "device": "cpu",
    "runs": {"report": False},
}
SECURE = {"secagg": True}
VARIANTS = {
    "secret sketches in a secure sum": {"method": {"kind": "fot"}, "privacy": SECURE},
    "noise in a secure sum": {"privacy": {**SECURE, "clip": 1.0, "noise": 0.1}},
    "noise": {"privacy": {"clip": 1.0, "noise": 0.1, "mode": "local"}},
}
DYING = 2


class Death(BaseException):
    """The end of a process, which no handler of errors sees."""


class MortalTransport(InProcessTransport):
    """Lets one node die once, at a file that a train or exchange request makes it write."""

    def __init__(self, config, folder, monkeypatch):
        super().__init__(config, folder)
        self.patch, self.moment, self.died = monkeypatch, None, False

    def node(self, number):
        if number == DYING and self.log[-1][1] in ("train", "exchange") and not self.died:
            self._arm()
        return super().node(number)

    def _arm(self):
        kind, left, after = self.moment
        rename = os.replace

        def mortal(*args):
            nonlocal left
            if self.log[-1][:2] != (DYING, kind) or self.died:
                return rename(*args)
            left -= 1
            self.died = left < 0
            if after or not self.died:
                rename(*args)
            if self.died:
                raise Death

        self.patch.setattr("perdure.core.files.os.replace", mortal)

    def send_and_receive(self, headers, body, limit):
        replies = {}
        for number, header in headers.items():
            try:
                replies |= super().send_and_receive({number: header}, body, limit)
            except Death:
                self.nodes.clear()
                replies |= super().send_and_receive({number: header}, body, limit)
            finally:
                self.patch.undo()
        return replies


def entries(folder):
    lines = (folder / f"node-{DYING}" / "released.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def sums(folder, client):
    """Return in how many sums a node knows that its client took part."""
    files = (folder / f"node-{client}").rglob(f"client-{client}-task-0.json")
    return sum(len(json.loads(path.read_text())["records"]) for path in files)


def place(entry):
    return entry["kind"], entry["round"], entry["exchange"]


@pytest.mark.slow
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_node_that_dies_while_it_serves_is_not_lost(variant, after, tmp_path, monkeypatch):
    config = with_method_defaults(parse({**CONFIG, **VARIANTS[variant]}))
    kinds = ("train", "exchange") if "method" in VARIANTS[variant] else ("train",)
    deaths = Counter()
    for kind in kinds:
        died, number = True, 0
        while died:
            folder = tmp_path / f"{kind} {number}"
            transport = MortalTransport(config, folder, monkeypatch)
            transport.moment = kind, number, after
            values = run(config, engine=FlowerEngine(3, transport)).values
            assert values["failures"] == []
            assert sums(folder, DYING) == sums(folder, 0)
            logged = entries(folder)
            described = {place(entry) for entry in logged if "fields" in entry}
            assert {place(entry) for entry in logged if entry.get("repeated")} <= described
            died, number = transport.died, number + 1
            deaths[kind] += died
    assert all(deaths[kind] for kind in kinds)
