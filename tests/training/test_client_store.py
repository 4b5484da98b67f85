"""The store of client states: commits, restores, and states that exceed memory."""

import os
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from perdure.core.errors import RunError
from perdure.runs import checkpoint
from perdure.training.client_store import ClientStore


class Killed(BaseException):
    """Stands for the end of the process at some step."""


def state(value):
    return {"w": torch.full((3,), float(value)), "n": value}


def value(tree):
    assert not tree or tree["w"].tolist() == [float(tree["n"])] * 3
    return tree.get("n")


def names(folder):
    return {path.name for path in folder.iterdir()} if folder.is_dir() else set()


@pytest.mark.parametrize("folder", [None, "clients"])
def test_get_returns_the_tree_that_was_put(tmp_path, folder):
    store = ClientStore(folder and tmp_path / folder, capacity=2)
    assert store.get(3) == {}
    for client in range(10):
        store.put(client, state(client))
    store.put(4, state(44))
    store.put(5, {})
    assert [value(store.get(client)) for client in range(6)] == [0, 1, 2, 3, 44, None]


def test_sizes_are_those_of_the_files_also_before_they_are_written(tmp_path):
    stores = [ClientStore(folder, capacity=2) for folder in (None, tmp_path / "clients")]
    for store in stores:
        for client in range(5):
            store.put(client, {"w": torch.zeros(10 * client + 1)})
    before = [store.sizes() for store in stores]
    files = stores[1].commit()
    found = [(tmp_path / "clients" / files[str(client)]).stat().st_size for client in range(5)]
    assert before == [found, found]
    assert stores[1].sizes() == found


def test_a_store_without_a_folder_writes_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    store = ClientStore(None, capacity=1)
    store.put(0, state(0))
    store.put(1, state(1))
    assert store.commit() == {}
    store.sweep([])
    assert value(store.get(0)) == 0
    assert not list(tmp_path.iterdir())


def test_an_empty_store_writes_nothing(tmp_path):
    store = ClientStore(tmp_path / "clients")
    for client in range(100):
        store.put(client, {})
        assert store.get(client) == {}
    assert store.commit() == {}
    store.sweep([{}])
    assert not (tmp_path / "clients").exists()


def test_only_changed_states_are_written(tmp_path, monkeypatch):
    store = ClientStore(tmp_path)
    for client in range(5):
        store.put(client, state(client))
    first = store.commit()
    written = []
    replace = os.replace
    monkeypatch.setattr(os, "replace", lambda a, b: (written.append(b), replace(a, b)))
    store.put(2, state(9))
    second = store.commit()
    assert [path.name for path in written] == [second["2"]]
    assert {client for client in first if first[client] != second[client]} == {"2"}
    assert store.commit() == second
    assert len(written) == 1


