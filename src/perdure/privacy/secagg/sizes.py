"""Sizes of what secure sums exchange, in bytes; known without the extra `privacy`."""

from __future__ import annotations

KEY_BYTES = 32
"""Size of keys, seeds and pads."""
COMMIT_BYTES = 16
"""Size of a commitment."""
TAG_BYTES = 16
"""Size by which encryption grows a text."""
OVERHEAD = "secagg"
"""Name in the ledger of all bytes except the masked values."""
