"""Outputs that follow a grammar: what they cost, whether they hold, and how hostile grammars end.

cost        tokens per second of the engine of a worker, model S: half of 32 requests constrained to a JSON schema, and none,
            in turns; half of the requests are on adapters of mixed ranks
schemas     random JSON schemas; for each, tokens by chance among the allowed ones until the output ends; it is read as JSON
            and validated by jsonschema
hostile     schemas and expressions that are exponential, recursive or large: time until they are compiled or refused
suite       (`--suite DIR`, a checkout of JSON-Schema-Test-Suite) instances of draft 2020-12: valid ones should be accepted
            and invalid ones refused. Beside xgrammar, vLLM's default, where that is installed
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import statistics
import tempfile
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from bench import report
from bench.models import model_and_adapters, prompts
from bench.rig.engine import host_adapters
from bench.structured_suite import suite
from motet.examples.demo import DEMO
from motet.services.worker.native.grammars import Grammars, Matcher
from motet.shared.clock import now_s
from motet.shared.errors import BadRequest
from motet.shared.model import StructuredOutput

STREAMS, TOKENS, ROUNDS = 32, 96, 8
SCHEMAS, STEPS = 10_000, 4000
ENDS = 2  # the demo's token that ends an output
ROW = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
ENDLESS = StructuredOutput(kind="json", value=json.dumps({"type": "array", "minItems": 10_000, "items": ROW}))


def arguments(parser: argparse.ArgumentParser) -> None:
    """This bench's own options."""
    parser.add_argument(
        "--suite", type=Path, metavar="DIR", help="a checkout of JSON-Schema-Test-Suite; nothing else is measured"
    )


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Print the tables, return the figures."""
    if args.suite:
        return suite(args.suite)
    figures = _cost(args) | _schemas(args) | _hostile()
    return figures


# ---- cost


def _cost(args: argparse.Namespace) -> dict[str, Any]:
    name = "XS" if args.quick else "S"
    model, adapters = model_and_adapters(name)
    with tempfile.TemporaryDirectory() as directory:
        there = Path(directory)
        for file in model.iterdir():
            (there / file.name).symlink_to(file)
        _write_tokenizer(there / "tokenizer.json", json.loads((model / "config.json").read_text())["vocab_size"])
        laps = _laps(args, there, model, adapters)
    rates = {kind: statistics.median(rates) for kind, rates in laps.items()}
    pairs = [half / none for half, none in zip(laps["half"], laps["none"], strict=True)]
    rows = [["none", rates["none"]], ["16 of 32", rates["half"]]]
    print(report.table(f"model {name}, {STREAMS} requests", ("constrained", "tokens/s"), rows))
    return {"structured_cost": round(statistics.median(pairs), 3), "tokens_per_s": {k: round(v) for k, v in rates.items()}}


def _write_tokenizer(path: Path, vocabulary: int) -> None:
    """A byte-level tokenizer with as many tokens as the model: bytes, and words by chance that JSON texts are made of."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = ["<end>", *letters]
    draw, known, merges = random.Random(1), set(names), list[tuple[str, str]]()
    while len(names) < vocabulary:
        pair = draw.choice(names[1:]), draw.choice(letters)
        if (word := "".join(pair)) not in known and len(word) < 8:
            known.add(word)
            names.append(word)
            merges.append(pair)
    made = Tokenizer(models.BPE(vocab={name: at for at, name in enumerate(names)}, merges=merges))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made.add_special_tokens([AddedToken("<end>", special=True)])
    made.save(str(path))


def _laps(args: argparse.Namespace, there: Path, model: Path, adapters: list[Path]) -> dict[str, list[float]]:
    from motet.policies.times.step_times import StepTimes
    from motet.services.worker.config import WorkerConfig
    from motet.services.worker.engines.start_perf import START_PERF
    from motet.services.worker.native.assemble import assemble

    config = WorkerConfig.of(model=str(there), threads=2, kv_memory_gib=1.0, max_lora_rank=64, max_loras=32)
    assembly = assemble(config, there, StepTimes(START_PERF))
    weights = host_adapters(assembly, model, [str(one) for one in adapters])
    found: dict[str, list[float]] = {"none": [], "half": []}
    tokens = 24 if args.quick else TOKENS
    for number in args.watch.rounds((2 if args.quick else ROUNDS) + 1):
        for half, (kind, rates) in enumerate(found.items()):
            asked = prompts(STREAMS, 32, seed=2 * number + half)  # none is in the prefix cache
            began_s = now_s()
            made = _lap(assembly.engine, asked, weights, tokens, half=kind == "half")
            if number:  # the first one warms up
                rates.append(made / (now_s() - began_s))
    return found