def test_at_most_capacity_states_are_in_memory(tmp_path):
    store, seen = ClientStore(tmp_path, capacity=3), []
    for client in range(20):
        tree = state(client)
        store.put(client, tree)
        seen += [weakref.ref(tree["w"]), weakref.ref(store.get(client // 2)["w"])]
        del tree
        assert len({id(ref()) for ref in seen if ref() is not None}) <= 3
    assert len(names(tmp_path)) >= 17


def test_the_least_recently_used_state_is_evicted_first(tmp_path):
    store = ClientStore(tmp_path, capacity=2)
    store.put(0, state(0))
    store.put(1, state(1))
    store.get(0)
    store.put(2, state(2))
    assert {name.partition("-")[0] for name in names(tmp_path)} == {"00000001"}


def test_a_stored_state_is_a_copy(tmp_path):
    stack = torch.zeros(50, 3)
    store = ClientStore(tmp_path)
    store.put(0, {"w": stack[7], "pair": (1, 2)})
    stack.fill_(5)
    kept = store.get(0)
    assert kept["w"].tolist() == [0, 0, 0]
    assert kept["w"].untyped_storage().nbytes() == 12
    assert kept["pair"] == [1, 2]  # as it comes back from disk


def test_restore_replaces_all_states_by_those_of_a_manifest(tmp_path):
    store = ClientStore(tmp_path, capacity=1)
    store.put(0, state(1))
    store.put(1, state(1))
    manifest = store.commit()
    store.put(0, state(2))
    store.put(2, state(2))
    store.commit()
    store.restore(manifest)
    assert [value(store.get(client)) for client in range(3)] == [1, 1, None]
    other = ClientStore(tmp_path)
    other.restore(manifest)
    assert [value(other.get(client)) for client in range(3)] == [1, 1, None]


def test_restore_discards_uncommitted_states(tmp_path):
    store = ClientStore(tmp_path)
    store.put(0, state(1))
    manifest = store.commit()
    store.put(0, state(2))
    store.put(1, state(2))
    store.restore(manifest)
    assert store.commit() == manifest
    assert store.get(1) == {}


def test_sweep_keeps_the_files_of_manifests_and_current_states(tmp_path):
    store = ClientStore(tmp_path, capacity=1)
    manifests = []
    for number in range(4):
        store.put(0, state(number))
        store.put(1, state(1))
        manifests.append(store.commit())
    store.put(0, state(99))
    store.put(1, state(98))  # evicts client 0, whose file no manifest names yet
    (tmp_path / ".x.tmp").touch()
    store.sweep(manifests[2:])
    needed = {name for manifest in manifests[2:] for name in manifest.values()}
    left = names(tmp_path)
    assert needed <= left
    assert left - needed == {store.commit()["0"]}
    assert value(store.get(0)) == 99


def test_a_deleted_state_can_be_restored_from_an_earlier_manifest(tmp_path):
    store = ClientStore(tmp_path)
    store.put(0, state(1))
    before = store.commit()
    store.put(0, {})
    after = store.commit()
    assert after == {}
    store.sweep([before, after])
    store.restore(before)
    assert value(store.get(0)) == 1
    store.restore(after)
    assert store.get(0) == {}


@pytest.mark.parametrize("content", [b"", b"half", None])
def test_a_corrupt_state_names_its_client(tmp_path, content):
    store = ClientStore(tmp_path)
    store.put(17, state(1))
    manifest = store.commit()
    path = tmp_path / manifest["17"]
    path.write_bytes(path.read_bytes()[:-1] if content is None else content)
    store.restore(manifest)
    with pytest.raises(RunError, match="client 17"):
        store.get(17)


@pytest.mark.parametrize("name", ["00000017-00.safetensors", "../secret.safetensors", None])
def test_restore_refuses_a_missing_file(tmp_path, name):
    store = ClientStore(tmp_path / "clients")
    store.put(1, state(1))
    store.commit()
    (tmp_path / "secret.safetensors").touch()
    with pytest.raises(RunError, match="client 17"):
        store.restore({"17": name})
    assert value(store.get(1)) == 1


actions = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.integers(0, 5), st.integers(0, 3)),
        st.tuples(st.just("drop"), st.integers(0, 5), st.just(0)),
        st.tuples(st.just("get"), st.integers(0, 5), st.just(0)),
        st.tuples(st.sampled_from(["commit", "back", "kill"]), st.just(0), st.just(0)),
    ),
    max_size=30,
)


@settings(max_examples=60)
@given(actions, st.integers(1, 4))
def test_a_store_behaves_like_a_dict_with_savepoints(tmp_path_factory, steps, capacity):
    folder = tmp_path_factory.mktemp("store")
    store, model = ClientStore(folder, capacity), {}
    saved = [({}, {}), ({}, {})]  # the last two (manifest, model)
    for action, client, number in steps:
        if action == "put":
            store.put(client, state(number))
            model[client] = number
        elif action == "drop":
            store.put(client, {})
            model.pop(client, None)
        elif action == "commit":
            saved = [saved[1], (store.commit(), dict(model))]
            store.sweep([manifest for manifest, _ in saved])
        elif action in {"back", "kill"}:
            store = ClientStore(folder, capacity)
            manifest, was = saved[0 if action == "back" else 1]
            store.restore(manifest)
            model = dict(was)
        assert value(store.get(client)) == model.get(client)


def test_killed_at_any_step_the_last_checkpoint_and_its_files_are_intact(tmp_path, monkeypatch):
    """A round is put, commit, checkpoint, prune, sweep; stop it at each system call in turn."""
    folder, points = tmp_path / "clients", tmp_path / "checkpoints"
    for stop in range(40):
        store, first, expected, manifests = ClientStore(folder, 2), 0, {}, []
        found = checkpoint.latest(points)
        if found:
            first, tree = checkpoint.number_of(found[0]), found[1]
            store.restore(tree["clients"])
            expected = tree["values"]
            manifests = [checkpoint.read(path)["clients"] for path in checkpoint.paths(points)]
        assert {str(c): value(store.get(c)) for c in range(4) if store.get(c)} == expected
        left = stop

        def step(real, *args):
            nonlocal left
            left -= 1
            if left < 0:
                raise Killed
            return real(*args)

        with monkeypatch.context() as patch:
            for name in ("fsync", "replace", "unlink"):
                real = getattr(os, name)
                patch.setattr(os, name, lambda *args, real=real, **_: step(real, *args))
            try:
                number = first + 1
                for client in range(4):
                    store.put(client, state(number * 10 + client))
                values = {str(client): number * 10 + client for client in range(4)}
                manifest = store.commit()
                checkpoint.save(points, number, {"clients": manifest, "values": values})
                checkpoint.prune(points, 2)
                store.sweep([*manifests[:1], manifest])
            except Killed:
                pass
    assert checkpoint.number_of(checkpoint.latest(points)[0]) > 5
