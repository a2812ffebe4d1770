"""Malformed adapters and archives of them, made by code: each with the reason for which a registry must refuse it.

for case in malformed(shapes):
    case.name, case.make(), case.reason      the archive to upload, and what its refusal says
for case in malformed_directories(shapes):
    case.make(directory)                     writes below `directory`; the path to register is `directory`

`shapes` are those of the base model that the registry serves: everything else about an adapter is right, so that it is
refused for what is wrong with it and for nothing before that.
"""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import os
import pickle
import struct
import tarfile
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from motet.shared.base_shapes import BaseShapes
from tests.support_adapters import TINY, peft_config, random_tensors, safetensors_bytes, write_adapter

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
KIB, MIB = 1 << 10, 1 << 20
LONG = "x" * 9000


@dataclass(frozen=True)
class Malformed:
    """One archive that must be refused. `reason`: a part of the expected message; `files`: what a sound archive holds."""

    name: str
    make: Callable[[], bytes]
    reason: str
    files: Mapping[str, bytes] | None = None


@dataclass(frozen=True)
class MalformedDirectory:
    """One directory that must be refused. `make` writes it below the given directory."""

    name: str
    make: Callable[[Path], object]
    reason: str


def zip_of(members: Mapping[str, bytes], change: Callable[[zipfile.ZipInfo], None] = lambda info: None) -> bytes:
    """A deflated zip; `change` may alter each member's header before it is written."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            info = zipfile.ZipInfo(name)
            info.compress_type = zipfile.ZIP_DEFLATED
            change(info)
            archive.writestr(info, data)
    return out.getvalue()


def tar_of(members: Mapping[str, bytes], change: Callable[[tarfile.TarInfo], None] = lambda info: None) -> bytes:
    """An uncompressed tar; `change` may alter each member's header before it is written."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            change(info)
            archive.addfile(info, io.BytesIO(data) if info.isreg() else None)
    return out.getvalue()


def extended_tar(kind: bytes, body: bytes, after: bytes) -> bytes:
    """A gzipped tar that begins with an extended header of type `kind`: a long name, PAX records, a sparse map."""
    info = tarfile.TarInfo("././@LongLink")
    info.type, info.size = kind, len(body)
    return gzip.compress(info.tobuf(tarfile.GNU_FORMAT) + body + bytes(-len(body) % 512) + after, compresslevel=1)


def pax_record(key: str, value: str) -> bytes:
    """One record of a PAX header, which begins with its own length."""
    rest = f" {key}={value}\n".encode()
    length = len(rest) + 1
    while length != len(rest) + len(str(length)):
        length = len(rest) + len(str(length))
    return str(length).encode() + rest


def many_global_headers(after: bytes) -> bytes:
    """Headers of allowed size, each of which tarfile copies into every later member, so that memory grows with their square."""
    blocks = []
    for header in range(60):
        records = b"".join(b"15 h%03d%05d=x\n" % (header, key) for key in range(4000))
        info = tarfile.TarInfo("././@PaxHeader")
        info.type, info.size = tarfile.XGLTYPE, len(records)
        member = tarfile.TarInfo(f"member-{header}").tobuf(tarfile.USTAR_FORMAT)
        blocks += [info.tobuf(tarfile.USTAR_FORMAT), records, bytes(-len(records) % 512), member]
    return gzip.compress(b"".join(blocks) + after, compresslevel=1)


def raw_safetensors(header: bytes, data: bytes = b"", length: int | None = None) -> bytes:
    """A safetensors file with this header as it is. `length` overrides the stated length of the header."""
    return struct.pack("<Q", len(header) if length is None else length) + header + data


