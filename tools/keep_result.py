"""Add a result or a comparison to docs/results, with the value of the paper and the command.

    python tools/keep_result.py NAME FILE --says TEXT --command TEXT [--shown ACC,AF]

FILE is the result.json of a run, or a comparison.json. `python -m claims` shows all.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

RESULTS = Path(__file__).resolve().parents[1] / "docs" / "results"


def main() -> None:
    """Write docs/results/NAME.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name")
    parser.add_argument("file", type=Path)
    parser.add_argument("--says", required=True)
    parser.add_argument("--command", required=True)
    parser.add_argument("--shown", default="ACC,FGT")
    given = parser.parse_args()
    about = {
        "command": given.command,
        "paper_says": given.says,
        "shown": given.shown.split(","),
    }
    values = about | json.loads(given.file.read_text(encoding="utf-8"))
    RESULTS.mkdir(exist_ok=True)
    text = json.dumps(values, indent=1) + "\n"
    (RESULTS / f"{given.name}.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
