"""Attacks use the federation without processes of tests/flower, and sums of tests/privacy."""

import sys
from pathlib import Path

sys.path += [str(Path(__file__).parents[1] / name) for name in ("flower", "privacy")]
