"""What a user may write, and the one sentence that every mistake gets."""

import math
import re

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from perdure.config import Config, dump, load, override, parse, read_yaml
from perdure.core.errors import UserError

INFINITE, NAN = math.inf, math.nan


KINDS = {
    "data.features": {"source": "text", "path": "a"},
    "data.path": {"source": "npz"},
    "stream.classes_per_task": {"kind": "split"},
    "stream.overlap": {"kind": "split"},
    "stream.labels": {"kind": "split"},
    "stream.domains": {"kind": "domains"},
    "stream.order": {"kind": "domains"},
    "clients.partition.per_client": {"kind": "shards"},
    "clients.partition.alpha": {"kind": "dirichlet"},
    "clients.partition.alfa": {"kind": "dirichlet"},
    "clients.partition.fraction": {"kind": "classes"},
    "model.width": {"kind": "conv"},
    "train.schedule.every": {"kind": "step"},
    "train.schedule.evry": {"kind": "step"},
    "train.schedule.gamma": {"kind": "exponential"},
    "train.schedule.floor": {"kind": "cosine"},
}
"""Keys of kinds that are not the default, and what they need beside them."""


def nested(key, value):
    """{"a": {"b": value}} for "a.b", with the kind that has the key."""
    *sections, name = key.split(".")
    value = {**KINDS.get(key, {}), name: value}
    for section in reversed(sections):
        value = {section: value}
    return value


def refusal(values):
    with pytest.raises(UserError) as caught:
        parse(values)
    sentence = str(caught.value)
    assert "\n" not in sentence
    return sentence


COUNTS = [
    "data.size",
    "data.limit",
    "data.features",
    "stream.tasks",
    "stream.classes_per_task",
    "clients.count",
    "clients.per_round",
    "clients.partition.per_client",
    "model.width",
    "train.local_epochs",
    "train.max_steps",
    "train.batch_size",
    "train.schedule.every",
    "engine.chunk",
    "runs.checkpoint_every",
]
POSITIVE = [
    "clients.partition.alpha",
    "train.lr",
    "train.clip",
    "train.task_decay",
    "train.schedule.gamma",
]
SHARES = ["stream.presence", "clients.partition.fraction"]
PROBABILITIES = ["clients.dropout", "model.dropout", "train.momentum"]
NOT_NEGATIVE = ["train.weight_decay", "train.schedule.floor"]
REALS = [*POSITIVE, *SHARES, *PROBABILITIES, *NOT_NEGATIVE, "data.test_fraction"]
CHOICES = {
    "data.source": "huggingface",
    "stream.kind": "permuted",
    "stream.labels": "separate",
    "clients.partition.kind": "dirichlet",
    "model.kind": "resnet18-reduced",
    "model.norm": "group",
    "model.head": "growing",
    "train.optimizer.kind": "adamw",
    "train.schedule.kind": "cosine",
    "train.weighting": "uniform",
    "train.outputs": "seen",
    "engine.kind": "vector",
    "device": "mps",
}


@pytest.mark.parametrize("key", COUNTS)
@pytest.mark.parametrize(
    ("value", "allowed"),
    [
        (0, "at least 1"),
        (-3, "at least 1"),
        (1.5, "an integer"),
        ("many", "an integer"),
        (True, "a number"),
        ([1], "an integer"),
    ],
)
def test_counts(key, value, allowed):
    assert refusal(nested(key, value)) == f"{key}: must be {allowed}, got {value!r}"


@pytest.mark.parametrize("key", REALS)
@pytest.mark.parametrize(
    ("value", "allowed"),
    [
        (INFINITE, "a finite number"),
        (-INFINITE, "a finite number"),
        (NAN, "a finite number"),
        ("fast", "a number"),
        (False, "a number"),
        ({"a": 1}, "a number"),
    ],
)
def test_numbers_with_a_fraction(key, value, allowed):
    assert refusal(nested(key, value)) == f"{key}: must be {allowed}, got {value!r}"


