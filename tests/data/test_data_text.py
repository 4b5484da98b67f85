import gzip
import json
from pathlib import Path

import pytest

from perdure.config import DataConfig
from perdure.core.errors import UserError
from perdure.core.rng import Rng
from perdure.data.load import load_domains, load_source
from perdure.data.sources.text import TextData

DRAWS = Rng(0)


def refused(config: DataConfig, *words: str, load=load_source) -> str:
    with pytest.raises(UserError) as caught:
        load(config, DRAWS)
    sentence = str(caught.value)
    assert "\n" not in sentence
    for word in ("data.", *words):
        assert word in sentence
    return sentence


ROWS = [
    {"split": "train", "text": "move money now now", "label": "transfer"},
    {"split": "train", "text": "my card is lost", "label": "card"},
    {"split": "oos_train", "text": "tell me a joke", "label": "oos"},
    {"split": "val", "text": "lost card", "label": "card"},
    {"split": "test", "text": "Move it", "label": "transfer"},
]


def lines(path: Path, rows: list) -> DataConfig:
    text = "\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return TextData(path=str(path), features=64)


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_text_counts_words(tmp_path, name):
    source = load_source(lines(tmp_path / name, ROWS), DRAWS)
    assert source.name == "a"
    assert source.class_names == ("card", "transfer")
    assert source.train.y.tolist() == [1, 0]
    assert source.test.y.tolist() == [1]
    assert source.train.x.shape == (2, 64)
    assert source.train.x.sum(1).tolist() == [4, 4]
    assert source.train.x[0].max() >= 2
    # "Move" and "move" are one word, at one place
    assert source.train.x[0][source.test.x[0] > 0].max() >= 1
    assert (source.train.texts, source.test.texts) == (
        ["move money now now", "my card is lost"],
        ["Move it"],
    )


def test_text_counts_are_clipped_not_wrapped(tmp_path):
    rows = [*ROWS, {"split": "train", "text": "word " * 300, "label": "card"}]
    assert load_source(lines(tmp_path / "a.jsonl", rows), DRAWS).train.x[2].max() == 255


def test_text_falls_back_on_val_and_then_on_a_seeded_split(tmp_path):
    rows = [row for row in ROWS if row["split"] != "test"]
    assert load_source(lines(tmp_path / "v.jsonl", rows), DRAWS).test.texts == ["lost card"]
    rows = [{"text": f"t{i}", "label": i % 2} for i in range(20)]
    config = lines(tmp_path / "n.jsonl", rows)
    source = load_source(config, DRAWS)
    assert (len(source.train), len(source.test)) == (16, 4)
    assert source.class_names == ("0", "1")
    assert sorted(source.train.texts + source.test.texts) == sorted(r["text"] for r in rows)
    assert load_source(config, DRAWS).train.texts == source.train.texts
    small = load_source(config.model_copy(update={"limit": 6}), DRAWS)
    assert len(small.train.texts) == len(small.train) == 6
    assert [int(text[1:]) % 2 for text in small.train.texts] == small.train.y.tolist()


def test_text_domains(tmp_path):
    rows = [
        {"domain": d, "text": f"{d} {i}", "label": ["bad", "good"][i % 2]}
        for d in ("dvd", "books")
        for i in range(10)
    ]
    books, dvd = load_domains(lines(tmp_path / "a.jsonl", rows), DRAWS)
    assert (books.name, dvd.name) == ("books", "dvd")
    assert all(text.startswith("dvd") for text in dvd.train.texts)
    assert books.class_names == dvd.class_names == ("bad", "good")
    refused(lines(tmp_path / "b.jsonl", ROWS), "'domain'", load=load_domains)


@pytest.mark.parametrize(
    ("rows", "word"),
    [
        ([], "at least one line"),
        (["{not json"], "line 1"),
        ([*ROWS, "[1]"], "line 6 is not an object"),
        ([*ROWS, {"text": "a"}], "line 6 has no field 'label'"),
        ([*ROWS, {"text": 3, "label": "card"}], "'text' is not a string"),
        ([*ROWS, {"split": "train", "text": "a", "label": 1.5}], "type float, str"),
        ([*ROWS, {"split": "train", "text": "a", "label": 1}], "type int, str"),
        ([{"text": "a", "label": -1}, {"text": "b", "label": -1}], "label -1"),
        ([{"text": "a", "label": 9 * (i % 2)} for i in range(8)], "labels reach 9"),
        ([{"text": "a", "label": "x"}], "test on"),
    ],
)
def test_invalid_text_is_refused(tmp_path, rows, word):
    refused(lines(tmp_path / "bad.jsonl", rows), "bad.jsonl", word)


def test_unreadable_text_files_are_refused(tmp_path):
    refused(TextData(path=str(tmp_path / "none.jsonl")), "none.jsonl")
    config = lines(tmp_path / "a.jsonl.gz", ROWS)
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(path.read_bytes()[:-20])
    refused(config, "cannot be read")
    (tmp_path / "b.jsonl").write_bytes(b'{"text": "\xff\xfe"}')
    refused(TextData(path=str(tmp_path / "b.jsonl")), "b.jsonl")
