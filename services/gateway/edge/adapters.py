"""Adapters as the API shows them."""

from __future__ import annotations

from typing import Annotated, Any, Literal, cast

import msgspec
from msgspec import Meta

from motet.services.gateway.edge.parts import Gateway
from motet.shared.refused_adapters import RefusedAdapters
from motet.shared.wire.registry import AdapterInfo

ShownRefused = Annotated[
    RefusedAdapters,
    Meta(description="Those of `--adapters-dir` that are not served: the first of them; the registry's log has all."),
]


class OlderVersion(msgspec.Struct, frozen=True, kw_only=True):
    """A version that an adapter can go back to."""

    version: int
    digest: str
    updated: int


class AdapterChat(msgspec.Struct, frozen=True, kw_only=True):
    """What an adapter brings for chats."""

    templates: Annotated[dict[str, str], Meta(description="Chat templates by name.")]
    special_tokens: Annotated[dict[str, str], Meta(description="Special tokens by name, such as eos_token.")]
    generation: Annotated[dict[str, Any], Meta(description="Defaults for requests that give no value.")]
    eos_token_ids: Annotated[list[int], Meta(description="Tokens that end an answer, beside eos_token and the base model's.")]


class ShownQuarantine(msgspec.Struct, frozen=True, kw_only=True):
    """Why an adapter does not answer."""

    verdict: Annotated[
        Literal["partial", "ignored", "other"],
        Meta(
            description="partial: not all of it was on the device; ignored: it had no effect; other: other answers than before."
        ),
    ]
    reason: str
    worker_id: Annotated[str, Meta(description="The worker whose probe found it.")]
    since: int


class Adapter(msgspec.Struct, frozen=True, kw_only=True):
    """A name and the adapter version behind it."""

    name: str
    object: Literal["adapter"] = "adapter"
    digest: str
    version: Annotated[int, Meta(description="Number of this version of the name, from 1.")]
    alias_of: str | None
    follows: Annotated[bool | None, Meta(description="Of an alias: whether it goes on to the other name's next versions.")]
    older_versions: Annotated[list[OlderVersion], Meta(description="Kept earlier versions of the name, the newest first.")]
    base_model: str
    rank: int
    modules: Annotated[
        tuple[str, ...], Meta(description="What it changes: modules, or of an image adapter the roles of its sites.")
    ]
    layers: Annotated[int, Meta(description="How many layers it changes; 0 for an image adapter.")]
    family: Annotated[str | None, Meta(description="Of an image adapter's base model: sd15, sd2, sdxl; null for text.")]
    sites: Annotated[int | None, Meta(description="Of an image adapter: how many layers and convolutions it changes.")]
    kind: Annotated[
        Literal["lora", "peft", "image"],
        Meta(
            description="lora: of the seven linear layers of a Llama-shaped decoder, for every worker; peft: of other layers, "
            "kept as PEFT's files, for workers whose engine can change them; image: of an image model."
        ),
    ]
    targets: Annotated[
        tuple[str, ...], Meta(description="Of kind peft: the layers that it changes, as the base's checkpoint names them.")
    ]
    workers: Annotated[list[str], Meta(description="Ids of the workers that can run it now.")]
    dtype: str
    size_bytes: int
    tenant: Annotated[str | None, Meta(description="Tenant that the adapter belongs to; null: shared by all.")]
    source: str
    created: int
    updated: int
    resident: Annotated[
        dict[str, str], Meta(description="Map from worker id to the fastest tier that holds the adapter: device, host or disk.")
    ]
    left_out: Annotated[
        tuple[str, ...],
        Meta(description="Modules of its file without effect: its configuration does not select them, as PEFT decides."),
    ]
    chat: Annotated[AdapterChat | None, Meta(description="What it brings for chats; null in lists, or when it brings nothing.")]
    pinned_to: Annotated[tuple[str, ...], Meta(description="Ids of the workers that keep the adapter loaded; `*`: all.")]
    placed_on: Annotated[list[str], Meta(description="Ids of the workers on which a scheduler wants it loaded.")]
    quarantine: Annotated[
        ShownQuarantine | None, Meta(description="Why it does not answer: a probe after a load failed. Null: it answers.")
    ]


