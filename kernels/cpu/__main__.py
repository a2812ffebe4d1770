"""`python -m kernels.cpu [--all]`: build the compiled kernels now rather than when a worker first starts."""

import sys

from kernels.cpu.build import main

if __name__ == "__main__":
    sys.exit(main())