class _Corpus:
    """The parts of a good adapter for one base model, and the malformed archives made of them."""

    def __init__(self, shapes: BaseShapes, max_bytes: int) -> None:
        self.shapes, self.max_bytes = shapes, max_bytes
        self.tensors = random_tensors(shapes=shapes)
        self.config, self.weights = peft_config(), safetensors_bytes(self.tensors)
        self.good = {CONFIG: self.config, WEIGHTS: self.weights}
        self.first_a, self.first_b = list(self.tensors)[:2]

    # ---- adapter_config.json

    def configs(self) -> Iterator[tuple[str, bytes, str]]:
        yield "config-empty", b"", "not a JSON object"
        yield "config-not-json", b"r: 4\n", "not a JSON object"
        yield "config-array", b"[1, 2]", "not a JSON object"
        yield "config-not-utf8", b'{"peft_type": "\xff\xfe"}', "not a JSON object"
        yield "config-deep", b"[" * 100_000, "not a JSON object"
        yield "config-deep-value", b'{"peft_type": "LORA", "x": ' + b"[" * 50_000 + b"]" * 50_000 + b"}", "not a JSON object"
        yield "config-cut", self.config[:-10], "not a JSON object"
        yield "config-nan", self.config.replace(b'"lora_alpha": 8', b'"lora_alpha": NaN'), "not a JSON object"
        yield "config-huge", b'{"x": "' + b"a" * MIB + b'"}', "the limit is 1048576"
        yield "rank-of-5000-digits", self.config.replace(b'"r": 4', b'"r": 4' + b"0" * 5000), "out of range"
        yield "alpha-out-of-range", self.config.replace(b'"lora_alpha": 8', b'"lora_alpha": 1e999'), "out of range"
        wrong: list[tuple[str, str, Any, str]] = [
            ("peft-type-missing", "peft_type", None, "only LORA adapters"),
            ("peft-type-other", "peft_type", "LOHA", "peft_type is 'LOHA'"),
            ("peft-type-long", "peft_type", LONG, "only LORA adapters"),
            ("peft-type-object", "peft_type", {"a": [1]}, "only LORA adapters"),
            ("rank-zero", "r", 0, "adapter_config.json"),
            ("rank-negative", "r", -4, "adapter_config.json"),
            ("rank-text", "r", "four", "adapter_config.json"),
            ("rank-fraction", "r", 4.5, "adapter_config.json"),
            ("rank-list", "r", [4], "adapter_config.json"),
            ("rank-astronomic", "r", 10**30, "but r says 1000000"),
            ("rank-of-other-tensors", "r", 8, "rank 4, but r says 8"),
            ("rank-missing", "r", None, "adapter_config.json"),
            ("alpha-missing", "lora_alpha", None, "adapter_config.json"),
            ("alpha-text", "lora_alpha", "8", "adapter_config.json"),
            ("alpha-overflows", "lora_alpha", 1e300, "no finite scale"),
            ("rslora-text", "use_rslora", "yes", "adapter_config.json"),
            ("dora", "use_dora", True, "use_dora"),
            ("modules-to-save", "modules_to_save", ["lm_head"], "modules_to_save"),
            ("bias-trained", "bias", "all", "trained biases"),
            ("bias-long", "bias", LONG, "trained biases"),
            ("lora-bias", "lora_bias", True, "lora_bias"),
            ("transposed", "fan_in_fan_out", True, "fan_in_fan_out"),
            ("activated-lora", "alora_invocation_tokens", [1, 2], "alora_invocation_tokens"),
            ("layer-replication", "layer_replication", [[0, 1]], "layer_replication"),
            ("unknown-key", "mixture_of_everything", 3, "its meaning is not known"),
            ("unknown-long-key", LONG, True, "its meaning is not known"),
            ("pissa", "init_lora_weights", "pissa_niter_16", "rewrites the base weights"),
            ("target-unknown", "target_modules", ["lm_head"], "leave out every tensor"),
            ("target-long", "target_modules", [LONG], "leave out every tensor"),
            ("target-catastrophic", "target_modules", "(a|a?|.?)+" * 8 + "$b", "more time or memory"),
            ("target-broken", "target_modules", "(q_proj", "not a regular expression"),
            ("exclude-catastrophic", "exclude_modules", "(a|a?|.?)+" * 8 + "$b", "more time or memory"),
            ("exclude-everything", "exclude_modules", ".*", "leave out every tensor"),
            ("layers-text", "layers_to_transform", "all", "layers_to_transform"),
            ("layers-pattern-alone", "layers_pattern", "layers", "needs layers_to_transform"),
            ("layers-of-another-model", "layers_to_transform", [10**30], "leave out every tensor"),
            ("target-numbers", "target_modules", [1, 2], "target_modules"),
            ("rank-pattern-catastrophic", "rank_pattern", {"(a|a?|.?)+" * 8 + "$b": 4}, "more time or memory"),
            ("rank-pattern-broken", "rank_pattern", {"(q_proj": 4}, "not a regular expression"),
            ("rank-pattern-long", "rank_pattern", {LONG: 4}, "longer than 4096"),
            ("rank-pattern-crowd", "rank_pattern", {f"m{n}": 4 for n in range(9000)}, "the limit is 8192"),
            ("rank-pattern-zero", "rank_pattern", {"q_proj": 0}, "rank_pattern"),
            ("rank-pattern-list", "rank_pattern", ["q_proj"], "rank_pattern"),
            ("rank-pattern-other-rank", "rank_pattern", {"q_proj": 16}, "but rank_pattern['q_proj'] says 16"),
            ("alpha-pattern-text", "alpha_pattern", {"q_proj": "big"}, "alpha_pattern"),
            ("alpha-pattern-overflows", "alpha_pattern", {"q_proj": 1e300}, "no finite scale"),
        ]
        for name, key, value, reason in wrong:
            fields = json.loads(self.config) | {key: value}
            yield name, json.dumps(fields).encode(), reason

    # ---- what it brings for chats

    def chats(self) -> Iterator[tuple[str, dict[str, bytes], str]]:
        """Other files beside the good ones. Templates that are safe until a conversation comes are not refused here."""
        forever = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
        templates = [
            ("endless", forever, "more time or memory"),
            ("huge-range", "{% for i in range(10**9) %}{% endfor %}", "Range too big"),
            ("huge-number", "{{ 9 ** (9 ** 9) }}", "more time or memory"),
            (
                "doubling",
                "{% set n = namespace(x='ab') %}{% for i in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
                "memory",
            ),
            ("huge-list", "{% set a = [0] * 999999999 %}", "time or memory"),
            ("huge-source", "{# " + "x" * 100_000 + " #}", "the limit is"),
            ("class", "{{ ''.__class__.__mro__ }}", "reads the attribute '__"),
            ("globals", "{{ cycler.__init__.__globals__.os.popen('id').read() }}", "reads the attribute '__"),
            ("format-trick", "{{ '{0.__class__.__mro__}'.format('') }}", "not safe"),
            ("include", "{% include '/etc/passwd' %}", "not safe"),
            ("recursion", "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "not safe"),
            ("nested", "{% if 1 %}" * 500 + "{% endif %}" * 500, "does not compile"),
            ("broken", "{% for %}", "does not compile"),
        ]
        for name, source, reason in templates:
            yield f"chat-{name}", {"chat_template.jinja": source.encode()}, reason
        settings: list[tuple[str, dict[str, Any], str]] = [
            ("template-number", {"chat_template": 7}, "chat_template"),
            ("token-beyond-the-base", {"added_tokens_decoder": {"9999999": {"content": "<new>"}}}, "the token '<new>'"),
            ("tokens-list", {"added_tokens_decoder": [1]}, "added_tokens_decoder"),
            ("token-object", {"eos_token": {"a": 1}}, "eos_token"),
        ]
        for name, value, reason in settings:
            yield f"chat-{name}", {"tokenizer_config.json": json.dumps(value).encode()}, reason
        yield "chat-config-not-json", {"tokenizer_config.json": b"{"}, "no JSON"
        yield "chat-not-utf8", {"chat_template.jinja": b"\xff\xfe"}, "not UTF-8"
        yield "chat-config-deep", {"tokenizer_config.json": b"[" * 100_000}, "tokenizer_config.json"
        generation = {"temperature": -1, "top_p": 2, "repetition_penalty": 0}
        for key, value in (generation | {"eos_token_id": -1}).items():
            yield f"chat-{key}", {"generation_config.json": json.dumps({key: value}).encode()}, key
        yield "chat-eos-beyond-the-base", {"generation_config.json": b'{"eos_token_id": [1, 9999999]}'}, "eos_token_id 9999999"

    # ---- adapter_model.safetensors

    def header(self, **tensors: Mapping[str, Any]) -> bytes:
        return json.dumps(tensors).encode()

    def one(self, name: str | None = None, **changed: Any) -> bytes:
        """A file of one F32 matrix, 4 x 4, with another header."""
        info = {"dtype": "F32", "shape": [4, 4], "data_offsets": [0, 64]} | changed
        return raw_safetensors(json.dumps({name or self.first_a: info}).encode(), bytes(64))

    def reshaped(self, key: str, change: Callable[[np.ndarray], np.ndarray]) -> bytes:
        return safetensors_bytes(self.tensors | {key: change(self.tensors[key])})

    def renamed(self, old: str, new: str) -> bytes:
        return safetensors_bytes({key.replace(old, new): value for key, value in self.tensors.items()})

    def without(self, key: str) -> bytes:
        return safetensors_bytes({other: value for other, value in self.tensors.items() if other != key})

    def poisoned(self, value: float) -> bytes:
        tensors = {key: tensor.copy() for key, tensor in self.tensors.items()}
        tensors[self.first_b][-1, -1] = value
        return safetensors_bytes(tensors)

    def weight_files(self) -> Iterator[tuple[str, bytes, str]]:
        good, a, b = self.weights, self.first_a, self.first_b
        length = int.from_bytes(good[:8], "little")
        yield "weights-empty", b"", "shorter than its 8-byte header length"
        yield "weights-seven-bytes", good[:7], "shorter than its 8-byte header length"
        yield "weights-header-past-the-end", raw_safetensors(b"{}", length=1000), "does not fit in"
        yield "weights-header-length-of-exabytes", raw_safetensors(b"{}", length=(1 << 64) - 1), "does not fit in"
        yield "weights-header-not-json", raw_safetensors(b"hello world"), "bad header"
        yield "weights-header-array", raw_safetensors(b"[]"), "bad header"
        yield "weights-header-deep", raw_safetensors(b'{"a":' * 50_000), "bad header"
        yield "weights-header-not-utf8", raw_safetensors(b'{"\xff": 1}'), "bad header"
        yield "weights-no-tensors", raw_safetensors(b"{}"), "no LoRA matrices"
        yield "weights-metadata-of-objects", raw_safetensors(b'{"__metadata__": {"a": {}}}'), "bad header"
        yield "weights-cut", good[:-1], "pass the end"
        yield "weights-cut-in-the-header", good[: length // 2], "does not fit in"
        yield "weights-longer-than-they-say", good + bytes(100), "100 bytes after the last tensor"
        yield "weights-gap", self.one(data_offsets=[4, 64], shape=[15, 1]), "leave a gap"
        yield "weights-offsets-negative", self.one(data_offsets=[-64, 0]), "overlap, leave a gap"
        yield "weights-offsets-reversed", self.one(data_offsets=[64, 0]), "overlap, leave a gap"
        yield "weights-offsets-astronomic", self.one(data_offsets=[0, 1 << 70]), "pass the end"
        overlap = {n: {"dtype": "F32", "shape": [4, 4], "data_offsets": [0, 64]} for n in (a, b)}
        yield "weights-overlap", raw_safetensors(json.dumps(overlap).encode(), bytes(64)), "overlap"
        yield "weights-shape-other-than-bytes", self.one(shape=[4, 5]), "does not fill"
        yield "weights-shape-negative", self.one(shape=[-4, -4]), "bad header"
        yield "weights-shape-astronomic", self.one(shape=[1 << 39, 1 << 39]), "does not fill"
        yield "weights-shape-of-nine", self.one(shape=[1] * 9), "bad header"
        yield "weights-shape-flat", self.one(shape=[16]), "is not a matrix"
        yield "weights-shape-cube", self.one(shape=[2, 2, 4]), "is not a matrix"
        yield "weights-matrix-of-nothing", self.one(shape=[0, 4], data_offsets=[0, 0]), "after the last tensor"
        yield "weights-dtype-integer", self.one(dtype="I32"), "dtype I32"
        yield "weights-dtype-double", self.one(dtype="F64"), "dtype F64"
        yield "weights-dtype-long", self.one(dtype=LONG), "is expected"
        yield "weights-nan", self.poisoned(float("nan")), "NaN or infinity"
        yield "weights-infinite", self.poisoned(float("-inf")), "NaN or infinity"
        yield "weights-a-missing", self.without(a), "lora_A of the same module is missing"
        yield "weights-b-missing", self.without(b), "lora_B of the same module is missing"
        yield "weights-wrong-inputs", self.reshaped(a, lambda m: np.pad(m, ((0, 0), (0, 1)))), "inputs"
        yield "weights-wrong-outputs", self.reshaped(b, lambda m: np.pad(m, ((0, 1), (0, 0)))), "outputs"
        yield "weights-ranks-differ", self.reshaped(a, lambda m: np.pad(m, ((0, 4), (0, 0)))), "rank 8, but r says 4"
        yield "weights-unknown-module", self.renamed("layers.0.self_attn.v", "vision.0.attention.v"), "not a LoRA matrix"
        yield "weights-embedding", self.one("base_model.model.model.embed_tokens.lora_embedding_A"), "leave out every tensor"
        yield "weights-module-in-the-wrong-place", self.renamed("self_attn", "mlp"), "not a LoRA matrix"
        yield "weights-layer-beyond-the-base", self.renamed("layers.0.", "layers.9999."), "the base model has layers"
        yield "weights-layer-negative", self.renamed("layers.0.", "layers.-1."), "not a LoRA matrix"
        yield "weights-long-name", self.one(LONG), "longer than 512"
        yield "weights-control-characters", self.one("\x1b[2J\n"), "not a LoRA matrix"
        twice = {key.replace(".weight", ".default.weight"): value for key, value in list(self.tensors.items())[:2]}
        yield "weights-twice", safetensors_bytes(self.tensors | twice), "twice"
        yield "weights-pickle", pickle.dumps({"a": 1}), "not a safetensors file"
        yield "weights-pickle-of-torch", b"PK\3\4" + bytes(500), "not a safetensors file"
        yield "weights-text", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "not a safetensors file"
        yield "weights-zeros", bytes(4096), "not a safetensors file"

    # ---- archives

    def archives(self) -> Iterator[tuple[str, Callable[[], bytes], str]]:
        good = self.good
        broken = "not a readable zip or tar"
        yield "archive-empty", lambda: b"", broken
        yield "archive-text", lambda: b"hello world\n" * 100, broken
        yield "archive-zeros", lambda: bytes(10_240), "holds no adapter_model.safetensors"
        yield "archive-noise", lambda: np.random.default_rng(1).bytes(5000), broken
        yield "archive-of-nothing-zip", lambda: zip_of({}), "holds no adapter_model.safetensors"
        yield "archive-of-nothing-tar", lambda: tar_of({}), "holds no adapter_model.safetensors"
        yield "archive-bzipped", lambda: bz2.compress(tar_of(good)), broken
        yield "archive-xz", lambda: lzma.compress(tar_of(good)), broken
        yield "archive-gzip-of-nothing", lambda: gzip.compress(b""), broken
        yield "archive-gzip-of-zip", lambda: gzip.compress(zip_of(good)), broken
        yield "archive-bare-weights", lambda: self.weights, broken
        yield "archive-in-archive", lambda: zip_of({"adapter.zip": zip_of(good)}), "holds no adapter_model.safetensors"
        for pack, kind in ((zip_of, "zip"), (tar_of, "tar")):
            yield f"{kind}-without-config", lambda p=pack: p({WEIGHTS: self.weights}), f"holds no {CONFIG}"
            yield f"{kind}-without-weights", lambda p=pack: p({CONFIG: self.config}), f"holds no {WEIGHTS}"
            yield f"{kind}-of-pickles", lambda p=pack: p({CONFIG: self.config, "adapter_model.bin": b"\x80"}), "never opened"
            yield (
                f"{kind}-two-adapters",
                lambda p=pack: p({f"{d}/{n}": x for d in "ab" for n, x in good.items()}),
                "more than one",
            )
            yield (
                f"{kind}-torn-apart",
                lambda p=pack: p({"a/" + CONFIG: self.config, "b/" + WEIGHTS: self.weights}),
                "different",
            )
            for number, name in enumerate(("../evil", "/etc/evil", "a/../../evil", "..\\evil", "C:/evil", f"../{LONG}")):
                yield f"{kind}-points-outside-{number}", lambda p=pack, n=name: p(good | {n: b"x"}), "points outside"
            yield f"{kind}-crowd", lambda p=pack: p({f"f{n}": b"" for n in range(1001)} | good), "more than 1000 members"
        yield from self.zips()
        yield from self.tars()

    def zips(self) -> Iterator[tuple[str, Callable[[], bytes], str]]:
        good, packed = self.good, zip_of(self.good)

        def method(number: int) -> Callable[[zipfile.ZipInfo], None]:
            return lambda info: setattr(info, "compress_type", number)

        def link(info: zipfile.ZipInfo) -> None:
            info.external_attr = 0o120777 << 16

        def patched(signature: bytes, offset: int, value: bytes, data: bytes = packed) -> bytes:
            at = data.rindex(signature) + offset
            return data[:at] + value + data[at + len(value) :]

        bomb = {CONFIG: self.config, WEIGHTS: bytes(1)}
        yield "zip-bzip2", lambda: zip_of(good, method(zipfile.ZIP_BZIP2)), "only stored and deflated"
        yield "zip-lzma", lambda: zip_of(good, method(zipfile.ZIP_LZMA)), "only stored and deflated"
        yield "zip-method-unknown", lambda: patched(b"PK\1\2", 10, struct.pack("<H", 97)), "zip method 97"
        yield "zip-link", lambda: zip_of(good, link), "is not a plain file"
        yield "zip-encrypted", lambda: patched(b"PK\1\2", 8, b"\1\0"), "is not a plain file"
        yield "zip-no-directory", lambda: packed[: packed.rindex(b"PK\1\2")], "no end-of-directory record"
        yield "zip-cut", lambda: packed[:-30], "no end-of-directory record"
        yield "zip-magic-alone", lambda: b"PK\3\4", "no end-of-directory record"
        yield "zip-directory-elsewhere", lambda: patched(b"PK\5\6", 16, struct.pack("<I", 1 << 30)), "not a readable zip"
        yield "zip-directory-of-a-gigabyte", lambda: patched(b"PK\5\6", 12, struct.pack("<I", 1 << 30)), "zip64"
        yield "zip-of-65535-members", lambda: patched(b"PK\5\6", 10, b"\xff\xff"), "more than 1000 members"
        end = packed.rindex(b"PK\5\6")
        locator = struct.pack("<4sIQI", b"PK\6\7", 0, 0, 1)
        yield "zip64", lambda: packed[:end] + locator + packed[end:], "zip64"
        yield "zip-wrong-checksum", lambda: patched(b"PK\1\2", 16, b"\0\1\2\3"), "not a readable zip"
        yield "zip-header-elsewhere", lambda: patched(b"PK\1\2", 42, struct.pack("<I", 5)), "not a readable zip"
        yield "zip-size-astronomic", lambda: patched(b"PK\1\2", 24, struct.pack("<I", 0xFFFFFFF0)), "the limit is"
        yield "zip-size-understated", lambda: patched(b"PK\1\2", 24, struct.pack("<I", 10)), "not a readable zip"
        yield "zip-broken-stream", lambda: patched(b"PK\3\4", 60, b"\xff" * 40), "not a readable zip"
        yield "zip-bomb-in-the-config", lambda: zip_of(bomb | {CONFIG: bytes(64 * MIB)}), "the limit is 1048576"

    def tars(self) -> Iterator[tuple[str, Callable[[], bytes], str]]:
        good, packed = self.good, tar_of(self.good)

        def odd(kind: bytes) -> Callable[[tarfile.TarInfo], None]:
            def change(info: tarfile.TarInfo) -> None:
                if info.name == "odd":
                    info.type, info.linkname, info.size = kind, "/etc/passwd", 0

            return change

        for name, kind in (
            ("link", tarfile.SYMTYPE), ("hard-link", tarfile.LNKTYPE), ("pipe", tarfile.FIFOTYPE),
            ("device", tarfile.CHRTYPE), ("block-device", tarfile.BLKTYPE),
        ):  # fmt: skip
            yield f"tar-{name}", lambda k=kind: tar_of(good | {"odd": b""}, odd(k)), "is not a plain file"
        yield "tar-weights-are-a-link", lambda: tar_of(good, lambda i: setattr(i, "type", tarfile.SYMTYPE)), "not a plain file"
        for name, kind in (
            ("long-name", tarfile.GNUTYPE_LONGNAME), ("long-link", tarfile.GNUTYPE_LONGLINK), ("pax", tarfile.XHDTYPE),
            ("global-pax", tarfile.XGLTYPE), ("solaris-pax", tarfile.SOLARIS_XHDTYPE),
        ):  # fmt: skip
            yield f"tar-{name}-of-megabytes", lambda k=kind: extended_tar(k, bytes(64 * MIB), packed), "the limit is 65536"
        yield "tar-long-name-outside", lambda: extended_tar(b"L", b"../" + b"x" * 9000 + b"\0", packed), "points outside"
        yield "tar-pax-name-outside", lambda: extended_tar(b"x", pax_record("path", "../evil"), packed), "points outside"
        yield "tar-sparse", lambda: tar_of(good | {"odd": b""}, odd(tarfile.GNUTYPE_SPARSE)), "not a plain file"
        sparse = b"".join(pax_record(f"GNU.sparse.{k}", v) for k, v in (("major", "1"), ("minor", "0"), ("name", "a")))
        yield "tar-pax-sparse", lambda: extended_tar(b"x", sparse, packed), "not a plain file"
        yield "tar-pax-headers-without-end", lambda: many_global_headers(packed), "memory to read than is allowed"
        yield "tar-wrong-checksum", lambda: packed[:148] + b"0000000\0" + packed[156:], "not a readable zip or tar"
        yield "tar-cut", lambda: packed[: 512 + 1024 + 512 + 100], "not a readable zip or tar"
        yield "tar-gzip-cut", lambda: gzip.compress(packed)[:-500], "not a readable zip or tar"
        yield "tar-gzip-wrong-checksum", lambda: gzip.compress(zeros_first(packed))[:-8] + bytes(8), "not a readable"
        yield "tar-bomb-beside", lambda: zeros_in_a_tar(self.max_bytes + 65 * MIB), "inflates to more"
        yield "tar-bomb-config", lambda: gzip.compress(tar_of({CONFIG: bytes(2 * MIB)})), "the limit is 1048576"


def zeros_in_a_tar(size_bytes: int) -> bytes:
    """A gzipped tar with one member of so many zeros, made piece by piece."""
    info = tarfile.TarInfo("zeros")
    info.size = size_bytes
    out = io.BytesIO()
    with gzip.GzipFile(fileobj=out, mode="wb", compresslevel=1) as packed:
        packed.write(info.tobuf())
        for _ in range(size_bytes // MIB):
            packed.write(bytes(MIB))
    return out.getvalue()


def zeros_first(packed: bytes) -> bytes:
    """A tar whose end is not reached before the gzip trailer is read."""
    return packed.rstrip(b"\0")


def malformed_chats(shapes: BaseShapes = TINY) -> Iterator[tuple[str, dict[str, bytes], str]]:
    """(name, files beside the weights, reason) of every chat template and tokenizer that must be refused."""
    return _Corpus(shapes, 8 * MIB).chats()


def malformed(shapes: BaseShapes = TINY, *, max_adapter_bytes: int = 8 * MIB, chats: bool = False) -> Iterator[Malformed]:
    """Every archive that must be refused by a registry for a base model of `shapes` with this `--max-adapter-bytes`.

    `chats`: also those of `malformed_chats`, each of which needs a process.
    """
    corpus = _Corpus(shapes, max_adapter_bytes)
    for name, config, reason in corpus.configs():
        yield _sound(name, corpus.good | {CONFIG: config}, reason)
    for name, weights, reason in corpus.weight_files():
        yield _sound(name, corpus.good | {WEIGHTS: weights}, reason)
    huge = {"tokenizer_config.json": b" " * (9 * MIB)}
    yield Malformed("chat-huge-file", lambda: tar_of(corpus.good | huge), "have more than")
    many = {f"additional_chat_templates/{n}.jinja": b"x" for n in range(20)}
    yield Malformed("chat-many-files", lambda: tar_of(corpus.good | many), "more than 16 text files")
    for name, files, reason in corpus.chats() if chats else ():
        yield Malformed(name, lambda f=files: tar_of(corpus.good | f), reason)
    for name, make, reason in corpus.archives():
        yield Malformed(name, make, reason)


def _sound(name: str, files: Mapping[str, bytes], reason: str) -> Malformed:
    """A sound archive of malformed files."""
    return Malformed(name, lambda: tar_of(files), reason, files)


def malformed_directories(shapes: BaseShapes = TINY) -> Iterator[MalformedDirectory]:
    """Every directory that must be refused when it is registered by its path."""

    def case(name: str, change: Callable[[Path], object], reason: str) -> MalformedDirectory:
        return MalformedDirectory(name, lambda directory: change(write_adapter(directory, shapes=shapes)), reason)

    def pipe(directory: Path) -> None:
        (directory / WEIGHTS).unlink()
        os.mkfifo(directory / WEIGHTS)  # opening it for reading would wait for ever

    def folder(directory: Path) -> None:
        (directory / CONFIG).unlink()
        (directory / CONFIG).mkdir()

    def link(name: str, target: str) -> Callable[[Path], None]:
        def change(directory: Path) -> None:
            (directory / name).unlink()
            (directory / name).symlink_to(target)

        return change

    def sparse(directory: Path) -> None:
        with (directory / WEIGHTS).open("wb") as file:
            file.truncate(1 << 40)

    yield case("no-config", lambda d: (d / CONFIG).unlink(), f"holds no {CONFIG}")
    yield case("no-weights", lambda d: (d / WEIGHTS).unlink(), f"holds no {WEIGHTS}")
    yield case("pickled", lambda d: (d / WEIGHTS).rename(d / "adapter_model.bin"), "never opened")
    yield case("pipe-for-weights", pipe, "not a plain file")
    yield case("folder-for-config", folder, "not a plain file")
    yield case("weights-linked-to-outside", link(WEIGHTS, "/etc/passwd"), "link to outside")
    yield case("config-linked-to-outside", link(CONFIG, "/proc/self/environ"), "link to outside")
    yield case("weights-linked-to-a-device", link(WEIGHTS, "/dev/zero"), "link to outside")
    yield case("weights-linked-in-a-circle", link(WEIGHTS, WEIGHTS), "symbolic links")
    yield case("weights-of-a-terabyte", sparse, "the limit is")
    yield case("config-too-large", lambda d: (d / CONFIG).write_bytes(b" " * (MIB + 1)), "larger than")
