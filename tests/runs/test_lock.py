"""Locks on platforms and file systems other than those of Linux."""

import os

import pytest

from perdure.runs import directory as lock


class FakeWindows:
    """The one function of msvcrt that locks, as Windows documents it."""

    LK_NBLCK = 2

    def __init__(self):
        self.locked = False

    def locking(self, handle, mode, count):
        assert os.lseek(handle, 0, os.SEEK_CUR) > 100  # away from the process id
        if self.locked:
            raise OSError(36, "deadlock avoided")
        self.locked = True


def test_windows_locks_are_used_where_there_are_no_others(tmp_path, monkeypatch):
    fake = FakeWindows()
    monkeypatch.setattr(lock, "lock_module", {"msvcrt": fake, "fcntl": None}.get)
    first = lock.FileLock(tmp_path / "lock")
    first.acquire()
    assert first.holder() == str(os.getpid())
    with pytest.raises(lock.LockHeld):
        lock.FileLock(tmp_path / "lock").acquire()
    first.release()
    first.release()


def test_a_file_system_without_locks_is_accepted(tmp_path, monkeypatch):
    asked = []

    class NoLocks:
        LOCK_EX = LOCK_NB = 0

        def flock(self, *_):
            asked.append("flock")
            raise OSError(95, "not supported")

    monkeypatch.setattr(lock, "lock_module", {"fcntl": NoLocks()}.get)
    held = lock.FileLock(tmp_path / "lock")
    held.acquire()
    assert asked == ["flock"]
    assert held.holder() == str(os.getpid())