_ids = count()


def _lap(engine: Any, asked: list[list[int]], weights: list[Any], tokens: int, *, half: bool) -> int:
    """The number of tokens of 32 requests that all come at once. Raises RuntimeError for one that ends otherwise."""
    from motet.services.worker.engines.request import EngineRequest
    from motet.shared.model import SamplingParams

    now, lap, made = now_s(), next(_ids), 0
    for number, prompt in enumerate(asked):
        structured = ENDLESS if half and number % 2 else None
        sampling = SamplingParams(max_tokens=tokens, temperature=0.0, seed=number, ignore_eos=True, structured=structured)
        adapter = weights[number] if number % 4 < 2 else None
        engine.add(EngineRequest.local(f"{lap}-{number}", prompt, sampling, weights=adapter, arrival_s=now), now)
    while engine.has_work():
        for item in engine.step(now_s()).items.get("", []):
            if item.error is not None:
                raise RuntimeError(item.error.message)
            made += len(item.tokens)
    return made


# ---- schemas


def _schemas(args: argparse.Namespace) -> dict[str, Any]:
    import jsonschema  # type: ignore[import-untyped]

    number = 100 if args.quick else SCHEMAS
    grammars = Grammars(DEMO / "model" / "tokenizer.json", 288, {ENDS})
    draw, ended, refused = np.random.default_rng(7), 0, 0
    wrong, compile_ms, mask_us = list[tuple[Any, str]](), list[float](), list[float]()
    for _ in range(number):
        schema = _schema(draw, 3)
        wanted = StructuredOutput(kind="json", value=json.dumps(schema), disable_any_whitespace=bool(draw.integers(2)))
        began_s = now_s()
        try:
            matcher = grammars.matcher(wanted, (), "json").result()
        except BadRequest:
            refused += 1
            continue
        compile_ms.append(1e3 * (now_s() - began_s))
        text = _output(matcher, grammars, draw, mask_us)
        if text is None:
            continue
        ended += 1
        try:
            jsonschema.validate(json.loads(text), schema)
        except (ValueError, jsonschema.ValidationError):
            wrong.append((schema, text))
    grammars.close()
    for schema, text in wrong[:3]:
        print("WRONG", json.dumps(schema)[:300], text[:300])
    rows = [[number, refused, ended, len(wrong), statistics.median(compile_ms), statistics.median(mask_us)]]
    print(
        report.table("random schemas", ("schemas", "refused", "outputs that ended", "invalid", "compile ms", "mask us"), rows)
    )
    return {
        "schemas": number,
        "schemas_refused": refused,
        "outputs_ended": ended,
        "outputs_invalid": len(wrong),
        "compile_ms_p50": round(statistics.median(compile_ms), 3),
        "mask_us_p50": round(statistics.median(mask_us), 1),
    }


def _schema(draw: Any, depth: int) -> dict[str, Any]:
    """A schema by chance, of the features that clients use; its outputs are bounded."""
    kinds = ["string", "integer", "number", "boolean", "enum", "const", "pattern", "null"]
    if depth:
        kinds += ["object", "object", "object", "array", "array", "anyOf", "ref"]
    match kinds[draw.integers(len(kinds))]:
        case "object":
            names = [f"k{n}" for n in range(draw.integers(1, 5))]
            required = [name for name in names if draw.random() < 0.6]
            shape = {"type": "object", "properties": {name: _schema(draw, depth - 1) for name in names}, "required": required}
            return shape | {"additionalProperties": False}
        case "array":
            least = int(draw.integers(0, 3))
            return {
                "type": "array",
                "items": _schema(draw, depth - 1),
                "minItems": least,
                "maxItems": least + int(draw.integers(0, 3)),
            }
        case "anyOf":
            return {"anyOf": [_schema(draw, depth - 1) for _ in range(draw.integers(1, 4))]}
        case "ref":
            return {"allOf": [_schema(draw, depth - 1)]}
        case "string":
            return {"type": "string", "minLength": int(draw.integers(0, 3)), "maxLength": int(draw.integers(3, 12))}
        case "integer":
            low = int(draw.integers(-50, 50))
            return {"type": "integer", "minimum": low, "maximum": low + int(draw.integers(0, 1000))}
        case "number":
            return {"type": "number", "minimum": -1.5, "maximum": float(draw.integers(0, 100))}
        case "enum":
            return {"enum": [["x", 1, None, True, "long text"][n] for n in draw.permutation(5)[: draw.integers(1, 5)]]}
        case "const":
            return {"const": ["fixed", 7, False][draw.integers(3)]}
        case "pattern":
            return {"type": "string", "pattern": ["^[a-z]{2,5}$", "^[0-9]{3}-[A-F]$", "^(yes|no)$"][draw.integers(3)]}
        case kind:
            return {"type": kind}


