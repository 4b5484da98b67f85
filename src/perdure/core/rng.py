"""Randomness without a global seed.

Every draw comes from a generator derived from (seed, purpose, task, round, client). So a result
depends neither on the engine, nor on the order in which clients finish, nor on restarts.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass

import numpy as np
import torch

_SIGNED_63_BITS = (1 << 63) - 1
_STATE_OFFSET, _STATE_WORDS = 24, 624
"""Position of the words of the Mersenne Twister, 8 bytes each, in the state of a CPU generator."""


def derive_seed(seed: int, purpose: str, *indices: int) -> int:
    """Return a 63-bit integer that depends on all arguments and on nothing else."""
    text = f"{seed}|{purpose}|" + "|".join(str(int(index)) for index in indices)
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") & _SIGNED_63_BITS


@dataclass(frozen=True)
class Rng:
    """The source of all randomness of one run: one generator per purpose and indices.

    Example:
        >>> rng = Rng(seed=0)
        >>> a = torch.rand(2, generator=rng.torch_generator("init"))
        >>> b = torch.rand(2, generator=rng.torch_generator("init"))
        >>> bool((a == b).all())
        True
    """

    seed: int
    """Seed of the run."""

    def torch_generator(self, purpose: str, *indices: int) -> torch.Generator:
        """Return a torch generator on the CPU, so that draws are the same on every device."""
        return torch.Generator().manual_seed(derive_seed(self.seed, purpose, *indices))

    def numpy_generator(self, purpose: str, *indices: int) -> np.random.Generator:
        """Return a NumPy generator."""
        return np.random.default_rng(derive_seed(self.seed, purpose, *indices))

    def key(self, purpose: str, *indices: int) -> int:
        """Return an integer, for noise that is hashed rather than drawn (`models.ops.dropout`)."""
        return derive_seed(self.seed, purpose, *indices)


@dataclass(frozen=True)
class SystemRng(Rng):
    """Secret randomness from the operating system, which cannot be repeated."""

    seed: int = 0
    """Not used."""

    def torch_generator(self, purpose: str, *indices: int) -> torch.Generator:
        """Return a new torch generator; the arguments are not used."""
        return system_generator()

    def numpy_generator(self, purpose: str, *indices: int) -> np.random.Generator:
        """Return a new NumPy generator; the arguments are not used."""
        return np.random.default_rng()

    def key(self, purpose: str, *indices: int) -> int:
        """Return a new integer; the arguments are not used."""
        return int.from_bytes(os.urandom(8), "little") & _SIGNED_63_BITS


def system_generator() -> torch.Generator:
    """Return a torch generator on the CPU whose whole state comes from the operating system.

    torch uses 32 bits of a seed, and an attacker who sees a result could try them all.
    """
    generator = torch.Generator()
    state = generator.get_state()
    words = np.frombuffer(os.urandom(4 * _STATE_WORDS), dtype="<u4").astype("<u8")
    state[_STATE_OFFSET : _STATE_OFFSET + words.nbytes] = torch.from_numpy(words.view(np.uint8))
    generator.set_state(state)
    return generator