@pytest.mark.parametrize(
    ("keys", "value", "allowed"),
    [
        (POSITIVE, 0, "greater than 0"),
        (POSITIVE, -0.5, "greater than 0"),
        (SHARES, 0, "greater than 0"),
        (SHARES, 1.01, "at most 1"),
        (PROBABILITIES, -0.1, "at least 0"),
        (PROBABILITIES, 1, "less than 1"),
        (NOT_NEGATIVE, -1e-9, "at least 0"),
        (["data.test_fraction"], 0, "greater than 0"),
        (["data.test_fraction"], 1, "less than 1"),
        (["seed", "stream.overlap"], -1, "at least 0"),
        (["runs.keep_checkpoints"], 1, "at least 2"),
    ],
)
def test_ranges(keys, value, allowed):
    for key in keys:
        assert refusal(nested(key, value)) == f"{key}: must be {allowed}, got {value!r}"


@pytest.mark.parametrize(("key", "choice"), CHOICES.items())
def test_choices_are_listed(key, choice):
    sentence = refusal(nested(key, "nonsense"))
    assert sentence.startswith(f"{key}: must be ")
    assert sentence.endswith(", got 'nonsense'")
    assert choice in re.findall(r"[\w-]+", sentence)


@pytest.mark.parametrize(
    ("key", "value", "sentence"),
    [
        ("data.channels", 2, "data.channels: must be 1 or 3, got 2"),
        ("data.channels", True, "data.channels: must be a number, got True"),
        ("data.mean", 0.5, "data.mean: must be a list, got 0.5"),
        ("data.mean", [], "data.mean: must be a list of at least 1, got []"),
        ("data.mean", [0.1, NAN], "data.mean.1: must be a finite number, got nan"),
        ("data.std", [0.1, 0], "data.std.1: must be greater than 0, got 0"),
        ("data.normalize", "perhaps", "data.normalize: must be true or false, got 'perhaps'"),
        ("data.path", 5, "data.path: must be a string, got 5"),
        ("data.source", "npz", "data.path: must be given for source 'npz'"),
        ("stream.domains", [], "stream.domains: must be a list of at least 1, got []"),
        (
            "stream.domains",
            [{"source": "digits"}, {"source": "idx"}],
            "stream.domains.1.path: must be given for source 'idx'",
        ),
        ("stream.order", [0, -1], "stream.order.1: must be at least 0, got -1"),
        ("clients.per_round", 11, "clients.per_round: must be 1 to 10 (clients.count), got 11"),
        ("model.hidden", 100, "model.hidden: must be a list, got 100"),
        ("model.hidden", [100, 0], "model.hidden.1: must be at least 1, got 0"),
        ("model.dropout", [0.1, 1], "model.dropout.1: must be less than 1, got 1"),
        ("model.init", 3, "model.init: must be a string, got 3"),
        ("method", "fot", "method: must be a mapping, got 'fot'"),
        ("method", {}, "method.kind: must be a name, a dotted path or a class, got None"),
        ("method.kind", 3, "method.kind: must be a name, a dotted path or a class, got 3"),
    ],
)
def test_the_other_values(key, value, sentence):
    assert refusal(nested(key, value)) == sentence


@pytest.mark.parametrize("section", ["data", "stream", "clients", "clients.partition", "train"])
@pytest.mark.parametrize("value", [5, None, [1]])
def test_a_section_must_be_a_section(section, value):
    assert refusal(nested(section, value)) == (f"{section}: must be a mapping, got {value!r}")


@pytest.mark.parametrize(
    ("key", "beside"),
    [
        ("sed", "seed"),
        ("data.sorce", "source"),
        ("clients.partition.alfa", "alpha"),
        ("train.schedule.evry", "every"),
    ],
)
def test_unknown_keys_are_answered_with_the_known_ones(key, beside):
    first, _, rest = refusal(nested(key, 7)).partition("; ")
    assert re.fullmatch(rf"{re.escape(key)}: unknown key( for \w+ '\w+')?, got 7", first)
    assert beside in rest.partition(": ")[2].split(", ")


