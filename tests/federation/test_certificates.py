"""Certificates that end: a warning from 30 days before, a sentence afterwards, and new ones."""

from __future__ import annotations

import socket
import ssl
import threading
from datetime import UTC, datetime, timedelta

import pytest
from cryptography import x509

from perdure.cli.main import main
from perdure.core.errors import UserError
from perdure.federation.admin import keys
from perdure.federation.admin import keys as certificates
from perdure.federation.admin.folders import NodeFolder, ServerFolder
from perdure.federation.admin.keys import check_node_certificates, check_server_certificates


@pytest.fixture
def make_home(tmp_path, monkeypatch):
    """Return a function that creates a federation whose server certificate ends after some days."""

    def make(days: float):
        home = tmp_path / "fed"
        assert main(["federation", "init", str(home), "--nodes", "1", "--host", "localhost"]) == 0
        monkeypatch.setattr(keys, "DAYS", days)
        hosts = certificates.certified_hosts(home / "server")
        keys.write_server_certificate(home / "server", home / "authority", hosts)
        monkeypatch.setattr(keys, "DAYS", 825)
        return home

    return make


@pytest.mark.parametrize(("days", "is_warned"), [(31, False), (29.5, True), (0.5, True)])
def test_a_server_is_warned_from_30_days_before(make_home, caplog, days, is_warned):
    check_server_certificates(ServerFolder.read(make_home(days) / "server"))
    assert ("perdure federation renew" in caplog.text) == is_warned


def test_a_server_whose_certificate_has_ended_is_not_started(make_home, capsys):
    home = make_home(-0.01)
    assert main(["federation", "server", str(home / "server")]) == 2
    sentence = capsys.readouterr().err
    assert "server.pem: ended on" in sentence
    assert "perdure federation renew" in sentence


def test_a_new_certificate_has_the_names_of_the_last(make_home, capsys, caplog):
    home = make_home(-0.01)
    before = certificates.certified_hosts(home / "server")
    words = ["federation", "renew", str(home / "server"), "--authority"]
    assert main([*words, str(home / "node-0")]) == 2
    assert "--authority: must be the folder authority/" in capsys.readouterr().err
    assert main([*words, str(home / "authority")]) == 0
    assert certificates.certified_hosts(home / "server") == before
    check_server_certificates(ServerFolder.read(home / "server"))
    assert caplog.text == ""
    read = x509.load_pem_x509_certificate((home / "server" / "server.pem").read_bytes())
    assert read.not_valid_after_utc > datetime.now(UTC) + timedelta(days=800)
    assert (home / "server" / "server.key").stat().st_mode & 0o777 == 0o600


def test_a_file_that_is_no_certificate(make_home):
    home = make_home(100)
    (home / "server" / "ca.pem").write_text("text")
    with pytest.raises(UserError, match=r"ca\.pem: must be a certificate"):
        check_server_certificates(ServerFolder.read(home / "server"))


def test_a_server_that_runs_for_years_is_warned_again(make_home, caplog, monkeypatch):
    home = make_home(31)
    server, ended = ServerFolder.read(home / "server"), threading.Event()
    monkeypatch.setattr(keys, "DAYS", -0.01)
    monkeypatch.setattr(certificates.log, "error", lambda *words: ended.set())

    def check():
        check_server_certificates(server)
        hosts = certificates.certified_hosts(home / "server")
        keys.write_server_certificate(home / "server", home / "authority", hosts)

    with certificates.checked_daily(check, seconds=0.01):
        assert caplog.text == ""
        assert ended.wait(60)


@pytest.fixture
def serve():
    """Return a function that serves one TLS connection and returns the port."""
    stop = []

    def start(folder) -> int:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(folder / "server.pem", folder / "server.key")
        listener = socket.create_server(("127.0.0.1", 0))

        def answer() -> None:
            connection, _ = listener.accept()
            try:
                context.wrap_socket(connection, server_side=True).close()
            except OSError:
                connection.close()

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        stop.append((listener, thread))
        return listener.getsockname()[1]

    yield start
    for listener, thread in stop:
        thread.join(20)
        listener.close()


def node_of(home, port: int) -> NodeFolder:
    return NodeFolder(home / "node-0", 0, f"127.0.0.1:{port}")


def test_a_node_is_warned_of_its_servers_certificate(make_home, serve, caplog):
    home = make_home(20)
    check_node_certificates(node_of(home, serve(home / "server")))
    assert "the certificate of the server 127.0.0.1:" in caplog.text


def test_a_node_of_a_server_whose_certificate_has_ended(make_home, serve):
    home = make_home(-0.01)
    with pytest.raises(UserError, match="has ended; renew it on the server"):
        check_node_certificates(node_of(home, serve(home / "server")))


def test_a_node_may_start_before_its_server(make_home, caplog):
    home = make_home(100)
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # bound and not listening: connections are refused
        check_node_certificates(node_of(home, unused.getsockname()[1]))
    assert caplog.text == ""


@pytest.mark.parametrize(
    ("path", "check", "folder"),
    [
        ("server/server.key", check_server_certificates, ServerFolder),
        ("server/server.pem", check_server_certificates, ServerFolder),
        ("node-0/node.key", check_node_certificates, NodeFolder),
        ("node-0/ca.pem", check_node_certificates, NodeFolder),
    ],
)
def test_a_file_that_is_missing_is_named(make_home, path, check, folder):
    file = make_home(100) / path
    file.unlink()
    with pytest.raises(UserError, match=f"{file.name}: cannot be read .No such file"):
        check(folder.read(file.parent))
