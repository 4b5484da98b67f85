"""Files are complete or absent."""

import hashlib
import os

import pytest

from perdure.core import files


class Killed(BaseException):
    """Simulates the end of the process at some step."""


def killer(*_, **__):
    raise Killed


def test_writing_creates_and_replaces_a_file(tmp_path):
    path = tmp_path / "a"
    files.write_atomic(path, b"one")
    files.write_atomic(path, b"two")
    assert path.read_bytes() == b"two"
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize("step", ["replace", "fsync"])
def test_a_failure_before_the_rename_leaves_the_old_file(tmp_path, monkeypatch, step):
    path = tmp_path / "a"
    files.write_atomic(path, b"old")
    with monkeypatch.context() as patch:
        patch.setattr(os, step, killer)
        with pytest.raises(Killed):
            files.write_atomic(path, b"new")
    assert path.read_bytes() == b"old"
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_bytes_reach_the_disk_before_the_name_does(tmp_path, monkeypatch):
    steps = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda handle: (steps.append("fsync"), fsync(handle)))
    monkeypatch.setattr(os, "replace", lambda a, b: (steps.append("replace"), replace(a, b)))
    files.write_atomic(tmp_path / "a", b"x")
    assert steps[:2] == ["fsync", "replace"]


def test_a_platform_that_cannot_sync_folders_raises_no_error(tmp_path, monkeypatch):
    asked = []

    def refuse(path, *_, **__):
        asked.append(path)
        raise PermissionError

    monkeypatch.setattr(os, "open", refuse)
    files.sync(tmp_path)
    assert asked == [tmp_path]


def test_hashes_equal_those_of_hashlib(tmp_path):
    data = bytes(range(256)) * 999
    (tmp_path / "a").write_bytes(data)
    expected = hashlib.sha256(data).hexdigest()
    assert files.sha256(data) == files.sha256_file(tmp_path / "a") == expected
    assert files.hash_name(7, data, ".bin") == f"00000007-{expected[:32]}.bin"


@pytest.mark.parametrize("content", [b"", b"tru", b"truthy", b"truxh"])
def test_content_that_does_not_match_its_name_is_refused(tmp_path, content):
    path = tmp_path / files.hash_name(1, b"truth", ".bin")
    path.write_bytes(b"truth")
    assert files.read_hashed(path) == b"truth"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="truncated or altered"):
        files.read_hashed(path)


def test_only_temporary_files_are_removed(tmp_path):
    for name in (".a.123.tmp", "a", ".lock", "b.tmp"):
        (tmp_path / name).touch()
    files.remove_temporaries(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "a", "b.tmp"]
