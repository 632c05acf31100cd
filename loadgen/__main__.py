"""`chairlift-loadgen`, also `python -m loadgen`."""

import sys

from loadgen.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
