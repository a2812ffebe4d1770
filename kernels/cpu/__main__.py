"""`python -m kernels.cpu [--all]`: build the compiled kernels now rather than when a worker first starts."""

from __future__ import annotations

import argparse
import sys

from kernels.cpu.build import ISAS, BuildError, available_isas, build


def main() -> int:
    """Exit status 1 when there is no compiler, or it fails."""
    parser = argparse.ArgumentParser(prog="python -m kernels.cpu", description="Builds the compiled CPU kernels.")
    parser.add_argument("--all", action="store_true", help="every instruction set, not only this machine's best")
    for isa in ISAS if parser.parse_args().all else available_isas()[-1:]:
        try:
            print(f"{isa}: {build(isa)}")
        except BuildError as error:
            print(f"{isa}: {error}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
