"""The end of certificates: a warning before it, a sentence after it, and a new certificate."""

from __future__ import annotations

import logging
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509

from perdure.core.errors import UserError, bad_value
from perdure.flower.folders import NodeFolder, ServerFolder
from perdure.flower.keys import write_server_certificate

log = logging.getLogger(__name__)
_WARNING = timedelta(days=30)
"""Time before the end of a certificate from which it is warned of."""
_CONNECT_SECONDS = 10.0
_EXPIRED = 10
"""OpenSSL's code for a certificate that has ended."""
_RENEW = "renew it on the server: perdure federation renew DIR --authority DIR"
_DAY_SECONDS = 86_400.0
_NEW_AUTHORITY = "create new folders with perdure federation init, since all of them hold it"


@contextmanager
def checked_daily(check: Callable[[], None], seconds: float = _DAY_SECONDS) -> Iterator[None]:
    """Check certificates now, and again every day while the block runs.

    Args:
        check: Checks them. What it raises later is logged, since connections that exist remain.
        seconds: Time between two checks.
    """
    check()
    ended = threading.Event()

    def repeat() -> None:
        while not ended.wait(seconds):
            try:
                check()
            except UserError as error:
                log.error("%s", error)

    threading.Thread(target=repeat, daemon=True).start()
    try:
        yield
    finally:
        ended.set()


def check_server_certificates(folder: ServerFolder) -> None:
    """Warn of certificates in a server's folder that end soon.

    Raises:
        UserError: One has ended, or a file is missing.
    """
    _content(folder.path / "server.key")
    check_certificate(folder.path / "server.pem", _RENEW)
    check_certificate(folder.path / "ca.pem", _NEW_AUTHORITY)


def check_node_certificates(folder: NodeFolder) -> None:
    """Warn of certificates of a node's folder and of its server that end soon.

    A server that cannot be reached is not an error here: it may start later.

    Raises:
        UserError: One has ended, or a file is missing.
    """
    _content(folder.path / "node.key")
    check_certificate(folder.path / "ca.pem", _NEW_AUTHORITY)
    host, _, port = folder.server.rpartition(":")
    context = ssl.create_default_context(cafile=str(folder.path / "ca.pem"))
    try:
        with (
            socket.create_connection((host.strip("[]"), int(port)), _CONNECT_SECONDS) as plain,
            context.wrap_socket(plain, server_hostname=host.strip("[]")) as connection,
        ):
            certificate = connection.getpeercert(binary_form=True) or b""
    except ssl.SSLCertVerificationError as error:
        if error.verify_code == _EXPIRED:
            message = f"the certificate of the server {folder.server} has ended; {_RENEW}"
            raise UserError(message) from None
        return  # the node's process says what is wrong with it
    except (OSError, ValueError):
        return
    end = x509.load_der_x509_certificate(certificate).not_valid_after_utc
    _check_end(f"the certificate of the server {folder.server}", end, _RENEW)


def check_certificate(path: Path, remedy: str) -> None:
    """Warn of a certificate that ends soon, and refuse one that has ended.

    Args:
        path: The certificate.
        remedy: What to do, for the sentence.

    Raises:
        UserError: It has ended, or is none.
    """
    try:
        end = x509.load_pem_x509_certificate(_content(path)).not_valid_after_utc
    except ValueError:
        raise bad_value(str(path), "another file", "a certificate in PEM format") from None
    _check_end(str(path), end, remedy)


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None


def _check_end(name: str, end: datetime, remedy: str) -> None:
    left = end - datetime.now(UTC)
    if left <= timedelta():
        raise UserError(f"{name}: ended on {end:%Y-%m-%d}; {remedy}")
    if left <= _WARNING:
        log.warning("%s ends on %s, in %d days; %s", name, f"{end:%Y-%m-%d}", left.days, remedy)


def renew_certificate(folder: ServerFolder, authority: Path) -> None:
    """Write a new key and certificate of a server, for the names of the last one.

    Args:
        folder: The server's folder.
        authority: The folder with the key that certifies servers.

    Raises:
        UserError: It is not the folder of this federation's authority.
    """
    try:
        is_same = (authority / "ca.pem").read_bytes() == (folder.path / "ca.pem").read_bytes()
        (authority / "ca.key").read_bytes()
    except OSError:
        is_same = False
    if not is_same:
        expected = "the folder authority/ that init wrote for this federation"
        raise bad_value("--authority", str(authority), expected)
    write_server_certificate(folder.path, authority, certified_hosts(folder.path))


def certified_hosts(folder: Path) -> list[str]:
    """Return the names and addresses for which the certificate of a server is valid."""
    certificate = x509.load_pem_x509_certificate((folder / "server.pem").read_bytes())
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    addresses = [str(address) for address in names.get_values_for_type(x509.IPAddress)]
    return [*names.get_values_for_type(x509.DNSName), *addresses]
