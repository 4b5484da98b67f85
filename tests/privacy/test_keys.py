"""Keys and masks against the cryptography library's own HKDF, X25519 and AES."""

from __future__ import annotations

import os

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF, HKDFExpand

from perdure.privacy.secagg.fixed_point import FixedPoint
from perdure.privacy.secagg.keys import (
    TaskKeys,
    commit,
    expand_mask,
    hkdf_expand,
    hkdf_extract,
    seal,
    unseal,
    xor,
)
from perdure.privacy.secagg.messages import MalformedMessage


@pytest.mark.parametrize("size", [1, 32, 33, 160])
def test_key_derivation_is_hkdf(size: int) -> None:
    key, info, salt = os.urandom(32), b"some context", os.urandom(20)
    assert hkdf_expand(key, info, size) == HKDFExpand(SHA256(), size, info).derive(key)
    whole = HKDF(SHA256(), size, salt, info).derive(b"secret")
    assert hkdf_expand(hkdf_extract(salt, b"secret"), info, size) == whole


@pytest.mark.parametrize("bits", [32, 64])
def test_a_mask_is_aes_of_a_counter(bits: int) -> None:
    seed = bytes(range(32))
    block = Cipher(algorithms.AES(seed), modes.ECB()).encryptor()
    text = b"".join(block.update(counter.to_bytes(16, "big")) for counter in range(5))
    expected = np.frombuffer(text, dtype=f"<u{bits // 8}")[:9]
    np.testing.assert_array_equal(expand_mask(seed, 9, FixedPoint(bits, 0, 1)), expected)


def test_two_clients_share_secrets_that_no_other_client_knows() -> None:
    ann, bob, eve = (TaskKeys(client, os.urandom(32)) for client in (3, 8, 5))
    one, two = ann.pair_secrets(8, bob.public, b"call"), bob.pair_secrets(3, ann.public, b"call")
    assert one.seed == two.seed
    assert (one.send_key, one.receive_key) == (two.receive_key, two.send_key)
    assert (one.client_pad, one.peer_pad) == (two.peer_pad, two.client_pad)
    secrets = [one.seed, one.send_key, one.receive_key, one.client_pad, one.peer_pad]
    assert len(set(secrets)) == 5
    assert not set(secrets) & set(vars(eve.pair_secrets(8, bob.public, b"call")).values())
    assert not set(secrets) & set(vars(ann.pair_secrets(8, bob.public, b"next")).values())


def test_the_common_secret_is_that_of_x25519() -> None:
    ann, bob = TaskKeys(0, bytes(32)), TaskKeys(1, os.urandom(32))
    private = X25519PrivateKey.from_private_bytes(hkdf_expand(bytes(32), b"perdure x25519", 32))
    assert private.public_key().public_bytes_raw() == ann.public
    agreed = private.exchange(X25519PublicKey.from_public_bytes(bob.public))
    names = b"".join(n.to_bytes(8, "little") + key for n, key in ((0, ann.public), (1, bob.public)))
    root = hkdf_extract(b"perdure secagg" + names, agreed)
    assert (
        bob.pair_secrets(0, ann.public, b"x").seed == hkdf_expand(root, b"perdure bond|x", 160)[:32]
    )


def test_master_secrets_come_from_the_operating_system_unless_given() -> None:
    assert TaskKeys(0).public != TaskKeys(0).public
    assert TaskKeys(0, bytes(32)).public == TaskKeys(0, bytes(32)).public
    assert bytes(32).hex() not in repr(TaskKeys(0, bytes(32)))


def test_an_invalid_public_key_is_refused() -> None:
    with pytest.raises(MalformedMessage, match="public key of client 4"):
        TaskKeys(0).pair_secrets(4, bytes(32), b"")  # a point of small order


def test_a_sealed_share_that_was_changed_is_refused() -> None:
    key, text = os.urandom(32), os.urandom(33)
    sealed = seal(key, text)
    assert unseal(key, sealed) == text
    for index in (0, 20, len(sealed) - 1):
        broken = bytearray(sealed)
        broken[index] ^= 1
        with pytest.raises(MalformedMessage, match="changed"):
            unseal(key, bytes(broken))


def test_pads_cancel_and_commitments_differ() -> None:
    a, b = os.urandom(32), os.urandom(32)
    assert xor(xor(a, b), b) == a
    assert commit(a) == commit(a)
    assert commit(a) != commit(b)
