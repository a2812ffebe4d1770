"""Tenants: the owners of keys, requests and adapters.

A tenant's name is one token of NATS subjects and KV keys. An adapter belongs to one tenant and is visible to it only, or it
is shared (`SHARED`). For a tenant, its own adapter hides a shared one of the same name.
"""

from __future__ import annotations

import re

from motet.shared.errors import BadRequest

DEFAULT_TENANT = "default"  # the tenant of all clients where no keys are used
SHARED = ""  # the owner of adapters that every tenant may use
TENANT = re.compile(r"[A-Za-z0-9_-]{1,64}")


def check_tenant(tenant: str) -> str:
    """`tenant` if it is a valid name. Raises BadRequest."""
    if not TENANT.fullmatch(tenant):
        raise BadRequest(f"tenant {tenant[:64]!r}: letters, digits, '_' and '-' only, at most 64", param="tenant")
    return tenant


def qualified(name: str, tenant: str) -> str:
    """An adapter's name as operators see it, in logs and metrics: `tenant:name`, or the bare name of a shared one."""
    return f"{tenant}:{name}" if tenant else name  # a name has no colon
