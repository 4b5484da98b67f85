"""The server's loop dies at the end of a run, or begins beside the loop of a dead server."""

from __future__ import annotations

import tomllib

import pytest
from in_process import RUN, in_process_engine
from own_data import CONFIG, write_nodes

from perdure.config import parse
from perdure.core.errors import UserError
from perdure.federation import apps
from perdure.federation.admin.folders import ServerFolder
from perdure.federation.admin.submission import create_submission, unfinished_submissions
from perdure.runs import run as runner
from perdure.training.settings import with_method_defaults

CONFIG = {**CONFIG, "method": {"kind": "er"}}


class Killed(Exception):
    pass


@pytest.fixture
def submitted(tmp_path):
    """A submission, and the config of its app."""
    config = with_method_defaults(parse(CONFIG))
    submission = create_submission(ServerFolder(tmp_path, 1, 3), config, tmp_path / "out", None)
    text = (submission.path / "perdure-run" / "pyproject.toml").read_text()
    return submission, tomllib.loads(text)["tool"]["flwr"]["app"]["config"]


@pytest.fixture
def data(tmp_path):
    return write_nodes(tmp_path / "data")


def test_nodes_are_told_the_end_by_the_next_server(tmp_path, data, submitted):
    submission, values = submitted
    _, transport = in_process_engine(CONFIG, tmp_path, data)

    def kill(node, request, reply):
        if request.kind == "end" and node == 1:
            raise Killed
        return reply

    transport.spoil = kill
    with pytest.raises(Killed):
        apps.run_submission(values, lambda timeout: transport)
    assert [each.path for each in unfinished_submissions(ServerFolder(tmp_path, 1, 3))] == [
        submission.path
    ]
    _, transport = in_process_engine(CONFIG, tmp_path, data)
    apps.run_submission(values, lambda timeout: transport)
    assert submission.outcome["state"] == "done"
    assert {kind for _, kind, _ in transport.log} == {"end"}
    for node in range(3):
        folder = tmp_path / f"node-{node}" / "state" / RUN
        assert (folder / "ended").is_file()
        assert not list(folder.glob("client-*"))


def test_a_run_that_another_loop_begins_meanwhile_is_not_refused(
    tmp_path, data, submitted, monkeypatch
):
    submission, values = submitted
    engine, transport = in_process_engine(CONFIG, tmp_path, data)
    build = runner.build_experiment

    def begun_meanwhile(*args, **kwargs):
        monkeypatch.setattr(runner, "build_experiment", build)
        runner.run(CONFIG, out=tmp_path / "out", engine=engine)
        return build(*args, **kwargs)

    monkeypatch.setattr(runner, "build_experiment", begun_meanwhile)
    apps.run_submission(values, lambda timeout: transport)
    assert submission.outcome["state"] == "done"


def test_a_folder_of_another_run_is_refused(tmp_path, data, submitted):
    submission, values = submitted
    engine, transport = in_process_engine({**CONFIG, "seed": 1}, tmp_path / "other", data)
    runner.run({**CONFIG, "seed": 1}, out=tmp_path / "out", engine=engine)
    with pytest.raises(UserError, match="seed: must be 1 as in"):
        apps.run_submission(values, lambda timeout: transport)
    assert submission.outcome["state"] == "refused"
