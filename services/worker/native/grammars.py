"""Compiles what outputs must look like into matchers (llguidance), in threads of their own, and keeps what it has compiled.

    StructuredOutput ──grammar_of──> llguidance's grammar ──compile, once──> Grammar ──a copy per request──> Matcher

Hostile grammars end in an error, not in a long wait: llguidance counts what it does while it compiles and while it makes a mask
(`LIMITS`). Their texts are bounded by the gateway. A compiled grammar holds at most some 40 MB; `KEPT` of them are remembered.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, StructTag, grammar_from

from motet.shared.errors import BadRequest
from motet.shared.model import StructuredOutput
from motet.shared.telemetry import logger

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

log = logger("motet.worker.grammars")

KEPT = 64
"""Compiled grammars that are remembered, those used last."""
THREADS = 1
WAITING = 256
"""Grammars that may wait to be compiled; more are refused."""
LIMITS = LLParserLimits(max_lexer_states=25_000, max_grammar_size=200_000, verbose_errors=False)
"""Of one grammar: its symbols, and the states of its lexer, of 1 to 2 kB each. The others are llguidance's own, with which a
mask takes at most some 60 ms."""
FORMATS = frozenset({"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"})
"""Formats of strings that are kept to. All others are remarks, as in JSON Schema."""
BLANKS_MAX = 32
"""Tokens of white space in a row in a JSON text. Models that were not trained for JSON would write nothing else to the end."""
NAMES = {"json": "JSON schema", "regex": "regular expression", "choice": "list of choices", "structural_tag": "structural tag"}
VALUES = ("const", "enum", "default", "examples")
"""Keywords of a schema whose values are no schemas."""
_PUNCTUATION = frozenset(r"""!"#$%&'()*+,-./:;<=>?@[\]^_`{|}~""")


class GrammarError(ValueError):
    """A grammar that cannot be compiled, or is too large for `LIMITS`."""


def grammar_of(wanted: StructuredOutput, *, loosely: bool = False) -> str:
    """What llguidance compiles for a constraint. Raises GrammarError. `loosely`: of a schema's `oneOf`, several may hold."""
    try:
        match wanted.kind:
            case "json" | "json_object":
                return _json(wanted, loosely=loosely)
            case "regex":
                return LLMatcher.grammar_from_regex(wanted.value)
            case "choice":
                return LLMatcher.grammar_from_regex(_choices(json.loads(wanted.value)))
            case "grammar":
                return grammar_from("grammar", wanted.value)
            case "structural_tag":
                return _structural_tag(json.loads(wanted.value))
    except (ValueError, KeyError, TypeError, AssertionError, RecursionError) as error:
        raise GrammarError(str(error) or type(error).__name__) from None


def _json(wanted: StructuredOutput, *, loosely: bool) -> str:
    schema: Any = json.loads(wanted.value) if wanted.kind == "json" else {"type": "object"}
    for part in _parts(schema):
        if isinstance(part.get("format"), str) and part["format"] not in FORMATS:
            del part["format"]
        named = part.get("properties"), part.get("patternProperties")
        if wanted.disable_additional_properties and any(isinstance(one, dict) for one in named):
            part.setdefault("additionalProperties", False)  # others only where the schema says so
    options: JsonCompileOptions = {"whitespace_flexible": not wanted.disable_any_whitespace, "coerce_one_of": loosely}
    if wanted.whitespace_pattern:
        options["whitespace_pattern"] = wanted.whitespace_pattern
    return LLMatcher.grammar_from_json_schema(schema, defaults=options)


def _parts(schema: Any) -> Iterator[dict[str, Any]]:
    """The schema and all schemas in it, each before what it contains."""
    if isinstance(schema, list):
        for one in schema:
            yield from _parts(one)
    elif isinstance(schema, dict):
        yield schema
        for name, one in schema.items():
            if name not in VALUES:
                yield from _parts(one)


def _choices(choices: Sequence[str]) -> str:
    if not choices:
        raise GrammarError("there is nothing to choose from")
    return "|".join("".join("\\" + one if one in _PUNCTUATION else one for one in choice) for choice in choices)


def _structural_tag(given: Any) -> str:
    """vLLM's tags: text, and in it what begins with one of the triggers follows the schema of its structure."""
    if "structures" not in given or "triggers" not in given:
        raise GrammarError("structures and triggers are expected")
    tags = []
    for number, one in enumerate(given["structures"]):
        trigger = next((trigger for trigger in given["triggers"] if one["begin"].startswith(trigger)), None)
        if trigger is None:
            raise GrammarError(f"structures[{number}].begin starts with none of the triggers")
        tags.append(StructTag(trigger=trigger, begin=one["begin"], grammar=one["schema"], end=one["end"]))
    return StructTag.to_grammar(tags, assume_special=False)


