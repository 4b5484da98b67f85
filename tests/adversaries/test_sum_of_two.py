"""A client that is in a sum of two reads the other one: it subtracts what it sent itself.

A round starts with three clients and one drops out, or the server asks for a threshold of two.
"""

from __future__ import annotations

from itertools import product

import pytest
from secagg_runs import Group, random_sums, upload

from perdure.privacy.secagg.journal import MIN_CLIENTS, min_survivors
from perdure.privacy.secagg.messages import BelowThreshold, UnsafeRequest, encode

THREE = Group(3)


def test_a_sum_of_three_is_not_opened_after_one_of_them_drops_out() -> None:
    request = THREE.request(threshold=min_survivors(3, 0.66))
    sums = random_sums(THREE, request, gone=({0}, set(), set()))
    with pytest.raises(BelowThreshold, match="2 of 3 clients are left, the threshold is 3"):
        sums.open()


def test_a_client_refuses_a_threshold_of_two() -> None:
    sums = random_sums(THREE, THREE.request(threshold=2))
    with pytest.raises(UnsafeRequest, match="a threshold of 2 of 3 clients is not a majority of"):
        THREE.secagg_clients[0].upload(encode(sums.request), upload(sums.values[0]), 1.0)


def test_no_number_of_clients_and_no_threshold_open_a_sum_of_two() -> None:
    fractions = (0.51, 0.66, 0.8, 1.0)
    assert min(min_survivors(n, f) for n, f in product(range(40), fractions)) == MIN_CLIENTS == 3
