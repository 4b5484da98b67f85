"""Draws depend on their purpose and indices alone."""

import hashlib
import os
import subprocess
import sys

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from perdure.core.rng import Rng, SystemRng, derive_seed, system_generator

indices_lists = st.lists(st.integers(0, 2**40), max_size=4)
purposes = st.text(st.characters(categories=["Ll"]), min_size=1, max_size=8)


def test_a_seed_has_a_fixed_value_so_that_old_runs_stay_repeatable():
    digest = hashlib.blake2b(b"7|batch|1|2|3", digest_size=8).digest()
    expected = int.from_bytes(digest, "little") % 2**63
    assert derive_seed(7, "batch", 1, 2, 3) == expected


def test_numpy_integers_give_the_seed_of_their_value():
    assert derive_seed(0, "a", np.int64(3)) == derive_seed(0, "a", 3)


@given(st.integers(0, 2**80), purposes, indices_lists)
def test_seeds_are_valid_for_every_generator(seed, purpose, indices):
    number = derive_seed(seed, purpose, *indices)
    assert 0 <= number < 2**63
    torch.Generator().manual_seed(number)


def test_every_argument_changes_the_seed():
    numbers = [
        derive_seed(seed, purpose, *indices)
        for seed in range(3)
        for purpose in ("init", "batch")
        for indices in [(), (0,), (1,), (0, 0), (0, 1), (1, 0), (11,), (1, 1), (0, 0, 0)]
    ]
    assert len(set(numbers)) == len(numbers)


def test_neighboring_indices_give_independent_draws():
    first = np.array([Rng(0).numpy_generator("x", k).random() for k in range(2000)])
    # Uniform draws: mean 1/2 with a standard error of 0.0065, and no serial correlation.
    assert abs(first.mean() - 0.5) < 0.03
    assert abs(np.corrcoef(first[:-1], first[1:])[0, 1]) < 0.1
    bits = np.array([[(Rng(0).key("x", k) >> b) & 1 for b in range(63)] for k in range(2000)])
    assert np.abs(bits.mean(axis=0) - 0.5).max() < 0.06


def test_draws_repeat_and_do_not_affect_each_other():
    rng = Rng(seed=3)
    alone = torch.randn(5, generator=rng.torch_generator("noise", 1))
    other = rng.torch_generator("noise", 2)
    torch.randn(100, generator=other)
    again = torch.randn(5, generator=rng.torch_generator("noise", 1))
    assert torch.equal(alone, again)
    assert not torch.equal(alone, torch.randn(5, generator=rng.torch_generator("noise", 2)))
    a, b = (rng.numpy_generator("noise", 1).random(5) for _ in range(2))
    assert (a == b).all()


def test_global_generators_are_neither_read_nor_advanced():
    torch.manual_seed(1)
    np.random.seed(1)
    before = torch.get_rng_state(), np.random.get_state()[1].copy()
    value = torch.rand(3, generator=Rng(0).torch_generator("a"))
    Rng(0).numpy_generator("a").random(3)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (np.random.get_state()[1] == before[1]).all()
    torch.manual_seed(2)
    assert torch.equal(value, torch.rand(3, generator=Rng(0).torch_generator("a")))


def test_another_process_with_another_hash_seed_draws_the_same():
    code = "from perdure.core.rng import derive_seed; print(derive_seed(5, 'clients', 2, 9))"
    env = os.environ | {
        "PYTHONHASHSEED": "123",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    out = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, check=True)
    assert int(out.stdout) == derive_seed(5, "clients", 2, 9)


def test_system_draws_never_repeat():
    rng, arguments = SystemRng(), ("noise", 1, 2)
    assert not torch.equal(
        *(torch.rand(4, generator=rng.torch_generator(*arguments)) for _ in range(2))
    )
    assert not np.array_equal(*(rng.numpy_generator(*arguments).random(4) for _ in range(2)))
    assert rng.key(*arguments) != rng.key(*arguments)
    values = torch.randn(40_000, generator=system_generator())
    assert abs(float(values.mean())) < 0.03
    assert abs(float(values.std()) - 1) < 0.03


def test_a_system_generator_uses_more_than_32_bits_of_entropy(monkeypatch):
    """torch uses 32 bits of a seed, which an attacker could try."""
    entropy = bytearray(range(1, 250)) * 12
    monkeypatch.setattr("os.urandom", lambda size: bytes(entropy[:size]))
    first = torch.rand(1000, generator=system_generator())
    assert torch.equal(first, torch.rand(1000, generator=system_generator()))
    for byte in (4, 9, 600, 1248, 2495):
        entropy[byte] ^= 1
        assert not torch.equal(first, torch.rand(1000, generator=system_generator()))
        entropy[byte] ^= 1
