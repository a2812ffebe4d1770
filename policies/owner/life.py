"""The life of an owned request, as a table, and what its owner knows of it.

                 ┌───────── resume, move ─────────┐          resume: its worker is lost, cannot serve it, or lost it; tokens are
                 ▼                                │          missing; or the answer to its submission is lost
    new ──> placing ──accept──> running ──────────┘          accept: a worker has it, as a scheduler or its first tokens say
              │ ▲ └─resume        │
              │ └────┘            │
              └──── end ──────────┴──> ended                 finished, failed, cancelled or refused

Every `resume` and `move` begins the next epoch. A message of an earlier epoch changes nothing.
"""

from __future__ import annotations

from typing import Any, Literal, Protocol

Phase = Literal["placing", "running", "ended"]
What = Literal["accept", "resume", "move", "end"]

TRANSITIONS: dict[Phase, dict[What, Phase]] = {
    "placing": {"accept": "running", "resume": "placing", "end": "ended"},
    "running": {"resume": "placing", "move": "placing", "end": "ended"},
    "ended": {},
}


class Item(Protocol):
    """New tokens of one request, as `shared.wire.stream.StreamItem`: `tokens[0]` has the output index `index`."""

    request_id: str
    epoch: int
    index: int
    tokens: list[int]
    finish: Any
    logprobs: Any
    error: Any


class Search:
    """The search for a worker in one epoch, or in several if answers are lost."""

    __slots__ = ("kv", "patience_s", "pause_s", "serial", "timeout_s", "to", "until_s", "waits")

    def __init__(self, until_s: float, patience_s: float, pause_s: float, timeout_s: float) -> None:
        self.until_s, self.patience_s = until_s, patience_s
        self.pause_s, self.timeout_s = pause_s, timeout_s  # of the next attempt
        self.to, self.kv = "", ""  # the worker to be tried first, and once; the token for KV blocks of the worker before
        self.serial = 0  # of the pause that is awaited
        self.waits = False


class Owned:
    """A request, and how far it is. Its subclass takes the tokens: a stream to a client, or a simulated one."""

    __slots__ = (
        "__weakref__",
        "constrained",
        "declined",
        "early",
        "epoch",
        "error",
        "excluded",
        "finish",
        "losses",
        "max_tokens",
        "opened",
        "parked_s",
        "phase",
        "place",
        "plain",
        "request_id",
        "resumed_s",
        "set_back_s",
        "sign_s",
        "tokens",
        "worker_id",
    )

    def __init__(self, request_id: str, max_tokens: int, *, constrained: bool, now_s: float) -> None:
        self.request_id, self.max_tokens = request_id, max_tokens
        self.constrained = constrained  # to a grammar: not every worker can continue its output
        self.phase: Phase = "placing"
        self.opened = False  # a worker has had it
        self.parked_s = 0.0  # since when it has waited for a first worker; 0 while it has not
        self.epoch = 0
        self.worker_id: str | None = None  # None while no worker is known to have it
        self.tokens: list[int] = []  # every output token of every epoch, EOS included
        self.early: dict[int, Any] = {}  # items that came before their turn, by index
        self.excluded: list[str] = []  # workers that lost it
        self.declined: dict[str, Any] = {}  # workers that can never serve it, with their errors
        self.losses = 0  # workers lost since the last new token
        self.sign_s = now_s  # the last sign of life of its worker
        self.resumed_s = 0.0  # since when it waits for a token from another worker; 0 while it does not
        self.set_back_s = 0.0  # since when its workers have been unable to serve it; 0 while they are able
        self.place: Search | None = None
        self.plain = False  # the next tokens may go through `push_plain`
        self.finish: Any = None
        self.error: Any = None

    def move(self, what: What) -> None:
        """Take the transition. Raises KeyError for one that is not in the table."""
        self.phase = TRANSITIONS[self.phase][what]

    # ---- what takes the tokens

    def push_plain(self, new: list[int]) -> bool:
        """Take one token of which nothing but its text is wanted. Returns False when the reader is too slow."""
        raise NotImplementedError

    def push(self, new: list[int], item: Any, logprobs: Any) -> None:
        """Take `new`, those tokens of `item` that were not known yet. Sets `finish` when they end the sequence."""
        raise NotImplementedError

    def see_plain(self) -> None:
        """Update `plain`."""
        raise NotImplementedError

    def begin_again(self) -> bool:
        """Forget the output so far. Returns False when somebody has seen some of it and cannot take it back."""
        raise NotImplementedError

    def end(self, finish: Any) -> None:
        """Finish without a new token."""
        raise NotImplementedError

    def fail(self, error: Any) -> None:
        """End with an error."""
        raise NotImplementedError
