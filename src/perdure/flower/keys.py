"""Create the keys of a federation: a local authority, the server's certificate, node keys."""

from __future__ import annotations

import ipaddress
import os
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

_DAYS = 825
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
    """Write server.key and server.pem, also in place of earlier ones.

    Args:
        folder: Where to write.
        authority: The folder with ca.key and ca.pem.
        hosts: Names and addresses for which the certificate is valid, besides loopback.
    """
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
        .not_valid_after(now + timedelta(days=_DAYS))
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
