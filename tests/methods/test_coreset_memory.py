"""STAMP's memory: which examples of which task it holds, and how, within a run."""

import numpy as np
import pytest
import torch
from stamp_runs import config, finished

import perdure
from perdure.methods.parts.coreset import divided_budget, mix_styles, stack_coresets
from perdure.methods.parts.replay import StoredExamples
from perdure.models.ops import ForwardPass


def memory_of(values, client=0):
    """A client's memory at the end of a run, as a tree."""
    experiment, _ = finished(values)
    return experiment.store.get(client)


def counts(examples):
    """Stored examples by task and output."""
    pairs = zip(examples["tasks"].tolist(), examples["targets"].tolist(), strict=True)
    found: dict[tuple[int, int], int] = {}
    for pair in pairs:
        found[pair] = found.get(pair, 0) + 1
    return found


@pytest.fixture(scope="module")
def domains(tmp_path_factory):
    """Four small domains with the same classes, each with another brightness."""
    folder, found = tmp_path_factory.mktemp("domains"), []
    for number in range(4):
        rng = np.random.default_rng(number)
        images = rng.integers(20 * number, 100 + 50 * number, (90, 8, 8), dtype=np.uint8)
        labels = np.arange(90) % 3
        arrays = {"x_train": images, "y_train": labels, "x_test": images, "y_test": labels}
        np.savez(folder / f"{number}.npz", **arrays)
        found.append({"source": "npz", "path": str(folder / f"{number}.npz")})
    return found


STREAMS = {
    "permuted": {"tasks": 4},
    "split": {"tasks": 4, "classes_per_task": 2},
    "pool": {"tasks": 4, "classes_per_task": 2},
    "split overlapping": {"tasks": 4, "classes_per_task": 4, "overlap": 2},
    "domains": {},
}


@pytest.mark.parametrize("mixes", [True, False])
@pytest.mark.parametrize("kind", STREAMS)
def test_every_past_task_has_a_memory(kind, mixes, domains):
    """Every client has four memories after four tasks, and so four gradients, on every stream."""
    stream = {"kind": kind.split()[0], **STREAMS[kind]}
    data = {"limit": 300}
    if kind == "domains":
        stream, data = stream | {"domains": domains}, {}
    values = config({"budget": 3, "mixstyle": mixes}, stream=stream, data=data)
    values["train"] |= {"rounds": 1}
    experiment, state = finished(values)
    state.task = 3
    context = experiment.context(state)
    for number in range(3):
        client = experiment.client(number, context, state.server, {"params": state.server.params})
        past = stack_coresets([client])
        assert past.y.shape[1] == 4
        assert (past.mask.sum(2) > 0).all()


@pytest.mark.parametrize("budget", [4, 9])
@pytest.mark.parametrize("mixes", [True, False])
@pytest.mark.parametrize("kind", ["pool", "permuted"])
def test_memory_is_bounded_by_the_budget_of_each_class(kind, mixes, budget):
    stream = {"kind": kind, "tasks": 4} | ({"classes_per_task": 2} if kind == "pool" else {})
    experiment, _ = finished(config({"budget": budget, "mixstyle": mixes}, stream=stream))
    for client in range(3):
        targets = experiment.store.get(client)["examples"]["targets"]
        sizes = torch.bincount(targets)
        assert sizes.max() <= budget
        assert (sizes > 0).sum() == (8 if kind == "pool" else 10)


@pytest.mark.parametrize(("budget", "wanted"), [(7, {0: 3, 1: 2, 2: 2}), (2, {0: 1, 1: 1, 2: 1})])
def test_a_class_divides_its_budget_among_its_tasks(budget, wanted):
    stream = {"kind": "permuted", "tasks": 3}
    memory = memory_of(config({"budget": budget}, stream=stream))
    assert counts(memory["examples"]) == {
        (task, output): size for task, size in wanted.items() for output in range(10)
    }


@pytest.mark.parametrize("budget", range(1, 25))
def test_a_divided_budget_is_even_and_never_grows(budget):
    for tasks in range(1, 30):
        sizes, later = divided_budget(budget, tasks), divided_budget(budget, tasks + 1)
        assert sum(sizes) == max(budget, tasks)
        assert max(sizes) - min(sizes) <= 1
        assert all(after <= before for before, after in zip(sizes, later, strict=False))


def test_the_best_examples_of_a_task_remain():
    """Those that are dropped later are those that herding chose last."""
    rows = []
    for tasks in (1, 2):
        values = config(
            {"budget": 6, "mixstyle": False}, stream={"kind": "permuted", "tasks": tasks}
        )
        examples = memory_of(values)["examples"]
        first = examples["tasks"] == 0
        rows.append([examples["rows"][first & (examples["targets"] == y)] for y in range(10)])
    for before, after in zip(*rows, strict=True):
        torch.testing.assert_close(after, before[:3], rtol=0, atol=0)


def test_rows_are_stored_as_bytes():
    rows = memory_of(config({"budget": 5}))["examples"]["rows"]
    assert rows.dtype == torch.uint8
    assert rows.shape[1] == 64


