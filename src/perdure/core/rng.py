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
"""Where torch's state of a CPU generator holds the words of the Mersenne Twister, 8 bytes each."""


def derive(seed: int, purpose: str, *place: int) -> int:
    """A 63-bit number that depends on all of its arguments and on nothing else."""
    text = f"{seed}|{purpose}|" + "|".join(str(int(part)) for part in place)
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") & _SIGNED_63_BITS


@dataclass(frozen=True)
class Rng:
    """The source of every random draw of one run.

    >>> draws = Draws(seed=0)
    >>> a = torch.rand(2, generator=draws.torch("init"))
    >>> b = torch.rand(2, generator=draws.torch("init"))
    >>> bool((a == b).all())
    True
    """

    seed: int

    def torch_generator(self, purpose: str, *place: int) -> torch.Generator:
        """A torch generator on the CPU, where draws are the same for every device."""
        return torch.Generator().manual_seed(derive(self.seed, purpose, *place))

    def numpy_generator(self, purpose: str, *place: int) -> np.random.Generator:
        """A numpy generator."""
        return np.random.default_rng(derive(self.seed, purpose, *place))

    def key(self, purpose: str, *place: int) -> int:
        """A bare number, for noise that is hashed rather than drawn (see models.ops.dropout)."""
        return derive(self.seed, purpose, *place)


@dataclass(frozen=True)
class SystemRng(Rng):
    """Draws that nobody can repeat: they come from the operating system, whatever the purpose."""

    seed: int = 0
    """Not used."""

    def torch_generator(self, purpose: str, *place: int) -> torch.Generator:
        """A new generator."""
        return system_generator()

    def numpy_generator(self, purpose: str, *place: int) -> np.random.Generator:
        """A new generator."""
        return np.random.default_rng()

    def key(self, purpose: str, *place: int) -> int:
        """A new number."""
        return int.from_bytes(os.urandom(8), "little") & _SIGNED_63_BITS


def system_generator() -> torch.Generator:
    """A torch generator on the CPU whose whole state comes from the operating system.

    Of a seed torch uses 32 bits, and somebody who sees a result could try them all.
    """
    generator = torch.Generator()
    state = generator.get_state()
    words = np.frombuffer(os.urandom(4 * _STATE_WORDS), dtype="<u4").astype("<u8")
    state[_STATE_OFFSET : _STATE_OFFSET + words.nbytes] = torch.from_numpy(words.view(np.uint8))
    generator.set_state(state)
    return generator
