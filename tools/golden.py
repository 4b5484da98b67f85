"""Record the golden results.

    python tools/golden.py [CASE ...]

A refactoring changes no bit of them. A commit that changes one records it again and states why.
Machines compute different last bits: each kind has its file in tests/golden/results, named by a
probe of its arithmetic. The weights, which every machine compares to 1e-5, are those of one.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

FOLDER = Path(__file__).parent.parent / "tests" / "golden"
sys.path.insert(0, str(FOLDER))

import golden_cases as golden  # noqa: E402


def main(only: list[str]) -> None:
    """Run the named cases, or all, and write this machine's results and weights.safetensors."""
    torch.set_num_threads(1)
    here = golden.fingerprint()
    path = FOLDER / "results" / f"{here['probe']}.json"
    known = json.loads(path.read_text()) if only else {"results": {}}
    weights = load_file(FOLDER / "weights.safetensors") if only else {}
    for name, values in golden.cases():
        if only and name not in only:
            continue
        known["results"][name] = golden.outcome(values)
        final = golden.final_weights(values)
        weights |= {f"{name}/{key}": value for key, value in final.items()}
        print(name, known["results"][name]["model_sha256"][:12], flush=True)
    recorded = {"fingerprint": here, "results": known["results"]}
    path.write_text(json.dumps(recorded, indent=1) + "\n")
    save_file(weights, FOLDER / "weights.safetensors")


if __name__ == "__main__":
    main(sys.argv[1:])