def test_herding_aims_at_the_class_mean_of_its_own_task():
    """Stored examples of earlier tasks with another permutation do not change the choice."""
    stream = {"kind": "permuted", "tasks": 2}
    values = config({"budget": 200, "selection": "herding", "mixstyle": False}, stream=stream)
    experiment, state = finished(values)
    examples = experiment.store.get(0)["examples"]
    state.task = 1
    client = experiment.client(
        0, experiment.context(state), state.server, {"params": state.server.params}
    )
    rows = client.data.index[client.data.targets[client.data.index] == 3]
    features = client.context.network.features(
        client.params, client.data.examples.gather(rows), ForwardPass()
    )
    nearest = int((features - features.mean(0)).square().sum(1).argmin())
    chosen = (examples["tasks"] == 1) & (examples["targets"] == 3)
    best = examples["rows"][chosen][0]
    wanted = client.data.examples.rows[rows[nearest]][client.data.examples.permutation]
    assert torch.equal(best, wanted)


# ---- MixStyle


def two_tasks(shape=(2, 4, 4), examples=6):
    """Examples of two classes in two tasks with different normalizations."""
    generator = torch.Generator().manual_seed(0)
    values = int(np.prod(shape))
    rows = torch.randint(60, 180, (4 * examples, values), generator=generator)
    rows[2 * examples :] = rows[2 * examples :] // 2 + 20  # the second task is darker
    half = torch.arange(values) < values // 2
    scale = torch.stack([torch.where(half, 0.02, 0.01), torch.where(half, 0.03, 0.01)])
    shift = torch.stack([torch.where(half, -1.0, 0.1), torch.where(half, -0.8, 0.2)])
    targets = torch.arange(2).repeat_interleave(examples).repeat(2)
    tasks = torch.arange(2).repeat_interleave(2 * examples)
    return StoredExamples(rows.to(torch.uint8), targets, tasks, scale, shift)


def inputs(examples, rows, shape):
    task = examples.tasks[rows]
    x = examples.rows[rows].double() * examples.scale[task] + examples.shift[task]
    return x.view(-1, *shape).numpy()


def test_earlier_examples_take_on_the_style_of_new_ones():
    """Eq. 6 in numpy: the content of task 0, and a mean and deviation between both tasks'."""
    shape, before = (2, 4, 4), two_tasks()
    after = mix_styles(before, [1], shape, torch.Generator().manual_seed(1))
    changed = (after.rows != before.rows).any(1)
    assert set(before.targets[changed].tolist()) == {1}
    assert set(before.tasks[changed].tolist()) == {0}
    old = ((before.targets == 1) & (before.tasks == 0)).nonzero().squeeze(1)
    new = ((before.targets == 1) & (before.tasks == 1)).nonzero().squeeze(1)
    content, style, mixed = (
        inputs(memory, rows, shape) for memory, rows in ((before, old), (before, new), (after, old))
    )

    def moments(x):
        return x.mean((2, 3)), x.std((2, 3), ddof=1)

    (mean, std), (style_mean, style_std), (mixed_mean, mixed_std) = map(
        moments, (content, style, mixed)
    )
    weight = (mixed_mean - style_mean) / (mean - style_mean)
    np.testing.assert_allclose(weight[:, 0], weight[:, 1], atol=0.1)  # one lambda per image
    assert (weight > -0.05).all()
    assert (weight < 1.05).all()
    np.testing.assert_allclose(mixed_std, weight * std + (1 - weight) * style_std, atol=0.05)

    def centred(x):
        mean, std = moments(x)
        return (x - mean[..., None, None]) / std[..., None, None]

    np.testing.assert_allclose(centred(mixed), centred(content), atol=0.1)


def test_styles_are_mixed_only_where_a_class_comes_again_over_its_budget():
    for budget, stream, mixes in (
        (3, {"kind": "permuted", "tasks": 2}, True),
        (200, {"kind": "permuted", "tasks": 2}, False),  # room for all
        (3, {"kind": "split", "tasks": 2, "classes_per_task": 2}, False),  # no class comes again
    ):
        mixed, plain = (
            memory_of(config({"budget": budget, "mixstyle": mixstyle}, stream=stream))["examples"]
            for mixstyle in (True, False)
        )
        changed = (mixed["rows"] != plain["rows"]).any(1)
        assert bool(changed[mixed["tasks"] == 0].any()) == mixes
        assert not changed[mixed["tasks"] == 1].any()


# ---- on disk


class Killed(Exception):
    pass


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["pool", "permuted"])
@pytest.mark.parametrize("moment", [3, 4, 6])
def test_memory_survives_a_kill(tmp_path, moment, kind):
    stream = {"kind": kind, "tasks": 3} | ({"classes_per_task": 2} if kind == "pool" else {})
    whole = perdure.run(config(stream=stream), out=tmp_path / "whole").values
    events = []

    def stop(state, event):
        events.append(event)
        if len(events) == moment:
            raise Killed

    with pytest.raises(Killed):
        perdure.run(config(stream=stream), out=tmp_path / "cut", watch=stop)
    again = perdure.resume(tmp_path / "cut").values
    assert again["model_sha256"] == whole["model_sha256"]
    assert again["matrix"] == whole["matrix"]
