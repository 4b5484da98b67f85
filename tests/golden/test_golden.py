"""A refactoring changes no bit: every method against results that were recorded before.

Made by tools/golden.py. Where this machine computes other bits than the one that recorded them,
weights are compared to 1e-5 after two tasks of one round.
"""

import json
from pathlib import Path

import golden_cases as golden
import pytest
import torch
from safetensors.torch import load_file

FOLDER = Path(__file__).parent
CASES = dict(golden.cases())
RECORDED = json.loads((FOLDER / "results.json").read_text())
WEIGHTS = load_file(FOLDER / "weights.safetensors")


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_every_case_is_recorded():
    assert set(RECORDED["results"]) == set(CASES)


@pytest.mark.parametrize("name", CASES)
def test_bits_where_the_machine_is_the_same(name):
    if golden.fingerprint() != RECORDED["fingerprint"]:
        pytest.skip("recorded on a machine that computes other last bits")
    assert golden.outcome(CASES[name]) == RECORDED["results"][name]


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
