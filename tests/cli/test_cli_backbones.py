"""Backbones on the command line: checkpoints that cannot be used, and texts to predict."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from shells import Shell, one_sentence

from backbone_files import write_bert, write_reviews, write_vit

TRAIN = {"rounds": 1, "batch_size": 8}


@pytest.mark.parametrize(
    ("model", "parts"),
    [
        ({"kind": "vit", "init": "./gone"}, ("model.init", "./gone", "exists")),
        ({"kind": "vit", "init": "bert"}, ("model.init", "'bert'", "'vit'")),
        ({"kind": "vit", "init": "vit", "train_layers": 9}, ("model.train_layers", "9", "0 to 3")),
        ({"kind": "text", "init": "bert"}, ("model.kind", "text", "digits")),
    ],
    ids=["gone", "type", "layers", "images"],
)
def test_what_cannot_be_used_is_one_sentence_and_nothing_is_written(
    shell: Shell, model: dict[str, Any], parts: tuple[str, ...]
) -> None:
    write_vit(shell.folder / "vit")
    write_bert(shell.folder / "bert")
    changes = {"model": model, "stream": {"kind": "split", "tasks": 2}}
    file, before = shell.config(changes), shell.files()
    for command in ("check", "run"):
        one_sentence(shell(command, file), *parts)
    assert shell.files() == before


def test_texts_are_predicted_line_by_line(shell: Shell) -> None:
    pytest.importorskip("tokenizers")
    write_bert(shell.folder / "bert")
    write_reviews(shell.folder / "reviews.jsonl")
    Path("new.txt").write_text("the book good\n\na very bad film\n", encoding="utf-8")
    file = shell.config(
        {
            "data": {"source": "text", "path": "reviews.jsonl"},
            "stream": {"kind": "domains"},
            "model": {"kind": "text", "init": "bert", "train_layers": 1},
            "train": TRAIN,
        }
    )
    assert shell("run", file, "--out", "done", "--quiet").code == 0
    said = shell("predict", "done", "new.txt")
    assert said.code == 0
    assert [line.split(":")[0] for line in said.out.splitlines()] == ["0", "1"]
    assert len(shell("predict", "done", "reviews.jsonl").out.splitlines()) == 48
    Path("empty.txt").write_text("\n")
    one_sentence(shell("predict", "done", "empty.txt"), "empty.txt", "at least one text")
