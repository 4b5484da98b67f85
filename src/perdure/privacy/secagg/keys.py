"""Keys: agreed once a task between each two clients, and fresh secrets from them for each round.

X25519 gives two clients a common secret; HKDF (RFC 5869) makes from it, for one call alone, the
seed of their common mask, the keys under which they send each other shares, and the pads with which
each opens the other's self-mask. AES-256 in counter mode stretches a seed into a mask. All of a
round's secrets follow from a client's master secret and the call, so nothing else must be kept.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

from perdure.privacy.secagg.errors import MalformedMessage
from perdure.privacy.secagg.fixed_point import FixedPoint, Vector

KEY_BYTES = 32
COMMIT_BYTES = 16
TAG_BYTES = 16
_HASH_BYTES = 32
_NONCE = bytes(12)
"""Every sealing key is used once, so that the nonce may stay."""


def expand(key: bytes, info: bytes, size: int) -> bytes:
    """HKDF-Expand with SHA-256."""
    output, block = b"", b""
    for counter in range(1, -(-size // _HASH_BYTES) + 1):
        block = hmac.digest(key, block + info + bytes([counter]), "sha256")
        output += block
    return output[:size]


def extract(salt: bytes, secret: bytes) -> bytes:
    """HKDF-Extract with SHA-256."""
    return hmac.digest(salt, secret, "sha256")


def commit(secret: bytes) -> bytes:
    """A fingerprint that tells nothing of a random secret, by which it is known again."""
    return hashlib.blake2b(secret, digest_size=COMMIT_BYTES, person=b"perdure commit").digest()


def expand_mask(seed: bytes, size: int, grid: FixedPoint) -> Vector:
    """A mask: `size` uniform numbers of the ring from a seed that is used for nothing else."""
    mask = np.empty(size, dtype=grid.dtype)
    encryptor = Cipher(algorithms.AES(seed), modes.CTR(bytes(16))).encryptor()
    encryptor.update_into(_zeros(mask.nbytes), mask.view(np.uint8).data)
    return mask


@lru_cache(maxsize=1)
def _zeros(size: int) -> bytes:
    """What masks of one size are encrypted from; the same again and again."""
    return bytes(size)


def seal(key: bytes, text: bytes) -> bytes:
    """Encrypt and authenticate under a key that is used once."""
    return ChaCha20Poly1305(key).encrypt(_NONCE, text, None)


def unseal(key: bytes, sealed: bytes) -> bytes:
    """The text, or Garbled if it was changed on its way."""
    try:
        return ChaCha20Poly1305(key).decrypt(_NONCE, sealed, None)
    except InvalidTag:
        raise MalformedMessage("a share was changed on its way") from None


def xor(a: bytes, b: bytes) -> bytes:
    """Bit by bit, of equal length."""
    return (int.from_bytes(a, "little") ^ int.from_bytes(b, "little")).to_bytes(len(a), "little")


@dataclass(frozen=True)
class PairSecrets:
    """What one client shares with one peer in one call. `own` means: of this client."""

    seed: bytes
    """Of the common mask, which the client with the lower number adds and the other takes away."""
    to_peer: bytes
    from_peer: bytes
    """Keys of the shares between the two."""
    own_pad: bytes
    """Covers this client's self-mask; the peer's upload tells it."""
    peer_pad: bytes
    """Covers the peer's self-mask; this client's upload tells it."""


@dataclass
class TaskKeys:
    """A client's keys for one task.

    `master`: 32 secret bytes, from the operating system unless a simulation gives its own.
    """

    client: int
    master: bytes = field(default_factory=lambda: os.urandom(KEY_BYTES), repr=False)
    _agreed: dict[bytes, bytes] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        secret = expand(self.master, b"perdure x25519", KEY_BYTES)
        self._private = X25519PrivateKey.from_private_bytes(secret)
        self.public = self._private.public_key().public_bytes_raw()

    def secret(self, purpose: str, context: bytes, size: int = KEY_BYTES) -> bytes:
        """A secret of this client alone, for one purpose in one call."""
        return expand(self.master, purpose.encode() + b"|" + context, size)

    def bond(self, peer: int, public: bytes, context: bytes) -> PairSecrets:
        """What this client and a peer share in the call of this context."""
        key = self._common(peer, public)
        parts = expand(key, b"perdure bond|" + context, 5 * KEY_BYTES)
        seed, *ways = (parts[k * KEY_BYTES : (k + 1) * KEY_BYTES] for k in range(5))
        up, down, lower, higher = ways
        if self.client < peer:
            return PairSecrets(seed, up, down, lower, higher)
        return PairSecrets(seed, down, up, higher, lower)

    def _common(self, peer: int, public: bytes) -> bytes:
        """The secret of two clients, agreed once."""
        if public not in self._agreed:
            try:
                agreed = self._private.exchange(X25519PublicKey.from_public_bytes(public))
            except ValueError:
                raise MalformedMessage(f"the public key of client {peer} is none") from None
            ends = sorted([(self.client, self.public), (peer, public)])
            salt = b"perdure secagg" + b"".join(
                number.to_bytes(8, "little") + k for number, k in ends
            )
            self._agreed[public] = extract(salt, agreed)
        return self._agreed[public]