def _output(matcher: Matcher, grammars: Grammars, draw: Any, mask_us: list[float]) -> str | None:
    """Tokens by chance until the output ends; None where it does not within `STEPS`."""
    tokens: list[int] = []
    for _ in range(STEPS):
        began_s = now_s()
        matcher.fill()
        mask_us.append(1e6 * (now_s() - began_s))
        allowed = np.flatnonzero(np.unpackbits(matcher.mask.view(np.uint8), bitorder="little"))
        token = int(draw.choice(allowed))
        if token == ENDS:
            return grammars.text(tokens)
        matcher.take((token,))
        tokens.append(token)
    return None


# ---- hostile


def hostile() -> Iterator[tuple[str, StructuredOutput]]:
    """(name, constraint) of grammars that are meant to cost time or memory."""

    def schema(value: Any) -> StructuredOutput:
        return StructuredOutput(kind="json", value=json.dumps(value))

    nested: Any = {"type": "string"}
    for _ in range(60):
        nested = (
            {"anyOf": [nested, {"type": "array", "items": nested}]} if len(json.dumps(nested)) < 20_000 else {"items": nested}
        )
    yield "expression of nested repetitions", StructuredOutput(kind="regex", value="((a{1,500}){1,500}){1,500}")
    yield "expression with exponential states", StructuredOutput(kind="regex", value="(a|b)*a(a|b){200}")
    yield "expression of 64 KB", StructuredOutput(kind="regex", value="|".join(f"x{n}y*z" for n in range(8000))[:65_000])
    yield (
        "recursive schema",
        schema({"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}, {"type": "null"}]}}}),
    )
    yield "schema with only itself", schema({"$ref": "#"})
    yield "string of a million characters", schema({"type": "string", "minLength": 1_000_000})
    yield "array of a million elements", schema({"type": "array", "items": {"type": "integer"}, "minItems": 1_000_000})
    yield (
        "2,000 optional properties",
        schema({"type": "object", "properties": {f"k{n}": {"type": "integer"} for n in range(2000)}}),
    )
    yield "nested alternatives", schema(nested)
    yield "ambiguous grammar", StructuredOutput(kind="grammar", value='root ::= root root | "a" | ""')


def _hostile() -> dict[str, Any]:
    grammars = Grammars(DEMO / "model" / "tokenizer.json", 288, {ENDS})
    rows: list[tuple[str, float, float, float, str]] = []
    for name, wanted in hostile():
        began_s, before = now_s(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        masks, said = 0.0, "served"
        try:
            matcher = grammars.matcher(wanted, (), "f").result()
            masks = _masks_ms(matcher)
            said = matcher.error or said
        except BadRequest as error:
            said = error.message
        took_ms = 1e3 * (now_s() - began_s)
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
        rows.append((name, took_ms, masks, grown, said.splitlines()[0][:60]))
    grammars.close()
    print(report.table("hostile grammars", ("grammar", "ms", "longest mask ms", "MiB", "answer"), rows))
    return {
        "hostile_ms_max": round(max(row[1] for row in rows), 1),
        "hostile_mask_ms_max": round(max(row[2] for row in rows), 1),
        "hostile_mib_max": round(max(row[3] for row in rows), 1),
    }


def _masks_ms(matcher: Matcher) -> float:
    """The longest of the first 200 masks, each followed by the first token that it allows."""
    longest = 0.0
    for _ in range(200):
        began_s = now_s()
        matcher.fill()
        longest = max(longest, 1e3 * (now_s() - began_s))
        allowed = np.flatnonzero(np.unpackbits(matcher.mask.view(np.uint8), bitorder="little"))
        if matcher.error or not len(allowed) or allowed[0] == ENDS:
            break
        matcher.take((int(allowed[0]),))
    return longest
