"""Publish a durable request with nats-py and wait for its result.

    python examples/clients/publish_nats.py --url nats://127.0.0.1:4222 --user upstream --password-file PATH \
        --model upper-case "hello world"

The same message id published twice is one request: run it again with the same --id and the stored result comes back.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import ssl
import sys
import uuid
from pathlib import Path

import nats
from nats.js.errors import NotFoundError


async def publish(args: argparse.Namespace) -> int:
    password = Path(args.password_file).read_text().strip() if args.password_file else None
    trust = {"tls": ssl.create_default_context(cafile=args.ca_file)} if args.ca_file else {}
    inbox = f"_INBOX_{args.user or 'client'}"
    nc = await nats.connect(args.url, user=args.user or None, password=password, inbox_prefix=inbox, **trust)
    js = nc.jetstream()
    body = {
        "model": args.model,
        "messages": [{"role": "user", "content": args.text}],
        "temperature": 0,
        "max_tokens": args.max_tokens,
        "stream": args.stream,
    }

    if args.stream:

        async def show(msg) -> None:  # type: ignore[no-untyped-def]
            if msg.data:
                for choice in json.loads(msg.data)["choices"]:
                    print(choice["delta"].get("content") or "", end="", file=sys.stderr, flush=True)

        await nc.subscribe(f"motet.v1.tokens.{args.tenant}.{args.id}", cb=show)

    # Subscribed before the request is published, so the result cannot be missed; a stored one is asked for directly.
    subject = f"motet.v1.results.{args.tenant}.{args.id}"
    results = await nc.subscribe(subject, max_msgs=1)
    ack = await js.publish(f"motet.v1.requests.{args.tenant}", json.dumps(body).encode(), headers={"Nats-Msg-Id": args.id})
    print(f"stored as sequence {ack.seq}{' (a duplicate)' if ack.duplicate else ''}", file=sys.stderr)
    try:
        stream = "MOTET_RESULTS" if args.tenant == "default" else f"MOTET_RESULTS_{args.tenant}"
        stored = await js.get_last_msg(stream, subject, direct=True)
        result = json.loads(stored.data or b"")
    except NotFoundError:
        result = json.loads((await results.next_msg(timeout=args.timeout_s)).data)
    print(json.dumps(result, indent=2))
    await nc.close()
    return 0 if result["status"] == "ok" else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text")
    parser.add_argument("--url", default="nats://127.0.0.1:4222")
    parser.add_argument("--user", default="")
    parser.add_argument("--password-file", default="")
    parser.add_argument("--ca-file", default="", help="certificate authority of a server that speaks TLS")
    parser.add_argument("--tenant", default="default")
    parser.add_argument("--model", required=True, help="adapter or base model name")
    parser.add_argument("--id", default=uuid.uuid4().hex, help="Nats-Msg-Id and result id")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--stream", action="store_true", help="also show tokens while they are drawn")
    parser.add_argument("--timeout-s", type=float, default=60.0)
    return asyncio.run(publish(parser.parse_args()))


if __name__ == "__main__":
    sys.exit(main())
