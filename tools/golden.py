"""Record the golden results.

    python tools/golden.py [CASE ...]

A refactoring changes no bit of them. A commit that changes one records it again and states why.
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
    """Run the named cases, or all, and write results.json and weights.safetensors."""
    torch.set_num_threads(1)
    known = json.loads((FOLDER / "results.json").read_text()) if only else {"results": {}}
    weights = load_file(FOLDER / "weights.safetensors") if only else {}
    for name, values in golden.cases():
        if only and name not in only:
            continue
        known["results"][name] = golden.outcome(values)
        final = golden.final_weights(values)
        weights |= {f"{name}/{key}": value for key, value in final.items()}
        print(name, known["results"][name]["model_sha256"][:12], flush=True)
    recorded = {"fingerprint": golden.fingerprint(), "results": known["results"]}
    (FOLDER / "results.json").write_text(json.dumps(recorded, indent=1) + "\n")
    save_file(weights, FOLDER / "weights.safetensors")


if __name__ == "__main__":
    main(sys.argv[1:])
