"""Changes and lists of adapters: gateway -> registry."""

from __future__ import annotations

import msgspec

from motet.shared.model import AdapterEntry, AdapterVersion
from motet.shared.wire.refusal import Refused


class RegisterAdapter(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Validate and publish an adapter under `name`.

    `kind` "path": a directory, archive or file below one of the registry's allowed roots; "hub": a Hugging Face id; "upload":
    an object in the uploads bucket (zip or tar, optionally gzipped, or an image adapter's file); "any": a path if it exists,
    else a hub id. A registry may have other kinds too (of its plug-ins).
    Without `replace` an existing name is refused (AdapterExists).
    """

    name: str
    kind: str
    location: str
    replace: bool = False
    tenant: str = ""  # the only tenant that may see and use it; "" is shared by all
    actor: str = ""  # who asked, for the audit log: an API key's id
    chat: bool = True  # also take what it brings for chats


class AliasAdapter(msgspec.Struct, kw_only=True):
    """Make `tenant`'s `name` an alias of the adapter that `target` refers to: its own, else a shared one.

    The alias keeps the version that `target` points at now, or `follows` it to later ones.
    """

    name: str
    target: str
    tenant: str = ""
    actor: str = ""
    follows: bool = False


class RollbackAdapter(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Let `tenant`'s `name` point at a version again that it pointed at before; 0: the one before the present version."""

    name: str
    version: int = 0
    tenant: str = ""
    actor: str = ""


class DeleteAdapter(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Remove a name, and its version when no other name uses it. Refused while requests run on it unless forced.

    `forget`: do not register it again from --adapters-dir at the next start.
    """

    name: str
    force: bool = False
    forget: bool = False
    tenant: str = ""
    actor: str = ""


class PinAdapter(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Keep the adapter that `tenant`'s `name` points at loaded on these workers; `model.EVERY_WORKER` means all of them.

    Without workers the name is unpinned. Refused when a worker is unknown (BadRequest) or has no room for another pin
    (Conflict).
    """

    name: str
    workers: tuple[str, ...] = ()
    tenant: str = ""
    actor: str = ""


class QuarantineAdapter(msgspec.Struct, kw_only=True):
    """A worker's probe found that this version must not answer. It is not served by any worker until it is released."""

    digest: str
    name: str  # by which a request asked for it, for the logs
    verdict: str
    reason: str
    worker_id: str


class ReleaseAdapter(msgspec.Struct, kw_only=True, omit_defaults=True):
    """End the quarantine of the version that `tenant`'s `name` points at. Its next load makes a new reference."""

    name: str
    tenant: str = ""
    actor: str = ""


class ListAdapters(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The names that `tenant` may see ("": the shared ones) after `after`, in order, at most `limit` of them; the next page
    starts after the last name received."""

    after: str = ""
    limit: int = 1000
    tenant: str = ""


class AdapterInfo(msgspec.Struct, kw_only=True):
    """One name with its version, as the registry and every watcher see it."""

    entry: AdapterEntry
    version: AdapterVersion


class RegistryOk(msgspec.Struct, tag="ok", kw_only=True):
    """A registry request succeeded. `adapters` contains the affected names or, for `list`, the page.

    `returns`: a deleted adapter lies in --adapters-dir and is registered again at the next start.
    """

    adapters: list[AdapterInfo]
    returns: bool = False


RegistryReply = RegistryOk | Refused
