"""Client states between rounds, on disk if they are too many for memory."""

from __future__ import annotations

import os
from collections import OrderedDict
from pathlib import Path
from typing import Any

from perdure.contract.method import Method
from perdure.core.errors import RunError, refuse
from perdure.core.files import hash_name, read_hashed, remove_temporaries, sync, write_atomic
from perdure.core.states import from_tree, to_tree
from perdure.core.trees import SUFFIX, Tensors, Tree, copy_tree, decode, encode

# ---- Conversion of a client's state and private parameters to the one tree that is stored

_PRIVATE = "private parameters"
"""Contains a space, so no field of a dataclass can have this name."""


def to_stored_tree(previous: Tree, state: Any, private: Tensors, method: Method) -> Tree:
    """Return the tree to store for a client.

    Raises:
        ContractError: `state` is of another type.

    """
    if state is not None and not isinstance(state, method.ClientState):
        expected = f"a {method.ClientState.__name__} (ClientState) or None"
        refuse("ClientResult.state", f"a {type(state).__name__}", expected)
    private = previous.get(_PRIVATE, {}) | private
    tree = _without_private(previous) if state is None else to_tree(state, "client state")
    return tree | ({_PRIVATE: private} if private else {})


def from_stored_tree(tree: Tree, method: Method) -> tuple[Any, Tensors]:
    """Return a client's state and private parameters; defaults if the tree is empty."""
    state = _without_private(tree)
    state_type = method.ClientState
    if not state:
        return state_type(), tree.get(_PRIVATE, {})
    return from_tree(state_type, state, "client state"), tree.get(_PRIVATE, {})


def _without_private(tree: Tree) -> Tree:
    return {name: value for name, value in tree.items() if name != _PRIVATE}


# ---- Storage of client states between rounds, on disk if they are too many for memory


class ClientStore:
    """The stored state of each client.

    Every version of a state is a separate file, named by its hash and never changed. So the files
    that a checkpoint's manifest names stay intact until `sweep` deletes those that no checkpoint
    needs. Within a round the order is: `commit`, save the checkpoint with the manifest, `sweep`.

    A tree from `get` must not be changed in place; use `put`.
    """

    def __init__(self, folder: Path | None, capacity: int = 256) -> None:
        self._folder = folder
        self._capacity = max(1, capacity)
        self._memory: OrderedDict[int, Tree] = OrderedDict()  # least recently used first
        self._changed: set[int] = set()  # in memory and not on disk
        self._files: dict[int, str] = {}

    def get(self, client: int) -> Tree:
        """Return the stored tree of a client ({} if there is none), with its tensors on the CPU."""
        if client not in self._memory:
            if client not in self._files:
                return {}
            self._remember(client, self._read(client))
        self._memory.move_to_end(client)
        return self._memory[client]

    def clients(self) -> list[int]:
        """Return the indices of the clients with a stored state, sorted."""
        return sorted({*self._memory, *self._files})

    def sizes(self) -> list[int]:
        """Return the bytes of the stored state of each of `clients()`, as on disk."""
        return [self._size(client) for client in self.clients()]

    def put(self, client: int, tree: Tree) -> None:
        """Store a copy of a tree for a client; an empty tree deletes its state."""
        if tree:
            self._changed.add(client)
            self._remember(client, copy_tree(tree))
        else:
            self._memory.pop(client, None)
            self._files.pop(client, None)
            self._changed.discard(client)

    def commit(self) -> Tree:
        """Write all changed states and return the manifest {client: file name} for a checkpoint."""
        if self._folder is None or not (self._changed or self._files):
            return {}
        if self._changed:
            for client in sorted(self._changed):
                self._write(client)
            sync(self._folder)
        return {str(client): name for client, name in self._files.items()}

    def check(self, manifest: Tree) -> None:
        """Check the files that a manifest names.

        Raises:
            OSError: A file cannot be read.
            ValueError: A file is missing, truncated or altered.

        """
        if reason := self._missing(manifest):
            raise ValueError(reason)
        for client, name in manifest.items() if self._folder else ():
            try:
                read_hashed(self._folder / name)
            except ValueError as error:
                raise ValueError(f"the state of client {client}, {name}: {error}") from None

    def restore(self, manifest: Tree) -> None:
        """Replace all states by those that a manifest names; RunError if a file is missing."""
        if reason := self._missing(manifest):
            raise RunError(reason)
        self._files = {int(client): str(name) for client, name in manifest.items()}
        self._memory.clear()
        self._changed.clear()

    def sweep(self, manifests: list[Tree]) -> None:
        """Delete the files that neither these manifests nor the current states need."""
        if self._folder is None or not self._folder.is_dir():
            return
        needed = {name for manifest in manifests for name in manifest.values()}
        for name in self._names() - needed - set(self._files.values()):
            (self._folder / name).unlink(missing_ok=True)
        remove_temporaries(self._folder)

    def _size(self, client: int) -> int:
        if client in self._files and client not in self._changed:
            assert self._folder is not None
            return (self._folder / self._files[client]).stat().st_size
        return len(encode(self._memory[client]))

    def _missing(self, manifest: Tree) -> str | None:
        """Return a sentence about the first missing file of a manifest, or None."""
        names = self._names()
        for client, name in manifest.items():
            if name not in names:
                return f"the state of client {client} is lost: no file {name}"
        return None

    def _names(self) -> set[str]:
        if self._folder is None or not self._folder.is_dir():
            return set()
        return {name for name in os.listdir(self._folder) if name.endswith(SUFFIX)}

    def _remember(self, client: int, tree: Tree) -> None:
        self._memory[client] = tree
        self._memory.move_to_end(client)
        while self._folder is not None and len(self._memory) > self._capacity:
            oldest = next(iter(self._memory))
            if oldest in self._changed:
                self._write(oldest)
            del self._memory[oldest]

    def _write(self, client: int) -> None:
        assert self._folder is not None
        self._folder.mkdir(parents=True, exist_ok=True)
        data = encode(self._memory[client])
        name = hash_name(client, data, SUFFIX)
        write_atomic(self._folder / name, data, sync_folder=False)
        self._files[client] = name
        self._changed.discard(client)

    def _read(self, client: int) -> Tree:
        assert self._folder is not None
        path = self._folder / self._files[client]
        try:
            return decode(read_hashed(path))
        except (OSError, ValueError) as error:
            raise RunError(
                f"the state of client {client} cannot be read: {path}: {error}"
            ) from error
