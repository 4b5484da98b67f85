"""A server, or a person who can submit runs, sends nodes an app with code in it."""

from __future__ import annotations

import io
import zipfile

import pytest
from flwr.cli.build import build_fab_from_disk

from perdure.config import parse
from perdure.core.files import sha256
from perdure.federation.admin.folders import ServerFolder
from perdure.federation.admin.submission import check_app, create_submission
from perdure.federation.messages import BadMessage
from perdure.federation.node.policy import TRIAL, NodePolicy

METHOD = "from perdure.contract import Method\n\n\nclass Theirs(Method):\n    pass\n"


def app(tmp_path, config, folder=None) -> bytes:
    """Return the app of a submission, as Flower sends it."""
    home = ServerFolder(tmp_path / "server", 9410, 3)
    submission = create_submission(home, parse(config), tmp_path / "out", folder)
    return build_fab_from_disk(submission.path / "perdure-run")


def with_file(content: bytes, name: str, data: bytes) -> bytes:
    """Return an app with a file added or replaced."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        files = {each: archive.read(each) for each in archive.namelist()}
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        for each, value in {**files, name: data}.items():
            archive.writestr(each, value)
    return made.getvalue()


def project(content: bytes) -> bytes:
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        return archive.read("pyproject.toml")


def test_a_run_of_built_in_parts_has_no_code(tmp_path):
    check_app(app(tmp_path, {}), NodePolicy())


@pytest.mark.parametrize("name", ["evil.py", "perdure/__init__.py", "evil.so", "x.pth", "a.pyc"])
def test_a_file_that_the_owner_did_not_list_is_refused(name, tmp_path):
    content = with_file(app(tmp_path, {}), name, b"print('here')")
    with pytest.raises(BadMessage, match=f"the SHA-256 of '{name}' must be listed, got [0-9a-f]+"):
        check_app(content, NodePolicy(code=(sha256(b"another"),)))
    check_app(content, TRIAL)


def test_a_listed_file_is_accepted_and_a_changed_one_is_not(tmp_path, monkeypatch):
    (tmp_path / "submitted_theirs.py").write_text(METHOD)
    monkeypatch.syspath_prepend(str(tmp_path))
    config = {"method": {"kind": "submitted_theirs.Theirs"}}
    content, policy = app(tmp_path, config, tmp_path), NodePolicy(code=(sha256(METHOD.encode()),))
    check_app(content, policy)
    with pytest.raises(BadMessage, match="must be listed"):
        check_app(with_file(content, "submitted_theirs.py", METHOD.encode() + b"#"), policy)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b"perdure.federation.apps:client", b"os:system"),
        (b"dependencies = []", b'dependencies = ["evil"]'),
        (b"[tool.flwr.app.components]", b"[other]"),
    ],
)
def test_another_entry_point_or_dependency_is_refused(old, new, tmp_path):
    content = app(tmp_path, {})
    changed = project(content).replace(old, new)
    assert changed != project(content)
    with pytest.raises(BadMessage, match=r"the app must start|cannot be read"):
        check_app(with_file(content, "pyproject.toml", changed), NodePolicy())


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 nothing", bytes(1000)])
def test_what_is_no_app_is_refused(content):
    with pytest.raises(BadMessage, match="the app cannot be read"):
        check_app(content, NodePolicy())


def test_an_app_that_unpacks_to_too_much_is_refused(tmp_path):
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("LICENSE", bytes(20 << 20))
    with pytest.raises(BadMessage, match="must have at most"):
        check_app(content.getvalue(), NodePolicy())
