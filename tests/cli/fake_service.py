"""A service in thirty lines for the supervisor's tests: answers /ready, drains as told, writes what happens to a file.

python fake_service.py PORT NAME JOURNAL [--exit STATUS] [--deaf] [--drain-s SECONDS] [--not-ready-while FILE]
"""

from __future__ import annotations

import argparse
import signal
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

parser = argparse.ArgumentParser()
parser.add_argument("port", type=int)
parser.add_argument("name")
parser.add_argument("journal", type=Path)
parser.add_argument("--exit", type=int)
parser.add_argument("--deaf", action="store_true", help="ignore SIGTERM")
parser.add_argument("--drain-s", type=float, default=0.0)
parser.add_argument("--not-ready-while", type=Path)
args = parser.parse_args()


def note(event: str) -> None:
    with args.journal.open("a") as sink:
        sink.write(f"{args.name} {event}\n")


print(f"{args.name} says hello", flush=True)
note("started")
if args.exit is not None:
    print(f"{args.name} has a problem", flush=True)
    sys.exit(args.exit)

told = threading.Event()
again = threading.Event()


def on_term(*_: object) -> None:
    if not args.deaf:
        (again if told.is_set() else told).set()


signal.signal(signal.SIGTERM, on_term)


class Ready(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        waits = args.not_ready_while is not None and args.not_ready_while.exists()
        body = b'{"reasons": ["warming up"]}' if waits else b"{}"
        self.send_response(503 if waits else 200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


server = HTTPServer(("127.0.0.1", args.port), Ready)
threading.Thread(target=server.serve_forever, daemon=True).start()
while not told.wait(0.02):
    pass
note("draining")
ends = time.monotonic() + args.drain_s
while time.monotonic() < ends and not again.wait(0.02):
    pass
note("hurried" if again.is_set() else "drained")
