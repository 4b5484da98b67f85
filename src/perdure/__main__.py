"""Run the command line as `python -m perdure`."""

import sys

from perdure.cli.__main__ import main

if __name__ == "__main__":
    sys.exit(main())
