"""Publish a durable request with nothing but a socket: the NATS protocol is lines of text, the request is plain JSON.

    python examples/clients/publish_raw.py 127.0.0.1 4222 upper-case "hello world" [user password-file]

What it sends, as you could type it into telnet:

    CONNECT {"verbose":false,"headers":true,"no_responders":true,"user":"...","pass":"..."}
    SUB _INBOX_upstream.1 1
    HPUB motet.v1.requests.default _INBOX_upstream.1 <header bytes> <total bytes>
    NATS/1.0
    Nats-Msg-Id: <id>

    {"model":"upper-case","messages":[{"role":"user","content":"hello world"}]}

Where the greeting (INFO) asks for TLS it is begun before CONNECT; SSL_CERT_FILE names the certificate authority.
The acknowledgement arrives on the inbox. The result is fetched from the stream with one JetStream API request.
"""

from __future__ import annotations

import json
import socket
import ssl
import sys
import time
import uuid
from pathlib import Path

INBOX = "_INBOX_upstream"


class Wire:
    """A NATS connection in forty lines."""

    def __init__(self, host: str, port: int, user: str, password: str) -> None:
        self._socket = socket.create_connection((host, port), timeout=10)
        info = b""
        while not info.endswith(b"\n"):  # byte by byte: what follows may be encrypted
            info += self._socket.recv(1)
        if json.loads(info[5:]).get("tls_required"):
            self._socket = ssl.create_default_context().wrap_socket(self._socket, server_hostname=host)
        self._stream = self._socket.makefile("rb")
        options: dict[str, object] = {"verbose": False, "headers": True, "no_responders": True}
        if user:
            options |= {"user": user, "pass": password}
        self._send(f"CONNECT {json.dumps(options)}\r\nSUB {INBOX}.* 1\r\n".encode())

    def _send(self, data: bytes) -> None:
        self._socket.sendall(data)

    def request(self, subject: str, payload: bytes, headers: dict[str, str]) -> dict:
        """Publish with a reply inbox; the JSON answer."""
        head = "NATS/1.0\r\n" + "".join(f"{k}: {v}\r\n" for k, v in headers.items()) + "\r\n"
        reply = f"{INBOX}.{uuid.uuid4().hex[:8]}"
        line = f"HPUB {subject} {reply} {len(head)} {len(head) + len(payload)}\r\n"
        self._send(line.encode() + head.encode() + payload + b"\r\n")
        while True:
            words = self._stream.readline().decode().split()
            if not words:
                raise ConnectionError("the server closed the connection")
            if words[0] == "PING":
                self._send(b"PONG\r\n")
            elif words[0] == "-ERR":
                raise PermissionError(" ".join(words[1:]))
            elif words[0] in ("MSG", "HMSG"):
                body = self._stream.read(int(words[-1]) + 2)[:-2]
                skip = int(words[-2]) if words[0] == "HMSG" else 0
                if skip and not body[skip:]:
                    raise LookupError(body[:skip].decode().splitlines()[0])
                return json.loads(body[skip:])


def main() -> int:
    if len(sys.argv) not in (5, 7):
        print(__doc__)
        return 2
    host, port, model, text = sys.argv[1:5]
    user, password = (sys.argv[5], Path(sys.argv[6]).read_text().strip()) if len(sys.argv) == 7 else ("", "")
    wire = Wire(host, int(port), user, password)
    request_id = uuid.uuid4().hex
    body = {"model": model, "messages": [{"role": "user", "content": text}], "temperature": 0, "max_tokens": 64}
    ack = wire.request("motet.v1.requests.default", json.dumps(body).encode(), {"Nats-Msg-Id": request_id})
    print(f"stored as sequence {ack['seq']} of {ack['stream']}", file=sys.stderr)
    subject = f"motet.v1.results.default.{request_id}"
    for _ in range(600):
        try:
            print(json.dumps(wire.request(f"$JS.API.DIRECT.GET.MOTET_RESULTS.{subject}", b"", {}), indent=2))
            return 0
        except LookupError:
            time.sleep(0.1)
    print("no result within a minute", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
