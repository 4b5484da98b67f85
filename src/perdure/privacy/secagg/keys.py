"""Keys that every two clients agree on once per task, and the secrets of each sum.

X25519 gives two clients a common secret. HKDF (RFC 5869) derives from it, for one sum request,
the seed of their common mask, the keys with which they encrypt shares for each other, and the
pads that cover their self-masks. AES-256 in counter mode expands a seed into a mask. All secrets
of a sum derive from a client's master secret and the request, so nothing else must be stored.

Shamir's secret sharing opens the self-mask of a client that is gone: t shares give the secret,
t - 1 reveal nothing.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF, HKDFExpand

from perdure.privacy.secagg.layout import COMMIT_BYTES, KEY_BYTES, SHARE_BYTES, FixedPoint, Vector
from perdure.privacy.secagg.messages import MalformedMessage

_NONCE = bytes(12)
"""Every encryption key is used once, so the nonce can be constant."""


def derive(key: bytes, info: bytes, size: int = KEY_BYTES) -> bytes:
    """Return `size` bytes derived from a uniform `key` for the purpose `info` (HKDF-Expand)."""
    return HKDFExpand(SHA256(), size, info).derive(key)


def commit(secret: bytes) -> bytes:
    """Return a commitment to a random secret, which identifies it and reveals nothing of it."""
    return hashlib.blake2b(secret, digest_size=COMMIT_BYTES, person=b"perdure commit").digest()


def expand_mask(seed: bytes, size: int, fixed_point: FixedPoint) -> Vector:
    """Return a mask: `size` uniform fixed-point numbers."""
    mask = np.empty(size, dtype=fixed_point.dtype)
    encryptor = Cipher(algorithms.AES(seed), modes.CTR(bytes(16))).encryptor()
    encryptor.update_into(_zeros(mask.nbytes), mask.view(np.uint8).data)
    return mask


@lru_cache(maxsize=1)
def _zeros(size: int) -> bytes:
    """Return the text that is encrypted into masks of one size."""
    return bytes(size)


def seal(key: bytes, text: bytes) -> bytes:
    """Encrypt and authenticate a text with a key that is used only once."""
    return ChaCha20Poly1305(key).encrypt(_NONCE, text, None)


def unseal(key: bytes, sealed: bytes) -> bytes:
    """Decrypt a text.

    Raises:
        MalformedMessage: The text was changed after encryption.

    """
    try:
        return ChaCha20Poly1305(key).decrypt(_NONCE, sealed, None)
    except InvalidTag:
        raise MalformedMessage("a share was changed in transit") from None


def xor(a: bytes, b: bytes) -> bytes:
    """Return the bitwise exclusive or of two strings of equal length."""
    return (int.from_bytes(a, "little") ^ int.from_bytes(b, "little")).to_bytes(len(a), "little")


@lru_cache(maxsize=1 << 14)
def is_public_key(key: bytes) -> bool:
    """Return whether others can agree on a secret with the owner of this public key.

    Some points of the curve (of low order) give the same secret to all peers and are refused.
    """
    try:
        X25519PrivateKey.generate().exchange(X25519PublicKey.from_public_bytes(key))
    except ValueError:
        return False
    return True


@dataclass(frozen=True)
class PairSecrets:
    """The secrets that one client shares with one peer in one sum."""

    seed: bytes
    """Seed of the common mask, which the lower client adds and the higher one subtracts."""
    send_key: bytes
    """Encrypts the share that this client sends the peer."""
    receive_key: bytes
    """Decrypts the share that the peer sends this client."""
    client_pad: bytes
    """Covers this client's self-mask; the peer's upload reveals it."""
    peer_pad: bytes
    """Covers the peer's self-mask; this client's upload reveals it."""


@dataclass
class TaskKeys:
    """A client's keys for one task."""

    client: int
    """Index of the client."""
    master: bytes = field(default_factory=lambda: os.urandom(KEY_BYTES), repr=False)
    """32 secret bytes. Default: from the operating system; a simulation passes derived bytes."""
    _common_secrets: dict[bytes, bytes] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        secret = derive(self.master, b"perdure x25519")
        self._private = X25519PrivateKey.from_private_bytes(secret)
        self.public = self._private.public_key().public_bytes_raw()
        """The public key, 32 bytes."""

    def secret(self, purpose: str, request_digest: bytes, size: int = KEY_BYTES) -> bytes:
        """Return a secret that only this client knows, for one purpose in one sum."""
        return derive(self.master, purpose.encode() + b"|" + request_digest, size)

    def pair_secrets(self, peer: int, public: bytes, request_digest: bytes) -> PairSecrets:
        """Return the secrets that this client and a peer share in one sum.

        Raises:
            MalformedMessage: `public` is not a valid key.

        """
        agreed, info = self._agree(peer, public), b"perdure bond|" + request_digest
        kdf = HKDF(SHA256(), 5 * KEY_BYTES, self._pair_salt(peer, public), info)
        derived = kdf.derive(agreed)
        seed, *directed = (derived[k * KEY_BYTES : (k + 1) * KEY_BYTES] for k in range(5))
        lower_key, higher_key, lower_pad, higher_pad = directed
        if self.client < peer:
            return PairSecrets(seed, lower_key, higher_key, lower_pad, higher_pad)
        return PairSecrets(seed, higher_key, lower_key, higher_pad, lower_pad)

    def _agree(self, peer: int, public: bytes) -> bytes:
        """Return the secret that this client and a peer agree on, which is computed once."""
        if public not in self._common_secrets:
            try:
                agreed = self._private.exchange(X25519PublicKey.from_public_bytes(public))
            except ValueError:
                raise MalformedMessage(f"the public key of client {peer} is not valid") from None
            self._common_secrets[public] = agreed
        return self._common_secrets[public]

    def _pair_salt(self, peer: int, public: bytes) -> bytes:
        """Return the salt of two clients: who they are, and their public keys."""
        ends = sorted([(self.client, self.public), (peer, public)])
        return b"perdure secagg" + b"".join(
            client.to_bytes(8, "little") + key for client, key in ends
        )


