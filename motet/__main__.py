"""`python -m motet` is `motet`."""

import sys

from motet.cli.main import main

if __name__ == "__main__":  # a spawned child process imports this file as well
    sys.exit(main())
