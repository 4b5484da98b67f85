import numpy as np
import pytest
import torch

from perdure.config import parse
from perdure.core.errors import UserError
from perdure.core.rng import Rng
from perdure.data.streams import make_stream


def build(seed=0, **values):
    return make_stream(parse(values), Rng(seed))


def refused(word, **values):
    with pytest.raises(UserError) as caught:
        build(**values)
    assert word in str(caught.value)


def save_set(path, rows=60, classes=4, shape=(5, 5), seed=0, **more):
    rng = np.random.default_rng(seed)
    np.savez(
        path,
        x_train=rng.integers(0, 256, (rows, *shape), dtype=np.uint8),
        y_train=np.arange(rows) % classes,
        x_test=rng.integers(0, 256, (rows // 2, *shape), dtype=np.uint8),
        y_test=np.arange(rows // 2) % classes,
        **more,
    )
    return str(path)


def domains(tmp_path, **more):
    a = save_set(tmp_path / "gray.npz", shape=(5, 5))
    b = save_set(tmp_path / "large.npz", shape=(9, 7), seed=1)
    c = save_set(tmp_path / "color.npz", shape=(4, 4, 3), seed=2)
    listed = [{"source": "npz", "path": path} for path in (a, b, c)]
    return {"kind": "domains", "domains": listed} | more


def test_domains_come_to_one_shape(tmp_path, caplog):
    caplog.set_level("INFO")
    stream = build(stream=domains(tmp_path))
    assert [task.name for task in stream.tasks] == ["gray", "large", "color"]
    assert stream.shape == (3, 9, 7)
    said = [r.message for r in caplog.records if "resized to 9x7 with 3 channels" in r.message]
    assert len(said) == 1
    assert "gray from 5x5 with 1 channel" in said[0]
    first = stream.tasks[0].train
    x = first.gather(torch.arange(60))
    assert x.shape == (60, 3, 9, 7)
    assert x.mean((0, 2, 3)).abs().max() < 1e-4
    assert (x.std((0, 2, 3), correction=0) - 1).abs().max() < 1e-4
    for task in stream.tasks:  # who predicts without a task label has one normalization only
        assert torch.equal(task.train.normalization.scale, first.normalization.scale)
        assert torch.equal(task.test.normalization.shift, first.normalization.shift)
    assert stream.tasks[0].classes == stream.tasks[2].classes == (0, 1, 2, 3)


def test_domains_of_a_given_shape_and_normalisation(tmp_path):
    data = {"size": 6, "channels": 1, "mean": [0.5], "std": [0.5]}
    stream = build(data=data, stream=domains(tmp_path))
    assert stream.shape == (1, 6, 6)
    x = stream.tasks[1].train
    assert torch.allclose(x.gather(torch.arange(5)).flatten(1), x.rows[:5] / 127.5 - 1, atol=1e-5)


@pytest.mark.parametrize(("key", "value"), [("mean", [0.5]), ("std", [0.1]), ("normalize", True)])
def test_a_domain_has_no_normalisation_of_its_own(tmp_path, key, value):
    said = domains(tmp_path)
    said["domains"][1][key] = value
    with pytest.raises(
        UserError, match=rf"^stream\.domains\.1\.{key}: must be null, .* by data\.{key}, got "
    ):
        build(stream=said)


def test_separate_labels(tmp_path):
    stream = build(stream=domains(tmp_path, labels="separate", order=[2, 0], tasks=2))
    assert [task.classes for task in stream.tasks] == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert stream.class_names[0] == "color/0"
    assert stream.class_names[7] == "gray/3"
    task = stream.tasks[1]
    assert set(task.test.y[task.groups[0].index].tolist()) == {4, 5, 6, 7}


def test_order_and_number_of_domains(tmp_path):
    stream = build(stream=domains(tmp_path, order=[1, 2]))
    assert [task.name for task in stream.tasks] == ["large", "color"]
    assert len(build(stream=domains(tmp_path, tasks=2)).tasks) == 2
    refused(
        "stream.tasks: must be 1 to 3, the number of domains, got 4",
        stream=domains(tmp_path, tasks=4),
    )
    refused(
        "stream.order: must be different numbers from 0 to 2, or names of domains, got [0, 3]",
        stream=domains(tmp_path, order=[0, 3]),
    )
    refused(
        "stream.order: must be different numbers from 0 to 2, or names of domains, got [0, 0]",
        stream=domains(tmp_path, order=[0, 0]),
    )


def test_domains_inside_one_file(tmp_path):
    rng = np.random.default_rng(0)
    np.savez(
        tmp_path / "d.npz",
        x=rng.integers(0, 256, (80, 5, 5, 3), dtype=np.uint8),
        y=np.arange(80) % 4,
        domain=np.arange(80) // 40,
        is_test=np.arange(80) % 5 == 0,
        domain_names=np.array(["photo", "sketch"]),
    )
    data = {"source": "npz", "path": str(tmp_path / "d.npz")}
    stream = build(data=data, stream={"kind": "domains"})
    assert [task.name for task in stream.tasks] == ["photo", "sketch"]
    assert [int(task.partition.sizes.sum()) for task in stream.tasks] == [32, 32]
    expected = "data.source: must be npz, folder, text or table; or stream.domains, got 'digits'"
    refused(expected, stream={"kind": "domains"})


def test_domains_that_do_not_fit_together(tmp_path):
    stream = domains(tmp_path)
    few = save_set(tmp_path / "few.npz", classes=3)
    listed = [*stream["domains"], {"source": "npz", "path": few}]
    refused("stream.labels", stream=stream | {"domains": listed})
    build(stream=stream | {"domains": listed, "labels": "separate"})
    text = tmp_path / "a.jsonl"
    text.write_text("".join(f'{{"text": "a{i}", "label": {i % 4}}}\n' for i in range(40)))
    listed = [*stream["domains"], {"source": "text", "path": str(text)}]
    refused(
        "stream.domains: must be all images, or inputs of one size, got ",
        stream=stream | {"domains": listed},
    )
    listed = [*stream["domains"], {"source": "npz", "path": "nowhere.npz"}]
    refused(
        "stream.domains.3.path: must be an npz file that exists, got",
        stream=stream | {"domains": listed},
    )


def test_split_over_several_sources_with_labels_of_their_own(tmp_path):
    listed = domains(tmp_path)["domains"]
    stream = build(stream={"kind": "split", "tasks": 6, "labels": "separate", "domains": listed})
    assert stream.shape == (3, 9, 7)
    assert len(stream.class_names) == 12
    assert stream.class_names[4] == "large/0"
    assert sorted(c for task in stream.tasks for c in task.classes) == list(range(12))
    own = [build(stream={"kind": "domains", "domains": [one]}).tasks[0] for one in listed]
    for task in stream.tasks:
        for group in task.groups:
            labels = task.test.y[group.index]
            assert set(labels.tolist()) == set(task.classes)
            assert len(labels) == sum(
                (t.test.y == c % 4).sum() for t, c in ((own[c // 4], c) for c in task.classes)
            )


def test_split_over_several_sources_with_shared_labels(tmp_path):
    listed = domains(tmp_path)["domains"]
    stream = build(stream={"kind": "split", "tasks": 2, "domains": listed})
    assert stream.classes == 4
    assert len(stream.tasks[0].train.y) == 180
    refused(
        "stream.labels",
        stream={
            "kind": "split",
            "tasks": 2,
            "domains": [
                *listed,
                {"source": "npz", "path": save_set(tmp_path / "five.npz", classes=5)},
            ],
        },
    )