# ---- Shamir's secret sharing over a prime field

PRIME = 2**256 + 297
"""The smallest prime above 2^256, so that every secret of 32 bytes is a field element."""
SECRET_BYTES = 32
"""Size of a secret."""


def split_secret(
    secret: bytes, points: Sequence[int], threshold: int, coefficient: Callable[[int], int]
) -> dict[int, bytes]:
    """Split a secret into shares."""
    _check_points(points, threshold)
    random_part = [coefficient(k) % PRIME for k in range(threshold - 1, 0, -1)]
    polynomial = [*random_part, int.from_bytes(secret, "little")]
    return {x: _evaluate(polynomial, x).to_bytes(SHARE_BYTES, "little") for x in points}


def _check_points(points: Sequence[int], threshold: int) -> None:
    distinct = len(set(points)) == len(points) and all(0 < x < PRIME for x in points)
    if not distinct or not 1 <= threshold <= len(points):
        raise ValueError(f"{threshold} of the points {list(points)} cannot share a secret")


def _evaluate(polynomial: Sequence[int], x: int) -> int:
    """Evaluate a polynomial by Horner's rule, highest coefficient first."""
    value = 0
    for coefficient in polynomial:
        value = (value * x + coefficient) % PRIME
    return value


def weights_at_zero(points: Sequence[int]) -> dict[int, int]:
    """Return the Lagrange weights with which shares at these points add up to the secret."""
    weights = {}
    for x in points:
        numerator = denominator = 1
        for other in points:
            if other != x:
                numerator = numerator * other % PRIME
                denominator = denominator * (other - x) % PRIME
        weights[x] = numerator * pow(denominator, -1, PRIME) % PRIME
    return weights


def combine_shares(shares: Mapping[int, bytes], weights: Mapping[int, int]) -> bytes | None:
    """Return the secret of shares, or None if they do not belong to one secret."""
    terms = (weights[x] * int.from_bytes(shares[x], "little") for x in weights)
    secret = sum(terms) % PRIME
    return secret.to_bytes(SECRET_BYTES, "little") if secret < 256**SECRET_BYTES else None
