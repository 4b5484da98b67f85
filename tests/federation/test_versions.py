"""Server and nodes of different versions refuse each other."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("flwr")
from flwr.app import ConfigRecord
from packaging.version import Version

from perdure.core.version import __version__
from perdure.federation import apps
from perdure.federation.messages import BadMessage
from perdure.federation.server import transport
from perdure.federation.server.transport import make_content, read_reply

MAJOR, MINOR, PATCH = Version(__version__).release
OTHER = [
    f"{MAJOR}.{MINOR}.{PATCH + 1}", f"{MAJOR}.{MINOR + 1}.0", f"{MAJOR + 1}.{MINOR}.0",
    f"{__version__}1", f"{__version__}rc1", "x", "",
]  # fmt: skip


@pytest.fixture
def message_of(monkeypatch):
    """Return a function that makes a message as another version writes it."""

    def make(version: str | None) -> SimpleNamespace:
        monkeypatch.setattr(transport, "__version__", version or "")
        content = make_content("", b"body")
        monkeypatch.setattr(transport, "__version__", __version__)
        if version is None:
            content["header"] = ConfigRecord({"header": ""})
        return SimpleNamespace(content=content, has_error=lambda: False)

    return make


def test_equal_versions_work_together(message_of):
    assert read_reply(3, message_of(__version__), 100) == b"body"
    apps.check_version(message_of(__version__))


@pytest.mark.parametrize("version", [*OTHER, None])
def test_the_server_names_a_node_of_another_version(message_of, version):
    failure = read_reply(3, message_of(version), 100)
    expected = f"node-3: must run perdure {__version__} as the server, got "
    assert failure.reason == expected + ("none" if version is None else version)
    assert failure.answered


@pytest.mark.parametrize("version", [*OTHER, None])
def test_a_node_refuses_a_server_of_another_version(message_of, version):
    with pytest.raises(BadMessage, match=f"the server must run perdure {__version__}"):
        apps.check_version(message_of(version))
