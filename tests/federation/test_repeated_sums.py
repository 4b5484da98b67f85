"""A server that dies while a secure sum is opened repeats it with the same clients."""

from __future__ import annotations

import pytest
from in_process import in_process_engine, no_secrets

from perdure.contract.uploads import FailedUpload
from perdure.core.errors import RunError
from perdure.runs.run import run

pytestmark = pytest.mark.slow

CONFIG = {
    "stream": {"kind": "split", "tasks": 2},
    "clients": {"count": 5},
    "model": {"kind": "mlp", "hidden": [8]},
    "train": {"rounds": 3, "batch_size": 64},
    "data": {"limit": 200},
    "engine": {"kind": "flower"},
    "privacy": {"secagg": True},
    "device": "cpu",
    "runs": {"report": False},
}
FOT = {"method": {"kind": "fot"}}


class Killed(Exception):
    pass


class Spoiler:
    """Lets clients be missing at a place of the run, and kills the server there."""

    def __init__(self, place, missing=(), die=None, after=1):
        self.place, self.missing, self.die, self.left = place, missing, die, after

    def __call__(self, node, request, reply):
        at = request.position
        if (at.task, at.round, at.exchange) != self.place:
            return reply
        if request.kind in ("train", "exchange") and node in self.missing:
            return FailedUpload(node, "no answer within 600 s")
        if request.kind == self.die:
            self.left -= 1
            if self.left == 0:
                raise Killed
        return reply


def start(config, folder, spoil=None, resume=False):
    engine, transport = in_process_engine(config, folder)
    transport.make_secret_source = no_secrets
    transport.spoil = spoil or transport.spoil
    return run(config, out=folder / "run", resume=resume, engine=engine).values


def same(values):
    keys = ("model_sha256", "matrix", "client_updates", "rounds")
    return {key: values[key] for key in keys}


def undisturbed(config, folder, place, missing):
    return start(config, folder / "alone", Spoiler(place, missing))


TRAINING, TASK_END = (0, 1, 0), (0, 3, 1)
FIRST_REVEALED, ALL_REVEALED, SHARES_REVEALED = 1, 4, 8
"""Replies to requests about a sum that four clients are left in: first masks, then shares."""


@pytest.mark.parametrize("after", [FIRST_REVEALED, ALL_REVEALED, SHARES_REVEALED])
@pytest.mark.parametrize("place", [TRAINING, TASK_END])
def test_a_client_that_is_back_stays_out_of_the_sum(place, after, tmp_path):
    config = CONFIG | (FOT if place == TASK_END else {})
    wanted = undisturbed(config, tmp_path, place, {2})
    with pytest.raises(Killed):
        start(config, tmp_path, Spoiler(place, {2}, "reveal", after))
    values = start(config, tmp_path, resume=True)
    assert same(values) == same(wanted)
    assert [failure["client"] for failure in values["failures"]] == [2]
    assert "dropped out" in values["failures"][0]["reason"]


def test_another_client_may_be_gone_until_shares_were_revealed(tmp_path):
    config = CONFIG | {"privacy": {"secagg": True, "threshold": 0.6}}
    with pytest.raises(Killed):
        start(config, tmp_path, Spoiler(TRAINING, {2}, "reveal", FIRST_REVEALED))
    values = start(config, tmp_path, Spoiler(TRAINING, {4}), resume=True)
    assert values["client_updates"] == 28  # of six rounds with five clients


KILLED_LATER = Spoiler((0, 2, 0), (), "train")
KILLED_IN_SUM = Spoiler(TRAINING, {2}, "reveal", SHARES_REVEALED)
SELDOM = CONFIG | {"runs": {"report": False, "checkpoint_every": 3}}


@pytest.mark.parametrize("spoil", [KILLED_LATER, KILLED_IN_SUM], ids=["one message", "dropout"])
def test_an_opened_sum_waits_for_its_clients(spoil, tmp_path):
    """Without one of them it would be a second sum, and the difference one client's upload."""
    wanted = undisturbed(SELDOM, tmp_path, TRAINING, spoil.missing)
    with pytest.raises(Killed):
        start(SELDOM, tmp_path, spoil)
    with pytest.raises(RunError, match=r"opened with clients \[4\] before"):
        start(SELDOM, tmp_path, Spoiler(TRAINING, {4}), resume=True)
    assert same(start(SELDOM, tmp_path, resume=True)) == same(wanted)


def test_rounds_since_the_last_checkpoint_are_repeated_with_the_same_clients(tmp_path):
    config = SELDOM
    wanted = undisturbed(config, tmp_path, (0, 0, 0), {2})

    def spoil(node, request, reply):
        missed = Spoiler((0, 0, 0), {2})(node, request, reply)
        return Spoiler((0, 2, 0), (), "train")(node, request, missed)

    with pytest.raises(Killed):
        start(config, tmp_path, spoil)
    assert same(start(config, tmp_path, resume=True)) == same(wanted)
