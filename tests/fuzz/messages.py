"""Every message is read as it was written, and bytes that are no message are refused."""

from __future__ import annotations

import contextlib
import random
import re

import msgspec
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from motet.shared.bus import decode, encode
from motet.shared.wire.registry import RegistryReply
from motet.shared.wire.request import AssignReply, Control, SubmitReply, pack_tokens, unpack_tokens
from motet.shared.wire.worker_state import WorkerState
from tests.fuzz.values import MESSAGES, mutated, payload, random_value

BEYOND = re.compile(r"Expected `\w+` [<>]=? \S+ - at")  # a limit that a type names
UNIONS = (SubmitReply, AssignReply, Control, WorkerState, RegistryReply)


def fuzz(count: int, seed_: int) -> int:
    """`count` messages of random types; returns how many byte strings were read. Raises AssertionError with one that fails."""
    read = 0

    @seed(seed_)
    @settings(max_examples=count, deadline=None, database=None, suppress_health_check=list(HealthCheck), print_blob=False)
    @given(st.sampled_from(MESSAGES), st.randoms(use_true_random=False), st.lists(st.integers(-(2**31), 2**31 - 1)))
    def messages_survive_and_nonsense_is_refused(kind: type[msgspec.Struct], rng: random.Random, tokens: list[int]) -> None:
        nonlocal read
        data = encode(random_value(kind, rng))
        try:
            assert encode(decode(data, kind)) == data
        except msgspec.ValidationError as error:
            assert BEYOND.match(str(error)), error
        assert unpack_tokens(pack_tokens(tokens)) == tokens
        for odd in (mutated(data, rng), payload(rng)):
            for target in (kind, *UNIONS):
                read += 1
                with contextlib.suppress(msgspec.MsgspecError):
                    encode(decode(odd, target))

    messages_survive_and_nonsense_is_refused()
    return read
