"""schemathesis over /openapi.json of a running stack: every operation, field and limit, with all of its checks.

It runs as a process of its own. Its stateful phase follows the links from a list to its members and deletes some, as an
administrator may; the adapters are registered anew afterwards.
"""

from __future__ import annotations

import asyncio
import sys
from dataclasses import dataclass
from pathlib import Path

import orjson

from tests.fuzz.mesh import FuzzMesh

SETTINGS = Path(__file__).with_name("schemathesis.toml")
SERVER_ERROR = "server error"
LATE_S = 60.0  # for the last phase and the report


@dataclass
class Seen:
    """Schemathesis's findings: cases, answers with 5xx, and a text for each failure."""

    cases: int
    server_errors: int
    failures: list[str]


async def fuzz(mesh: FuzzMesh, within_s: float, seed: int, directory: Path) -> Seen:
    """Run schemathesis for `within_s`. Its output and report stay in `directory`."""
    report = directory / "schemathesis.json"
    words = [
        *("--config-file", str(SETTINGS), "run", f"{mesh.url}/openapi.json", "--seed", str(seed), "--request-timeout", "30"),
        *("--max-time", f"{within_s:.0f}", "--continue-on-failure", "--no-shrink", "--suppress-health-check", "all"),
        *("--warnings", "off", "--report", "json", "--report-json-path", str(report)),
    ]
    output = directory / "schemathesis.log"
    with output.open("wb") as sink:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "schemathesis.cli", *words), stdout=sink, stderr=sink, cwd=directory
        )
        try:
            await asyncio.wait_for(process.wait(), within_s + LATE_S)
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
    if not report.exists():
        return Seen(0, 0, [f"schemathesis gave no report: {output.read_text(errors='replace')[-2000:]}"])
    seen = orjson.loads(report.read_bytes())
    failures = [orjson.dumps(one).decode()[:1500] for one in [*seen["failures"], *seen["errors"]]]
    await mesh.restore()
    if trouble := await mesh.trouble():
        failures.append(trouble)
    return Seen(seen["test_cases"]["generated"], sum(SERVER_ERROR in one.lower() for one in failures), failures)
