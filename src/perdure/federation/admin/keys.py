"""The keys and certificates of a federation: created, checked before their end, renewed."""

from __future__ import annotations

import ipaddress
import logging
import os
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from perdure.core.errors import UserError, bad_value
from perdure.federation.admin.folders import NodeFolder, ServerFolder

# ---- Create the keys of a federation: a local authority, the server's certificate, node keys

DAYS = 825
_ALWAYS = ("localhost", "127.0.0.1", "::1")
"""Names under which processes of the same machine reach the server."""


def write_authority(folder: Path) -> None:
    """Write ca.key and ca.pem. The holder of ca.key can certify servers."""
    key = ec.generate_private_key(ec.SECP384R1())
    name = _name("perdure federation authority")
    usage = x509.KeyUsage(
        digital_signature=False, content_commitment=False, key_encipherment=False,
        data_encipherment=False, key_agreement=False, key_cert_sign=True, crl_sign=True,
        encipher_only=False, decipher_only=False,
    )  # fmt: skip
    certificate = (
        _draft(name, name, key.public_key())
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA384())
    )
    write_private(folder / "ca.key", _pem(key))
    (folder / "ca.pem").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))


def write_server_certificate(folder: Path, authority: Path, hosts: list[str]) -> None:
    """Write server.key and server.pem, also in place of earlier ones."""
    issuer = x509.load_pem_x509_certificate((authority / "ca.pem").read_bytes())
    signer = serialization.load_pem_private_key((authority / "ca.key").read_bytes(), None)
    assert isinstance(signer, ec.EllipticCurvePrivateKey)
    key = ec.generate_private_key(ec.SECP384R1())
    names = [_general_name(host) for host in dict.fromkeys([*hosts, *_ALWAYS])]
    usage = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH])
    authority_id = x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key())
    certificate = (
        _draft(_name("perdure server"), issuer.subject, key.public_key())
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(usage, critical=False)
        .add_extension(authority_id, critical=False)
        .sign(signer, hashes.SHA384())
    )
    for name, data in (
        ("server.key", _pem(key)),
        ("server.pem", certificate.public_bytes(serialization.Encoding.PEM)),
    ):
        (folder / f"{name}.new").unlink(missing_ok=True)  # of a killed process
        write_private(folder / f"{name}.new", data)
    for name in ("server.key", "server.pem"):  # together, as far as two files can be
        os.replace(folder / f"{name}.new", folder / name)


def write_node_key(private: Path, public: Path) -> None:
    """Write a node's key pair (P-384) in OpenSSH format."""
    key = ec.generate_private_key(ec.SECP384R1())
    encoding, plain = serialization.Encoding, serialization.NoEncryption()
    secret = key.private_bytes(encoding.PEM, serialization.PrivateFormat.OpenSSH, plain)
    write_private(private, secret)
    public.write_bytes(
        key.public_key().public_bytes(encoding.OpenSSH, serialization.PublicFormat.OpenSSH) + b"\n"
    )


def write_private(path: Path, data: bytes) -> None:
    """Write a new file that only its owner can read."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "wb") as file:
        file.write(data)


def _draft(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))
        .not_valid_after(now + timedelta(days=DAYS))
    )


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )


# ---- The end of certificates: a warning before it, a sentence after it, and a new certificate

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
    """Check certificates now, and again every day while the block runs."""
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
