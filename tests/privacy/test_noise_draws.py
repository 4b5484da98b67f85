"""The file of a server's draws of noise: a second draw at a place is another sum."""

from __future__ import annotations

from pathlib import Path

import pytest

from perdure.privacy.accounting import NoiseDraws


@pytest.mark.parametrize("cut", range(6))
def test_draws_are_counted_whenever_the_process_dies(cut: int, tmp_path: Path) -> None:
    path = tmp_path / "draws.txt"
    first = NoiseDraws()
    first.store_in(path)
    for position in ((0, 0, 0), (0, 1, 0)):
        first.add(position)
    assert first.repeated == 0
    path.write_bytes(path.read_bytes()[: len(path.read_bytes()) - cut])
    second = NoiseDraws()
    second.store_in(path)
    for position in ((0, 0, 0), (0, 1, 0), (0, 2, 0)):
        second.add(position)
    third = NoiseDraws()
    third.store_in(path)
    assert third.repeated == second.repeated == (2 if cut == 0 else 1)


def test_a_damaged_file_counts_what_it_can(tmp_path):
    path = tmp_path / "draws.txt"
    path.write_bytes(b"\n0 0 0\n\xff\xfe\n0 0 0")
    draws = NoiseDraws()
    draws.store_in(path)
    draws.add((0, 1, 0))
    assert draws.repeated == 1
