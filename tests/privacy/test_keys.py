"""Keys and masks against RFC 5869 by hand, recorded bytes, X25519 and AES."""

from __future__ import annotations

import hmac
import os

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from perdure.privacy.secagg.keys import TaskKeys, commit, derive, expand_mask, seal, unseal, xor
from perdure.privacy.secagg.layout import FixedPoint
from perdure.privacy.secagg.messages import MalformedMessage

RECORDED = {
    (b"perdure x25519", 32): "4a3fb81f147481210ece91a972a2cdb4f03e45b238c616d0040ff73c00f25bad",
    (b"", 16): "9b4c8120a4823a95f47cde17a244f450",
    (b"perdure bond|" + bytes(32), 160): (
        "b4bdd8755f6efe8c6d4752468e6bc433d6f39fa7fb230e38b8238c29220e1b2a"
        "07fd3acbaefc7240db6ed55ecd7e63166983ab098b30063e83d0828b30c815be"
        "6530eb925d4568488d732b572234e541b2065de74a446460d314eb994dade611"
        "467ebed3d3764122524c3c9e973e582c7381d7d607941f141ff7521f8217c08a"
        "bd4f3dfdc98f62ff49ee8ed2d007176b1fde6d791a43a24b4fcb155a7306dc4d"
    ),
}
"""Derived bytes of perdure 0.3 by purpose and size, from the key 0, 1, ..., 31."""
RECORDED_PAIR = {
    "seed": "7d0cd39e7d499e284a1d2228fe3679868a5f1ce7b57b9825379faad6b7cf30a4",
    "send_key": "586f6d789514c6beb06f61c3d9fb30063af6b28800ed372dd5cbfcfb5a0c8d6f",
    "receive_key": "6a14bccd9b3281ba3d52f219c23678226213087edb816b868986b11506f015a9",
    "client_pad": "ed05b3470cba8ee5e012323514fb61172563d376151e36dd883ec664ce683581",
    "peer_pad": "1170b1dd1036e75a758c035b0d0962d23571d04f4db6d12b502cf6b60be7829c",
}
"""Secrets in perdure 0.3 of client 0 with client 3, in a sum with the digest 64, 65, ..., 95."""


@pytest.mark.parametrize(("info", "size"), RECORDED)
def test_derived_keys_are_those_of_earlier_versions(info: bytes, size: int) -> None:
    assert derive(bytes(range(32)), info, size).hex() == RECORDED[info, size]


def test_secrets_of_two_clients_are_those_of_earlier_versions() -> None:
    one, three = TaskKeys(0, bytes(range(32))), TaskKeys(3, bytes(range(32, 64)))
    found = one.pair_secrets(3, three.public, bytes(range(64, 96)))
    assert {name: value.hex() for name, value in vars(found).items()} == RECORDED_PAIR


@pytest.mark.parametrize("size", [1, 32, 33, 160])
def test_key_derivation_is_hkdf(size: int) -> None:
    """RFC 5869 by hand: T(k) = HMAC(key, T(k - 1) | info | k)."""
    key, info, block, expected = os.urandom(32), b"some context", b"", b""
    for counter in range(1, 6):
        block = hmac.digest(key, block + info + bytes([counter]), "sha256")
        expected += block
    assert derive(key, info, size) == expected[:size]


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
    private = X25519PrivateKey.from_private_bytes(derive(bytes(32), b"perdure x25519"))
    assert private.public_key().public_bytes_raw() == ann.public
    agreed = private.exchange(X25519PublicKey.from_public_bytes(bob.public))
    names = b"".join(n.to_bytes(8, "little") + key for n, key in ((0, ann.public), (1, bob.public)))
    root = hmac.digest(b"perdure secagg" + names, agreed, "sha256")  # HKDF-Extract
    assert bob.pair_secrets(0, ann.public, b"x").seed == derive(root, b"perdure bond|x")


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