class Adapters(msgspec.Struct, frozen=True, kw_only=True):
    """All adapters."""

    object: Literal["list"] = "list"
    data: list[Adapter]
    refused: ShownRefused


class Deleted(msgspec.Struct, frozen=True, kw_only=True):
    """An adapter that is gone."""

    name: str
    object: Literal["adapter"] = "adapter"
    deleted: Literal[True] = True
    returns_at_start: Annotated[bool, Meta(description="Whether it lies in `--adapters-dir` and comes back at the next start.")]


def resource(gateway: Gateway, info: AdapterInfo, chat: AdapterChat | None = None) -> Adapter:
    """An adapter as the API shows it."""
    entry, version = info.entry, info.version
    return Adapter(
        name=entry.name,
        digest=entry.digest,
        version=entry.version,
        alias_of=entry.alias_of,
        follows=entry.follows if entry.alias_of is not None else None,
        older_versions=[
            OlderVersion(version=one.version, digest=one.digest, updated=one.updated_unix_ms // 1000)
            for one in sorted(entry.older, key=lambda one: -one.version)
        ],
        base_model=version.base_model,
        rank=version.rank,
        modules=version.modules,
        layers=version.layers,
        family=version.family or None,
        sites=version.sites or None,
        kind="image" if version.family else "peft" if version.targets else "lora",
        targets=version.targets,
        workers=gateway.fleet.able(version.targets, version.rank),
        dtype=version.dtype,
        size_bytes=version.size_bytes,
        tenant=entry.tenant or None,
        source=shown_source(info),
        created=created_unix_ms(info) // 1000,
        updated=entry.updated_unix_ms // 1000,
        resident=gateway.fleet.tiers(entry.digest),
        left_out=entry.left_out,
        chat=chat,
        pinned_to=entry.pin.workers if entry.pin is not None else (),
        placed_on=gateway.placements.workers(entry.digest),
        quarantine=_quarantine(gateway, entry.digest),
    )


def _quarantine(gateway: Gateway, digest: str) -> ShownQuarantine | None:
    found = gateway.adapters.quarantined.get(digest)
    if found is None:
        return None
    verdict = cast(Literal["partial", "ignored", "other"], found.verdict)
    return ShownQuarantine(verdict=verdict, reason=found.reason, worker_id=found.worker_id, since=found.since_unix_ms // 1000)


def chat_of(gateway: Gateway, info: AdapterInfo) -> AdapterChat | None:
    """What an adapter brings for chats; None for nothing."""
    chat = gateway.adapters.chat(info.version.chat)
    if chat is None:
        return None
    return AdapterChat(
        templates={name: template.source for name, template in chat.templates.items()},
        special_tokens=chat.special,
        generation={name: value for name, value in msgspec.structs.asdict(chat.generation).items() if value is not None},
        eos_token_ids=list(chat.eos_token_ids),
    )


def shown_source(info: AdapterInfo) -> str:
    """The source of an adapter as every client may see it: of a path on the server, only the last part.

    The source of a private adapter is not shown: its content may be another tenant's, who uploaded the same content before.
    """
    source = info.entry.source or ("" if info.entry.tenant else info.version.source)
    return public_source(source)


def created_unix_ms(info: AdapterInfo) -> int:
    """When an adapter was registered.

    For a private adapter this is the time of its name: the version may be older, and another tenant's.
    """
    return info.entry.updated_unix_ms if info.entry.tenant else info.version.created_unix_ms


def public_source(source: str) -> str:
    """Where an adapter came from, as every client may see it: of a path on the server only its last part."""
    kind, _, place = source.partition(":")
    return f"path:{place.rstrip('/').rsplit('/', 1)[-1]}" if kind == "path" else source
