"""Texts as token rows: what the tokenizer gives, on all streams, and through prediction."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from backbone_files import MARKS, WORDS, write_bert, write_reviews
from perdure.config import Config, parse
from perdure.core.errors import UserError
from perdure.core.rng import Rng
from perdure.data.load import load_source
from perdure.data.streams import make_stream
from perdure.data.text import pad_rows, token_rows
from perdure.deploy.model_files import load_model
from perdure.deploy.prediction_input import read_input
from perdure.runs.run import run
from perdure.training.experiment import build_experiment
from perdure.training.loop import begin_task
from perdure.training.round import train_round

tokenizers = pytest.importorskip("tokenizers")

NUMBER = {word: place for place, word in enumerate((*MARKS, *WORDS))}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_reviews(tmp_path / "reviews.jsonl")
    write_bert(tmp_path / "bert")
    return tmp_path


def config(folder: Path, stream: dict[str, Any], **sections: Any) -> Config:
    values: dict[str, Any] = {
        "data": {"source": "text", "path": str(folder / "reviews.jsonl")},
        "stream": stream,
        "clients": {"count": 2},
        "model": {"kind": "text", "init": str(folder / "bert"), **sections.pop("model", {})},
        "train": {"rounds": 1, "batch_size": 8, "lr": 0.05},
        "engine": {"kind": "serial"},
        **sections,
    }
    return parse(values)


def numbers(text: str) -> list[int]:
    return [NUMBER[word] for word in ("[CLS]", *text.split(), "[SEP]")]


def write_tokenizer(folder: Path, words: dict[str, int]) -> None:
    """A tokenizer.json with these numbers of words."""
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(folder / "tokenizer.json"))


def test_rows_are_the_tokens_of_the_words(folder: Path) -> None:
    model = config(folder, {"kind": "split"}).model
    rows = token_rows(["the good book", "a very very very bad film", "zebra"], model, 6)
    assert rows.dtype == torch.int32
    assert rows[0].tolist() == [*numbers("the good book"), 0]
    assert rows[1].tolist() == [*numbers("a very very very")]
    assert rows[2].tolist() == [NUMBER["[CLS]"], NUMBER["[UNK]"], NUMBER["[SEP]"], 0, 0, 0]


def test_padding_fills_rows_up() -> None:
    assert pad_rows([[5, 6], [7]], 3, 9).tolist() == [[5, 6, 9], [7, 9, 9]]


@pytest.mark.parametrize(
    ("stream", "tasks"),
    [
        ({"kind": "split", "tasks": 2}, 2),
        ({"kind": "domains"}, 2),
        ({"kind": "pool", "tasks": 2}, 2),
    ],
    ids=["split", "domains", "pool"],
)
def test_every_stream_of_texts_gives_rows_of_one_length(
    folder: Path, stream: dict[str, Any], tasks: int
) -> None:
    found = make_stream(config(folder, stream), Rng(0))
    assert len(found.tasks) == tasks
    assert found.shape == (9,)  # the longest text has 7 words
    for task in found.tasks:
        rows = task.train.gather(torch.arange(4))
        assert rows.dtype == torch.int32
        assert (rows[:, 0] == NUMBER["[CLS]"]).all()


def test_long_texts_are_truncated(folder: Path) -> None:
    short = config(folder, {"kind": "domains"}, model={"max_tokens": 5})
    assert make_stream(short, Rng(0)).shape == (5,)
    none = config(folder, {"kind": "domains"}, model={"max_tokens": 2})
    with pytest.raises(UserError, match=r"model\.max_tokens: must be more than 2, .*got 2$"):
        make_stream(none, Rng(0))


def test_a_permuted_stream_of_texts_is_refused(folder: Path) -> None:
    with pytest.raises(UserError, match=r"stream\.kind: must be .*model\.kind text.*'permuted'$"):
        make_stream(config(folder, {"kind": "permuted"}), Rng(0))


def test_a_text_model_on_images_is_refused(folder: Path) -> None:
    wrong = config(folder, {"kind": "split"}, data={"source": "digits"})
    with pytest.raises(UserError, match=r"^model\.kind: .*digits contains no texts, got 'text'$"):
        build_experiment(wrong)


def test_a_tokenizer_with_more_words_than_the_model_is_refused(folder: Path) -> None:
    write_bert(folder / "small", vocabulary=9)
    wrong = config(folder, {"kind": "split"}, model={"init": str(folder / "small")})
    with pytest.raises(UserError, match=r"tokenizer fits it \(.* go up to 13, the model's to 8\)"):
        build_experiment(wrong)


def test_a_token_beyond_the_vocabulary_is_refused(folder: Path) -> None:
    words = {word: place * 2 for place, word in enumerate((*MARKS, *WORDS))}
    write_tokenizer(folder / "bert", words)
    with pytest.raises(UserError, match=r"tokenizer fits it \(.* go up to 26, the model's to 13\)"):
        build_experiment(config(folder, {"kind": "split"}))


@pytest.mark.parametrize(
    ("key", "value", "sentence"),
    [
        ("pad_token_id", 14, "pad_token_id to a token below vocab_size (14), not 14"),
        ("pad_token_id", 5, "pad_token_id to 0, the padding token of its tokenizer, not 5"),
        ("pad_token_id", -1, "pad_token_id to an integer of at least 0, not -1"),
        ("vocab_size", None, "vocab_size to an integer of at least 1, not None"),
        ("vocab_size", "many", "vocab_size to an integer of at least 1, not 'many'"),
    ],
    ids=str,
)
def test_invalid_vocabulary_sizes_and_padding_tokens_are_refused(
    folder: Path, key: str, value: Any, sentence: str
) -> None:
    path = folder / "bert" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
    with pytest.raises(UserError, match=re.escape(sentence)):
        build_experiment(config(folder, {"kind": "split"}))


@pytest.mark.parametrize("lower", [True, False, None])
def test_a_bare_vocabulary_is_read_with_the_options_of_its_checkpoint(
    folder: Path, lower: bool | None
) -> None:
    if lower is not None:
        options = json.dumps({"do_lower_case": lower})
        (folder / "bert" / "tokenizer_config.json").write_text(options)
    rows = token_rows(["the Good book"], config(folder, {"kind": "split"}).model, 5)
    good = NUMBER["[UNK]"] if lower is False else NUMBER["good"]
    assert rows[0].tolist() == [2, NUMBER["the"], good, NUMBER["book"], 3]


def test_a_checkpoint_without_a_tokenizer_is_refused(folder: Path) -> None:
    (folder / "bert" / "vocab.txt").unlink()
    with pytest.raises(UserError, match=r"tokenizer\.json or vocab\.txt"):
        build_experiment(config(folder, {"kind": "split"}))
    (folder / "bert" / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match="a valid tokenizer"):
        build_experiment(config(folder, {"kind": "split"}))


def test_a_trained_text_model_learns_and_predicts_texts(folder: Path) -> None:
    train = {"rounds": 2, "batch_size": 8, "lr": 0.01, "optimizer": "adam", "local_epochs": 6}
    text_config = config(folder, {"kind": "domains"}, train=train, model={"train_layers": 2})
    run(text_config, folder / "run")
    model = load_model(folder / "run")
    found = [model.class_names[place] for place in model.predict(["the film good", "a book bad"])]
    assert found == ["good", "bad"]
    card = json.loads((folder / "run" / "model" / "card.json").read_text())
    assert card["backbone"]["name"] == str(folder / "bert")
    (folder / "bert" / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"model\.safetensors is missing"):
        load_model(folder / "run").predict(["a book"])


def test_a_whole_text_model_trains_alike_on_both_engines(folder: Path) -> None:
    ends = []
    for engine in ("serial", "vector"):
        experiment = build_experiment(config(folder, {"kind": "domains"}, engine={"kind": engine}))
        state = experiment.initial_state()
        begin_task(experiment, state)
        train_round(experiment, state)
        assert not experiment.engine.choice().get("serial")  # it did not fall back
        ends.append(state.server.params)
    first = build_experiment(config(folder, {"kind": "domains"})).initial_state().server.params
    assert not torch.equal(first["words"], ends[0]["words"])
    for name, value in ends[0].items():
        torch.testing.assert_close(ends[1][name], value, atol=1e-4, rtol=1e-3)


def test_pairs_are_joined_as_the_tokenizer_joins_them(folder: Path) -> None:
    rows = [("the good book", "a bad film"), ("a film", "the book")] * 6
    lines = [
        json.dumps({"premise": a, "second": b, "label": i % 2}) for i, (a, b) in enumerate(rows)
    ]
    (folder / "pairs.jsonl").write_text("\n".join(lines))
    data = {
        "source": "text",
        "path": str(folder / "pairs.jsonl"),
        "text_column": ["premise", "second"],
    }
    made = config(folder, {"kind": "split", "tasks": 1}, data=data)
    x = build_experiment(made).task(0).train.rows
    joined = [[NUMBER[word] for word in f"[CLS] {a} [SEP] {b} [SEP]".split()] for a, b in rows]
    expected = {tuple(row + [0] * (x.shape[1] - len(row))) for row in joined}
    assert {tuple(row) for row in x.tolist()} == expected
    assert token_rows([rows[0]], made.model, 20)[0, :10].tolist() == [*joined[0], 0][:10]
    run(made, out=folder / "run")
    model = load_model(folder / "run")
    assert model.predict(rows).shape == (12,)
    names, inputs = read_input(folder / "pairs.jsonl", model)
    assert len(names) == 12
    assert np.array_equal(model.predict(inputs), model.predict(rows))


def test_pairs_without_a_text_model_are_counted_together(tmp_path: Path) -> None:
    hub = pytest.importorskip("datasets")
    columns = {"q1": ["red car"] * 6, "q2": ["blue sky"] * 6, "label": [0, 1] * 3}
    hub.Dataset.from_dict(columns).save_to_disk(str(tmp_path / "d"))
    data = {"source": "huggingface", "path": str(tmp_path / "d"), "text_column": ["q1", "q2"]}
    source = load_source(parse({"data": data}).data, Rng(0))
    assert source.train.x.sum(1).tolist() == [4] * len(source.train)
    with pytest.raises(UserError, match=r"^data.text_column: must be a column of the dataset: q1"):
        load_source(parse({"data": data | {"text_column": ["q1", "q3"]}}).data, Rng(0))
    with pytest.raises(UserError, match=r"^data.text_column: must be a list of at most 2"):
        parse({"data": data | {"text_column": ["a", "b", "c"]}})
