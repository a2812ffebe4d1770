"""Tenants: whose a key, a request or an adapter is.

A tenant is a word of a NATS subject and of a KV key. An adapter belongs to one tenant, which alone sees it, or is shared
(`SHARED`). A tenant's own adapter hides a shared one of the same name from it.
"""

from __future__ import annotations

import re

from shared.errors import BadRequest

DEFAULT_TENANT = "default"  # everybody's, where no keys are used
SHARED = ""  # the owner of adapters that every tenant may use
TENANT = re.compile(r"[A-Za-z0-9_-]{1,64}")


def check_tenant(tenant: str) -> str:
    """`tenant` if it can be one. Raises BadRequest."""
    if not TENANT.fullmatch(tenant):
        raise BadRequest(f"tenant {tenant[:64]!r}: letters, digits, '_' and '-' only, at most 64", param="tenant")
    return tenant


def qualified(name: str, tenant: str) -> str:
    """An adapter's name as operators see it, in logs and metrics: `tenant:name`, or the bare name of a shared one."""
    return f"{tenant}:{name}" if tenant else name  # a name has no colon
