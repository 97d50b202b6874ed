"""`python -m omniflow` is the command `omniflow`."""

import sys

from omniflow.cli import main

if __name__ == "__main__":
    sys.exit(main())