def test_an_unknown_key_of_a_domain():
    sentence = refusal({"stream": {"kind": "domains", "domains": [{"nme": "a"}]}})
    assert sentence.startswith("stream.domains.0.nme: unknown key for source 'digits', got 'a'; ")
    assert "name" in sentence.partition("its keys: ")[2].split(", ")


@pytest.mark.parametrize("values", [{1: 2}, {"data": {1: 2}}, {"method": {"kind": "a", 1: 2}}])
def test_keys_that_are_not_text(values):
    assert "got 1" in refusal(values)


def test_defaults_are_a_whole_experiment():
    config = parse({})
    assert (config.data.source, config.stream.kind, config.method) == (
        "digits",
        "permuted",
        {"kind": "fedavg"},
    )
    assert config == Config()


def test_the_documented_example():
    config = parse(
        yaml.safe_load("""
        seed: 0
        data:    {source: digits}
        stream:  {kind: permuted, tasks: 5}
        clients: {count: 10, per_round: 10, partition: {kind: dirichlet, alpha: 0.5}}
        model:   {kind: mlp, hidden: [100, 100]}
        method:  {kind: fot, threshold: 0.95}
        train:   {rounds: 20, local_epochs: 2, batch_size: 16, lr: 0.1}
        engine:  {kind: auto}
        """)
    )
    assert config.method["threshold"] == 0.95
    assert config.clients.partition.alpha == 0.5


def test_numbers_that_yaml_takes_for_text():
    values = yaml.safe_load("train: {lr: 1e-3}")
    assert values["train"]["lr"] == "1e-3"
    assert parse(values).train.lr == 0.001


def test_dropout_is_one_number_or_several():
    assert parse({"model": {"dropout": 0.5}}).model.dropout == 0.5
    assert parse({"model": {"dropout": [0.2, 0.5]}}).model.dropout == [0.2, 0.5]


def test_per_round_and_rounds_fall_back():
    config = parse({"clients": {"count": 7}, "train": {"rounds": [9, 4]}})
    assert config.per_round == 7
    assert [config.rounds(task) for task in range(3)] == [9, 4, 4]
    assert parse({"clients": {"count": 7, "per_round": 2}}).per_round == 2
    assert parse({"train": {"rounds": 4}}).rounds(0) == 4


def test_rounds_are_one_number_or_a_list_whose_last_entry_repeats(tmp_path):
    config = parse({"train": {"rounds": [1000, 100, 200]}})
    assert [config.rounds(task) for task in range(5)] == [1000, 100, 200, 200, 200]
    assert (config.total_rounds(1), config.total_rounds(4)) == (1000, 1500)
    path = tmp_path / "a.yaml"
    path.write_text("train: {rounds: [9, 3]}\n", encoding="utf-8")
    assert load(path, ["train.rounds=4"]).train.rounds == 4
    assert load(path, ["train.rounds=[4, 5, 6]"]).train.rounds == [4, 5, 6]


@pytest.mark.parametrize(
    ("rounds", "sentence"),
    [
        ([], "train.rounds: must be a list of at least 1, got []"),
        ([3, 0], "train.rounds.1: must be at least 1, got 0"),
        ([3, 1.5], "train.rounds.1: must be an integer, got 1.5"),
        (0, "train.rounds: must be at least 1, got 0"),
        (True, "train.rounds: must be a number, got True"),
    ],
)
def test_each_entry_of_rounds_is_positive(rounds, sentence):
    assert refusal({"train": {"rounds": rounds}}) == sentence


