"""Mutation testing of `policies/`: alters one line at a time and expects a test to fail. `make mutants` runs it.

mutmut makes the mutants, finds the tests that run each function, and runs them in a forked process per mutant. This script
draws the sample, leaves out the equivalent mutants that `equivalent_mutants.toml` lists, and prints the survivors.

    .venv/bin/python .ci/mutants.py                a sample of 300 of all mutants
    .venv/bin/python .ci/mutants.py --again        the survivors of the last run, with the mutants and coverage of that run

The sample is the mutants with the smallest hashes of (seed, name): when a function changes, those of other functions stay in
the sample. The last line is JSON.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import shutil
import sys
import time
import tomllib
from pathlib import Path

from mutmut.__main__ import _run as run
from mutmut.__main__ import copy_src_dir, create_mutants
from mutmut.mutation.data import SourceFileMutationData
from mutmut.mutation.diff_apply import get_diff_for_mutant
from mutmut.stats import status_by_exit_code
from mutmut.utils.file_utils import walk_mutatable_files

ROOT = Path(__file__).resolve().parents[1]
EQUIVALENT = ROOT / ".ci" / "equivalent_mutants.toml"
WORK = ROOT / "mutants"  # mutmut's folder
LAST = WORK / "survivors.json"
DETECTED = ("killed", "timeout", "segfault", "caught by type check")


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--sample", type=int, default=300)
    options.add_argument("--seed", type=int, default=1)
    options.add_argument("--processes", type=int, default=2)
    options.add_argument("--least", type=float, default=0.9, help="the share of killed mutants below which this fails")
    options.add_argument("--again", action="store_true", help="only the survivors of the last run")
    args = options.parse_args()
    began_s = time.monotonic()
    if args.again:
        sample = json.loads(LAST.read_text())
    else:
        shutil.rmtree(WORK, ignore_errors=True)
        WORK.mkdir()
        copy_src_dir()
        create_mutants(args.processes)
        sample = sorted(names(), key=lambda name: hashlib.sha256(f"{args.seed}:{name}".encode()).digest())[: args.sample]
    diffs = {name: diff(name) for name in sample}
    reasons = {name: reason for name in sample if (reason := why_equivalent(name, diffs[name]))}
    run([name for name in sample if name not in reasons], args.processes)
    status = {name: status_by_exit_code[code] for name, code in names().items()}
    survivors = [name for name in sample if name not in reasons and status[name] not in DETECTED]
    LAST.write_text(json.dumps(survivors))
    for name in survivors:
        print(f"\n{status[name]}: {where(name, diffs[name])}  {name}\n{diffs[name]}")
    tried = len(sample) - len(reasons)
    share = 1.0 - len(survivors) / tried if tried else 1.0
    result = {
        "killed_share": round(share, 4),
        "killed": tried - len(survivors),
        "survived": len(survivors),
        "equivalent": len(reasons),
        "sample": len(sample),
        "of": len(status),
        "seed": args.seed,
        "seconds": round(time.monotonic() - began_s),
    }
    print(json.dumps(result))
    return 0 if share >= args.least else 1


def names() -> dict[str, int | None]:
    """The exit code of each mutant by name; None before its tests have run."""
    found: dict[str, int | None] = {}
    for path in walk_mutatable_files():
        data = SourceFileMutationData(path=path)
        data.load()
        found |= data.exit_code_by_key
    return found


def function(name: str) -> str:
    """`motet.policies.memory.eviction.Gdsf.use` of `motet.policies.memory.eviction.xǁGdsfǁuse__mutmut_5`."""
    module, _, mangled = name.partition("__mutmut_")[0].rpartition(".")
    return ".".join([module, *(part for part in mangled.removeprefix("x").removeprefix("_").split("ǁ") if part)])


def path_of(name: str) -> Path:
    """The file that the mutant changes, from the project's root."""
    return Path(*name.rpartition(".")[0].split(".")).with_suffix(".py")


def diff(name: str) -> str:
    """The lines that the mutant takes out and puts in, with mutmut's context."""
    return "\n".join(get_diff_for_mutant(name, path=path_of(name)).splitlines()[3:])


def changed(text: str, sign: str) -> list[str]:
    """The lines of a diff with this sign, without it and without indentation."""
    return [line[1:].strip() for line in text.splitlines() if line.startswith(sign)]


def where(name: str, text: str) -> str:
    """file:line of the mutant in the source."""
    path = ROOT / path_of(name).relative_to("motet")
    lines = path.read_text().splitlines()
    *classes, last = function(name).removeprefix(".".join(path_of(name).with_suffix("").parts) + ".").split(".")
    at = 0
    for pattern in [*(rf"class {one}\b" for one in classes), rf"\s*(async )?def {last}\b"]:
        at = next((number for number in range(at, len(lines)) if re.match(pattern, lines[number])), at)
    removed = changed(text, "-")
    at = next((number for number in range(at, len(lines)) if removed and lines[number].strip() == removed[0]), at)
    return f"{path.relative_to(ROOT)}:{at + 1}"


def why_equivalent(name: str, text: str) -> str | None:
    """The listed reason for which the mutant cannot change behaviour; None if it is not listed."""
    for one in tomllib.loads(EQUIVALENT.read_text())["mutant"]:
        if one["function"] == function(name) and one["before"] in changed(text, "-") and one["after"] in changed(text, "+"):
            return one["reason"]
    return None


if __name__ == "__main__":
    sys.exit(main())
