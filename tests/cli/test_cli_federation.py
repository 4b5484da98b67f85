"""perdure federation: its commands stand together, and a mistake in a file is one sentence."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from shells import Shell, one_sentence

COMMANDS = ("server", "node", "submit")


def test_the_commands_stand_together(shell: Shell) -> None:
    words = set(shell("federation", "--help").out.split())
    assert {"init", *COMMANDS} <= words


@pytest.mark.parametrize("name", COMMANDS)
def test_a_mistake_is_one_sentence(shell: Shell, name: str) -> None:
    words = ["split-digits", "--server", "nowhere"] if name == "submit" else ["nowhere"]
    one_sentence(shell("federation", name, *words), "nowhere")


def test_start_scripts_and_readme_name_the_commands(shell: Shell) -> None:
    pytest.importorskip("flwr")
    assert shell("federation", "init", "home", "--nodes", "1").code == 0
    server, node = (Path("home", name, "start.sh").read_text() for name in ("server", "node-0"))
    assert "exec perdure federation server ." in server
    assert "exec perdure federation node . --data" in node
    page = Path("home/README.md").read_text()
    assert "perdure federation submit CONFIG" in page


def test_a_node_shows_what_left_it(shell: Shell) -> None:
    pytest.importorskip("flwr")
    assert shell("federation", "init", "home", "--nodes", "1").code == 0
    empty = shell("federation", "node", "home/node-0", "--show")
    assert (empty.code, empty.out.strip()) == (0, "nothing has left this node")
    entry = {"run": "ab" * 16, "kind": "train", "task": 0, "round": 0, "masked": True, "bytes": 900}
    fields = {"update": {"type": "Sum", "shapes": {"w": [2, 3]}, "bytes": 24}}
    lines = [{**entry, "fields": fields}, {**entry, "repeated": True}]
    log = Path("home/node-0/released.jsonl")
    log.write_text("".join(json.dumps(line) + "\n" for line in lines) + "half a li")
    (row,) = json.loads(shell("federation", "node", "home/node-0", "--json").out)
    assert row == {
        "run": "ab" * 16, "task": 0, "kind": "train", "replies": 2, "repeated": 1, "bytes": 1800,
        "fields": "update (24 bytes)", "protection": "masked",
    }  # fmt: skip
    shown = shell("federation", "node", "home/node-0", "--show").out
    assert "abababab" in shown


def test_clean_deletes_what_ended_runs_left(shell: Shell) -> None:
    pytest.importorskip("flwr")
    assert shell("federation", "init", "home", "--nodes", "1").code == 0
    state, ended, live = Path("home/node-0/state"), "ab" * 16, "cd" * 16
    for name in (ended, live, "notes of the owner"):
        rows = state / name / "client-0"
        rows.mkdir(parents=True)
        (rows / "memory.safetensors").write_bytes(bytes(10))
    (state / ended / "ended").touch()
    for link in (state / ("ef" * 16), state / ended / "link"):
        link.symlink_to(Path("home/node-0/state/notes of the owner").resolve())
    one_sentence(shell("federation", "clean", "home/node-0", "--run", "none"), "--run")
    one_sentence(shell("federation", "clean", "home/node-0", "--run", live), "has ended")
    done = shell("federation", "clean", "home/node-0")
    assert f"run {ended}: 10 bytes deleted" in done.out
    assert sorted(path.name for path in (state / ended).iterdir()) == [".lock", "ended"]
    assert (state / live / "client-0" / "memory.safetensors").is_file()
    assert f"run {live}: 10 bytes" in shell("federation", "clean", "home/node-0", "--all").out
    assert "nothing to delete" in shell("federation", "clean", "home/node-0").out
    (kept,) = (state / "notes of the owner").iterdir()
    assert [path.name for path in kept.iterdir()] == ["memory.safetensors"]


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ("min_rows: 8", "min_rows: many", "policy.min_rows: must be an integer, got 'many'"),
        ("code: []", "code: sha", "policy.code: must be any, or a list, got 'sha'"),
        ("methods: null", "methods: fot", "policy.methods: must be a list, got 'fot'"),
        ("policy:", "policies:", "policies: unknown key"),
        ("number: 0", "number: x", "number: must be an integer, got 'x'"),
        ("localhost:9410", "5", "server: must be a string, got 5"),
        ("localhost:9410", "localhost", "server: must be the server's address as host:port"),
    ],
)
def test_what_is_wrong_in_node_yaml_is_named(
    shell: Shell, old: str, new: str, sentence: str
) -> None:
    pytest.importorskip("flwr")
    assert shell("federation", "init", "home", "--nodes", "1").code == 0
    path = Path("home/node-0/node.yaml")
    path.write_text(path.read_text().replace(old, new, 1))
    one_sentence(shell("federation", "node", "home/node-0", "--show"), sentence)


def test_a_policy_that_is_no_mapping_is_not_the_default_policy(shell: Shell) -> None:
    pytest.importorskip("flwr")
    assert shell("federation", "init", "home", "--nodes", "1").code == 0
    path = Path("home/node-0/node.yaml")
    path.write_text("number: 0\nserver: localhost:9410\npolicy: []\n")
    shown = shell("federation", "node", "home/node-0", "--show")
    one_sentence(shown, "policy: must be a mapping, got []")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("port: x\nnodes: 3", "port: must be an integer, got 'x'"),
        ("port: 70000\nnodes: 3", "port: must be at most 65535, got 70000"),
        ("port: 9410\nnodes: many", "nodes: must be an integer, got 'many'"),
        ("port: 9410", "nodes: must be given"),
    ],
)
def test_what_is_wrong_in_server_yaml_is_named(shell: Shell, text: str, sentence: str) -> None:
    pytest.importorskip("flwr")
    assert shell("federation", "init", "home", "--nodes", "1").code == 0
    Path("home/server/server.yaml").write_text(text)
    one_sentence(shell("federation", "renew", "home/server"), sentence)
    one_sentence(shell("federation", "submit", "split-digits", "--server", "home/server"), sentence)
