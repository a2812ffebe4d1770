"""JSON Schema's own test suite as a test of grammars: do they accept the valid instances and refuse the invalid ones?

An instance is written as compact JSON, and its bytes are given to the matcher as tokens of one byte, then the end. A schema
that is refused makes no wrong output, but none at all. Only assertions of draft 2020-12 without its optional parts; schemas
that refer to other documents are left out.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench import report
from motet.examples.demo import DEMO
from motet.services.worker.native.grammars import Grammars
from motet.shared.clock import now_s
from motet.shared.errors import BadRequest
from motet.shared.model import StructuredOutput

DRAFT = Path("tests/draft2020-12")
LEFT_OUT = ("refRemote.json", "vocabulary.json", "dynamicRef.json")
OUTCOMES = ("right", "valid refused", "invalid accepted", "not compiled")
Accepts = Callable[[Sequence[int]], bool]
ENDS = 2


def suite(directory: Path) -> dict[str, Any]:
    """Print the table, return the figures: instances by what became of them."""
    if not (directory / DRAFT).is_dir():
        raise SystemExit(f"structured: {directory / DRAFT} is not there")
    makers: dict[str, Callable[[], Callable[[str], Accepts]]] = {"Motet": _ours, "xgrammar": _xgrammar}
    figures: dict[str, Any] = {}
    rows = []
    for name, make in makers.items():
        try:
            compile_ = make()
        except ImportError:
            continue
        counts, times_ms = _counted(directory, compile_)
        total = sum(counts.values())
        found = [counts[what] for what in OUTCOMES]
        rows.append([name, total, *found, sum(times_ms) / len(times_ms)])
        key = name.lower()
        figures[f"suite_right_{key}"] = round(counts["right"] / total, 4)
        figures |= {f"suite_{what.replace(' ', '_')}_{key}": counts[what] for what in OUTCOMES[1:]}
    columns = (
        "compiled by",
        "instances",
        "right",
        "valid ones refused",
        "invalid ones accepted",
        "schema not compiled",
        "compile ms",
    )
    print(report.table("JSON-Schema-Test-Suite, draft 2020-12", columns, rows))
    return figures


def _counted(directory: Path, compile_: Callable[[str], Accepts]) -> tuple[Counter[str], list[float]]:
    counts, times_ms = Counter[str](), []
    for file in sorted((directory / DRAFT).glob("*.json")):
        if file.name in LEFT_OUT:
            continue
        for case in json.loads(file.read_text()):
            schema = case["schema"]
            began_s = now_s()
            try:
                accepts = compile_(json.dumps(schema))
            except ValueError:
                counts["not compiled"] += len(case["tests"])
                continue
            times_ms.append(1e3 * (now_s() - began_s))
            for test in case["tests"]:
                text = json.dumps(test["data"], ensure_ascii=False, separators=(",", ":"))
                found = accepts(list(text.encode()))
                counts["right" if found == test["valid"] else "valid refused" if test["valid"] else "invalid accepted"] += 1
    return counts, times_ms


def _bytes() -> dict[int, int]:
    """The demo's token of each byte."""
    from tokenizers import pre_tokenizers

    vocabulary = json.loads((DEMO / "model" / "tokenizer.json").read_text())["model"]["vocab"]
    order = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = {byte: chr(byte) for byte in order}
    letters |= {byte: chr(256 + at) for at, byte in enumerate(byte for byte in range(256) if byte not in letters)}
    assert set(letters.values()) == set(pre_tokenizers.ByteLevel.alphabet())
    return {byte: vocabulary[letter] for byte, letter in letters.items() if letter in vocabulary}


def _ours() -> Callable[[str], Accepts]:
    grammars, tokens = Grammars(DEMO / "model" / "tokenizer.json", 288, {ENDS}), _bytes()

    def compiled(schema: str) -> Accepts:
        try:
            made = grammars.matcher(StructuredOutput(kind="json", value=schema), (), "json").result()
        except BadRequest as error:
            raise ValueError(error.message) from None

        def accepts(text: Sequence[int]) -> bool:
            matcher = made.copy()
            return matcher.take([tokens[byte] for byte in text]) and matcher.may_end

        return accepts

    return compiled


def _xgrammar() -> Callable[[str], Accepts]:
    import xgrammar  # type: ignore[import-not-found, unused-ignore]
    from tokenizers import Tokenizer

    vocabulary = Tokenizer.from_file(str(DEMO / "model" / "tokenizer.json")).get_vocab()
    names = [name for name, _ in sorted(vocabulary.items(), key=lambda one: one[1])]
    info = xgrammar.TokenizerInfo(names, vocab_type=xgrammar.VocabType.BYTE_LEVEL, stop_token_ids=[ENDS])
    compiler, tokens = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False), _bytes()

    def compiled(schema: str) -> Accepts:
        try:
            grammar = compiler.compile_json_schema(schema, any_whitespace=True, strict_mode=False)
        except Exception as error:
            raise ValueError(str(error)) from None

        def accepts(text: Sequence[int]) -> bool:
            matcher = xgrammar.GrammarMatcher(grammar)
            return all(matcher.accept_token(tokens[byte]) for byte in text) and bool(matcher.accept_token(ENDS))

        return accepts

    return compiled
