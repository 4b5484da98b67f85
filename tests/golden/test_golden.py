"""A refactoring changes no bit: every method against results that were recorded before.

Made by tools/golden.py, one file of results per kind of machine. Where this machine computes other
bits than all that recorded them, weights are compared to 1e-5 after two tasks of one round.
"""

import json
from pathlib import Path

import golden_cases as golden
import pytest
import torch
from safetensors.torch import load_file

FOLDER = Path(__file__).parent
CASES = dict(golden.cases())
RECORDED = [json.loads(path.read_text()) for path in sorted((FOLDER / "results").glob("*.json"))]
WEIGHTS = load_file(FOLDER / "weights.safetensors")


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def recorded():
    """The results that a machine with the last bits of this one recorded."""
    here = golden.fingerprint()
    for results in RECORDED:
        if results["fingerprint"] == here:
            return results["results"]
    pytest.skip("recorded on machines that compute other last bits")


def test_every_case_is_recorded():
    assert RECORDED
    assert all(set(results["results"]) == set(CASES) for results in RECORDED)


@pytest.mark.parametrize("name", CASES)
def test_bits_where_the_machine_is_the_same(name, recorded):
    assert golden.outcome(CASES[name]) == recorded[name]


@pytest.mark.parametrize("name", CASES)
def test_weights_everywhere(name):
    recorded = {
        key.removeprefix(f"{name}/"): value
        for key, value in WEIGHTS.items()
        if key.startswith(f"{name}/")
    }
    found = golden.final_weights(CASES[name])
    assert set(found) == set(recorded)
    for key, value in recorded.items():
        torch.testing.assert_close(found[key], value, rtol=0, atol=1e-5)
