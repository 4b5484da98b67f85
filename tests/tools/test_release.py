"""What tools/release.py refuses before it builds anything."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

import release

ROOT = release.ROOT
VERSIONED = ("CHANGELOG.md", "CITATION.cff", "pyproject.toml", "src/perdure/core/version.py")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A repository with the files of this one that name the version."""
    for name in VERSIONED:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "add", ".")
    git(tmp_path, "-c", "user.name=n", "-c", "user.email=n@n", "commit", "--quiet", "-m", "all")
    return tmp_path


def git(folder: Path, *words: str) -> None:
    subprocess.run(["git", *words], cwd=folder, check=True)


def change(path: Path, old: str, new: str) -> None:
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new, 1), encoding="utf-8")


def test_a_good_tree_is_accepted(tree: Path) -> None:
    release.check_clean(tree)
    release.check_changelog(tree, release.common_version(tree))


@pytest.mark.parametrize("name", ["pyproject.toml", "new.txt"])
def test_what_is_not_committed_is_refused(
    tree: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (tree / name).open("a") as file:
        file.write("\n")
    monkeypatch.setattr(release, "ROOT", tree)
    with pytest.raises(SystemExit, match=f"the tree must be clean, got '.*{name}'"):
        release.main(["--dry-run", "--skip-tests"])


@pytest.mark.parametrize("name", VERSIONED[1:])
def test_versions_that_differ_are_refused(tree: Path, name: str) -> None:
    change(tree / name, release.common_version(tree), "9.9.9")
    with pytest.raises(SystemExit, match=rf"must be the same .*9\.9\.9 in {Path(name).name}"):
        release.common_version(tree)


@pytest.mark.parametrize("newer", ["## 9.9.9\n\n- All.\n\n## ", "## Unreleased\n\n## "])
def test_a_changelog_without_the_version_is_refused(tree: Path, newer: str) -> None:
    change(tree / "CHANGELOG.md", "## ", newer)
    with pytest.raises(SystemExit, match=r"CHANGELOG\.md: must begin with a section of"):
        release.check_changelog(tree, release.common_version(tree))


def test_an_empty_section_is_refused(tree: Path) -> None:
    version = release.common_version(tree)
    (tree / "CHANGELOG.md").write_text(f"# Changelog\n\n## {version}\n\n## 0.0.1\n\n- Things.\n")
    with pytest.raises(SystemExit, match="must begin with a section"):
        release.check_changelog(tree, version)


def test_the_changelog_is_one_page() -> None:
    assert len((ROOT / "CHANGELOG.md").read_text(encoding="utf-8").splitlines()) <= 60
