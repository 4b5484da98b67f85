"""What clients keep between rounds, on disk as soon as it is too much for memory."""

from __future__ import annotations

import os
from collections import OrderedDict
from pathlib import Path

from perdure.core.encoding import SUFFIX, copy_tree, decode, encode
from perdure.core.errors import RunError
from perdure.core.files import hash_name, read_hashed, remove_temporaries, sync, write_atomic
from perdure.core.trees import Tree


class ClientStore:
    """The kept state of each client, of which at most `capacity` are in memory.

    Every version of a state is a separate file, named by its hash and never changed. So files
    that a checkpoint's manifest names stay intact until `sweep` learns that no checkpoint needs
    them; the order of a round is commit, save the checkpoint with the manifest, sweep. Without a
    folder everything stays in memory and `capacity` and manifests mean nothing.

    A tree from `get` is to be read, not changed in place: `put` is how a state changes.
    """

    def __init__(self, folder: Path | None, capacity: int = 256) -> None:
        self._folder = folder
        self._capacity = max(1, capacity)
        self._memory: OrderedDict[int, Tree] = OrderedDict()  # least recently used first
        self._changed: set[int] = set()  # in memory and not on disk
        self._files: dict[int, str] = {}

    def get(self, client: int) -> Tree:
        """Return the state of a client ({} if it has none), with its tensors on the CPU."""
        if client not in self._memory:
            if client not in self._files:
                return {}
            self._remember(client, self._read(client))
        self._memory.move_to_end(client)
        return self._memory[client]

    def clients(self) -> list[int]:
        """Return the clients that keep something, in the order of their index."""
        return sorted({*self._memory, *self._files})

    def put(self, client: int, tree: Tree) -> None:
        """Keep a copy of a tree for a client; an empty tree means that it keeps nothing."""
        if tree:
            self._changed.add(client)
            self._remember(client, copy_tree(tree))
        else:
            self._memory.pop(client, None)
            self._files.pop(client, None)
            self._changed.discard(client)

    def commit(self) -> Tree:
        """Write every changed state; the manifest {client: file name} belongs in the checkpoint."""
        if self._folder is None or not (self._changed or self._files):
            return {}
        if self._changed:
            for client in sorted(self._changed):
                self._write(client)
            sync(self._folder)
        return {str(client): name for client, name in self._files.items()}

    def check(self, manifest: Tree) -> None:
        """OSError or ValueError if a state that a manifest names is lost, truncated or altered."""
        if lost := self._lost(manifest):
            raise ValueError(lost)
        for client, name in manifest.items() if self._folder else ():
            try:
                read_hashed(self._folder / name)
            except ValueError as error:
                raise ValueError(f"the state of client {client}, {name}: {error}") from None

    def restore(self, manifest: Tree) -> None:
        """Go back to the states that a manifest names."""
        if lost := self._lost(manifest):
            raise RunError(lost)
        self._files = {int(client): str(name) for client, name in manifest.items()}
        self._memory.clear()
        self._changed.clear()

    def sweep(self, manifests: list[Tree]) -> None:
        """Delete the files that neither these manifests nor the present states name."""
        if self._folder is None or not self._folder.is_dir():
            return
        needed = {name for manifest in manifests for name in manifest.values()}
        for name in self._names() - needed - set(self._files.values()):
            (self._folder / name).unlink(missing_ok=True)
        remove_temporaries(self._folder)

    def _lost(self, manifest: Tree) -> str | None:
        """Return a sentence on the first missing file of a manifest."""
        there = self._names()
        for client, name in manifest.items():
            if name not in there:
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
