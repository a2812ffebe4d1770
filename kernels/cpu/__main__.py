"""`python -m motet.kernels.cpu [--all]`: builds the compiled kernels now instead of at a worker's first start."""

import sys

from motet.kernels.cpu.build import main

if __name__ == "__main__":
    sys.exit(main())