class Matcher:
    """What one sequence may draw next. Not for several threads at once.

    `blanks`: the tokens of white space as bits, like `mask`, for a JSON text; of them at most `BLANKS_MAX` follow each other.
    """

    __slots__ = ("_blanks", "_in_a_row", "_matcher", "mask")

    def __init__(self, matcher: LLMatcher, words: int, blanks: np.ndarray | None = None, in_a_row: int = 0) -> None:
        self._matcher, self._blanks, self._in_a_row = matcher, blanks, in_a_row
        self.mask = np.zeros(words, np.int32)
        """The tokens that may come next as bits, int32 [vocabulary / 32]; valid after `fill`."""

    @property
    def error(self) -> str:
        """Why nothing may come any more; "" while all is well."""
        return str(self._matcher.get_error())

    @property
    def may_end(self) -> bool:
        """Whether the output is whole."""
        return bool(self._matcher.is_accepting())

    def fill(self) -> None:
        """Compute the mask for the next token. Other Python threads go on meanwhile."""
        self._matcher.unsafe_compute_mask_ptr(self.mask.ctypes.data, self.mask.nbytes)
        if self._blanks is not None and self._in_a_row >= BLANKS_MAX:
            others = self.mask & ~self._blanks
            if others.any():
                self.mask[:] = others

    def take(self, tokens: Sequence[int]) -> bool:
        """These tokens were drawn. Returns False, and never allows anything again, if they do not fit."""
        if self._blanks is not None:
            for token in tokens:
                blank = int(self._blanks[token >> 5]) >> (token & 31) & 1
                self._in_a_row = self._in_a_row + 1 if blank else 0
        ended = self._matcher.is_stopped() and not self.error
        return ended or bool(self._matcher.consume_tokens(list(tokens)))

    def copy(self) -> Matcher:
        """Another one in the same state."""
        return Matcher(self._matcher.deep_copy(), len(self.mask), self._blanks, self._in_a_row)


def grammars_for(tokenizer: Path, vocab_size: int, ends: Collection[int]) -> Grammars | None:
    """The grammars of a model; None, with a line in the log, where llguidance cannot read its tokenizer."""
    if not tokenizer.is_file():
        return None
    try:
        return Grammars(tokenizer, vocab_size, ends)
    except Exception as error:  # whatever is in the file
        log.warning("no structured outputs: the tokenizer cannot be read for grammars", extra={"error": str(error)})
        return None


class Grammars:
    """Compiles the constraints of one model's requests.

    `tokenizer`: its tokenizer.json; `vocab_size`: of its logits; `ends`: the tokens that end an output.
    """

    def __init__(self, tokenizer: Path, vocab_size: int, ends: Collection[int]) -> None:
        self._tokenizer = LLTokenizer(str(tokenizer), n_vocab=vocab_size, eos_token=sorted(ends) or None)
        self._vocab_size, self._words = vocab_size, -(-vocab_size // 32)
        self._blanks: np.ndarray | None = None
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="grammars")
        self._known: OrderedDict[StructuredOutput, Matcher] = OrderedDict()
        self._lock = threading.Lock()
        self._waiting = 0

    def matcher(self, wanted: StructuredOutput, output: Sequence[int], param: str) -> Future[Matcher]:
        """A matcher after the `output` so far. Its future may have a BadRequest, for the request's field `param`."""
        with self._lock:
            if self._waiting >= WAITING:
                found: Future[Matcher] = Future()
                found.set_exception(BadRequest(f"{param}: {WAITING} grammars wait to be compiled already", param=param))
                return found
            self._waiting += 1
        return self._threads.submit(self._made, wanted, output, param)

    def _made(self, wanted: StructuredOutput, output: Sequence[int], param: str) -> Matcher:
        try:
            made = self._compiled(wanted).copy()
        except GrammarError as error:
            what = NAMES.get(wanted.kind, "grammar")
            raise BadRequest(f"{param}: the {what} cannot be used: {error}", param=param) from None
        finally:
            with self._lock:
                self._waiting -= 1
        if output and not made.take(output):
            raise BadRequest(f"{param}: the output so far does not follow it", param=param)
        return made

    def _compiled(self, wanted: StructuredOutput) -> Matcher:
        known = self._known.get(wanted)
        if known is None:
            json_text = wanted.kind in ("json", "json_object")
            known = self._matcher(grammar_of(wanted), json_text=json_text)
            if "coerce_one_of" in known.error:  # alternatives that could hold together: any of them will do, as in vLLM
                known = self._matcher(grammar_of(wanted, loosely=True), json_text=json_text)
            if known.error:
                raise GrammarError(known.error)
            if len(self._known) >= KEPT:
                self._known.popitem(last=False)
            self._known[wanted] = known
        self._known.move_to_end(wanted)
        return known

    def _matcher(self, grammar: str, *, json_text: bool) -> Matcher:
        made = LLMatcher(self._tokenizer, grammar, log_level=0, limits=LIMITS)
        return Matcher(made, self._words, self._blank_tokens() if json_text else None)

    def _blank_tokens(self) -> np.ndarray:
        """The tokens of white space as bits, int32 [vocabulary / 32]."""
        if self._blanks is None:
            decode = self._tokenizer.decode_bytes
            blank = [bool(text := decode([token])) and not text.strip(b" \n\r\t") for token in range(self._vocab_size)]
            bits = np.packbits(np.array(blank), bitorder="little")
            self._blanks = np.pad(bits, (0, 4 * self._words - len(bits))).view(np.int32)
        return self._blanks

    def text(self, tokens: Sequence[int]) -> str:
        """The text of tokens."""
        return str(self._tokenizer.decode_str(list(tokens)))

    def close(self) -> None:
        """End the thread."""
        self._threads.shutdown(wait=False, cancel_futures=True)