configs = st.fixed_dictionaries(
    {},
    optional={
        "seed": st.integers(0, 2**70),
        "data": st.fixed_dictionaries({"source": st.just("npz"), "path": st.text(min_size=1)}),
        "clients": st.fixed_dictionaries(
            {"count": st.integers(1, 10**6)},
            optional={"dropout": st.floats(0, 1, exclude_max=True)},
        ),
        "train": st.fixed_dictionaries({"lr": st.floats(0, 1e30, exclude_min=True)}),
        "method": st.fixed_dictionaries(
            {"kind": st.text()},
            optional={"lambda": st.floats(allow_nan=False), "names": st.lists(st.text())},
        ),
        "model": st.fixed_dictionaries({"dropout": st.just(0.25) | st.just([0.0, 0.5])}),
    },
)


@given(configs)
@example({"method": {"kind": "x", "cap": INFINITE, "each": [-INFINITE]}})
def test_a_dumped_config_reads_back_the_same(values):
    config = parse(values)
    assert parse(yaml.safe_load(dump(config))) == config


def test_load_applies_overrides(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text("train: {lr: 0.5, rounds: 3}\n", encoding="utf-8")
    partition = ["clients.partition.alpha=2", "clients.partition.kind=dirichlet"]
    settings = ["train.lr=1e-2", *partition, "model.hidden=[5, 6]"]
    config = load(path, settings)
    assert (config.train.lr, config.train.rounds) == (0.01, 3)
    assert config.clients.partition.alpha == 2
    assert config.model.hidden == [5, 6]


def test_overrides_leave_the_values_as_they_were():
    values = {"train": {"lr": 0.5}}
    assert override(values, ["train.lr=1", "seed=2"]) == {"train": {"lr": 1}, "seed": 2}
    assert values == {"train": {"lr": 0.5}}


@pytest.mark.parametrize(
    ("setting", "part"),
    [
        ("lr", "--set: must be key=value, such as train.lr=0.05, got 'lr'"),
        ("=3", "--set: must be key=value, such as train.lr=0.05, got '=3'"),
        ("train.lr=[", "--set train.lr: must be a YAML value, got '['"),
        ("train.lr=2024-13-45", "--set train.lr: must be a YAML value, got '2024-13-45'"),
        ("train.lr.x=3", "--set train.lr.x: 'x' lies below a value that is not a section"),
    ],
)
def test_bad_overrides(setting, part):
    with pytest.raises(UserError) as caught:
        override({"train": {"lr": 0.5}}, [setting])
    assert part in str(caught.value)


def test_an_empty_file_means_the_defaults(tmp_path):
    path = tmp_path / "empty.yaml"
    path.write_text("", encoding="utf-8")
    assert load(path) == Config()


@pytest.mark.parametrize(
    ("content", "part"),
    [
        (b"a: [", "not a YAML file"),
        (b"a: 2024-13-45", "not a YAML file"),
        (b"\xff\xfe\x00", "not a YAML file"),
        (b"- a\n- b", "must be a mapping of sections, got list"),
        (b"just text", "must be a mapping of sections, got str"),
    ],
)
def test_files_that_are_no_config(tmp_path, content, part):
    path = tmp_path / "bad.yaml"
    path.write_bytes(content)
    with pytest.raises(UserError) as caught:
        read_yaml(path)
    assert part in str(caught.value)
    assert str(path) in str(caught.value)


def test_a_missing_file_and_a_folder(tmp_path):
    for path in (tmp_path, tmp_path / "none.yaml"):
        with pytest.raises(UserError, match=r"no such config file|a folder, not a config file"):
            load(path)


@pytest.mark.parametrize("kind", ["sgd", "adam", "adamw"])
def test_an_optimizer_may_be_named_alone(kind):
    optimizer = parse({"train": {"optimizer": kind}}).train.optimizer
    assert optimizer.kind == kind
    assert optimizer == parse({"train": {"optimizer": {"kind": kind}}}).train.optimizer
