"""Where the command begins: Ctrl-C is one line even while everything else is being loaded."""

from __future__ import annotations

import sys


def main() -> int:
    """Load the commands and run one; the exit code."""
    try:
        from perdure.cli.main import main as run

        return run()
    except KeyboardInterrupt:
        sys.stderr.write("stopped: nothing was written\n")
        return 130
