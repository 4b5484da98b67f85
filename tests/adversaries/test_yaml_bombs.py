"""YAML files of strangers try to fill the memory or to break the reader.

Tried: aliases of aliases that stand for a billion values, as lists and as merged mappings; an alias
of the list that contains it; brackets and blocks nested ten thousand deep; a text of two million
characters; numbers of ten thousand digits, bytes that are not text. In a config, in a run's
config.yaml, in node.yaml, server.yaml and tasks.yaml, and as the value of an option.
"""

from __future__ import annotations

import pytest

from perdure.cli.main import main
from perdure.config import parse
from perdure.core.documents import yaml_value
from perdure.core.errors import UserError
from perdure.federation.admin.folders import NodeFolder, ServerFolder
from perdure.federation.node.data import find_source

LISTS = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 10)
)
MAPPINGS = "a0: &a0 {k: x}\n" + "".join(
    f"a{n}: &a{n} {{p: *a{n - 1}, q: *a{n - 1}, r: *a{n - 1}, s: *a{n - 1}}}\n"
    for n in range(1, 12)
)
MERGED = MAPPINGS + "train: {<<: *a11}\n"
BOMBS = {
    "lists": LISTS,
    "mappings": MAPPINGS,
    "merged": MERGED,
    "itself": "train: &a [*a]\n",
    "itself_in_mapping": "train: &a {b: {c: *a}}\n",
    "brackets": "train: " + "[" * 10_000 + "]" * 10_000,
    "open_brackets": "train: " + "[" * 10_000,
    "braces": "train: " + "{a: " * 5_000,
    "blocks": "train:\n" + "".join(f"{' ' * n}a:\n" for n in range(1, 200)),
    "dashes": "- " * 3_000 + "x",
    "long": "seed: 0 #" + "x" * 2_000_000,
    "digits": "seed: " + "9" * 10_000,
    "not_text": b"seed: \xff\xfe\x00",
    "tag": "seed: !!python/object/apply:os.system [id]",
    "unhashable": "? {a: b}\n: c\n",
    "date": "seed: 2020-99-99",
}


def write(path, name):
    bomb = BOMBS[name]
    path.write_bytes(bomb if isinstance(bomb, bytes) else bomb.encode())
    return path


@pytest.mark.parametrize("name", BOMBS)
def test_a_config_is_refused_with_one_sentence(name, tmp_path, capsys):
    path = write(tmp_path / "bomb.yaml", name)
    assert main(["run", str(path)]) == 2
    sentence = capsys.readouterr().err
    assert sentence.startswith(f"perdure: error: {path}")
    assert sentence.count("\n") == 1
    assert len(sentence) < 600


@pytest.mark.parametrize("name", BOMBS)
def test_files_of_runs_and_federations_are_refused(name, tmp_path, capsys):
    for file in ("config.yaml", "node.yaml", "server.yaml"):
        write(tmp_path / file, name)
    for read in (NodeFolder.read, ServerFolder.read):
        with pytest.raises(UserError):
            read(tmp_path)
    write(tmp_path / "tasks.yaml", name)
    with pytest.raises(UserError):
        find_source(parse({}), tmp_path, 0)
    assert main(["extend", str(tmp_path), "--tasks", "1"]) == 2
    assert main(["watch", str(tmp_path), "--once"]) == 0, "the events alone are shown"
    assert main(["report", str(tmp_path)]) == 2
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("name", ["lists", "brackets", "itself"])
def test_values_of_options_are_refused(name, capsys):
    bomb = BOMBS[name].removeprefix("train: ")
    assert main(["run", "permuted-digits", "--set", f"train.lr={bomb}"]) == 2
    assert capsys.readouterr().err.startswith("perdure: error: --set train.lr: ")


def test_aliases_in_reason_are_read():
    text = "base: &base {lr: 0.1, b: [1, 2]}\na: {<<: *base, lr: 0.2}\nb: *base\n"
    assert yaml_value(text)["a"] == {"lr": 0.2, "b": [1, 2]}
