"""Folders of `federation init`: keys that only their owner reads, certificates that verify."""

from __future__ import annotations

import ssl
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key
from cryptography.x509.verification import PolicyBuilder, Store

from perdure.cli.main import main
from perdure.core.errors import RunError, UserError
from perdure.federation.admin import child_scripts
from perdure.federation.admin.folders import (
    NodeFolder,
    ServerFolder,
    create_federation,
    node_name,
    node_number,
)
from perdure.federation.admin.keys import write_authority, write_server_certificate
from perdure.federation.admin.submission import unfinished_submissions


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    path = tmp_path_factory.mktemp("new") / "fed"
    arguments = ["--nodes", "2", "--host", "fl.example.org", "--port", "9999"]
    assert main(["federation", "init", str(path), *arguments]) == 0
    return path


def test_private_keys_are_private(home):
    for name in ("authority/ca.key", "server/server.key", "node-0/node.key", "node-1/node.key"):
        assert stat.S_IMODE((home / name).stat().st_mode) == 0o600
    assert not list(home.glob("node-*/server.key"))
    assert not (home / "server" / "ca.key").exists()


@pytest.mark.parametrize("name", ["fl.example.org", "localhost"])
def test_the_certificate_verifies_for_the_names_of_the_server(home, name):
    def read(path):
        return x509.load_pem_x509_certificate((home / path).read_bytes())

    store = Store([read("node-0/ca.pem")])
    verifier = PolicyBuilder().store(store).build_server_verifier(x509.DNSName(name))
    verifier.verify(read("server/server.pem"), [])
    context = ssl.create_default_context(cafile=str(home / "node-1" / "ca.pem"))
    assert context.cert_store_stats()["x509_ca"] == 1


def test_another_authority_does_not_verify_the_certificate(home, tmp_path):
    write_authority(tmp_path)
    other = x509.load_pem_x509_certificate((tmp_path / "ca.pem").read_bytes())
    certificate = x509.load_pem_x509_certificate((home / "server" / "server.pem").read_bytes())
    verifier = (
        PolicyBuilder().store(Store([other])).build_server_verifier(x509.DNSName("localhost"))
    )
    with pytest.raises(x509.verification.VerificationError):
        verifier.verify(certificate, [])
    write_server_certificate(tmp_path, tmp_path, ["10.1.2.3"])


def test_the_server_has_each_nodes_public_key(home):
    for number in range(2):
        private = load_ssh_private_key((home / node_name(number) / "node.key").read_bytes(), None)
        public = load_ssh_public_key((home / f"server/nodes/node-{number}.pub").read_bytes())
        assert isinstance(private, ec.EllipticCurvePrivateKey)
        assert private.curve.name == "secp384r1"
        assert private.public_key() == public


def test_folders_are_read_back(home):
    server, node = ServerFolder.read(home / "server"), NodeFolder.read(home / "node-1")
    assert (server.port, server.nodes) == (9999, 2)
    assert (node.number, node.server) == (1, "fl.example.org:9999")
    assert [name for name, _ in server.public_keys()] == ["node-0", "node-1"]
    assert "serves nodes only" in (home / "README.md").read_text()
    assert "0.0.0.0" in (home / "server" / "start.sh").read_text()
    with pytest.raises(UserError, match=r"must be the folder of a node, but it has no node\.yaml"):
        NodeFolder.read(home / "server")


@pytest.mark.parametrize(("name", "number"), [("node-7", 7), ("node-x", None), ("", None)])
def test_the_index_of_a_node_is_read_from_its_name(name, number):
    assert node_number(name) == number


def test_a_folder_that_is_not_empty_is_left_alone(home, capsys):
    assert main(["federation", "init", str(home)]) == 2
    assert "must be a folder that is new or empty" in capsys.readouterr().err


def test_a_mistake_is_reported_in_one_sentence(home, tmp_path, capsys):
    config = tmp_path / "c.yaml"
    config.write_text(yaml.safe_dump({"clients": {"count": 5}}))
    for arguments, sentence in [
        (["federation", "server", str(tmp_path)], "must be the folder of a server"),
        (["federation", "node", str(home / "node-0"), "--data", str(tmp_path / "none")], "--data"),
        (["federation", "submit", str(config), "--server", str(home / "server")], "at most 2"),
        (["federation", "init", str(tmp_path / "x"), "--host", "a b"], "--host"),
        (
            ["federation", "server", str(home / "server"), "--host", "no.such.invalid"],
            "an address of this",
        ),
        (
            ["federation", "server", str(home / "server"), "--host", "192.0.2.1"],
            "an address of this machine",
        ),
    ]:
        assert main(arguments) == 2
        assert sentence in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


def test_a_run_that_could_not_be_started_is_not_resumed_later(home, tmp_path, capsys, monkeypatch):
    config = tmp_path / "c.yaml"
    config.write_text(yaml.safe_dump({"clients": {"count": 2}}))
    place = ServerFolder.read(home / "server")
    seen = []

    def no_server(folder, submission):
        seen.extend(unfinished_submissions(folder))
        raise RunError("no reply")

    monkeypatch.setattr("perdure.cli.federation.start_submission", no_server)
    assert main(["federation", "submit", str(config), "--server", str(home / "server")]) == 1
    assert "is perdure federation server running? (no reply)" in capsys.readouterr().err
    assert len(seen) == 1
    assert unfinished_submissions(place) == []


def test_a_watched_command_ends_with_the_process_that_started_it(tmp_path):
    flag = tmp_path / "pid"
    script = f"import os,time;open({str(flag)!r},'w').write(str(os.getpid()));time.sleep(600)"
    process = subprocess.Popen(
        [sys.executable, child_scripts.__file__, "watch", sys.executable, "-c", script],
        stdin=subprocess.PIPE,
    )
    while not (flag.exists() and flag.read_text()):
        time.sleep(0.05)
    assert process.stdin is not None
    process.stdin.close()  # as when the parent is killed
    process.wait(60)
    assert not Path(f"/proc/{flag.read_text()}/cmdline").exists() or sys.platform != "linux"


def test_folders_with_keys_are_for_their_owner_alone(tmp_path):
    create_federation(tmp_path / "home", 1, "localhost", 9410)
    for name in ("authority", "server", "node-0"):
        assert (tmp_path / "home" / name).stat().st_mode & 0o077 == 0
