"""The registry's configuration."""

from __future__ import annotations

import os
from typing import Annotated

from msgspec import Meta

from shared.config import ServiceConfig


class RegistryConfig(ServiceConfig, frozen=True, kw_only=True):
    """Which base model adapters must fit, where they may come from and how large they may be."""

    model: Annotated[str, Meta(min_length=1, description="base model: directory or Hugging Face id; only config.json is read")]
    served_model_name: Annotated[str, Meta(description="the base model's name in requests; empty: last part of --model")] = ""
    adapter_roots: Annotated[
        str, Meta(description="directories below which adapters may be registered by path, comma-separated; empty: none")
    ] = ""
    adapters_dir: Annotated[
        str, Meta(description="every PEFT directory below this one is registered at start under its (relative) name")
    ] = ""
    hub_allowed: Annotated[bool, Meta(description="adapters may be registered by Hugging Face id")] = True
    max_adapter_bytes: Annotated[int, Meta(ge=1024, description="largest adapter weights file")] = 1 << 30
    max_lora_rank: Annotated[int, Meta(ge=1, le=512, description="largest adapter rank accepted")] = 256
    max_adapters: Annotated[int, Meta(ge=1, description="largest number of adapter names, aliases included")] = 20_000
    max_tenant_adapters: Annotated[int, Meta(ge=1, description="the same for one tenant's own names")] = 2_000

    @property
    def base_model(self) -> str:
        """The name under which requests ask for the base model."""
        return self.served_model_name or self.model.rstrip("/").rsplit("/", 1)[-1]

    @property
    def roots(self) -> tuple[str, ...]:
        """The real paths of `adapter_roots`."""
        return tuple(
            os.path.realpath(os.path.expanduser(root.strip())) for root in self.adapter_roots.split(",") if root.strip()
        )
