"""The registry's configuration."""

from __future__ import annotations

import os
from typing import Annotated

from msgspec import Meta

from motet.services.registry.hub import PUBLIC_ENDPOINT, HubOptions
from motet.shared.config import COMMON, EXPERT, MAX_LORA_RANK, BaseModelConfig, Config, ConfigError, MaxLoraRank, ServiceConfig
from motet.shared.tenancy import DEFAULT_TENANT, TENANT


class SourcesConfig(Config, frozen=True, kw_only=True):
    """Where adapters may come from."""

    adapters_dir: Annotated[
        str,
        Meta(description="directory of adapters to register at start; an adapter's name is its relative path", extra=COMMON),
    ] = ""
    adapter_roots: Annotated[
        str,
        Meta(
            description="directories below which adapters may be registered by server path, comma-separated; empty: none",
            extra=COMMON,
        ),
    ] = ""
    hub_allowed: Annotated[bool, Meta(description="allow registering adapters by Hugging Face id")] = True
    hub_endpoint: Annotated[str, Meta(description="URL of the hub; empty: HF_ENDPOINT, else https://huggingface.co")] = ""
    hub_repositories: Annotated[
        str,
        Meta(description="hub repositories that adapters may come from, comma-separated, as acme/* or acme/name; empty: all"),
    ] = ""
    hub_private_hosts: Annotated[
        str,
        Meta(
            description="hosts that downloads may reach at loopback, link-local or private addresses, besides the hub and "
            "proxies; comma-separated, as name or name:port",
            extra=EXPERT,
        ),
    ] = ""
    hub_timeout_s: Annotated[
        float,
        Meta(
            gt=0,
            le=3600,
            description="maximum duration of one adapter's download in seconds",
            extra=EXPERT,
        ),
    ] = 300.0

    @property
    def roots(self) -> tuple[str, ...]:
        """The real paths of `adapter_roots`."""
        return tuple(os.path.realpath(os.path.expanduser(root)) for root in _parts(self.adapter_roots))


class LimitsConfig(Config, frozen=True, kw_only=True):
    """How large adapters may be, and how many."""

    max_adapter_bytes: Annotated[int, Meta(ge=1024, description="largest adapter weights file in bytes")] = 1 << 30
    max_lora_rank: MaxLoraRank = MAX_LORA_RANK
    max_adapters: Annotated[int, Meta(ge=1, description="maximum adapter names, aliases included")] = 20_000
    max_tenant_adapters: Annotated[int, Meta(ge=1, description="maximum adapter names of one tenant, aliases included")] = 2_000
    older_versions: Annotated[
        int,
        Meta(
            ge=0,
            le=100,
            description="replaced versions to keep of each adapter name, for `motet adapters rollback`; they do not count "
            "towards a tenant's limits",
        ),
    ] = 3
    max_tenant_pins: Annotated[int, Meta(ge=0, description="maximum pinned adapter names of one tenant")] = 4
    max_stored_mib: Annotated[int, Meta(ge=1, description="maximum size of all stored adapter versions in MiB")] = 1 << 20
    max_tenant_stored_mib: Annotated[int, Meta(ge=1, description="maximum size of one tenant's stored adapters in MiB")] = (
        1 << 17
    )


class PublishersConfig(Config, frozen=True, kw_only=True):
    """Durable requests over NATS, and pictures that are fetched later."""

    tenants: Annotated[str, Meta(description="tenants that may publish durable requests over NATS, comma-separated")] = (
        DEFAULT_TENANT
    )
    tenant_stream_mib: Annotated[
        int,
        Meta(
            ge=16,
            description="disk in MiB for a tenant's durable requests, and the same again for its results; never reduced",
        ),
    ] = 512
    picture_ttl_s: Annotated[
        float,
        Meta(
            ge=120,
            le=30 * 86_400,
            description="seconds that pictures of an image base can be fetched by their URLs (response_format url)",
        ),
    ] = 3600.0

    @property
    def names(self) -> tuple[str, ...]:
        """The tenants of `tenants`. Raises ConfigError for an invalid name."""
        words = _parts(self.tenants)
        for word in words:
            if not TENANT.fullmatch(word):
                raise ConfigError(f"--tenants: {word!r}: letters, digits, '_' and '-' only, at most 64")
        return words


class RegistryConfig(ServiceConfig, frozen=True, kw_only=True):
    """Which base model adapters must fit, where they may come from and how large they may be."""

    base: BaseModelConfig
    sources: SourcesConfig = SourcesConfig()
    limits: LimitsConfig = LimitsConfig()
    publishers: PublishersConfig = PublishersConfig()

    @property
    def hub(self) -> HubOptions:
        """Options of hub downloads."""
        sources = self.sources
        return HubOptions(
            allowed=sources.hub_allowed,
            endpoint=sources.hub_endpoint or os.environ.get("HF_ENDPOINT") or PUBLIC_ENDPOINT,
            repositories=_parts(sources.hub_repositories),
            private_hosts=_parts(sources.hub_private_hosts),
            timeout_s=sources.hub_timeout_s,
            max_bytes=self.limits.max_adapter_bytes,
        )


def _parts(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())
