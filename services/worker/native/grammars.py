"""Compiles what outputs must look like into matchers (llguidance), in threads of their own, and keeps what it has compiled.

    StructuredOutput ──grammar_of──> llguidance's grammar ──compile, once──> Grammar ──a copy per request──> Matcher

Hostile grammars end in an error, not in a long wait: llguidance counts what it does while it compiles and while it makes a mask
(`LIMITS`). Their texts are bounded by the gateway. A compiled grammar holds at most some 40 MB; `KEPT` of them are remembered.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Collection, Sequence
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
LIMITS = LLParserLimits(
    initial_lexer_fuel=2_000_000, step_lexer_fuel=400_000, step_max_items=100_000, max_lexer_states=25_000, verbose_errors=False
)
"""Of one grammar: 40 ms to prepare it, 30 ms for a mask, and 1 to 2 kB for each state of its lexer."""
WHITESPACE = r"[ \n\r\t]{1,64}"
"""Between the parts of a JSON text. Without a bound, models that were not trained for JSON write nothing else to the end."""
NAMES = {"json": "JSON schema", "regex": "regular expression", "choice": "list of choices", "structural_tag": "structural tag"}
_PUNCTUATION = frozenset(r"""!"#$%&'()*+,-./:;<=>?@[\]^_`{|}~""")


class GrammarError(ValueError):
    """A grammar that cannot be compiled, or is too large for `LIMITS`."""


def grammar_of(wanted: StructuredOutput) -> str:
    """What llguidance compiles for a constraint. Raises GrammarError."""
    try:
        match wanted.kind:
            case "json" | "json_object":
                return _json(wanted)
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


def _json(wanted: StructuredOutput) -> str:
    schema: Any = json.loads(wanted.value) if wanted.kind == "json" else {"type": "object"}
    if wanted.disable_additional_properties:
        _close(schema)
    options: JsonCompileOptions = {"whitespace_flexible": not wanted.disable_any_whitespace}
    if not wanted.disable_any_whitespace:
        options["whitespace_pattern"] = wanted.whitespace_pattern or WHITESPACE
    return LLMatcher.grammar_from_json_schema(schema, defaults=options)


def _close(schema: Any) -> None:
    """Objects with properties have no others, unless their schema says that they may."""
    if isinstance(schema, list):
        for one in schema:
            _close(one)
    elif isinstance(schema, dict):
        if isinstance(schema.get("properties"), dict) or isinstance(schema.get("patternProperties"), dict):
            schema.setdefault("additionalProperties", False)
        for name, one in schema.items():
            if name not in ("const", "enum", "default", "examples"):
                _close(one)


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
    """What one sequence may draw next. Not for several threads at once."""

    __slots__ = ("_matcher", "mask")

    def __init__(self, matcher: LLMatcher, words: int) -> None:
        self._matcher = matcher
        self.mask = np.zeros(words, np.int32)
        """The tokens that may come next as bits, int32 [vocabulary / 32]; valid after `fill`."""

    @property
    def error(self) -> str:
        """Why nothing may come any more; "" while all is well."""
        return str(self._matcher.get_error())

    def fill(self) -> None:
        """Compute the mask for the next token. Other Python threads go on meanwhile."""
        self._matcher.unsafe_compute_mask_ptr(self.mask.ctypes.data, self.mask.nbytes)

    def take(self, tokens: Sequence[int]) -> bool:
        """These tokens were drawn. Returns False, and never allows anything again, if they do not fit."""
        return self._matcher.is_stopped() or bool(self._matcher.consume_tokens(list(tokens)))

    def copy(self) -> Matcher:
        """Another one in the same state."""
        return Matcher(self._matcher.deep_copy(), len(self.mask))


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
        self._words = -(-vocab_size // 32)
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
            known = Matcher(LLMatcher(self._tokenizer, grammar_of(wanted), log_level=0, limits=LIMITS), self._words)
            if known.error:
                raise GrammarError(known.error)
            if len(self._known) >= KEPT:
                self._known.popitem(last=False)
            self._known[wanted] = known
        self._known.move_to_end(wanted)
        return known

    def close(self) -> None:
        """End the thread."""
        self._threads.shutdown(wait=False, cancel_futures=True)
