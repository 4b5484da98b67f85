"""Check that this commit can be released, and build its wheel and source distribution.

    python tools/release.py [--dry-run] [--skip-tests]

Checked are: nothing is uncommitted, one version stands everywhere, the changelog has a section for
it, `make test` passes, and the wheel, built from the source distribution of the commit, says its
version in a new environment. The two files go to dist/. No tag is set: the command is printed.
"""

from __future__ import annotations

import argparse
import io
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import venv
from collections.abc import Sequence
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[1]
_BUILD = "import sys; from setuptools import build_meta; build_meta.build_{}(sys.argv[1])"


def main(arguments: Sequence[str] | None = None) -> None:
    """Check and build; a reason why the commit cannot be released is one sentence."""
    parser = argparse.ArgumentParser(description="Check and build a release.")
    parser.add_argument("--dry-run", action="store_true", help="leave nothing behind")
    parser.add_argument("--skip-tests", action="store_true", help="to try this script alone")
    options = parser.parse_args(arguments)
    check_clean(ROOT)
    version = common_version(ROOT)
    check_changelog(ROOT, version)
    if not options.skip_tests:
        subprocess.run(["make", "test"], cwd=ROOT, check=True)
    with tempfile.TemporaryDirectory() as folder:
        files = build(ROOT, Path(folder))
        check_wheel(ROOT, Path(folder), files[-1], version)
        if not options.dry_run:
            keep(files, ROOT / "dist")
    print(f"perdure {version} can be released; to tag it:")
    print(f"git tag -a v{version} -m 'perdure {version}' {_git(ROOT, 'rev-parse', 'HEAD')}")


def check_clean(root: Path) -> None:
    """Refuse a tree with changes or files that are not committed."""
    changed = _git(root, "status", "--porcelain")
    if changed:
        raise SystemExit(f"the tree must be clean, got {changed.splitlines()[0].strip()!r}")


def common_version(root: Path) -> str:
    """Return the version, which the package, its metadata and the citation must agree on."""
    module = (root / "src/perdure/core/version.py").read_text(encoding="utf-8")
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    citation = yaml.safe_load((root / "CITATION.cff").read_text(encoding="utf-8"))
    found = {
        "version.py": dict(re.findall(r'^(__version__) = "(.*)"$', module, re.M))["__version__"],
        "pyproject.toml": project["version"],
        "CITATION.cff": citation["version"],
    }
    if len(set(found.values())) > 1:
        listed = ", ".join(f"{version} in {name}" for name, version in found.items())
        raise SystemExit(f"the version must be the same everywhere, got {listed}")
    return str(project["version"])


def check_changelog(root: Path, version: str) -> None:
    """Refuse a changelog whose newest section is of another version, or empty."""
    text = (root / "CHANGELOG.md").read_text(encoding="utf-8")
    _, _, newest = text.partition("\n## ")
    title, _, body = newest.partition("\n")
    if title.split()[:1] != [version] or not body.partition("\n## ")[0].strip():
        raise SystemExit(f"CHANGELOG.md: must begin with a section of {version}, got {title!r}")


def build(root: Path, folder: Path) -> list[Path]:
    """Build a source distribution of the commit, and a wheel of what is in it; return both."""
    tree, dist = folder / "tree", folder / "dist"
    archive = subprocess.run(
        ["git", "archive", "--format=tar", "HEAD"], cwd=root, check=True, capture_output=True
    )
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as tar:
        tar.extractall(tree, filter="data")
    _python("-c", _BUILD.format("sdist"), str(dist), cwd=tree)
    (source,) = dist.glob("*.tar.gz")
    with tarfile.open(source) as tar:
        tar.extractall(folder / "source", filter="data")
    (unpacked,) = (folder / "source").iterdir()
    _python("-c", _BUILD.format("wheel"), str(dist), cwd=unpacked)
    (wheel,) = dist.glob("*.whl")
    return [source, wheel]


def check_wheel(root: Path, folder: Path, wheel: Path, version: str) -> None:
    """Install a wheel in a new environment, and run the command that it installs."""
    venv.create(folder / "env", with_pip=True)
    binaries = folder / "env" / "bin"
    install = ["-m", "pip", "install", "--quiet", "-c", str(root / "constraints.txt"), str(wheel)]
    subprocess.run([binaries / "python", *install], cwd=folder, check=True)
    done = subprocess.run(
        [binaries / "perdure", "--version"], cwd=folder, check=True, capture_output=True, text=True,
        env={"PATH": str(binaries)},
    )  # fmt: skip
    if done.stdout.strip() != f"perdure {version}":
        raise SystemExit(f"perdure --version: must be perdure {version}, got {done.stdout!r}")


def keep(files: Sequence[Path], folder: Path) -> None:
    """Copy the built files to a folder."""
    folder.mkdir(exist_ok=True)
    for file in files:
        print(shutil.copy(file, folder))


def _git(root: Path, *words: str) -> str:
    done = subprocess.run(["git", *words], cwd=root, check=True, capture_output=True, text=True)
    return done.stdout.strip()


def _python(*words: str, cwd: Path) -> None:
    done = subprocess.run([sys.executable, *words], cwd=cwd, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"the build failed:\n{done.stdout}{done.stderr}")


if __name__ == "__main__":
    main()
