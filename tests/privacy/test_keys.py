"""Keys and masks against the cryptography library's own HKDF, X25519 and AES."""

from __future__ import annotations

import os

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF, HKDFExpand

from perdure.privacy.secagg.errors import MalformedMessage
from perdure.privacy.secagg.fixed_point import FixedPoint
from perdure.privacy.secagg.keys import (
    TaskKeys,
    commit,
    expand,
    expand_mask,
    extract,
    seal,
    unseal,
    xor,
)


@pytest.mark.parametrize("size", [1, 32, 33, 160])
def test_expanding_is_hkdf(size: int) -> None:
    key, info, salt = os.urandom(32), b"some context", os.urandom(20)
    assert expand(key, info, size) == HKDFExpand(SHA256(), size, info).derive(key)
    whole = HKDF(SHA256(), size, salt, info).derive(b"secret")
    assert expand(extract(salt, b"secret"), info, size) == whole


@pytest.mark.parametrize("bits", [32, 64])
def test_a_mask_is_aes_of_a_counter(bits: int) -> None:
    seed = bytes(range(32))
    block = Cipher(algorithms.AES(seed), modes.ECB()).encryptor()
    text = b"".join(block.update(counter.to_bytes(16, "big")) for counter in range(5))
    expected = np.frombuffer(text, dtype=f"<u{bits // 8}")[:9]
    np.testing.assert_array_equal(expand_mask(seed, 9, FixedPoint(bits, 0, 1)), expected)


def test_two_clients_agree_and_nobody_else_does() -> None:
    ann, bob, eve = (TaskKeys(client, os.urandom(32)) for client in (3, 8, 5))
    one, two = ann.bond(8, bob.public, b"call"), bob.bond(3, ann.public, b"call")
    assert one.seed == two.seed
    assert (one.to_peer, one.from_peer) == (two.from_peer, two.to_peer)
    assert (one.own_pad, one.peer_pad) == (two.peer_pad, two.own_pad)
    secrets = [one.seed, one.to_peer, one.from_peer, one.own_pad, one.peer_pad]
    assert len(set(secrets)) == 5
    assert not set(secrets) & set(vars(eve.bond(8, bob.public, b"call")).values())
    assert not set(secrets) & set(vars(ann.bond(8, bob.public, b"next")).values())


def test_the_common_secret_is_x25519s() -> None:
    ann, bob = TaskKeys(0, bytes(32)), TaskKeys(1, os.urandom(32))
    private = X25519PrivateKey.from_private_bytes(expand(bytes(32), b"perdure x25519", 32))
    assert private.public_key().public_bytes_raw() == ann.public
    agreed = private.exchange(X25519PublicKey.from_public_bytes(bob.public))
    names = b"".join(n.to_bytes(8, "little") + key for n, key in ((0, ann.public), (1, bob.public)))
    root = extract(b"perdure secagg" + names, agreed)
    assert bob.bond(0, ann.public, b"x").seed == expand(root, b"perdure bond|x", 160)[:32]


def test_masters_come_from_the_operating_system_unless_given() -> None:
    assert TaskKeys(0).public != TaskKeys(0).public
    assert TaskKeys(0, bytes(32)).public == TaskKeys(0, bytes(32)).public
    assert bytes(32).hex() not in repr(TaskKeys(0, bytes(32)))


def test_a_key_that_is_none_is_refused() -> None:
    with pytest.raises(MalformedMessage, match="public key of client 4"):
        TaskKeys(0).bond(4, bytes(32), b"")  # a point of small order


def test_a_sealed_share_that_was_changed_is_refused() -> None:
    key, text = os.urandom(32), os.urandom(33)
    sealed = seal(key, text)
    assert unseal(key, sealed) == text
    for place in (0, 20, len(sealed) - 1):
        broken = bytearray(sealed)
        broken[place] ^= 1
        with pytest.raises(MalformedMessage, match="changed"):
            unseal(key, bytes(broken))


def test_pads_and_commitments() -> None:
    a, b = os.urandom(32), os.urandom(32)
    assert xor(xor(a, b), b) == a
    assert commit(a) == commit(a)
    assert commit(a) != commit(b)
