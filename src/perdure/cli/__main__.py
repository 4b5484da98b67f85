"""Entry point of the command, which reports Ctrl-C in one line even while modules are loading."""

from __future__ import annotations

import sys


def main() -> int:
    """Load the commands, run one and return the exit code."""
    try:
        from perdure.cli.main import main as run

        return run()
    except KeyboardInterrupt:
        sys.stderr.write("perdure: stopped: nothing was written\n")
        return 130


if __name__ == "__main__":
    sys.exit(main())
