"""`make compose-test`: the Compose stack on a real container engine, from its images to its alerts, as a table.

Builds the images, starts the stack under its own project name and ports, sends requests through openai-python and both NATS
publishers, kills its containers' processes under streams, takes it down and up again, and removes it. Installs nothing: missing
programs are named, with the way to get them. The last line is one line of JSON; exit status 1 when a promise was broken.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from bench.report import append, table
from tests.compose.engine import Missing, Project, require_engine
from tests.compose.proof import Proof

COLUMNS = ("step", "seconds", "seen", "kept")


def main() -> int:
    """0 when every promise was kept, 1 when one was not, 2 when there is no container engine."""
    try:
        require_engine()
        with tempfile.TemporaryDirectory(prefix="motet-compose-") as home:
            proof = Proof(Project(Path(home)))
            proof.run()
    except Missing as missing:
        print(f"compose-test needs {missing}", file=sys.stderr)
        return 2
    print(table("The Compose stack on a container engine", COLUMNS, proof.rows))
    append("compose", {"figures": proof.figures, "steps": [dict(zip(COLUMNS, row, strict=True)) for row in proof.rows]})
    print(json.dumps(proof.figures))
    return 0 if all(kept == "yes" for *_, kept in proof.rows) else 1


if __name__ == "__main__":
    sys.exit(main())
