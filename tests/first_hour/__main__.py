"""`make first-hour`: a newcomer's first hour, from a fresh clone: both commands of README, an own adapter, ten mistakes.

    python -m tests.first_hour           installs from nothing; minutes, most of them for downloads
    python -m tests.first_hour --reuse   with this clone's environment

The clone has the present commit; changes that are not committed are left out. Prints a table and, as its last line, one line of
JSON. Exit status 1 when a command fails, the own adapter answers otherwise than with PEFT, or a mistake is not explained.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from motet.shared.clock import now_s
from tests.first_hour.mistakes import MISTAKES, Said, problem
from tests.first_hour.newcomer import Newcomer
from tests.first_hour.own_adapter import PROMPT, TOKENS, expected_answer, save_adapter

ROOT = Path(__file__).resolve().parents[2]
DEMO_ANSWER = "MANY ADAPTERS"  # of README's second command


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.first_hour", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--reuse", action="store_true", help="use this clone's environment instead of installing one")
    args = parser.parse_args()
    wrong: list[str] = []
    with tempfile.TemporaryDirectory(prefix="motet-first-hour-") as directory, Newcomer(Path(directory)) as person:
        began_s = now_s()
        person.clone(ROOT, environment=ROOT / ".venv" if args.reuse else None)
        serve, chat = person.readme_commands()
        print(f"$ {serve}", flush=True)
        person.serve(serve)
        answer = person.shell(chat)
        first_answer_s = now_s() - began_s
        print(f"$ {chat}\n{answer.text}", flush=True)
        if answer.status or DEMO_ANSWER not in answer.text:
            wrong.append(f"README's second command answered {answer.text!r}")

        own = save_adapter(person.home / "examples/demo/model", person.directory / "my-adapter/checkpoint-900")
        added_s = now_s()
        said = person.motet("adapters", "add", "mine", str(own))
        print(f"$ motet adapters add mine my-adapter/checkpoint-900\n{said.text}", flush=True)
        status, body = person.post(
            "/v1/completions", {"model": "mine", "prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
        )
        answered_s = now_s() - added_s
        text = body["choices"][0]["text"] if status == 200 else body
        if text != (expected := expected_answer(person.home / "examples/demo/model", own)):
            wrong.append(f"the own adapter answered {text!r}, with PEFT it answers {expected!r}")

        rows: list[tuple[str, str, str]] = []
        for mistake in MISTAKES:
            said = mistake.make(person)
            trouble = problem(mistake, said)
            rows.append((mistake.name, "no" if trouble else "yes", _short(said)))
            if trouble:
                wrong.append(f"{mistake.name}: {trouble}\n{said.text}")
    print(f"\n{'mistake':<40} {'explained':<10} what it says")
    for name, explained, says in rows:
        print(f"{name:<40} {explained:<10} {says}")
    sys.stdout.flush()
    print("\n".join(wrong), file=sys.stderr, flush=True)
    figures = {
        "mistakes_explained": sum(explained == "yes" for _, explained, _ in rows),
        "mistakes": len(MISTAKES),
        "seconds_to_first_answer": round(first_answer_s, 1),
        "seconds_to_own_adapter": round(answered_s, 1),
        "installed": not args.reuse,
        "commit": subprocess.check_output(["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"], text=True).strip(),
    }
    print(json.dumps(figures))
    return 1 if wrong else 0


def _short(said: Said, chars: int = 150) -> str:
    line = " ".join(said.text.split())
    return line if len(line) <= chars else line[: chars - 1] + "…"


if __name__ == "__main__":
    sys.exit(main())
