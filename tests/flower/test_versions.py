"""Server and nodes of different versions: the same minor version works, any other is refused."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("flwr")
from flwr.app import ConfigRecord

from perdure.core.version import __version__, has_same_minor
from perdure.flower import apps, transport
from perdure.flower.protocol import BadMessage
from perdure.flower.transport import _read_reply, make_content

MAJOR, MINOR = map(int, __version__.split(".")[:2])
SAME = [f"{MAJOR}.{MINOR}.99", f"{MAJOR}.{MINOR}.0rc1"]
OTHER = [f"{MAJOR}.{MINOR + 1}.0", f"{MAJOR + 1}.{MINOR}.0", f"{MAJOR}.{MINOR}1.0", "x"]


@pytest.fixture
def message_of(monkeypatch):
    """Return a function that makes a message as another version writes it."""

    def make(version: str | None) -> SimpleNamespace:
        monkeypatch.setattr(transport, "__version__", version or "")
        content = make_content("", b"body")
        monkeypatch.setattr(transport, "__version__", __version__)
        if version is None:  # as of 0.4.0, which did not send it
            content["head"] = ConfigRecord({"head": ""})
        return SimpleNamespace(content=content, has_error=lambda: False)

    return make


@pytest.mark.parametrize("version", [__version__, *SAME])
def test_releases_of_one_minor_version_work_together(message_of, version):
    assert has_same_minor(version)
    assert _read_reply(3, message_of(version), 100) == b"body"
    apps._check_version(message_of(version))


@pytest.mark.parametrize("version", [*OTHER, None])
def test_the_server_names_a_node_of_another_version(message_of, version):
    failure = _read_reply(3, message_of(version), 100)
    expected = f"node-3: must run perdure {__version__} as the server, got "
    assert failure.reason == expected + (version or "an earlier version")
    assert failure.answered


@pytest.mark.parametrize("version", [*OTHER, None])
def test_a_node_refuses_a_server_of_another_version(message_of, version):
    with pytest.raises(BadMessage, match=f"the server must run perdure {__version__}"):
        apps._check_version(message_of(version))
