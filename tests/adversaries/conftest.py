"""Attacks use the federation without processes of tests/flower, and the sums of tests/privacy."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "flower"))
sys.path.append(str(Path(__file__).parents[1] / "privacy"))
